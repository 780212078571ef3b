//! The tasks that are timed: tensorwire's operations and their limits.

use std::{hint::black_box, iter, sync::Arc, time::Duration};

use futures::{StreamExt, stream::FuturesUnordered};
use tensorwire::{Key, RemoteTensor, Sharing, Worker, fabric::Runtime, settings::Validation};
use tensorwire_fabric::Operation;

use super::{
    control::{Answer, Order, done},
    cpus::{cpu_ns_of, sleeps_of},
    error::BenchError,
    fabrics::Opened,
    group,
    limits::{
        LimitWait,
        bare::{self, Answers, Contents},
        perftest::{self, Perftest, VerbsSide},
        read_once,
        signal::Signals,
        stream::{self, RawStream},
    },
    pages::PageReads,
    phase::{Phase, PhaseLength, Watch},
    process::Peer,
    ranks::Rank,
    side::Side,
    workers::{Names, PULLER, client_name, start_worker, tensor_name},
};

/// Writes under way at once when bandwidth is measured.
const WRITES_OPEN: usize = 4;
/// Duration of one idle period.
const IDLE_TIME: Duration = Duration::from_secs(1);
/// Bytes of a sample if several operations are under way, and its maximum number of operations.
const STREAMED_BYTES: usize = 8 << 20;
const STREAMED_MAX: usize = 1024;
/// A raw request.
const ASK: [u8; 8] = [1; 8];
/// Number of tensors that pulls with several outstanding use in turns.
pub(super) const PULLED_TENSORS: usize = 64;
/// Receives of one step.
pub(super) const RECEIVES: usize = 10_000;

/// The context of every task.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) peer: Peer,
    /// The other ranks of a group, from rank 2 on: `peer` is rank 1, and this process is rank 0.
    pub(super) others: Vec<Peer>,
    pub(super) clock: Arc<dyn Runtime>,
    /// This process's fabric.
    pub(super) opened: Opened,
}

impl Stage {
    /// This process's side of bare signals.
    pub(super) fn signals(&self, wait: LimitWait) -> Signals<'_> {
        Signals::new(&self.peer.memory, &self.peer.bells, &*self.clock, wait, true)
    }

    /// The other processes.
    pub(super) fn peers(&mut self) -> Vec<&mut Peer> {
        iter::once(&mut self.peer).chain(&mut self.others).collect()
    }

    /// CPU time of all processes so far, in nanoseconds.
    pub(super) fn cpu_ns(&self) -> u64 {
        let peers = iter::once(&self.peer).chain(&self.others).map(|peer| cpu_ns_of(peer.id()));
        cpu_ns_of(std::process::id()) + peers.sum::<u64>()
    }
}

/// A worker that pulls from the other process's worker.
#[derive(Debug, Clone)]
pub(super) struct Puller {
    pub(super) worker: Worker,
    pub(super) server: tensorwire::Peer,
}

/// A task to time.
#[derive(Debug)]
pub(super) enum Task {
    /// Round trips of writes, each counted as two ways.
    RoundTrips { side: Arc<Side> },
    /// Writes in one direction.
    Writes { side: Arc<Side> },
    /// Writes in one direction, as many under way as perftest has; only the last one has an immediate.
    QuietWrites { side: Arc<Side> },
    /// Writes in both directions at once, in pieces; each operation moves all bytes of both sides.
    WritesBothWays { side: Arc<Side> },
    /// A program of perftest; each operation counts as `parts` operations of the program.
    Perftest { test: Perftest, side: VerbsSide, bytes: usize, parts: f64 },
    /// Pulls of the first tensor, one after the other.
    Pulls { puller: Puller, sharing: Sharing, read: bool },
    /// Pulls by a handle, one after the other.
    HandlePulls { tensor: RemoteTensor, read: bool, _puller: Puller },
    /// Pulls of tensors that the other process has just written, `pieces` one after the other.
    FreshPulls { puller: Puller, bytes: usize, pieces: usize },
    /// Reads of pages.
    Pages(PageReads),
    /// Pulls with this many outstanding.
    ManyPulls { puller: Puller, outstanding: usize },
    /// Pulls of lists.
    ListPulls { puller: Puller },
    /// Receives of steps, all of a step outstanding at once.
    Receives { puller: Puller, keys: Arc<[Key]>, step: i64 },
    /// Connecting and the first fetch, each by a new worker.
    SetUps { address: String, validation: Validation, number: u64 },
    /// A new raw stream and one round trip over it.
    Connects { port: u16 },
    /// Calls of a group.
    Collectives { rank: Box<Rank> },
    /// Nothing, for some time, with a connection open.
    Idle { _puller: Puller },
    /// Nothing at all.
    Nothing,
    /// Bare signals: round trips of `width` at once, each counted as `parts` operations.
    Signals { wait: LimitWait, width: usize, parts: f64 },
    /// Contents of shared memory, copied or read.
    Contents { contents: Contents, messages: Messages, wait: LimitWait, rewritten: bool },
    /// Round trips of a raw stream, each counted as `parts` operations.
    StreamRoundTrips { stream: Arc<RawStream>, bytes: usize, wait: LimitWait, parts: f64 },
    /// A raw stream in one direction.
    StreamWrites { stream: Arc<RawStream>, bytes: usize, wait: LimitWait },
    /// A raw stream. Each message is requested.
    StreamPulls { stream: Arc<RawStream>, bytes: usize, wait: LimitWait },
}

/// Whether a limit has messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Messages {
    /// Two, one each way.
    Two,
    /// None: only the work on the bytes.
    None,
}

impl Task {
    /// Operations that must be done together.
    pub(super) fn batch(&self) -> u64 {
        match self {
            Self::FreshPulls { pieces, .. } => *pieces as u64,
            Self::Contents { contents, rewritten: true, .. } => contents.pieces() as u64,
            Self::Pages(reads) => reads.batch(),
            Self::ManyPulls { outstanding, .. } => (4 * outstanding) as u64,
            Self::ListPulls { .. } => PULLED_TENSORS as u64,
            Self::Receives { .. } => RECEIVES as u64,
            Self::QuietWrites { side } => Perftest::WriteBandwidth.batch(side.bytes()),
            Self::Perftest { test, bytes, .. } => test.batch(*bytes),
            _ => 1,
        }
    }

    /// Executes the operations of `plan`, and times them.
    pub(super) async fn run(&mut self, stage: &mut Stage, plan: PhaseLength) -> Result<Phase, BenchError> {
        match self {
            Self::RoundTrips { side } => Ok(round_trips(stage, side, plan).await?.split(2.0)),
            Self::Writes { side } => writes(stage, side, plan).await,
            Self::QuietWrites { side } => quiet_writes(stage, side, plan).await,
            Self::WritesBothWays { side } => writes_both_ways(stage, side, plan).await,
            Self::Perftest { test, side, bytes, parts } => {
                let phase = run_perftest(stage, (*test, side), *bytes, plan).await?;
                Ok(phase.split(1.0 / *parts))
            }
            Self::Pulls { puller, sharing, read } => pulls(stage, puller, *sharing, *read, plan).await,
            Self::HandlePulls { tensor, read, .. } => handle_pulls(stage, tensor, *read, plan).await,
            Self::FreshPulls { puller, bytes, pieces } => {
                fresh_pulls(stage, puller, (*bytes, *pieces), plan).await
            }
            Self::Pages(reads) => reads.run(&*stage.clock, plan).await,
            Self::ManyPulls { puller, outstanding } => many_pulls(stage, puller, *outstanding, plan).await,
            Self::ListPulls { puller } => list_pulls(stage, puller, plan).await,
            Self::Receives { puller, keys, step } => {
                let mut all = Phase::default();
                for _ in 0..plan.ops.div_ceil(RECEIVES as u64) {
                    all = all.and(&receives(stage, puller, keys, *step).await?);
                    *step += 1;
                }
                Ok(all)
            }
            Self::SetUps { address, validation, number } => {
                set_ups(stage, (address, *validation), number, plan).await
            }
            Self::Connects { port } => connects(stage, *port, plan).await,
            Self::Collectives { rank } => {
                let clock = stage.clock.clone();
                group::calls(stage.peers(), rank, &*clock, plan).await
            }
            Self::Idle { .. } => idle(stage).await,
            Self::Nothing => Ok(Phase::nothing()),
            Self::Signals { wait, width, parts } => {
                Ok(signal_round_trips(stage, *wait, *width, plan).await?.split(*parts))
            }
            Self::Contents { contents, messages, wait, rewritten: false } => {
                take_contents(stage, contents, (*messages, *wait), plan).await
            }
            Self::Contents { contents, messages, wait, rewritten: true } => {
                take_rewritten(stage, contents, (*messages, *wait), plan).await
            }
            Self::StreamRoundTrips { stream, bytes, wait, parts } => {
                Ok(stream_round_trips(stage, stream, (*bytes, *wait), plan).await?.split(*parts))
            }
            Self::StreamWrites { stream, bytes, wait } => {
                stream_writes(stage, stream, (*bytes, *wait), plan).await
            }
            Self::StreamPulls { stream, bytes, wait } => {
                stream_pulls(stage, stream, (*bytes, *wait), plan).await
            }
        }
    }
}

async fn round_trips(stage: &mut Stage, side: &Side, plan: PhaseLength) -> Result<Phase, BenchError> {
    stage.peer.order(&Order::Echo { count: plan.ops }, "round trips").await?;
    let mut watch = Watch::start(&*stage.clock, plan);
    for _ in 0..plan.ops {
        side.round_trip().await?;
        watch.tick();
    }
    Ok(watch.stop())
}

/// Operations of a sample if several are under way: completions come in bursts, so that single times mean little.
fn streamed(bytes: usize) -> u64 {
    (STREAMED_BYTES / bytes.max(1)).clamp(WRITES_OPEN, STREAMED_MAX) as u64
}

async fn writes(stage: &mut Stage, side: &Side, plan: PhaseLength) -> Result<Phase, BenchError> {
    stage.peer.order(&Order::Take { count: plan.ops }, "writes").await?;
    let plan = plan.grouped(streamed(side.bytes()));
    let mut watch = Watch::start(&*stage.clock, plan);
    let mut open = std::collections::VecDeque::<Operation>::with_capacity(WRITES_OPEN);
    for _ in 0..plan.ops {
        if open.len() == WRITES_OPEN
            && let Some(oldest) = open.pop_front()
        {
            oldest.await?;
            watch.tick();
        }
        open.push_back(side.write());
    }
    for rest in open {
        rest.await?;
        watch.tick();
    }
    // A completion means that the bytes may be reused; only the last arrival shows that they have landed.
    side.arrival().await?;
    Ok(watch.stop())
}

async fn quiet_writes(stage: &mut Stage, side: &Side, plan: PhaseLength) -> Result<Phase, BenchError> {
    stage.peer.order(&Order::Take { count: 1 }, "writes").await?;
    // One sample, because perftest's report has one average.
    let mut watch = Watch::start(&*stage.clock, plan.grouped(plan.ops));
    side.write_many(plan.ops, || watch.tick()).await?;
    let phase = watch.stop();
    // The answer belongs to no sample, because perftest's writes end with their completions, too.
    side.arrival().await?;
    Ok(phase)
}

async fn writes_both_ways(stage: &mut Stage, side: &Side, plan: PhaseLength) -> Result<Phase, BenchError> {
    stage.peer.order(&Order::WriteBothWays { count: plan.ops }, "writes both ways").await?;
    side.meet().await?;
    let mut watch = Watch::start(&*stage.clock, plan.grouped(plan.ops));
    side.write_both_ways(plan.ops).await?;
    (0..plan.ops).for_each(|_| watch.tick());
    Ok(watch.stop())
}

async fn run_perftest(
    stage: &mut Stage,
    (test, side): (Perftest, &VerbsSide),
    bytes: usize,
    plan: PhaseLength,
) -> Result<Phase, BenchError> {
    let order = Order::Perftest { test, operations: plan.ops, bytes };
    let port = match stage.peer.ask(&order, "starting a server of perftest").await? {
        Answer::Port(port) => port,
        other => return Err(BenchError::Unexpected(format!("{other:?}"))),
    };
    let ns = perftest::run(test, side, (plan.ops, bytes), port)?;
    let ops = plan.ops as f64;
    Ok(Phase { samples: vec![ns], ops, spent_ns: ns * ops })
}

async fn pulls(
    stage: &Stage,
    puller: &Puller,
    sharing: Sharing,
    read: bool,
    plan: PhaseLength,
) -> Result<Phase, BenchError> {
    let name = tensor_name(0);
    let mut watch = Watch::start(&*stage.clock, plan);
    for _ in 0..plan.ops {
        let tensor = puller.server.fetch(&name).sharing(sharing).await?;
        if read {
            read_once(tensor.bytes());
        }
        black_box(&tensor);
        drop(tensor);
        watch.tick();
    }
    Ok(watch.stop())
}

async fn handle_pulls(
    stage: &Stage,
    tensor: &RemoteTensor,
    read: bool,
    plan: PhaseLength,
) -> Result<Phase, BenchError> {
    let mut watch = Watch::start(&*stage.clock, plan);
    for _ in 0..plan.ops {
        let fetched = tensor.fetch().await?;
        if read {
            read_once(fetched.bytes());
        }
        black_box(fetched);
        watch.tick();
    }
    Ok(watch.stop())
}

async fn fresh_pulls(
    stage: &mut Stage,
    puller: &Puller,
    (bytes, pieces): (usize, usize),
    plan: PhaseLength,
) -> Result<Phase, BenchError> {
    let names: Vec<String> = (0..pieces).map(tensor_name).collect();
    let mut all = Phase::default();
    for batch in 0..plan.ops / pieces as u64 {
        let order = Order::Publish { names: Names::Short, value: value_of(batch), bytes, copies: pieces };
        done(stage.peer.ask(&order, "publishing").await?)?;
        let mut watch = Watch::start(&*stage.clock, PhaseLength { ops: pieces as u64, group: 1 });
        for name in &names {
            black_box(puller.server.fetch(name).await?);
            watch.tick();
        }
        all = all.and(&watch.stop());
    }
    Ok(all)
}

/// The byte that fills a batch. It differs from the previous batch's.
fn value_of(batch: u64) -> u8 {
    (batch % 251) as u8 + 1
}

async fn list_pulls(stage: &Stage, puller: &Puller, plan: PhaseLength) -> Result<Phase, BenchError> {
    let names: Vec<String> = (0..PULLED_TENSORS).map(tensor_name).collect();
    let lists = PhaseLength { ops: plan.ops / PULLED_TENSORS as u64, group: 1 };
    let mut watch = Watch::start(&*stage.clock, lists);
    for _ in 0..lists.ops {
        black_box(puller.server.fetch_many(&names).await?);
        watch.tick();
    }
    Ok(watch.stop().split(PULLED_TENSORS as f64))
}

async fn many_pulls(
    stage: &Stage,
    puller: &Puller,
    outstanding: usize,
    plan: PhaseLength,
) -> Result<Phase, BenchError> {
    let names: Vec<String> = (0..PULLED_TENSORS).map(tensor_name).collect();
    let mut turns =
        names.iter().map(String::as_str).cycle().take(usize::try_from(plan.ops).unwrap_or(usize::MAX));
    // Answers come in batches, so that single times mean little.
    let plan = plan.grouped(4 * PULLED_TENSORS as u64);
    let mut watch = Watch::start(&*stage.clock, plan);
    let mut open = FuturesUnordered::new();
    let pull = |name| puller.server.fetch(name).into_future();
    open.extend(turns.by_ref().take(outstanding).map(pull));
    while let Some(pulled) = open.next().await {
        black_box(pulled?);
        watch.tick();
        open.extend(turns.next().map(pull));
    }
    Ok(watch.stop())
}

/// One step: all values are sent once all receives are outstanding.
async fn receives(stage: &mut Stage, puller: &Puller, keys: &[Key], step: i64) -> Result<Phase, BenchError> {
    let receiving = puller.worker.shared_step(step);
    let order = Order::Send { to: PULLER.to_owned(), step, keys: keys.len() };
    let mut watch =
        Watch::start(&*stage.clock, PhaseLength { ops: keys.len() as u64, group: keys.len() as u64 });
    let mut open: FuturesUnordered<_> = keys.iter().map(|key| receiving.recv(key).into_future()).collect();
    let asked = futures::poll!(open.next());
    if asked.is_ready() {
        return Err(BenchError::Unexpected("a value before it was sent".to_owned()));
    }
    stage.peer.order(&order, "sending").await?;
    while let Some(received) = open.next().await {
        black_box(received?);
        watch.tick();
    }
    Ok(watch.stop())
}

async fn set_ups(
    stage: &Stage,
    (address, validation): (&str, Validation),
    number: &mut u64,
    plan: PhaseLength,
) -> Result<Phase, BenchError> {
    let mut all = Phase::default();
    for _ in 0..plan.ops {
        *number += 1;
        let worker = start_worker(&client_name(*number), &stage.opened, validation).await?;
        let mut watch = Watch::start(&*stage.clock, PhaseLength { ops: 1, group: 1 });
        black_box(worker.peer_at(address).await?.fetch(&tensor_name(0)).await?);
        watch.tick();
        all = all.and(&watch.stop());
        worker.shutdown().await;
    }
    Ok(all)
}

async fn connects(stage: &mut Stage, port: u16, plan: PhaseLength) -> Result<Phase, BenchError> {
    stage.peer.order(&Order::Accept { count: plan.ops }, "raw connections").await?;
    let mut watch = Watch::start(&*stage.clock, plan);
    for _ in 0..plan.ops {
        stream::connect_once(port, ASK)?;
        watch.tick();
    }
    Ok(watch.stop())
}

/// The time between two wake-ups of the other process; 0 if there are none.
async fn idle(stage: &Stage) -> Result<Phase, BenchError> {
    // The second process is counted: it is as idle as this one, and reads no clock.
    let before = sleeps_of(stage.peer.id());
    stage.clock.sleep(IDLE_TIME).await;
    let wakeups = sleeps_of(stage.peer.id()).saturating_sub(before);
    let spent_ns = IDLE_TIME.as_nanos() as f64;
    let between = if wakeups == 0 { 0.0 } else { spent_ns / wakeups as f64 };
    Ok(Phase { samples: vec![between], ops: wakeups as f64, spent_ns })
}

/// Orders the second process to answer the signals of `plan`.
async fn order_answers(stage: &mut Stage, answers: Answers) -> Result<(), BenchError> {
    // The second process reads no word before the order.
    stage.signals(answers.wait).reset();
    stage.peer.order(&Order::Answer { answers }, "signals").await
}

async fn signal_round_trips(
    stage: &mut Stage,
    wait: LimitWait,
    width: usize,
    plan: PhaseLength,
) -> Result<Phase, BenchError> {
    let plan = PhaseLength { ops: plan.ops.div_ceil(width as u64), ..plan };
    order_answers(stage, Answers { count: plan.ops, width, wait, copied: None }).await?;
    bare::round_trips(stage.signals(wait), width, &*stage.clock, plan)
}

async fn take_contents(
    stage: &mut Stage,
    contents: &mut Contents,
    (messages, wait): (Messages, LimitWait),
    plan: PhaseLength,
) -> Result<Phase, BenchError> {
    if messages == Messages::None {
        return contents.alone(wait, &stage.peer.memory, &*stage.clock, plan);
    }
    let answers = Answers { count: plan.ops, width: 1, wait, copied: contents.copied() };
    order_answers(stage, answers).await?;
    contents.between_messages(stage.signals(wait), &stage.peer.memory, &*stage.clock, plan)
}

/// The other process writes all pieces before each batch.
async fn take_rewritten(
    stage: &mut Stage,
    contents: &mut Contents,
    how: (Messages, LimitWait),
    plan: PhaseLength,
) -> Result<Phase, BenchError> {
    let (bytes, pieces) = (contents.bytes(), contents.pieces());
    let mut all = Phase::default();
    for batch in 0..plan.ops / pieces as u64 {
        let order = Order::Fill { value: value_of(batch), bytes, pieces };
        done(stage.peer.ask(&order, "filling").await?)?;
        let length = PhaseLength { ops: pieces as u64, group: 1 };
        all = all.and(&take_contents(stage, contents, how, length).await?);
    }
    Ok(all)
}

async fn stream_round_trips(
    stage: &mut Stage,
    stream: &RawStream,
    (bytes, wait): (usize, LimitWait),
    plan: PhaseLength,
) -> Result<Phase, BenchError> {
    stage.peer.order(&Order::StreamEcho { count: plan.ops, bytes, wait }, "raw round trips").await?;
    let (wait, clock, mut message) = (stream.prepare(wait, bytes)?, &*stage.clock, vec![7; bytes]);
    let mut watch = Watch::start(clock, plan);
    for _ in 0..plan.ops {
        stream.write(&message, wait, clock)?;
        stream.read(&mut message, wait, clock)?;
        watch.tick();
    }
    Ok(watch.stop())
}

async fn stream_writes(
    stage: &mut Stage,
    stream: &RawStream,
    (bytes, wait): (usize, LimitWait),
    plan: PhaseLength,
) -> Result<Phase, BenchError> {
    stage.peer.order(&Order::StreamTake { count: plan.ops, bytes, wait }, "raw writes").await?;
    // The writer does not wait until a small message is read, so the socket's buffer may be full at any time.
    let wait = stream.prepare(wait, usize::MAX)?;
    let (clock, message, plan) = (&*stage.clock, vec![7; bytes], plan.grouped(streamed(bytes)));
    let mut watch = Watch::start(clock, plan);
    for _ in 0..plan.ops {
        stream.write(&message, wait, clock)?;
        watch.tick();
    }
    stream.read(&mut [0], wait, clock)?;
    Ok(watch.stop())
}

async fn stream_pulls(
    stage: &mut Stage,
    stream: &RawStream,
    (bytes, wait): (usize, LimitWait),
    plan: PhaseLength,
) -> Result<Phase, BenchError> {
    let (asked, ask) = (ASK.len(), &ASK);
    stage.peer.order(&Order::StreamServe { count: plan.ops, asked, bytes, wait }, "raw pulls").await?;
    let (wait, clock, mut message) = (stream.prepare(wait, bytes)?, &*stage.clock, vec![0; bytes]);
    let mut watch = Watch::start(clock, plan);
    for _ in 0..plan.ops {
        stream.write(ask, wait, clock)?;
        stream.read(&mut message, wait, clock)?;
        watch.tick();
    }
    Ok(watch.stop())
}
