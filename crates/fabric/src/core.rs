//! The state that a queue pair's two halves share.

use std::{
    fmt, mem,
    sync::{
        Arc, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use futures::task::AtomicWaker;
use tensorwire_testpoints::sync::Mutex;

use crate::{
    Arrival, Capabilities, FabricError, FabricKind, Help, RemoteRegions, SlotKey, SlotTable,
    arrival_queue::ArrivalQueue, slot::remember,
};

/// Depths of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePairConfig {
    /// Operations that may be outstanding at once.
    pub send_depth: u32,
    /// Immediates that may arrive before the first of them is taken.
    pub receive_depth: u32,
}

/// Sent bytes that wait for an acknowledgement of the peer's host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unacknowledged {
    /// The bytes that the peer's host has acknowledged so far.
    pub acknowledged: u64,
    /// How long the peer's host has sent nothing, while the system only probes the connection: because it is idle, or
    /// because its peer accepts no data now. `None` while data are unacknowledged.
    pub silence: Option<Duration>,
}

/// Counters of one queue pair, counted by the fabric.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueuePairStats {
    /// Operations completed without error.
    pub operations: u64,
    /// Payload bytes of those.
    pub bytes_sent: u64,
    /// Immediates that arrived.
    pub arrivals: u64,
    /// Bytes that the peer's writes put into local memory.
    pub bytes_received: u64,
    /// Set while something waits for an acknowledgement of the peer's host, whose kernel answers even while the peer's
    /// process does not run. `None` if nothing waits, or if the fabric does not know.
    pub unacknowledged: Option<Unacknowledged>,
}

#[derive(Debug, Default)]
struct Counters {
    operations: AtomicU64,
    bytes_sent: AtomicU64,
    /// Operations that were complete when they were posted, and their bytes.
    inline_operations: AtomicU64,
    inline_bytes: AtomicU64,
    arrivals: AtomicU64,
    bytes_received: AtomicU64,
}

/// Adds to a counter that one task at a time changes. An atomic addition would cost as much as a lock.
fn add(counter: &AtomicU64, more: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}

/// Takes the arrivals of one queue pair in the thread that finds them. See
/// [`QueuePair::set_sink`](crate::QueuePair::set_sink).
pub trait ArrivalSink: Send + Sync + fmt::Debug + 'static {
    /// Takes one arrival, in the peer's posting order. Calls for one queue pair never overlap.
    ///
    /// Any task that drives the queue pair may call this, and the fabric may hold the lock of its receiving side. So
    /// this must not wait for a lock that is held by a task which drives or closes the queue pair. It may post, poll
    /// operations and close.
    ///
    /// Returns true if no other task has work because of the arrival, as for a request that was answered: then the
    /// driver polls for the next one at once. After false it first lets other tasks run.
    fn arrived(&self, arrival: Arrival) -> bool;
}

/// Slots, arrivals and failure of one queue pair. The fabric's [`Link`](crate::Link) reports to it; the user's
/// [`QueuePair`](crate::QueuePair) awaits it.
#[derive(Debug)]
pub struct QueuePairCore {
    kind: FabricKind,
    config: QueuePairConfig,
    capabilities: Capabilities,
    slots: SlotTable,
    remote: RemoteRegions,
    /// Takes the arrivals. Without a sink they wait in `arrivals`.
    sink: OnceLock<Arc<dyn ArrivalSink>>,
    arrivals: ArrivalQueue<Arrival>,
    inbound: Mutex<Inbound>,
    /// Whether `inbound` has a failure.
    has_failed: AtomicBool,
    /// Takes the arrivals.
    consumer: AtomicWaker,
    help: Help,
    counters: Counters,
    /// Counts completions, and arrivals that left work to other tasks. If two threads add at once, one addition may be
    /// lost: the number still changes.
    for_tasks: AtomicU64,
}

#[derive(Debug, Default)]
struct Inbound {
    failure: Option<FabricError>,
    drained: bool,
    /// The tasks that wait for the drain. Several may close at once.
    closers: Vec<Waker>,
}

impl QueuePairCore {
    /// The shared state of a new queue pair. The fabric gets no operation that `capabilities` excludes.
    pub fn new(kind: FabricKind, config: QueuePairConfig, capabilities: Capabilities) -> Self {
        Self {
            kind,
            config,
            capabilities,
            slots: SlotTable::new(config.send_depth),
            remote: RemoteRegions::default(),
            sink: OnceLock::new(),
            arrivals: ArrivalQueue::new(),
            inbound: Mutex::default(),
            has_failed: AtomicBool::new(false),
            consumer: AtomicWaker::new(),
            help: Help::default(),
            counters: Counters::default(),
            for_tasks: AtomicU64::new(0),
        }
    }

    /// The kind of the fabric.
    pub fn kind(&self) -> FabricKind {
        self.kind
    }

    /// The depths.
    pub fn config(&self) -> QueuePairConfig {
        self.config
    }

    /// What the fabric can do.
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// The slots.
    pub fn slots(&self) -> &SlotTable {
        &self.slots
    }

    /// The state that helping tasks share with the driver.
    pub fn help(&self) -> &Help {
        &self.help
    }

    /// The peer's regions. The fabric looks up the target of a write in them.
    pub fn remote_regions(&self) -> &RemoteRegions {
        &self.remote
    }

    /// The current values of the counters.
    pub fn stats(&self) -> QueuePairStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        QueuePairStats {
            operations: read(&self.counters.operations) + read(&self.counters.inline_operations),
            bytes_sent: read(&self.counters.bytes_sent) + read(&self.counters.inline_bytes),
            arrivals: read(&self.counters.arrivals),
            bytes_received: read(&self.counters.bytes_received),
            unacknowledged: None,
        }
    }

    /// Reports the completion of one operation of `length` payload bytes.
    pub fn complete(&self, key: SlotKey, length: u64, result: Result<(), FabricError>) {
        if result.is_ok() {
            self.count_sent(length);
        }
        self.concerns_tasks();
        self.slots.complete(key, result);
    }

    /// Counts an operation of `length` payload bytes that is complete and has no slot. See
    /// [`count_inline`](Self::count_inline).
    pub fn count_sent(&self, length: u64) {
        self.counters.operations.fetch_add(1, Ordering::Relaxed);
        self.counters.bytes_sent.fetch_add(length, Ordering::Relaxed);
    }

    /// Like [`count_sent`](Self::count_sent), for a fabric that posts such writes under a lock: calls must not overlap.
    #[inline]
    pub fn count_inline(&self, length: u64) {
        add(&self.counters.inline_operations, 1);
        add(&self.counters.inline_bytes, length);
    }

    /// Counts `length` bytes that a write of the peer put into local memory. Calls must not overlap.
    #[inline]
    pub fn count_received(&self, length: u64) {
        add(&self.counters.bytes_received, length);
    }

    /// Reports an arrival, which consumes one posted receive. Calls must not overlap, and must follow the peer's
    /// posting order. A queue pair with a [sink](crate::QueuePair::set_sink) passes the arrival to the sink before
    /// this returns, which frees the receive. The sink posts, so this must not be called inside
    /// [`Link::submit`](crate::Link::submit), nor while a lock is held that a call of the link waits for. Use
    /// [`queue_arrival`](Self::queue_arrival) there.
    ///
    /// # Errors
    /// [`FabricError::ReceiverNotReady`] when all `receive_depth` receives are in use. The fabric must then fail the
    /// connection on both sides.
    pub fn deliver(&self, arrival: Arrival) -> Result<(), FabricError> {
        match self.sink.get() {
            // Earlier arrivals that are queued go to the sink first.
            Some(sink) if self.arrivals_waiting() == 0 => {
                add(&self.counters.arrivals, 1);
                if !sink.arrived(arrival) {
                    self.concerns_tasks();
                }
                Ok(())
            }
            _ => self.queue_arrival(arrival),
        }
    }

    /// Like [`deliver`](Self::deliver), but queues the arrival and wakes the task that awaits arrivals. That task, or
    /// the next one that drives the queue pair, passes it on. For a fabric that finds arrivals where it may not call
    /// the sink.
    ///
    /// # Errors
    /// As [`deliver`](Self::deliver).
    pub fn queue_arrival(&self, arrival: Arrival) -> Result<(), FabricError> {
        let (kind, depth) = (self.kind, self.config.receive_depth);
        if self.arrivals.push(arrival, depth).is_err() {
            return Err(FabricError::ReceiverNotReady { kind, depth });
        }
        add(&self.counters.arrivals, 1);
        self.concerns_tasks();
        let is_lost =
            tensorwire_testpoints::planted!("some arrivals wake no task") && self.stats().arrivals % 8 == 7;
        if !is_lost {
            self.consumer.wake();
        }
        Ok(())
    }

    /// Passes arrivals to `sink` from now on. Later calls have no effect.
    pub(crate) fn set_sink(&self, sink: Arc<dyn ArrivalSink>) {
        let _first = self.sink.set(sink);
    }

    /// Passes queued arrivals to the sink, if there is one, unless another task is doing so. Returns whether it
    /// passed any.
    pub(crate) fn hand_on(&self) -> bool {
        let Some(sink) = self.sink.get().filter(|_| self.arrivals_waiting() > 0 && !is_put_off()) else {
            return false;
        };
        let has_more = self.arrivals.hand_on(self.config.receive_depth, |arrival| {
            // The caller lets other tasks run afterwards.
            let _is_done = sink.arrived(arrival);
        });
        if has_more == Some(true) {
            self.consumer.wake();
        }
        has_more.is_some()
    }

    /// The number of arrivals so far, taken or not.
    pub(crate) fn arrived(&self) -> u64 {
        self.counters.arrivals.load(Ordering::Relaxed)
    }

    /// A number that changes whenever there is a result that a task may wait for.
    pub(crate) fn for_tasks(&self) -> u64 {
        self.for_tasks.load(Ordering::Relaxed)
    }

    fn concerns_tasks(&self) {
        add(&self.for_tasks, 1);
    }

    /// The number of arrivals that were not taken yet. Each still uses its receive.
    pub fn arrivals_waiting(&self) -> u64 {
        self.arrivals.waiting()
    }

    /// Wakes the task that takes the arrivals.
    pub(crate) fn wake_consumer(&self) {
        self.consumer.wake();
    }

    /// Reports that the connection is over. Fails every outstanding operation, and ends the arrivals once the earlier
    /// ones are taken. The first failure counts. For fabrics whose operations end with the connection. A fabric whose
    /// device still uses buffers calls [`fail_arrivals`](Self::fail_arrivals) instead, and completes each operation
    /// itself.
    pub fn fail(&self, failure: &FabricError) {
        self.fail_arrivals(failure);
        self.slots.fail(failure);
    }

    /// Like [`fail`](Self::fail), but leaves outstanding operations to the fabric, which completes them.
    pub fn fail_arrivals(&self, failure: &FabricError) {
        self.slots.refuse(failure);
        self.lock().failure.get_or_insert_with(|| failure.clone());
        self.has_failed.store(true, Ordering::Release);
        self.consumer.wake();
    }

    /// The failure, if there was one.
    pub fn failure(&self) -> Option<FabricError> {
        if self.has_failed() { self.lock().failure.clone() } else { None }
    }

    /// Whether the connection has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    /// Reports that the peer cannot access local memory any more.
    pub fn mark_drained(&self) {
        let closers = {
            let mut inbound = self.lock();
            inbound.drained = true;
            mem::take(&mut inbound.closers)
        };
        closers.into_iter().for_each(Waker::wake);
    }

    /// Whether an arrival is queued, or the arrivals have ended.
    pub(crate) fn has_arrival(&self) -> bool {
        self.arrivals_waiting() > 0 || self.has_failed()
    }

    /// Takes the next arrival from the queue.
    pub(crate) fn take_arrival(&self) -> Option<Arrival> {
        let mut next = None;
        if self.arrivals_waiting() > 0 {
            let _has_more = self.arrivals.hand_on(1, |arrival| next = Some(arrival));
        }
        next
    }

    pub(crate) fn poll_arrival(&self, context: &Context<'_>) -> Poll<Result<Arrival, FabricError>> {
        let Poll::Ready(there) = self.poll_inbound(context) else { return Poll::Pending };
        match there.map(|()| self.take_arrival()) {
            Ok(Some(arrival)) => Poll::Ready(Ok(arrival)),
            // Another task took it, although there must be one consumer only.
            Ok(None) => {
                context.waker().wake_by_ref();
                Poll::Pending
            }
            Err(failure) => Poll::Ready(Err(failure)),
        }
    }

    /// Ready when an arrival is queued, or when there will be no more.
    pub(crate) fn poll_inbound(&self, context: &Context<'_>) -> Poll<Result<(), FabricError>> {
        if self.sink.get().is_none() && is_put_off() {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        if self.arrivals_waiting() > 0 {
            return Poll::Ready(Ok(()));
        }
        self.consumer.register(context.waker());
        // An arrival before the waker was registered woke no task.
        if !self.has_arrival() {
            return Poll::Pending;
        }
        let inbound = self.lock();
        match &inbound.failure {
            Some(failure) if self.arrivals_waiting() == 0 => Poll::Ready(Err(failure.clone())),
            _ => Poll::Ready(Ok(())),
        }
    }

    /// Ready when the connection is over, the peer cannot access local memory any more, and every operation has
    /// ended.
    pub fn poll_drained(&self, context: &Context<'_>) -> Poll<()> {
        {
            let mut inbound = self.lock();
            if !inbound.drained {
                remember(&mut inbound.closers, context.waker());
                return Poll::Pending;
            }
        }
        self.slots.poll_idle(context)
    }

    fn lock(&self) -> MutexGuard<'_, Inbound> {
        self.inbound.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the simulator delays queued arrivals by one turn.
fn is_put_off() -> bool {
    tensorwire_testpoints::chance!("an arrival is delivered one poll later")
}
