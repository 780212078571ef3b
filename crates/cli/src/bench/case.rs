//! One case: an operation, its limit, and the processes set up for both.

use std::sync::{Arc, atomic::AtomicI64};

use serde::Serialize;
use tensorwire::{Key, Runtime, Sharing};
use tensorwire_verbs_reactor::Role;

use super::{
    control::{Answer, Order},
    cpus::Placement,
    error::BenchError,
    fabrics::FabricChoice,
    limits::{
        perftest::{Perftest, VerbsSide},
        stream::{RawStream, listen},
    },
    process::Peer,
    side::{Side, Unconnected},
    task::{FRESH_PIECES, PULLED_TENSORS, Puller, RECEIVES, Stage, Task, done},
    workers::{PULLER, SERVER, device_of, edge_name, start_worker, tensor_name},
};
use crate::arguments::{
    Checksum,
    bench::{BenchFabric, Mode, Op, WaitChoice},
};

/// From this size on, pulls are compared by bandwidth.
const BANDWIDTH_BYTES: u64 = 64 << 10;
/// Up to this size the source is rewritten before each pull. Larger sources come from main memory anyway.
const FRESH_BYTES_MAX: u64 = 1 << 20;
/// Bytes of a header of the TCP fabric, which a raw round trip carries too.
const TCP_HEADER_BYTES: usize = 40;
/// Bytes of the pull that a view is compared with.
const SMALL_PULL_BYTES: usize = 4 << 10;
/// Bytes of each value when many are outstanding.
const SMALL_BYTES: u64 = 8;

/// The subject of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) fabric: BenchFabric,
    pub(super) op: Op,
    pub(super) mode: Mode,
    pub(super) wait: WaitChoice,
    pub(super) validate: Checksum,
    pub(super) size: u64,
}

/// The RDMA devices of both processes, as far as they are named.
#[derive(Debug, Clone, Default)]
pub(super) struct DevicePair {
    pub(super) own: Option<String>,
    pub(super) peer: Option<String>,
}

impl DevicePair {
    /// From the names on the command line.
    pub(super) fn new(arguments: &crate::arguments::bench::Bench) -> Self {
        let own = arguments.device.clone();
        Self { peer: arguments.peer_device.clone().or_else(|| own.clone()), own }
    }
}

/// The quantity that a ratio compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Compares {
    /// Time over the limit's time: less is better.
    Time,
    /// Bandwidth over the limit's bandwidth: more is better.
    Bandwidth,
}

/// A case that is set up.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) stage: Stage,
    pub(super) ours: Task,
    pub(super) limit: Task,
    pub(super) limit_name: &'static str,
    pub(super) compares: Compares,
    pub(super) outstanding: usize,
}

impl Case {
    /// Refuses a case that this build cannot measure, before anything is started.
    pub(super) fn check(&self) -> Result<(), BenchError> {
        let refused = |value: &str| {
            let (field, remedy) =
                ("--mode", "only shared memory can be viewed; use --fabric shm or --mode copy");
            Err(BenchError::NotInThisBuild { field, value: value.to_owned(), remedy })
        };
        match (self.mode, self.fabric) {
            (Mode::Copy, _) | (_, BenchFabric::Shm) => Ok(()),
            (Mode::View, _) => refused("view"),
            (Mode::ViewRead, _) => refused("view-read"),
        }
    }

    fn bytes(&self) -> usize {
        usize::try_from(self.size).unwrap_or(usize::MAX)
    }

    fn is_fresh(&self) -> bool {
        self.op == Op::Pull
            && self.mode == Mode::Copy
            && self.fabric == BenchFabric::Shm
            && (BANDWIDTH_BYTES..=FRESH_BYTES_MAX).contains(&self.size)
    }

    /// Starts the second process and connects to it.
    pub(super) async fn set_up(
        &self,
        placement: Placement,
        devices: &DevicePair,
        clock: Arc<dyn Runtime>,
    ) -> Result<Ready, BenchError> {
        let shared = if self.is_fresh() { FRESH_PIECES * self.bytes() } else { 4096 };
        let peer = Peer::start(placement.peer, shared)?;
        let opened = self.choice(devices.own.as_ref()).open(clock.clone())?;
        let mut stage = Stage { peer, clock, opened };
        let order = Order::Open { choice: self.choice(devices.peer.as_ref()) };
        done(stage.peer.ask(&order, "opening the fabric").await?)?;
        let (ours, limit, limit_name) = match self.op {
            Op::Pingpong => self.pingpong(&mut stage).await?,
            Op::Write => self.write(&mut stage).await?,
            Op::Pull => self.pull(&mut stage).await?,
            Op::Outstanding => self.outstanding(&mut stage).await?,
            Op::Receives => self.receives(&mut stage).await?,
            Op::Idle => self.idle(&mut stage).await?,
        };
        let (compares, outstanding) = (self.compares(), self.outstanding_operations());
        Ok(Ready { stage, ours, limit, limit_name, compares, outstanding })
    }

    /// The fabric of a process with this device.
    fn choice(&self, device: Option<&String>) -> FabricChoice {
        FabricChoice { fabric: self.fabric, wait: self.wait, device: device.cloned() }
    }

    fn compares(&self) -> Compares {
        match self.op {
            Op::Write => Compares::Bandwidth,
            Op::Pull if self.mode == Mode::ViewRead => Compares::Bandwidth,
            Op::Pull if self.mode == Mode::View => Compares::Time,
            Op::Pull if self.size >= BANDWIDTH_BYTES => Compares::Bandwidth,
            _ => Compares::Time,
        }
    }

    fn outstanding_operations(&self) -> usize {
        match self.op {
            Op::Outstanding => PULLED_TENSORS,
            Op::Receives => RECEIVES,
            _ => 1,
        }
    }

    async fn pingpong(&self, stage: &mut Stage) -> Result<(Task, Task, &'static str), BenchError> {
        let ours = Task::RoundTrips { side: self.connect(stage).await? };
        Ok(match (self.fabric, self.wait) {
            (BenchFabric::Shm, WaitChoice::Busy) => (ours, Task::Words, "words in shared memory"),
            (BenchFabric::Shm, _) => (ours, Task::Bells, "eventfd + epoll"),
            (BenchFabric::Verbs, WaitChoice::Sleep) => {
                let (limit, name) = self.perftest(stage, Perftest::SendLatencyEvents)?;
                (ours, limit, name)
            }
            (BenchFabric::Verbs, _) => {
                let (limit, name) = self.perftest(stage, Perftest::WriteLatency)?;
                (ours, limit, name)
            }
            (BenchFabric::Tcp, _) => {
                let (stream, bytes) = (open_stream(stage).await?, self.bytes() + TCP_HEADER_BYTES);
                (ours, Task::StreamRoundTrips { stream, bytes }, "raw stream + epoll")
            }
        })
    }

    async fn write(&self, stage: &mut Stage) -> Result<(Task, Task, &'static str), BenchError> {
        let side = self.connect(stage).await?;
        let ours = if self.fabric == BenchFabric::Verbs {
            Task::QuietWrites { side }
        } else {
            Task::Writes { side }
        };
        Ok(match self.fabric {
            BenchFabric::Verbs => {
                let (limit, name) = self.perftest(stage, Perftest::WriteBandwidth)?;
                (ours, limit, name)
            }
            BenchFabric::Shm => (ours, self.copies(), "memcpy, resident"),
            BenchFabric::Tcp => {
                let stream = open_stream(stage).await?;
                (ours, Task::StreamWrites { stream, bytes: self.bytes() }, "raw blocking stream")
            }
        })
    }

    async fn pull(&self, stage: &mut Stage) -> Result<(Task, Task, &'static str), BenchError> {
        let (puller, bytes) = (self.start_workers(stage).await?, self.bytes());
        if self.mode != Mode::Copy {
            return self.view(stage, puller).await;
        }
        publish(stage, bytes, if self.is_fresh() { FRESH_PIECES } else { 1 }).await?;
        if self.size < BANDWIDTH_BYTES {
            let side = self.connect(stage).await?;
            let ours = pulls(puller);
            return Ok((ours, Task::TwoWays { side }, "two writes of the fabric"));
        }
        Ok(match self.fabric {
            BenchFabric::Shm if self.is_fresh() => {
                let ours = Task::FreshPulls { puller, bytes, value: 0 };
                (ours, Task::FreshCopies { to: vec![1; bytes], value: 0 }, "memcpy, just written elsewhere")
            }
            BenchFabric::Shm => (pulls(puller), self.copies(), "memcpy, resident"),
            BenchFabric::Verbs => {
                let (limit, name) = self.perftest(stage, Perftest::WriteBandwidth)?;
                (pulls(puller), limit, name)
            }
            BenchFabric::Tcp => {
                let stream = open_stream(stage).await?;
                let limit = Task::StreamPulls { stream, bytes };
                (pulls(puller), limit, "raw blocking stream")
            }
        })
    }

    /// A view that is not read is compared with a small pull; a view that is read, with reading the bytes.
    async fn view(
        &self,
        stage: &mut Stage,
        puller: Puller,
    ) -> Result<(Task, Task, &'static str), BenchError> {
        publish(stage, SMALL_PULL_BYTES, 2).await?;
        publish(stage, self.bytes(), 1).await?;
        let read = self.mode == Mode::ViewRead;
        let ours = Task::Pulls { puller: puller.clone(), number: 0, sharing: Sharing::View, read };
        Ok(if read {
            (ours, Task::Reads { bytes: vec![7; self.bytes()] }, "reading, resident")
        } else {
            let limit = Task::Pulls { puller, number: 1, sharing: Sharing::Copy, read: false };
            (ours, limit, "pull of 4 KiB")
        })
    }

    async fn outstanding(&self, stage: &mut Stage) -> Result<(Task, Task, &'static str), BenchError> {
        let puller = self.start_workers(stage).await?;
        publish(stage, self.bytes(), PULLED_TENSORS).await?;
        let many = |outstanding| Task::ManyPulls { puller: puller.clone(), outstanding };
        Ok((many(PULLED_TENSORS), many(1), "one pull at a time"))
    }

    async fn receives(&self, stage: &mut Stage) -> Result<(Task, Task, &'static str), BenchError> {
        let puller = self.start_workers(stage).await?;
        let (from, to) = (device_of(SERVER), device_of(PULLER));
        let mut keys = Vec::with_capacity(RECEIVES);
        for number in 0..RECEIVES {
            keys.push(puller.worker.key(&from, &to, &edge_name(number))?);
        }
        let keys: Arc<[Key]> = keys.into();
        let step = Arc::new(AtomicI64::new(1));
        let many = |outstanding| Task::Receives {
            puller: puller.clone(),
            keys: keys.clone(),
            outstanding,
            step: step.clone(),
        };
        Ok((many(RECEIVES), many(10), "10 outstanding"))
    }

    async fn idle(&self, stage: &mut Stage) -> Result<(Task, Task, &'static str), BenchError> {
        let puller = self.start_workers(stage).await?;
        publish(stage, self.bytes(), 1).await?;
        // Workers connect when the first tensor moves.
        puller.server.fetch(&tensor_name(0)).await?;
        Ok((Task::Idle { _puller: puller }, Task::Nothing, "none"))
    }

    fn copies(&self) -> Task {
        Task::Copies { from: vec![7; self.bytes()], to: vec![1; self.bytes()] }
    }

    /// A program of perftest between the devices of both processes, and its name.
    fn perftest(&self, stage: &Stage, test: Perftest) -> Result<(Task, &'static str), BenchError> {
        test.check()?;
        let verbs = stage.opened.verbs.as_ref();
        let verbs = verbs.ok_or_else(|| BenchError::Unexpected("no device".to_owned()))?;
        let side = VerbsSide::new(verbs);
        Ok((Task::Perftest { test, side, bytes: self.bytes() }, test.name()))
    }

    /// Connects a side in this process with one in the second process.
    async fn connect(&self, stage: &mut Stage) -> Result<Arc<Side>, BenchError> {
        let bytes = self.bytes();
        let mine = Unconnected::prepare(&stage.opened, bytes)?;
        let theirs = match stage.peer.ask(&Order::Prepare { bytes }, "preparing a side").await? {
            Answer::Side(theirs) => theirs,
            other => return Err(BenchError::Unexpected(format!("{other:?}"))),
        };
        let order = Order::Connect { side: mine.data() };
        // If the second process failed, its error is the cause. If it has ended, nobody will connect.
        let side = async { Ok(mine.connect(theirs, Role::Acceptor).await) };
        let answer = async { done(stage.peer.ask(&order, "connecting").await?) };
        let (side, ()) = futures::try_join!(side, answer)?;
        Ok(Arc::new(side?))
    }

    /// Starts a worker in each process.
    async fn start_workers(&self, stage: &mut Stage) -> Result<Puller, BenchError> {
        let address = match stage.peer.ask(&Order::Worker, "starting a worker").await? {
            Answer::Address(address) => address,
            other => return Err(BenchError::Unexpected(format!("{other:?}"))),
        };
        // It is enough that one of the two workers wants it.
        let worker = start_worker(PULLER, &stage.opened, self.validate.validation()).await?;
        let server = worker.peer_at(&address).await?;
        Ok(Puller { worker, server })
    }
}

fn pulls(puller: Puller) -> Task {
    Task::Pulls { puller, number: 0, sharing: Sharing::Copy, read: false }
}

async fn publish(stage: &mut Stage, bytes: usize, copies: usize) -> Result<(), BenchError> {
    done(stage.peer.ask(&Order::Publish { value: 7, bytes, copies }, "publishing").await?)
}

async fn open_stream(stage: &mut Stage) -> Result<Arc<RawStream>, BenchError> {
    let (listener, port) = listen()?;
    let order = Order::Stream { port };
    let (stream, answer) =
        futures::join!(RawStream::accept(listener), stage.peer.ask(&order, "opening a stream"));
    done(answer?)?;
    Ok(Arc::new(stream?))
}

/// The cases of a command line, in order. Operations with a fixed size occur once.
pub(super) fn cases(arguments: &crate::arguments::bench::Bench) -> Vec<Case> {
    let mut cases = Vec::new();
    for &fabric in &arguments.fabric {
        for op in arguments.op.iter().flat_map(|choice| choice.ops().iter().copied()) {
            let own = [SMALL_BYTES];
            let sizes = if op.has_own_size() { &own[..] } else { &arguments.size };
            for &wait in &arguments.wait {
                for &mode in modes(op, &arguments.mode) {
                    for &validate in checksums(op, &arguments.validate) {
                        let case = |&size| Case { fabric, op, mode, wait, validate, size };
                        cases.extend(sizes.iter().map(case));
                    }
                }
            }
        }
    }
    cases
}

/// Only workers validate.
fn checksums(op: Op, asked: &[Checksum]) -> &[Checksum] {
    if matches!(op, Op::Write | Op::Pingpong) { &[Checksum::Off] } else { asked }
}

/// Only pulls have a mode.
fn modes(op: Op, asked: &[Mode]) -> &[Mode] {
    if op == Op::Pull { asked } else { &[Mode::Copy] }
}
