//! One rank of a group, and the collectives that it calls.

use std::{sync::Arc, time::Duration};

use super::{error::BenchError, fabrics::Opened, workers::start_worker};
use crate::arguments::{AlgorithmChoice, Op};
use serde::{Deserialize, Serialize};
use tensorwire::{
    DataType, Tensor, Worker,
    collective::{
        Group, GroupError,
        store::{Store, WorkerStore},
    },
    settings::Validation,
};

/// Limit for joining, and for a call that moves no bytes.
const CALL_LIMIT: Duration = Duration::from_secs(8);
/// A call that moves fewer bytes in a second, of all ranks together, counts as stuck.
const BYTES_PER_S_MIN: usize = 32 << 20;
/// The period of the numbers that are checked. Their sums are exact in any order.
const PATTERN: usize = 251;

/// The collective that is called, with its values.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Values {
    pub(super) op: Op,
    /// Bytes that each rank contributes.
    pub(super) bytes: usize,
    pub(super) algorithm: Option<AlgorithmChoice>,
}

/// The rank of a process, and the store at which all meet.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Seat {
    pub(super) rank: usize,
    pub(super) ranks: usize,
    /// The address of the store that rank 0 serves.
    pub(super) store: String,
}

/// This process's rank of a group, with its values.
#[derive(Debug)]
pub(super) struct Rank {
    group: Group,
    values: Values,
    /// The numbers that reductions combine.
    numbers: Vec<f32>,
    /// The elements of each rank's part.
    counts: Vec<usize>,
    /// The tensors that this rank contributes to other calls.
    tensors: Vec<Tensor>,
    is_checked: bool,
}

impl Rank {
    /// Joins the group whose store rank 0 serves.
    pub(super) async fn join(opened: &Opened, seat: &Seat, values: Values) -> Result<Self, BenchError> {
        let worker = start_worker(&format!("rank_{}", seat.rank), opened, Validation::Off).await?;
        let store = WorkerStore::connect(&worker, &seat.store, CALL_LIMIT).await?;
        Self::join_with(worker, seat, values, Arc::new(store)).await
    }

    /// Joins with a store that exists already.
    pub(super) async fn join_with(
        worker: Worker,
        seat: &Seat,
        values: Values,
        store: Arc<dyn Store>,
    ) -> Result<Self, BenchError> {
        let moved = values.bytes.saturating_mul(seat.ranks);
        let limit = CALL_LIMIT + Duration::from_secs((moved / BYTES_PER_S_MIN) as u64);
        let builder = Group::builder(store, seat.rank, seat.ranks).name("bench").timeout(limit);
        let group = builder.join(&worker).await?;
        let numbers = if values.op.is_reduction() { values.bytes / size_of::<f32>() } else { 0 };
        Ok(Self {
            counts: parts(numbers, seat.ranks),
            tensors: values.tensors(&worker, seat)?,
            numbers: vec![0.0; numbers],
            is_checked: false,
            values,
            group,
        })
    }

    /// How long a call may take.
    pub(super) fn limit(&self) -> Duration {
        self.group.timeout()
    }

    /// Calls once.
    pub(super) async fn call(&mut self) -> Result<(), BenchError> {
        if self.values.op.is_reduction() {
            self.reduce().await?;
        } else {
            drop(self.exchange().await?);
        }
        Ok(())
    }

    /// Calls once before calls are timed, so that all ranks begin together. The first such call checks the result.
    pub(super) async fn begin(&mut self) -> Result<(), BenchError> {
        match std::mem::replace(&mut self.is_checked, true) {
            false => self.check().await,
            true => self.call().await,
        }
    }

    /// Calls once, with values whose result is known, and compares the result.
    async fn check(&mut self) -> Result<(), BenchError> {
        if !self.values.op.is_reduction() {
            return self.check_tensors(&self.exchange().await?);
        }
        let rank = self.group.rank();
        self.numbers.iter_mut().enumerate().for_each(|(at, number)| *number = own_number(rank, at));
        if self.values.op == Op::AllReduceTensors {
            return self.check_reduced_tensor().await;
        }
        self.reduce().await?;
        self.check_sums()?;
        // Sums of zeros stay zero, however many calls follow.
        self.numbers.fill(0.0);
        Ok(())
    }

    /// Like [`check`](Self::check), for the call whose values are a tensor. Later calls combine the results of earlier
    /// ones: zeros.
    async fn check_reduced_tensor(&mut self) -> Result<(), BenchError> {
        let pool = self.group.worker().pool().clone();
        let tensor = |numbers: &[f32]| Tensor::from_values(&pool, &[numbers.len() as u64], numbers);
        self.tensors = vec![tensor(&self.numbers)?];
        self.reduce().await?;
        self.numbers.copy_from_slice(self.tensors[0].as_slice()?);
        self.check_sums()?;
        self.numbers.fill(0.0);
        self.tensors = vec![tensor(&self.numbers)?];
        Ok(())
    }

    async fn reduce_tensors(&mut self) -> Result<(), GroupError> {
        let call = self.group.all_reduce_tensors(self.tensors.drain(..));
        let reduced = match self.values.algorithm {
            None => call.await?,
            Some(choice) => call.algorithm(choice.algorithm()).await?,
        };
        self.tensors.push(reduced);
        Ok(())
    }

    async fn reduce(&mut self) -> Result<(), GroupError> {
        if self.values.op == Op::AllReduceTensors {
            return self.reduce_tensors().await;
        }
        let numbers = &mut self.numbers[..];
        match (self.values.op, self.values.algorithm) {
            (Op::Reduce, _) => self.group.reduce(0, numbers).await,
            (Op::ReduceScatter, _) => self.group.reduce_scatter(numbers, &self.counts).await,
            (_, None) => self.group.all_reduce(numbers).await,
            (_, Some(choice)) => self.group.all_reduce(numbers).algorithm(choice.algorithm()).await,
        }
    }

    /// Compares the elements of the result that this rank has.
    fn check_sums(&self) -> Result<(), BenchError> {
        let (rank, ranks) = (self.group.rank(), self.group.size());
        let before: usize = self.counts.iter().take(rank).sum();
        let has = match self.values.op {
            Op::ReduceScatter => before..before + self.counts[rank],
            Op::Reduce if rank > 0 => 0..0,
            _ => 0..self.numbers.len(),
        };
        for (at, got) in self.numbers.iter().enumerate().take(has.end).skip(has.start) {
            let wanted: f32 = (0..ranks).map(|rank| own_number(rank, at)).sum();
            if *got != wanted {
                return Err(self.wrong(at, format!("{got} instead of {wanted}")));
            }
        }
        Ok(())
    }

    /// A call whose values are tensors; returns those that this rank received.
    async fn exchange(&self) -> Result<Vec<Tensor>, GroupError> {
        let mut own = self.tensors.iter().cloned();
        Ok(match (self.values.op, own.next()) {
            (Op::Broadcast, first) => vec![self.group.broadcast(0, first).await?],
            (Op::AllGather, Some(first)) => self.group.all_gather(first).await?,
            (Op::AllToAll, _) => self.group.all_to_all(self.tensors.clone()).await?,
            _ => {
                self.group.barrier().await?;
                Vec::new()
            }
        })
    }

    /// Compares the tensors of a call: each is filled with the byte of the rank that contributed it.
    fn check_tensors(&self, arrived: &[Tensor]) -> Result<(), BenchError> {
        let wanted = match self.values.op {
            Op::AllToAll => parts(self.values.bytes, self.group.size())[self.group.rank()],
            _ => self.values.bytes,
        };
        for (from, tensor) in arrived.iter().enumerate() {
            if tensor.bytes().len() != wanted {
                return Err(self.wrong(from, format!("{} bytes instead of {wanted}", tensor.bytes().len())));
            }
            if let Some(byte) = tensor.bytes().iter().find(|byte| **byte != byte_of(from)) {
                return Err(self.wrong(from, format!("a byte {byte} instead of {}", byte_of(from))));
            }
        }
        Ok(())
    }

    fn wrong(&self, at: usize, what: String) -> BenchError {
        BenchError::WrongResult { rank: self.group.rank(), at, what }
    }
}

impl Values {
    /// The tensors that a rank contributes, for calls without numbers.
    fn tensors(&self, worker: &Worker, seat: &Seat) -> Result<Vec<Tensor>, BenchError> {
        let sizes = match self.op {
            Op::Broadcast if seat.rank > 0 => Vec::new(),
            Op::Broadcast | Op::AllGather => vec![self.bytes],
            Op::AllToAll => parts(self.bytes, seat.ranks),
            _ => Vec::new(),
        };
        let tensor = |bytes: usize| {
            let mut buffer = worker.pool().try_alloc(bytes)?;
            buffer.fill(byte_of(seat.rank));
            Ok(Tensor::new(buffer, DataType::U8, &[bytes as u64])?)
        };
        sizes.into_iter().map(tensor).collect()
    }
}

/// The sizes of the parts, one for each rank.
fn parts(whole: usize, ranks: usize) -> Vec<usize> {
    let end = |rank: usize| (whole as u128 * rank as u128 / ranks as u128) as usize;
    (0..ranks).map(|rank| end(rank + 1) - end(rank)).collect()
}

/// The number that a rank contributes to a sum that is checked.
fn own_number(rank: usize, at: usize) -> f32 {
    ((at % PATTERN) * (rank + 1)) as f32
}

/// The byte that fills a rank's tensors.
fn byte_of(rank: usize) -> u8 {
    rank as u8 + 1
}
