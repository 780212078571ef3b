//! The tasks that are timed: tensorwire's operations and their limits.

use std::{hint::black_box, sync::Arc, time::Duration};

use futures::{StreamExt, stream::FuturesUnordered};
use tensorwire::{Key, Runtime, Sharing, Worker};
use tensorwire_memory::copy::{CopyReason, copy_bytes};
use tensorwire_verbs_reactor::{Operation, verbs::VerbsCounts};

use super::{
    control::{Answer, Order},
    cpus::sleeps_of,
    error::BenchError,
    fabrics::Opened,
    limits::{
        bell::Words,
        perftest::{self, Perftest, VerbsSide},
        read_once,
        stream::RawStream,
    },
    phase::{Phase, PhaseLength, Watch},
    process::Peer,
    side::Side,
    workers::{PULLER, tensor_name},
};

/// Writes under way at once when bandwidth is measured.
const WRITES_OPEN: usize = 4;
/// Duration of one idle period.
const IDLE_TIME: Duration = Duration::from_secs(1);
/// Bytes of a sample where several operations are under way, and most operations of one.
const STREAMED_BYTES: usize = 8 << 20;
const STREAMED_MAX: usize = 1024;
/// Tensors that are rewritten before they are pulled, or copied, one after the other.
pub(super) const FRESH_PIECES: usize = 16;
/// Tensors that pulls with several outstanding take in turns.
pub(super) const PULLED_TENSORS: usize = 64;
/// Receives of one step.
pub(super) const RECEIVES: usize = 10_000;

/// The context of every task.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) peer: Peer,
    pub(super) clock: Arc<dyn Runtime>,
    /// This process's fabric.
    pub(super) opened: Opened,
}

impl Stage {
    /// The calls of this process to an RDMA device so far.
    pub(super) fn verbs_counts(&self) -> Option<VerbsCounts> {
        Some(self.opened.verbs.as_ref()?.counts())
    }
}

/// A worker that pulls from the other process's.
#[derive(Debug, Clone)]
pub(super) struct Puller {
    pub(super) worker: Worker,
    pub(super) server: tensorwire::Peer,
}

/// Something to time.
#[derive(Debug)]
pub(super) enum Task {
    /// Round trips of writes, each counted as two ways.
    RoundTrips { side: Arc<Side> },
    /// Round trips, each counted as one operation.
    TwoWays { side: Arc<Side> },
    /// Writes in one direction.
    Writes { side: Arc<Side> },
    /// Writes in one direction, as many under way as perftest has; only the last one has an immediate.
    QuietWrites { side: Arc<Side> },
    /// A program of perftest.
    Perftest { test: Perftest, side: VerbsSide, bytes: usize },
    /// Pulls of the tensor with this number, one after the other.
    Pulls { puller: Puller, number: usize, sharing: Sharing, read: bool },
    /// Pulls of tensors that the other process has just written.
    FreshPulls { puller: Puller, bytes: usize, value: u8 },
    /// Pulls with this many outstanding.
    ManyPulls { puller: Puller, outstanding: usize },
    /// Receives of steps, with this many outstanding.
    Receives { puller: Puller, keys: Arc<[Key]>, outstanding: usize, step: Arc<std::sync::atomic::AtomicI64> },
    /// Nothing, for a while, with a connection open.
    Idle { _puller: Puller },
    /// Nothing at all.
    Nothing,
    /// Bare eventfds.
    Bells,
    /// Bare words in shared memory.
    Words,
    /// Round trips of a raw stream, each counted as two ways.
    StreamRoundTrips { stream: Arc<RawStream>, bytes: usize },
    /// A raw stream in one direction.
    StreamWrites { stream: Arc<RawStream>, bytes: usize },
    /// A raw stream, asked for each message.
    StreamPulls { stream: Arc<RawStream>, bytes: usize },
    /// A copy between two buffers of this process.
    Copies { from: Vec<u8>, to: Vec<u8> },
    /// A copy from memory that the other process has just written.
    FreshCopies { to: Vec<u8>, value: u8 },
    /// Reading a buffer of this process.
    Reads { bytes: Vec<u8> },
}

impl Task {
    /// Operations that must be done together.
    pub(super) fn batch(&self) -> u64 {
        match self {
            Self::FreshPulls { .. } | Self::FreshCopies { .. } => FRESH_PIECES as u64,
            Self::ManyPulls { outstanding, .. } => (4 * outstanding) as u64,
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
            Self::TwoWays { side } => round_trips(stage, side, plan).await,
            Self::Writes { side } => writes(stage, side, plan).await,
            Self::QuietWrites { side } => quiet_writes(stage, side, plan).await,
            Self::Perftest { test, side, bytes } => run_perftest(stage, (*test, side), *bytes, plan).await,
            Self::Pulls { puller, number, sharing, read } => {
                pulls(stage, puller, (*number, *sharing), *read, plan).await
            }
            Self::FreshPulls { puller, bytes, value } => {
                fresh_pulls(stage, puller, *bytes, value, plan).await
            }
            Self::ManyPulls { puller, outstanding } => many_pulls(stage, puller, *outstanding, plan).await,
            Self::Receives { puller, keys, outstanding, step } => {
                let next = || step.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                let mut all = Phase::default();
                for _ in 0..plan.ops.div_ceil(RECEIVES as u64) {
                    all = all.and(&receives(stage, puller, keys, *outstanding, next()).await?);
                }
                Ok(all)
            }
            Self::Idle { .. } => idle(stage).await,
            Self::Nothing => Ok(Phase::nothing()),
            Self::Bells => Ok(bells(stage, plan).await?.split(2.0)),
            Self::Words => Ok(words(stage, plan).await?.split(2.0)),
            Self::StreamRoundTrips { stream, bytes } => {
                Ok(stream_round_trips(stage, stream, *bytes, plan).await?.split(2.0))
            }
            Self::StreamWrites { stream, bytes } => stream_writes(stage, stream, *bytes, plan).await,
            Self::StreamPulls { stream, bytes } => stream_pulls(stage, stream, *bytes, plan).await,
            Self::Copies { from, to } => Ok(copies(&*stage.clock, from, to, plan)),
            Self::FreshCopies { to, value } => fresh_copies(stage, to, value, plan).await,
            Self::Reads { bytes } => Ok(reads(&*stage.clock, bytes, plan)),
        }
    }
}

async fn round_trips(stage: &mut Stage, side: &Side, plan: PhaseLength) -> Result<Phase, BenchError> {
    stage.peer.order(&Order::Echo { count: plan.ops }, "round trips").await?;
    let mut watch = Watch::start(&*stage.clock, plan);
    for _ in 0..plan.ops {
        let write = side.write();
        side.arrival().await?;
        // Complete by now, since its answer has come.
        write.await?;
        watch.tick();
    }
    Ok(watch.stop())
}

/// Operations of a sample where several are under way: completions come in bursts, so that single times mean little.
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
    // One sample, as perftest's average is one.
    let mut watch = Watch::start(&*stage.clock, plan.grouped(plan.ops));
    let mut open = std::collections::VecDeque::<Operation>::with_capacity(perftest::WRITES_OPEN as usize);
    for number in 1..=plan.ops {
        if open.len() as u64 == perftest::WRITES_OPEN
            && let Some(oldest) = open.pop_front()
        {
            oldest.await?;
            watch.tick();
        }
        open.push_back(if number == plan.ops { side.write() } else { side.write_quietly() });
    }
    for rest in open {
        rest.await?;
        watch.tick();
    }
    let phase = watch.stop();
    // The answer belongs to no sample, because perftest's writes end with their completions too.
    side.arrival().await?;
    Ok(phase)
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
    (number, sharing): (usize, Sharing),
    read: bool,
    plan: PhaseLength,
) -> Result<Phase, BenchError> {
    let name = tensor_name(number);
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

async fn fresh_pulls(
    stage: &mut Stage,
    puller: &Puller,
    bytes: usize,
    value: &mut u8,
    plan: PhaseLength,
) -> Result<Phase, BenchError> {
    let names: Vec<String> = (0..FRESH_PIECES).map(tensor_name).collect();
    let mut all = Phase::default();
    for _ in 0..plan.ops / FRESH_PIECES as u64 {
        *value = value.wrapping_add(1);
        let order = Order::Publish { value: *value, bytes, copies: FRESH_PIECES };
        done(stage.peer.ask(&order, "publishing").await?)?;
        let mut watch = Watch::start(&*stage.clock, PhaseLength { ops: FRESH_PIECES as u64, group: 1 });
        for name in &names {
            black_box(puller.server.fetch(name).await?);
            watch.tick();
        }
        all = all.and(&watch.stop());
    }
    Ok(all)
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

/// One step: all values are sent once the first receives are outstanding, and each receive that ends is followed by the
/// next.
async fn receives(
    stage: &mut Stage,
    puller: &Puller,
    keys: &[Key],
    outstanding: usize,
    step: i64,
) -> Result<Phase, BenchError> {
    let receiving = puller.worker.shared_step(step);
    let order = Order::Send { to: PULLER.to_owned(), step, keys: keys.len() };
    let mut watch =
        Watch::start(&*stage.clock, PhaseLength { ops: keys.len() as u64, group: keys.len() as u64 });
    let mut turns = keys.iter();
    let mut open = FuturesUnordered::new();
    let receive = |key| receiving.recv(key).into_future();
    open.extend(turns.by_ref().take(outstanding).map(receive));
    let asked = futures::poll!(open.next());
    if asked.is_ready() {
        return Err(BenchError::Unexpected("a value before it was sent".to_owned()));
    }
    stage.peer.order(&order, "sending").await?;
    while let Some(received) = open.next().await {
        black_box(received?);
        watch.tick();
        open.extend(turns.next().map(receive));
    }
    Ok(watch.stop())
}

/// The time between two wake-ups of the other process; 0 if there are none.
async fn idle(stage: &Stage) -> Result<Phase, BenchError> {
    // The second process is as idle as this one, and reads no clock.
    let before = sleeps_of(stage.peer.id());
    stage.clock.sleep(IDLE_TIME).await;
    let wakeups = sleeps_of(stage.peer.id()).saturating_sub(before);
    let spent_ns = IDLE_TIME.as_nanos() as f64;
    let between = if wakeups == 0 { 0.0 } else { spent_ns / wakeups as f64 };
    Ok(Phase { samples: vec![between], ops: 1.0, spent_ns })
}

async fn bells(stage: &mut Stage, plan: PhaseLength) -> Result<Phase, BenchError> {
    stage.peer.order(&Order::Bell { count: plan.ops }, "bells").await?;
    let mut watch = Watch::start(&*stage.clock, plan);
    for _ in 0..plan.ops {
        stage.peer.bells.ring()?;
        stage.peer.bells.wait()?;
        watch.tick();
    }
    Ok(watch.stop())
}

async fn words(stage: &mut Stage, plan: PhaseLength) -> Result<Phase, BenchError> {
    let words = Words::new(&stage.peer.memory, true);
    // Both start from 0 again; the second process reads nothing before the order.
    words.reset();
    stage.peer.order(&Order::Ring { count: plan.ops }, "words").await?;
    let words = Words::new(&stage.peer.memory, true);
    let mut watch = Watch::start(&*stage.clock, plan);
    for value in 1..=plan.ops {
        words.store(value);
        words.await_value(value, &*stage.clock)?;
        watch.tick();
    }
    Ok(watch.stop())
}

async fn stream_round_trips(
    stage: &mut Stage,
    stream: &RawStream,
    bytes: usize,
    plan: PhaseLength,
) -> Result<Phase, BenchError> {
    stage.peer.order(&Order::StreamEcho { count: plan.ops, bytes }, "raw round trips").await?;
    stream.prepare_message(bytes)?;
    let mut message = vec![7; bytes];
    let mut watch = Watch::start(&*stage.clock, plan);
    for _ in 0..plan.ops {
        stream.write(&message)?;
        stream.read_message(&mut message)?;
        watch.tick();
    }
    stream.set_blocking(true)?;
    Ok(watch.stop())
}

async fn stream_writes(
    stage: &mut Stage,
    stream: &RawStream,
    bytes: usize,
    plan: PhaseLength,
) -> Result<Phase, BenchError> {
    stage.peer.order(&Order::StreamTake { count: plan.ops, bytes }, "raw writes").await?;
    let (message, plan) = (vec![7; bytes], plan.grouped(streamed(bytes)));
    let mut watch = Watch::start(&*stage.clock, plan);
    for _ in 0..plan.ops {
        stream.write(&message)?;
        watch.tick();
    }
    stream.read(&mut [0])?;
    Ok(watch.stop())
}

async fn stream_pulls(
    stage: &mut Stage,
    stream: &RawStream,
    bytes: usize,
    plan: PhaseLength,
) -> Result<Phase, BenchError> {
    stage.peer.order(&Order::StreamServe { count: plan.ops, bytes }, "raw pulls").await?;
    let mut message = vec![0; bytes];
    let mut watch = Watch::start(&*stage.clock, plan);
    for _ in 0..plan.ops {
        stream.write(&[1])?;
        stream.read(&mut message)?;
        watch.tick();
    }
    Ok(watch.stop())
}

fn copies(clock: &dyn Runtime, from: &[u8], to: &mut [u8], plan: PhaseLength) -> Phase {
    let mut watch = Watch::start(clock, plan);
    for _ in 0..plan.ops {
        copy_bytes(black_box(to), black_box(from), CopyReason::Local);
        watch.tick();
    }
    watch.stop()
}

async fn fresh_copies(
    stage: &mut Stage,
    to: &mut [u8],
    value: &mut u8,
    plan: PhaseLength,
) -> Result<Phase, BenchError> {
    let mut all = Phase::default();
    for _ in 0..plan.ops / FRESH_PIECES as u64 {
        *value = value.wrapping_add(1);
        let order = Order::Fill { value: *value, bytes: to.len(), pieces: FRESH_PIECES };
        done(stage.peer.ask(&order, "filling").await?)?;
        let mut watch = Watch::start(&*stage.clock, PhaseLength { ops: FRESH_PIECES as u64, group: 1 });
        for piece in 0..FRESH_PIECES {
            stage.peer.memory.read(piece * to.len(), black_box(to));
            watch.tick();
        }
        all = all.and(&watch.stop());
    }
    Ok(all)
}

fn reads(clock: &dyn Runtime, bytes: &[u8], plan: PhaseLength) -> Phase {
    let mut watch = Watch::start(clock, plan);
    for _ in 0..plan.ops {
        read_once(black_box(bytes));
        watch.tick();
    }
    watch.stop()
}

/// Takes an answer that only confirms the order.
pub(super) fn done(answer: Answer) -> Result<(), BenchError> {
    match answer {
        Answer::Done => Ok(()),
        other => Err(BenchError::Unexpected(format!("{other:?}"))),
    }
}
