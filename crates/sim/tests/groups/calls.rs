//! Calls that all ranks make, drawn from the seed, and their expected results.

use tensorwire_collective::{Algorithm, Group, GroupError, Reduction};
use tensorwire_rendezvous::Tensor;
use tensorwire_sim::{Handle, Rng, Violation};

/// Elements of a value: none, as many as fit into a message, and more.
const LENGTHS: [usize; 8] = [0, 1, 7, 64, 500, 1000, 5003, 12_000];

/// How often memory may be refused before it counts as full: each call is made to fail once.
const ATTEMPTS: usize = 4;

/// A collective.
#[derive(Debug, Clone, Copy)]
pub(super) enum What {
    AllReduce(Option<Algorithm>),
    Reduce,
    ReduceScatter,
    Broadcast,
    AllGather,
    Gather,
    Scatter,
    AllToAll,
    Barrier,
    Derive,
}

/// A call, the same on all ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call {
    pub(super) what: What,
    root: usize,
    length: usize,
    /// Distinguishes its values from those of other calls.
    salt: i32,
}

impl Call {
    pub(super) fn draw(rng: &mut Rng, size: usize, is_on_one_host: bool) -> Self {
        let algorithm = rng.pick([
            None,
            Some(Algorithm::Exchange),
            Some(Algorithm::Ring),
            Some(Algorithm::HalvingDoubling),
            Some(Algorithm::Doubling),
            Some(Algorithm::Hierarchical),
            is_on_one_host.then_some(Algorithm::Views),
        ]);
        let what = rng.pick([
            What::AllReduce(algorithm),
            What::AllReduce(algorithm),
            What::AllReduce(algorithm),
            What::Reduce,
            What::ReduceScatter,
            What::Broadcast,
            What::AllGather,
            What::Gather,
            What::Scatter,
            What::AllToAll,
            What::Barrier,
            What::Derive,
        ]);
        let (root, length) = (rng.below(size), rng.pick(LENGTHS));
        Self { what, root, length, salt: rng.below(1 << 20) as i32 }
    }

    /// Element `at` of the value that `from` has for `to`.
    fn value(&self, at: usize, from: usize, to: usize) -> i32 {
        (at as i32).wrapping_mul(31) ^ self.salt.wrapping_add((from * 1009 + to * 10_007) as i32)
    }

    fn values(&self, from: usize, to: usize) -> Vec<i32> {
        (0..self.length).map(|at| self.value(at, from, to)).collect()
    }

    fn sum(&self, at: usize, size: usize) -> i32 {
        (0..size).map(|from| self.value(at, from, 0)).fold(0, i32::wrapping_add)
    }

    /// Makes the call, and checks its result. The call gets its number in the first poll.
    ///
    /// # Errors
    /// The call's.
    pub(super) async fn make(self, handle: &Handle, group: &Group) -> Result<(), GroupError> {
        let (rank, size) = (group.rank(), group.size());
        let is_root = rank == self.root;
        let tensor = |to| tensor(group, &self.values(rank, to));
        let is_right = match self.what {
            What::AllReduce(algorithm) => {
                let mut values = self.values(rank, 0);
                let call = group.all_reduce(&mut values);
                algorithm.into_iter().fold(call, |call, algorithm| call.algorithm(algorithm)).await?;
                self.is_sum(&values, 0, size)
            }
            What::Reduce => {
                let mut values = self.values(rank, 0);
                group.reduce(self.root, &mut values).reduction(Reduction::Sum).await?;
                !is_root || self.is_sum(&values, 0, size)
            }
            What::ReduceScatter => {
                let mut values = self.values(rank, 0);
                let part = self.length / size;
                let mut counts = vec![part; size];
                counts[self.root] += self.length % size;
                group.reduce_scatter(&mut values, &counts).await?;
                let begin: usize = counts[..rank].iter().sum();
                self.is_sum(&values[begin..begin + counts[rank]], begin, size)
            }
            What::Broadcast => {
                let got = group.broadcast(self.root, is_root.then(|| tensor(0))).await?;
                self.is_value(&got, self.root, 0)
            }
            What::AllGather => {
                let got = group.all_gather(tensor(0)).await?;
                self.are_values(&got, size, 0)
            }
            What::Gather => {
                let got = group.gather(self.root, tensor(0)).await?;
                got.is_some() == is_root && got.is_none_or(|got| self.are_values(&got, size, 0))
            }
            What::Scatter => {
                let given = is_root.then(|| (0..size).map(tensor).collect());
                self.is_value(&group.scatter(self.root, given).await?, self.root, rank)
            }
            What::AllToAll => {
                let got = group.all_to_all((0..size).map(tensor).collect()).await?;
                self.are_values(&got, size, rank)
            }
            What::Barrier => group.barrier().await.map(|()| true)?,
            What::Derive => {
                let derived = group.derive("derived").await?;
                let mut values = self.values(rank, 0);
                derived.all_reduce(&mut values).await?;
                derived.close().await?;
                self.is_sum(&values, 0, size)
            }
        };
        if !is_right {
            handle.fail(Violation::Data(format!("rank {rank} of {size}: {self:?}")));
        }
        Ok(())
    }

    /// Whether `values` are the sums of the elements from `begin` on.
    fn is_sum(&self, values: &[i32], begin: usize, size: usize) -> bool {
        values.iter().enumerate().all(|(at, value)| *value == self.sum(begin + at, size))
    }

    fn is_value(&self, tensor: &Tensor, from: usize, to: usize) -> bool {
        tensor.values::<i32>().is_ok_and(|values| values == self.values(from, to))
    }

    fn are_values(&self, tensors: &[Tensor], size: usize, to: usize) -> bool {
        tensors.len() == size
            && tensors.iter().enumerate().all(|(from, tensor)| self.is_value(tensor, from, to))
    }
}

/// Without waiting, because calls are numbered as they are invoked.
fn tensor(group: &Group, values: &[i32]) -> Tensor {
    let pool = group.worker().pool();
    let mut attempts =
        (0..ATTEMPTS).filter_map(|_| Tensor::from_values(pool, &[values.len() as u64], values).ok());
    attempts.next().expect("the pool has room for all values that are under way")
}
