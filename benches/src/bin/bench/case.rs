//! One case: an operation, its limit, and the processes set up for both.

use std::sync::Arc;

use serde::Serialize;
use tensorwire::{Sharing, fabric::Runtime};
use tensorwire_fabric::Role;

use super::{
    control::{Answer, Order, done},
    cpus::Placement,
    error::BenchError,
    fabrics::FabricChoice,
    group,
    limits::{
        LimitWait,
        bare::{COPY_ON_ONE, COPY_ON_TWO, Contents, Work},
        perftest::{Perftest, VerbsSide},
        signal::SIGNALS_MAX,
        stream::{RawStream, listen},
    },
    pages::{self, PageReads},
    process::Peer,
    ranks::Values,
    side::{Side, Unconnected},
    task::{Messages, PULLED_TENSORS, Puller, RECEIVES, Stage, Task},
    workers::{Names, PULLER, SERVER, device_of, edge_name, start_worker, tensor_name},
};
use crate::arguments::{AlgorithmChoice, Bench, BenchFabric, Checksum, Mode, Op, Source, WaitChoice};

/// From this size on, pulls are compared by bandwidth.
const BANDWIDTH_BYTES: u64 = 64 << 10;
/// Limits of the bytes and the tensors that are rewritten together before they are pulled one after the other.
const REWRITTEN_BYTES_MAX: u64 = 64 << 20;
const REWRITTEN_MAX: u64 = 16;
/// Bytes of the numbers that collectives combine.
const NUMBER_BYTES: u64 = size_of::<f32>() as u64;

/// The subject of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) fabric: BenchFabric,
    pub(super) op: Op,
    pub(super) mode: Mode,
    pub(super) wait: WaitChoice,
    pub(super) validate: Checksum,
    pub(super) source: Source,
    pub(super) size: u64,
    /// Processes that take part.
    pub(super) ranks: u32,
    pub(super) algorithm: Option<AlgorithmChoice>,
}

/// The RDMA devices of both processes, if they are named.
#[derive(Debug, Clone, Default)]
pub(super) struct DevicePair {
    pub(super) own: Option<String>,
    pub(super) peer: Option<String>,
}

impl DevicePair {
    /// From the names on the command line.
    pub(super) fn new(arguments: &Bench) -> Self {
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

/// A limit that a row is compared with.
#[derive(Debug)]
pub(super) struct Limit {
    pub(super) name: String,
    pub(super) task: Task,
}

impl Limit {
    /// The same limit with one core, if it has two: if copies are short or the machine is busy, one may be faster.
    pub(super) fn on_one_core(&self) -> Option<Self> {
        let Task::Contents { contents, messages, wait, rewritten } = &self.task else { return None };
        let (contents, name) = (contents.on_one_core()?, self.name.replace(COPY_ON_TWO, COPY_ON_ONE));
        let (messages, wait, rewritten) = (*messages, *wait, *rewritten);
        Some(Self { name, task: Task::Contents { contents, messages, wait, rewritten } })
    }
}

/// A case that is set up.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) stage: Stage,
    pub(super) ours: Task,
    /// The same work without tensorwire.
    pub(super) limit: Limit,
    /// Only moving the bytes, for a row that also has messages.
    pub(super) bare_work: Option<Limit>,
    pub(super) compares: Compares,
    pub(super) outstanding: usize,
}

/// Tensorwire's task, its limit, and the bare work.
type Tasks = (Task, Limit, Option<Limit>);

fn limit(name: &str, task: Task) -> Limit {
    Limit { name: name.to_owned(), task }
}

impl Case {
    /// Refuses a case that this build cannot measure, before anything is started.
    pub(super) fn check(&self) -> Result<(), BenchError> {
        let refused = |field, value: &str, remedy| {
            Err(BenchError::NotInThisBuild { field, value: value.to_owned(), remedy })
        };
        let is_shm = self.fabric == BenchFabric::Shm;
        let view = "only shared memory can be viewed; use --fabric shm or --mode copy";
        let rewritten = "only copies over shared memory have such a row; use --fabric shm --mode copy";
        if self.algorithm == Some(AlgorithmChoice::Views) && !is_shm {
            return refused("--algorithm", "views", "only shared memory can be viewed; use --fabric shm");
        }
        if self.op.is_reduction() && !self.size.is_multiple_of(NUMBER_BYTES) {
            let remedy = "numbers of 4 bytes are combined; use a multiple of 4 bytes";
            return refused("--size", &self.size.to_string(), remedy);
        }
        match (self.mode, self.source) {
            (Mode::View, _) if !is_shm => refused("--mode", "view", view),
            (Mode::ViewRead, _) if !is_shm => refused("--mode", "view-read", view),
            (Mode::Copy, Source::Rewritten) if is_shm => Ok(()),
            (_, Source::Rewritten) => refused("--source", "rewritten", rewritten),
            _ => Ok(()),
        }
    }

    fn bytes(&self) -> usize {
        usize::try_from(self.size).unwrap_or(usize::MAX)
    }

    fn is_rewritten(&self) -> bool {
        self.source == Source::Rewritten
    }

    /// Tensors that are pulled one after the other.
    fn pieces(&self) -> usize {
        if self.is_rewritten() {
            (REWRITTEN_BYTES_MAX / self.size.max(1)).clamp(2, REWRITTEN_MAX) as usize
        } else {
            1
        }
    }

    /// Starts the second process and connects to it.
    pub(super) async fn set_up(
        &self,
        placement: Placement,
        devices: &DevicePair,
        clock: Arc<dyn Runtime>,
    ) -> Result<Ready, BenchError> {
        let peer = Peer::start(placement.peer, Contents::shared_bytes(self.bytes(), self.pieces()))?;
        let opened = self.choice(devices.own.as_ref()).open(clock.clone())?;
        let mut stage = Stage { peer, others: Vec::new(), clock, opened };
        let open = Order::Open { choice: self.choice(devices.peer.as_ref()) };
        done(stage.peer.ask(&open, "opening the fabric").await?)?;
        if self.op.is_collective() {
            let ours = self.join(&mut stage, placement, &open).await?;
            let (limit, compares) = self.limit_of_collective(&mut stage).await?;
            return Ok(Ready { stage, ours, limit, bare_work: None, compares, outstanding: 1 });
        }
        let order = Order::Fill { value: 7, bytes: self.bytes(), pieces: self.pieces() };
        done(stage.peer.ask(&order, "filling").await?)?;
        let (ours, limit, bare_work) = match self.op {
            Op::Pingpong => self.pingpong(&mut stage, placement).await?,
            Op::Write => self.write(&mut stage, placement).await?,
            Op::Pull | Op::PullByHandle | Op::PullByMessage => self.pull(&mut stage, placement).await?,
            Op::Pages => self.pages(&mut stage, placement).await?,
            Op::Outstanding | Op::List => self.outstanding(&mut stage, placement).await?,
            Op::Receives => self.receives(&mut stage, placement).await?,
            Op::SetUp => self.set_ups(&mut stage).await?,
            // Collectives were set up above.
            _ => self.idle(&mut stage).await?,
        };
        let (compares, outstanding) = (self.compares(), self.outstanding_operations());
        Ok(Ready { stage, ours, limit, bare_work, compares, outstanding })
    }

    /// The fabric of a process with this device.
    fn choice(&self, device: Option<&String>) -> FabricChoice {
        FabricChoice { fabric: self.fabric, wait: self.wait, device: device.cloned() }
    }

    fn compares(&self) -> Compares {
        match self.op {
            Op::Write | Op::Pages => Compares::Bandwidth,
            Op::Pull | Op::PullByHandle if self.mode == Mode::ViewRead => Compares::Bandwidth,
            Op::Pull | Op::PullByHandle if self.mode == Mode::View => Compares::Time,
            Op::Pull | Op::PullByHandle | Op::PullByMessage if self.size >= BANDWIDTH_BYTES => {
                Compares::Bandwidth
            }
            _ => Compares::Time,
        }
    }

    fn outstanding_operations(&self) -> usize {
        match self.op {
            Op::Outstanding | Op::List => PULLED_TENSORS,
            Op::Receives => RECEIVES,
            _ => 1,
        }
    }

    async fn pingpong(&self, stage: &mut Stage, placement: Placement) -> Result<Tasks, BenchError> {
        let ours = Task::RoundTrips { side: self.connect(stage).await? };
        let limit = match self.fabric {
            BenchFabric::Shm => self.signals(placement, 1, 2.0),
            BenchFabric::Tcp => self.stream_round_trips(stage, placement, (self.bytes(), 2.0)).await?,
            BenchFabric::Verbs => self.perftest_messages(stage, 1.0)?,
        };
        Ok((ours, limit, self.bare_work(Work::Copy, placement)))
    }

    async fn write(&self, stage: &mut Stage, placement: Placement) -> Result<Tasks, BenchError> {
        let side = self.connect(stage).await?;
        let ours = if self.fabric == BenchFabric::Verbs {
            Task::QuietWrites { side }
        } else {
            Task::Writes { side }
        };
        Ok((ours, self.limit_of_writes(stage, placement).await?, None))
    }

    async fn pages(&self, stage: &mut Stage, placement: Placement) -> Result<Tasks, BenchError> {
        let Puller { worker, server } = self.start_workers(stage).await?;
        let order = Order::Expose { pages: pages::count(self.bytes()), page_bytes: self.bytes() };
        done(stage.peer.ask(&order, "exposing pages").await?)?;
        let ours = Task::Pages(PageReads::new(worker, &server, self.bytes()).await?);
        Ok((ours, self.limit_of_writes(stage, placement).await?, None))
    }

    async fn limit_of_writes(&self, stage: &mut Stage, placement: Placement) -> Result<Limit, BenchError> {
        Ok(match self.fabric {
            BenchFabric::Verbs => self.perftest(stage, Perftest::WriteBandwidth, 1.0)?,
            BenchFabric::Shm => self.work(Work::Copy, placement),
            BenchFabric::Tcp => {
                let (stream, wait) = (open_stream(stage).await?, self.limit_wait(placement));
                limit("raw stream", Task::StreamWrites { stream, bytes: self.bytes(), wait })
            }
        })
    }

    async fn pull(&self, stage: &mut Stage, placement: Placement) -> Result<Tasks, BenchError> {
        let puller = self.start_workers(stage).await?;
        let (bytes, pieces) = (self.bytes(), self.pieces());
        let names = if self.op == Op::PullByMessage { Names::InNoCatalogue } else { Names::Short };
        publish(stage, names, bytes, pieces).await?;
        let (sharing, read) = match self.mode {
            Mode::Copy => (Sharing::Copy, false),
            Mode::View => (Sharing::View, false),
            Mode::ViewRead => (Sharing::View, true),
        };
        let ours = match (self.op, self.source) {
            (Op::Pull, Source::AsItWas) => Task::Pulls { puller, sharing, read },
            (Op::Pull, Source::Rewritten) => Task::FreshPulls { puller, bytes, pieces },
            _ => {
                let tensor = puller.server.tensor(&names.of(0))?.sharing(sharing);
                Task::HandlePulls { tensor, read, _puller: puller }
            }
        };
        let work = if self.mode == Mode::ViewRead { Work::Read } else { Work::Copy };
        let limit = match self.fabric {
            // Neither process reads or writes the bytes.
            BenchFabric::Shm if self.mode == Mode::View => {
                return Ok((
                    ours,
                    Limit { name: "two messages".to_owned(), ..self.signals(placement, 1, 1.0) },
                    None,
                ));
            }
            BenchFabric::Shm => self.messages_and_work(work, placement),
            BenchFabric::Tcp => {
                let (stream, wait) = (open_stream(stage).await?, self.limit_wait(placement));
                limit("raw stream", Task::StreamPulls { stream, bytes, wait })
            }
            BenchFabric::Verbs if self.size < BANDWIDTH_BYTES => self.perftest_messages(stage, 2.0)?,
            BenchFabric::Verbs => self.perftest(stage, Perftest::WriteBandwidth, 1.0)?,
        };
        Ok((ours, limit, self.bare_work(work, placement)))
    }

    async fn outstanding(&self, stage: &mut Stage, placement: Placement) -> Result<Tasks, BenchError> {
        let puller = self.start_workers(stage).await?;
        publish(stage, Names::Short, self.bytes(), PULLED_TENSORS).await?;
        let ours = match self.op {
            Op::List => Task::ListPulls { puller },
            _ => Task::ManyPulls { puller, outstanding: PULLED_TENSORS },
        };
        Ok((ours, self.many_messages(stage, placement).await?, None))
    }

    async fn receives(&self, stage: &mut Stage, placement: Placement) -> Result<Tasks, BenchError> {
        let puller = self.start_workers(stage).await?;
        let (from, to) = (device_of(SERVER), device_of(PULLER));
        let mut keys = Vec::with_capacity(RECEIVES);
        for number in 0..RECEIVES {
            keys.push(puller.worker.key(&from, &to, &edge_name(number))?);
        }
        let ours = Task::Receives { puller, keys: keys.into(), step: 1 };
        Ok((ours, self.many_messages(stage, placement).await?, None))
    }

    async fn set_ups(&self, stage: &mut Stage) -> Result<Tasks, BenchError> {
        let address = start_server(stage).await?;
        publish(stage, Names::Short, self.bytes(), 1).await?;
        let port = match stage.peer.ask(&Order::Listen, "listening").await? {
            Answer::Port(port) => port,
            other => return Err(BenchError::Unexpected(format!("{other:?}"))),
        };
        let ours = Task::SetUps { address, validation: self.validate.validation(), number: 0 };
        Ok((ours, limit("TCP connect, round trip", Task::Connects { port }), None))
    }

    async fn idle(&self, stage: &mut Stage) -> Result<Tasks, BenchError> {
        let puller = self.start_workers(stage).await?;
        publish(stage, Names::Short, self.bytes(), 1).await?;
        // Workers connect when the first tensor moves.
        puller.server.fetch(&tensor_name(0)).await?;
        Ok((Task::Idle { _puller: puller }, limit("none", Task::Nothing), None))
    }

    /// Starts the other ranks, and joins a group with all of them.
    async fn join(&self, stage: &mut Stage, placement: Placement, open: &Order) -> Result<Task, BenchError> {
        for rank in 2..self.ranks as usize {
            let mut other = Peer::start(placement.of_rank(rank), Contents::shared_bytes(0, 0))?;
            done(other.ask(open, "opening the fabric").await?)?;
            stage.others.push(other);
        }
        let values = Values { op: self.op, bytes: self.bytes(), algorithm: self.algorithm };
        let opened = stage.opened.clone();
        let rank = group::join(stage.peers(), &opened, values).await?;
        Ok(Task::Collectives { rank: Box::new(rank) })
    }

    /// The limit of a collective. An all-reduce of two ranks over RDMA sends a rank's bytes in each direction, so it is
    /// compared with the fabric's own writes.
    async fn limit_of_collective(&self, stage: &mut Stage) -> Result<(Limit, Compares), BenchError> {
        let is_all_reduce = matches!(self.op, Op::AllReduce | Op::AllReduceTensors);
        if self.fabric != BenchFabric::Verbs || !is_all_reduce || self.ranks != 2 {
            return Ok((limit("none", Task::Nothing), Compares::Time));
        }
        let side = self.connect(stage).await?;
        Ok((limit("writes both ways", Task::WritesBothWays { side }), Compares::Bandwidth))
    }

    fn limit_wait(&self, placement: Placement) -> LimitWait {
        LimitWait::of(self.wait, placement)
    }

    /// Bare signals, `width` at once; a round trip counts as `parts` operations.
    fn signals(&self, placement: Placement, width: usize, parts: f64) -> Limit {
        let wait = self.limit_wait(placement);
        let name = if wait == LimitWait::Sleep { "eventfd + epoll" } else { "words in shared memory" };
        limit(name, Task::Signals { wait, width, parts })
    }

    /// One message and one answer for each outstanding operation, at once.
    async fn many_messages(&self, stage: &mut Stage, placement: Placement) -> Result<Limit, BenchError> {
        let limit = match self.fabric {
            BenchFabric::Tcp => {
                let all = (SIGNALS_MAX * self.bytes(), SIGNALS_MAX as f64);
                self.stream_round_trips(stage, placement, all).await?
            }
            // perftest has no such test.
            BenchFabric::Shm | BenchFabric::Verbs => self.signals(placement, SIGNALS_MAX, SIGNALS_MAX as f64),
        };
        Ok(Limit { name: format!("{}, 64 at once", limit.name), ..limit })
    }

    async fn stream_round_trips(
        &self,
        stage: &mut Stage,
        placement: Placement,
        (bytes, parts): (usize, f64),
    ) -> Result<Limit, BenchError> {
        let (stream, wait) = (open_stream(stage).await?, self.limit_wait(placement));
        Ok(limit("raw stream", Task::StreamRoundTrips { stream, bytes, wait, parts }))
    }

    fn contents(&self, work: Work, placement: Placement, messages: Messages) -> Task {
        let contents = Contents::new(work, self.bytes(), self.pieces(), placement);
        let wait = self.limit_wait(placement);
        Task::Contents { contents, messages, wait, rewritten: self.is_rewritten() }
    }

    /// Two bare messages, and the work on the bytes after the first.
    fn messages_and_work(&self, work: Work, placement: Placement) -> Limit {
        let name = format!("two messages, {}", self.work(work, placement).name);
        Limit { name, task: self.contents(work, placement, Messages::Two) }
    }

    /// Only the work on the bytes.
    fn work(&self, work: Work, placement: Placement) -> Limit {
        let name = Contents::name(work, self.bytes(), placement);
        limit(name, self.contents(work, placement, Messages::None))
    }

    /// The work on the bytes as a second limit, unless moving so few bytes takes negligible time.
    fn bare_work(&self, work: Work, placement: Placement) -> Option<Limit> {
        (self.size >= BANDWIDTH_BYTES).then(|| self.work(work, placement))
    }

    /// Messages of perftest. One operation corresponds to `parts` messages.
    fn perftest_messages(&self, stage: &Stage, parts: f64) -> Result<Limit, BenchError> {
        let test = match self.wait {
            WaitChoice::Sleep => Perftest::SendLatencyEvents,
            WaitChoice::Adaptive | WaitChoice::Busy => Perftest::WriteLatency,
        };
        self.perftest(stage, test, parts)
    }

    /// A program of perftest between the devices of both processes.
    fn perftest(&self, stage: &Stage, test: Perftest, parts: f64) -> Result<Limit, BenchError> {
        test.check()?;
        let verbs = stage.opened.verbs.as_ref();
        let verbs = verbs.ok_or_else(|| BenchError::Unexpected("no device".to_owned()))?;
        let side = VerbsSide::new(verbs);
        let name =
            if parts > 1.0 { format!("{}, two messages", test.name()) } else { test.name().to_owned() };
        Ok(Limit { name, task: Task::Perftest { test, side, bytes: self.bytes(), parts } })
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
        // If the second process failed, its error is the cause. If it has ended, no side will connect.
        let side = async { Ok(mine.connect(theirs, Role::Acceptor).await) };
        let answer = async { done(stage.peer.ask(&order, "connecting").await?) };
        let (side, ()) = futures::try_join!(side, answer)?;
        Ok(Arc::new(side?))
    }

    /// Starts a worker in each process.
    async fn start_workers(&self, stage: &mut Stage) -> Result<Puller, BenchError> {
        let address = start_server(stage).await?;
        // It is enough that one of the two workers asks for validation.
        let worker = start_worker(PULLER, &stage.opened, self.validate.validation()).await?;
        let server = worker.peer_at(&address).await?;
        Ok(Puller { worker, server })
    }
}

/// Starts the second process's worker; returns its address.
async fn start_server(stage: &mut Stage) -> Result<String, BenchError> {
    match stage.peer.ask(&Order::Worker, "starting a worker").await? {
        Answer::Address(address) => Ok(address),
        other => Err(BenchError::Unexpected(format!("{other:?}"))),
    }
}

async fn publish(stage: &mut Stage, names: Names, bytes: usize, copies: usize) -> Result<(), BenchError> {
    done(stage.peer.ask(&Order::Publish { names, value: 7, bytes, copies }, "publishing").await?)
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
pub(super) fn cases(arguments: &Bench) -> Vec<Case> {
    let mut cases = Vec::new();
    for &fabric in &arguments.fabric {
        for op in arguments.op.iter().flat_map(|choice| choice.ops().iter().copied()) {
            let own: Vec<u64> = op.own_size().into_iter().collect();
            let sizes = if own.is_empty() { &arguments.size } else { &own };
            for &wait in &arguments.wait {
                for (mode, source) in ways(op, arguments) {
                    for &validate in checksums(op, &arguments.validate) {
                        for (ranks, algorithm) in groups(op, arguments) {
                            let case = |&size| Case {
                                fabric,
                                op,
                                mode,
                                wait,
                                validate,
                                source,
                                size,
                                ranks,
                                algorithm,
                            };
                            cases.extend(sizes.iter().map(case));
                        }
                    }
                }
            }
        }
    }
    cases
}

/// Numbers of ranks, which only collectives have, and algorithms, which only all-reduce has.
fn groups(op: Op, arguments: &Bench) -> Vec<(u32, Option<AlgorithmChoice>)> {
    let algorithms: Vec<_> = match op {
        Op::AllReduce | Op::AllReduceTensors if !arguments.algorithm.is_empty() => {
            arguments.algorithm.iter().copied().map(Some).collect()
        }
        _ => vec![None],
    };
    let ranks = if op.is_collective() { &arguments.ranks[..] } else { &[2] };
    ranks.iter().flat_map(|&ranks| algorithms.iter().map(move |&algorithm| (ranks, algorithm))).collect()
}

/// Only workers validate, and no pages.
fn checksums(op: Op, asked: &[Checksum]) -> &[Checksum] {
    if op.is_collective() || matches!(op, Op::Write | Op::Pingpong | Op::Pages) {
        &[Checksum::Off]
    } else {
        asked
    }
}

/// Only pulls have a mode, and only pulls by name can have a rewritten source.
fn ways(op: Op, arguments: &Bench) -> Vec<(Mode, Source)> {
    let sources = match op {
        Op::Pull => &arguments.source[..],
        Op::PullByHandle => &[Source::AsItWas],
        _ => return vec![(Mode::Copy, Source::AsItWas)],
    };
    let sources = |&mode| sources.iter().map(move |&source| (mode, source));
    arguments.mode.iter().flat_map(sources).collect()
}
