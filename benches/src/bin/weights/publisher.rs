//! The process that commits versions.

use std::{
    fmt,
    hint::black_box,
    time::{Duration, Instant},
};

use tensorwire::{DataType, Tensor, Worker};
use tensorwire_benches::{grpc, random::Random};

use crate::{
    Arguments, Failure,
    follower::{Follower, Order},
    milliseconds,
};

const SET: &str = "weights";

/// Elements of a row.
const ROW: usize = 1024;

/// What differs between two versions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Change {
    /// The tensors are the same ones.
    Nothing,
    /// One row in a hundred of each tensor.
    Rows,
    /// This percentage of the elements, at random.
    Elements(f64),
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("nothing"),
            Self::Rows => f.write_str("1 % of the rows"),
            Self::Elements(percent) => write!(f, "{percent} % of the elements"),
        }
    }
}

/// How a version came to the followers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Round {
    /// The time of the commit, if they wait for it.
    pub(crate) commit: Duration,
    /// The time until the last of them has the version: from the commit on if they wait for it, otherwise from their requests on.
    pub(crate) all: Duration,
    /// The bytes that one of them moved.
    pub(crate) bytes: u64,
}

#[derive(Debug)]
pub(crate) struct Publisher {
    worker: Worker,
    tensors: Vec<Tensor>,
    tensor_bytes: usize,
    version: u64,
    random: Random,
}

impl Publisher {
    /// Commits the first version.
    pub(crate) async fn start(arguments: &Arguments) -> Result<Self, Failure> {
        let bytes = arguments.mebibytes << 20;
        let tensor_bytes = arguments.tensor_bytes();
        let worker = Worker::builder("publisher").fabrics([arguments.fabric.kind()]);
        let worker = worker
            .memory(|memory| {
                memory.source_bytes = 5 * bytes as u64;
                memory.viewed_bytes_per_peer_max = Some(4 * bytes as u64);
            })
            .set_bytes(4 * bytes as u64);
        let worker = worker.start().await?;
        let mut publisher =
            Self { worker, tensors: Vec::new(), tensor_bytes, version: 0, random: Random::default() };
        for _ in 0..arguments.tensors {
            let bytes: Vec<u8> = (0..tensor_bytes).map(|_| publisher.random.number() as u8).collect();
            publisher.tensors.push(publisher.tensor(&bytes)?);
        }
        publisher.commit().await?;
        Ok(publisher)
    }

    pub(crate) fn address(&self) -> String {
        self.worker.address().to_owned()
    }

    /// Serves tensors of the same sizes by tonic. Returns the address.
    pub(crate) async fn serve_by_tonic(&self) -> Result<String, Failure> {
        let (give, address) = tokio::sync::oneshot::channel();
        let sizes = [self.tensor_bytes];
        tokio::spawn(async move {
            let listening = |address| {
                let _ = give.send(address);
            };
            grpc::serve(&sizes, listening, std::future::pending()).await
        });
        Ok(address.await?.to_string())
    }

    /// Lets all followers get a version.
    pub(crate) async fn round(
        &mut self,
        change: Change,
        order: Order,
        followers: &mut [Follower],
    ) -> Result<Round, Failure> {
        // Those that fetch have not got the last version by their stream.
        if order == Order::Follow {
            self.catch_up(followers).await?;
        }
        let tensors = self.changed(change)?;
        if order != Order::Follow {
            self.tensors = tensors.clone();
            self.commit().await?;
        }
        let next = self.version + u64::from(order == Order::Follow);
        let mut begun = Instant::now();
        for follower in followers.iter_mut() {
            follower.tell(order, next)?;
        }
        for follower in followers.iter_mut() {
            follower.hear()?;
        }
        if order == Order::Follow {
            tokio::time::sleep(Duration::from_millis(20)).await;
            self.tensors = tensors;
            begun = Instant::now();
            self.commit().await?;
        }
        let commit = begun.elapsed();
        let mut bytes = 0;
        for follower in followers {
            bytes = tokio::task::block_in_place(|| follower.hear())?;
        }
        Ok(Round { commit, all: begun.elapsed(), bytes })
    }

    /// Lets the streams of all followers get to the newest version.
    async fn catch_up(&self, followers: &mut [Follower]) -> Result<(), Failure> {
        for follower in followers.iter_mut() {
            follower.tell(Order::Follow, self.version)?;
            follower.hear()?;
        }
        for follower in followers {
            tokio::task::block_in_place(|| follower.hear())?;
        }
        Ok(())
    }

    /// Prints how long a commit compares contents that are equal, in other memory, and how long reading both takes.
    pub(crate) async fn compare(&mut self, rounds: u32, followers: &mut [Follower]) -> Result<(), Failure> {
        let (mut comparing, mut reading) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            self.catch_up(followers).await?;
            let others = self.changed(Change::Elements(0.0))?;
            let begun = Instant::now();
            black_box(self.tensors.iter().chain(&others).map(sum).fold(0, u64::wrapping_add));
            reading.push(begun.elapsed());
            self.tensors = others;
            let begun = Instant::now();
            self.commit().await?;
            comparing.push(begun.elapsed());
        }
        let (comparing, reading) = (milliseconds(&mut comparing), milliseconds(&mut reading));
        println!(
            "# a commit of equal contents {comparing:.2} ms, reading both {reading:.2} ms: {:.2} of the speed",
            reading / comparing
        );
        Ok(())
    }

    pub(crate) async fn end(self) {
        self.worker.shutdown().await;
    }

    async fn commit(&mut self) -> Result<(), Failure> {
        self.version += 1;
        let named = self
            .tensors
            .iter()
            .enumerate()
            .map(|(at, tensor)| (format!("layer.{at}.weight"), tensor.clone()));
        Ok(self.worker.set(SET).commit(self.version, named).await?)
    }

    fn tensor(&self, bytes: &[u8]) -> Result<Tensor, Failure> {
        Ok(Tensor::from_bytes(self.worker.pool(), DataType::Bf16, &[bytes.len() as u64 / 2], bytes)?)
    }

    fn changed(&mut self, change: Change) -> Result<Vec<Tensor>, Failure> {
        if change == Change::Nothing {
            return Ok(self.tensors.clone());
        }
        let mut changed = Vec::with_capacity(self.tensors.len());
        for at in 0..self.tensors.len() {
            let mut bytes = self.tensors[at].bytes().to_vec();
            self.change(change, &mut bytes);
            changed.push(self.tensor(&bytes)?);
        }
        Ok(changed)
    }

    fn change(&mut self, change: Change, bytes: &mut [u8]) {
        let elements = bytes.len() / 2;
        match change {
            Change::Nothing => {}
            Change::Rows => {
                let rows = elements / ROW;
                for _ in 0..rows.div_ceil(100) {
                    let row = self.random.number() as usize % rows.max(1) * ROW * 2;
                    bytes[row..].iter_mut().take(2 * ROW).for_each(|byte| *byte = byte.wrapping_add(1));
                }
            }
            Change::Elements(percent) => {
                let threshold = (percent / 100.0 * f64::from(1 << 24)) as u64;
                for element in 0..elements {
                    if self.random.number() >> 40 < threshold {
                        bytes[2 * element] = bytes[2 * element].wrapping_add(1);
                    }
                }
            }
        }
    }
}

fn sum(tensor: &Tensor) -> u64 {
    let words = tensor.bytes().chunks_exact(8);
    words.map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default())).fold(0, u64::wrapping_add)
}

/// Prints how long it takes to copy the set once for each follower, on both cores, into resident memory.
pub(crate) fn copy_alone(arguments: &Arguments) -> Result<(), Failure> {
    let bytes = arguments.mebibytes << 20;
    let source = vec![1u8; bytes];
    let mut targets: Vec<Vec<u8>> = (0..arguments.followers).map(|_| vec![2u8; bytes]).collect();
    let mut times = Vec::new();
    for _ in 0..arguments.rounds {
        let begun = Instant::now();
        for target in &mut targets {
            let (left, right) = target.split_at_mut(bytes / 2);
            let (from_left, from_right) = source.split_at(bytes / 2);
            std::thread::scope(|scope| {
                scope.spawn(|| left.copy_from_slice(from_left));
                right.copy_from_slice(from_right);
            });
        }
        times.push(begun.elapsed());
        black_box(&mut targets);
    }
    println!(
        "# copying the set {} times on two threads: {:.2} ms",
        arguments.followers,
        milliseconds(&mut times)
    );
    Ok(())
}
