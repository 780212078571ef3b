//! A verbs queue pair as a [`Link`].

use std::{
    sync::{
        Arc, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures::task::AtomicWaker;
use tensorwire_testpoints::sync::Mutex;

use tensorwire_fabric::{
    Arrival, Effort, FabricError, FabricKind, Immediate, Link, Look, LossCause, PeerViolation, QueuePairCore,
    SlotKey, WorkRequest,
};

use super::{
    DeviceEvent, Endpoint, VerbsError,
    completion::{Batch, Completion, CompletionQueue, Done, Status, WorkCompletion},
    doorbell::BATCH,
    error::fabric_error,
    message::Message,
    opened::Child,
    pending::RequestLimits,
    queue_pair::RawQueuePair,
    ranges::{Aim, Ranges},
    registrations::Registrations,
    send::{Phase, SendSide},
    send_queue::{Ended, SendStatus},
    submissions::Submissions,
    sys,
    tag::Tag,
};

/// The number of batches of completions after which other tasks get a turn.
pub(super) const TURN: usize = 8;

/// The fabric's half of a queue pair. Locks are taken in the order of the fields, and never held while a caller's code
/// runs.
#[derive(Debug)]
pub(super) struct VerbsLink {
    core: Arc<QueuePairCore>,
    domain: Arc<Registrations>,
    /// The receive depth of the peer.
    receive_depth: u32,
    /// Locked while a task takes completions and passes them on, so that their order is preserved.
    polling: Mutex<Receiving>,
    /// The send side. Submitted operations are posted by one call to the device: at once if nothing is outstanding or
    /// enough wait to fill a call, otherwise when the submitting task begins to wait or a completion comes back. So
    /// operations that one task submits in sequence, or that other threads submit during a call, share one call.
    send: Submissions<SendSide>,
    limits: RequestLimits,
    established: AtomicBool,
    /// Whether the phase has left [`Phase::Open`].
    is_ending: AtomicBool,
    /// The number of batches of completions so far, by any task.
    finds: AtomicU64,
    /// Whether a completion of the send queue was still to come after the latest batch.
    is_sending: AtomicBool,
    /// The device's round trip in nanoseconds; 0 if it is not known.
    round_trip_ns: AtomicU64,
    connecting: AtomicWaker,
    /// Wakes the driver when the phase leaves [`Phase::Open`].
    driver: AtomicWaker,
}

/// The state of receiving since the last immediate.
#[derive(Debug)]
struct Receiving {
    /// `None` once drained: otherwise every handle of the queue pair would keep the device open.
    completions: Option<Arc<CompletionQueue>>,
    /// The length in bytes of the pieces into which the peer splits its writes.
    piece_bytes: u32,
    /// The bytes before the last piece of the write whose immediate comes next.
    earlier_bytes: u64,
    /// The operations of the send queue that the latest batch completed, in order. The allocation is reused.
    ended: Vec<Ended>,
}

/// The work that a batch of completions requires besides passing its parts on.
#[derive(Default)]
struct Tally {
    /// For each completion of the batch: the length of [`Receiving::ended`] up to and including it.
    ends: [usize; Batch::SIZE],
    trouble: Option<VerbsError>,
}

impl VerbsLink {
    pub(super) fn new(
        core: Arc<QueuePairCore>,
        domain: Arc<Registrations>,
        completions: Arc<CompletionQueue>,
        send: SendSide,
        limits: RequestLimits,
        peer: &Endpoint,
    ) -> Self {
        let (completions, piece_bytes) = (Some(completions), peer.piece_bytes);
        let inbound = Receiving { completions, piece_bytes, earlier_bytes: 0, ended: Vec::new() };
        Self {
            core,
            domain,
            receive_depth: peer.receive_depth,
            polling: Mutex::new(inbound),
            send: Submissions::new(send),
            limits,
            established: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            finds: AtomicU64::new(0),
            is_sending: AtomicBool::new(false),
            round_trip_ns: AtomicU64::new(0),
            connecting: AtomicWaker::new(),
            driver: AtomicWaker::new(),
        }
    }

    /// The completion queue; `None` once drained.
    pub(super) fn completions(&self) -> Option<Arc<CompletionQueue>> {
        self.lock_polling().completions.clone()
    }

    /// The failure that ended the connection.
    pub(super) fn failure(&self) -> FabricError {
        self.core.failure().unwrap_or(FabricError::Closed)
    }

    /// Drops the completion queue of a drained connection.
    pub(super) fn release(&self) {
        let completions = self.lock_polling().completions.take();
        drop(completions);
    }

    pub(super) fn core(&self) -> &QueuePairCore {
        &self.core
    }

    /// The waker of the driver.
    pub(super) fn waker(&self) -> &AtomicWaker {
        &self.driver
    }

    /// Whether the connection is over or closing.
    pub(super) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    /// A number that changes with each batch of completions that any task takes.
    pub(super) fn finds(&self) -> u64 {
        self.finds.load(Ordering::Relaxed)
    }

    /// Whether a completion of the send queue was still to come after the latest batch.
    pub(super) fn is_sending(&self) -> bool {
        self.is_sending.load(Ordering::Relaxed)
    }

    /// The device's round trip.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        let ns = self.round_trip_ns.load(Ordering::Relaxed);
        (ns > 0).then_some(Duration::from_nanos(ns))
    }

    /// Sends the greeting. Its arrival completes the peer's `connect`, and its acknowledgement completes this side's.
    pub(super) fn greet(&self) {
        let result = self.with_send(|send| send.signal(Message::Greeting));
        if let Err(error) = result {
            self.fail(&fabric_error(&error));
        }
    }

    /// Ready once both sides are known to be ready.
    pub(super) fn poll_established(&self, context: &Context<'_>) -> Poll<Result<(), FabricError>> {
        self.connecting.register(context.waker());
        self.drive();
        if self.established.load(Ordering::Acquire) {
            return Poll::Ready(Ok(()));
        }
        self.core.failure().map_or(Poll::Pending, |failure| Poll::Ready(Err(failure)))
    }

    /// Takes one batch of completions and passes it on. Returns whether there was one.
    pub(super) fn take_batch(&self) -> bool {
        self.take_batch_locked(&mut self.lock_polling())
    }

    fn take_batch_locked(&self, inbound: &mut Receiving) -> bool {
        let mut batch = Batch::new();
        let Some(completions) = &inbound.completions else { return false };
        if let Err(error) = completions.poll(&mut batch) {
            self.abandon(&fabric_error(&error));
            return false;
        }
        if batch.is_empty() {
            return false;
        }
        self.finds.fetch_add(1, Ordering::Relaxed);
        let mut ended = std::mem::take(&mut inbound.ended);
        let tally = self.settle(&batch, &mut ended);
        let mut start = 0;
        for (completion, end) in batch.iter().zip(tally.ends) {
            self.hand_on(&completion, ended.get(start..end).unwrap_or_default(), inbound);
            start = end;
        }
        ended.clear();
        inbound.ended = ended;
        if let Some(error) = &tally.trouble {
            self.fail(&fabric_error(error));
        }
        // Only now: if posting fails, the earlier arrivals have been passed on.
        self.post_submitted(true);
        self.finish_if_idle();
        true
    }

    /// Refills the queues: counts completed work, posts new receives before the arrivals that consumed the old ones are
    /// passed on, and posts operations that waited for room.
    fn settle(&self, batch: &Batch, ended: &mut Vec<Ended>) -> Tally {
        self.send.with(|send| {
            let mut tally = Tally::default();
            let mut consumed = 0;
            for (completion, end) in batch.iter().zip(&mut tally.ends) {
                match completion.tag {
                    Tag::Receive => consumed += 1,
                    Tag::Send(sequence) => send.returned(sequence, send_status(&completion), ended),
                }
                *end = ended.len();
            }
            let posted = send.replace_receives(consumed).and_then(|()| self.send.collect(send));
            tally.trouble = posted.err();
            self.is_sending.store(send.is_sending(), Ordering::Relaxed);
            if let Some(round_trip) = send.round_trip() {
                let ns = u64::try_from(round_trip.as_nanos()).unwrap_or(u64::MAX);
                self.round_trip_ns.store(ns, Ordering::Relaxed);
            }
            tally
        })
    }

    fn hand_on(&self, completion: &WorkCompletion, ended: &[Ended], inbound: &mut Receiving) {
        match (completion.tag, completion.completion) {
            (tag, Completion::Failed { status, vendor }) => self.failed(tag, status, vendor, ended),
            (Tag::Send(_), Completion::Ok { .. }) => self.end(ended, &FabricError::Closed),
            (Tag::Receive, Completion::Ok { done }) => self.arrived(done, inbound),
        }
    }

    /// Completes the operations in `ended`. Those that are not done fail with `failure`.
    fn end(&self, ended: &[Ended], failure: &FabricError) {
        for ended in ended {
            match *ended {
                Ended::Operation { key, bytes, is_done: true } => {
                    self.core.complete(key, bytes, Ok(()));
                }
                Ended::Operation { key, bytes, is_done: false } => {
                    self.core.complete(key, bytes, Err(failure.clone()));
                }
                Ended::Signal { message: Message::Greeting, is_done: true } => self.establish(),
                Ended::Signal { is_done: true, .. } => self.go_down(),
                Ended::Signal { is_done: false, .. } => {}
            }
        }
    }

    fn arrived(&self, done: Done, inbound: &mut Receiving) {
        let message = match done {
            Done::Written { bytes, immediate } => return self.written(bytes, immediate, inbound),
            Done::Message(bits) => Message::from_bits(bits),
            Done::Write | Done::Send | Done::Other(_) => None,
        };
        match message {
            Some(Message::Greeting) => self.establish(),
            Some(Message::Extent(pieces)) => {
                let bytes = u64::from(pieces) * u64::from(inbound.piece_bytes);
                inbound.earlier_bytes = inbound.earlier_bytes.saturating_add(bytes);
            }
            Some(Message::Residue(bytes)) => {
                inbound.earlier_bytes = inbound.earlier_bytes.saturating_add(u64::from(bytes));
            }
            Some(Message::Farewell) => self.fail(&lost(LossCause::ClosedByPeer, "the peer closed it")),
            Some(Message::Overrun) => {
                let depth = self.core.config().receive_depth;
                self.fail(&FabricError::ReceiverNotReady { kind: FabricKind::VERBS, depth });
            }
            None => self.fail(&misbehaved(PeerViolation::Malformed)),
        }
    }

    fn written(&self, bytes: u32, immediate: u32, inbound: &mut Receiving) {
        let length = std::mem::take(&mut inbound.earlier_bytes).saturating_add(u64::from(bytes));
        if self.core.failure().is_some() {
            return;
        }
        self.core.count_received(length);
        let arrival = Arrival::Immediate { immediate: Immediate(immediate), length };
        if let Err(overrun) = self.core.deliver(arrival) {
            self.core.fail_arrivals(&overrun);
            self.leave(Message::Overrun);
        }
    }

    /// Handles a failed request. The queue pair is in its error state, or is going there.
    fn failed(&self, tag: Tag, status: Status, vendor: u32, ended: &[Ended]) {
        let cause = cause(tag, status, vendor, self.receive_depth).map(|cause| self.domain.explain(cause));
        if let Some(cause) = &cause {
            self.fail(cause);
        } else if self.core.failure().is_none() {
            self.fail(&lost(
                LossCause::Reset,
                "the queue pair failed: the peer accessed memory without permission, or the device gave up",
            ));
        }
        let failure = cause.or_else(|| self.core.failure()).unwrap_or(FabricError::Closed);
        self.end(ended, &failure);
    }

    fn establish(&self) {
        self.established.store(true, Ordering::Release);
        self.connecting.wake();
    }

    /// Ends the connection: there are no more arrivals, and posted work is flushed.
    pub(super) fn fail(&self, failure: &FabricError) {
        self.core.fail_arrivals(failure);
        self.go_down();
    }

    /// Posts the last message behind all work that has room. The queue pair goes down when the message is
    /// acknowledged, or when that is impossible.
    fn leave(&self, farewell: Message) {
        let is_leaving = self.with_send(|send| {
            if send.phase != Phase::Open {
                return true;
            }
            let posted = self.send.collect(send);
            send.phase = Phase::Leaving;
            self.stop_taking();
            let is_established = posted.is_ok() && self.established.load(Ordering::Acquire);
            is_established && send.signal(farewell).is_ok()
        });
        if is_leaving {
            self.driver.wake();
        } else {
            self.go_down();
        }
    }

    fn go_down(&self) {
        let went_down = self.with_send(|send| {
            if send.phase >= Phase::Down {
                return false;
            }
            send.phase = Phase::Down;
            self.stop_taking();
            let result = send.queue_pair.as_ref().map_or(Ok(()), RawQueuePair::fail);
            if let Err(error) = result {
                // The driver's time limit destroys the queue pair instead.
                log!(WARN, %error, "cannot move a queue pair to its error state");
            }
            true
        });
        if went_down {
            self.connecting.wake();
            self.driver.wake();
        }
    }

    /// Accepts no more work. Submitted operations that are not in the send queue yet end when the queue pair does.
    fn stop_taking(&self) {
        self.is_ending.store(true, Ordering::Relaxed);
        self.send.close();
    }

    /// Destroys the queue pair once all work is back. The peer cannot access memory after that.
    fn finish_if_idle(&self) {
        // Checked before the lock is taken, because most connections are not ending.
        if self.is_ending() && self.with_send(|send| send.phase == Phase::Down && send.is_idle()) {
            self.abandon(&FabricError::Closed);
        }
    }

    /// Destroys the queue pair. Outstanding work fails with `failure`, or with the earlier failure.
    pub(super) fn abandon(&self, failure: &FabricError) {
        self.core.fail_arrivals(failure);
        let taken = self.with_send(|send| {
            if send.phase == Phase::Drained {
                return None;
            }
            send.phase = Phase::Drained;
            self.stop_taking();
            let submitted = self.send.take_rest();
            let submitted = submitted.iter().filter(|range| range.is_last).map(|range| range.key);
            let unfinished: Vec<SlotKey> = send.take_unfinished().into_iter().chain(submitted).collect();
            Some((send.queue_pair.take(), unfinished))
        });
        let Some((queue_pair, unfinished)) = taken else { return };
        drop(queue_pair);
        let failure = self.core.failure().unwrap_or_else(|| failure.clone());
        for key in unfinished {
            self.core.complete(key, 0, Err(failure.clone()));
        }
        self.connecting.wake();
        self.driver.wake();
        self.core.mark_drained();
    }

    pub(super) fn is_drained(&self) -> bool {
        // Checked before the lock is taken, because the driver asks in every turn.
        self.is_ending() && self.with_send(|send| send.phase == Phase::Drained)
    }

    /// Posts the submitted operations, if they are due or `at_once`. If another task is using the send side, that task
    /// posts them afterwards.
    fn post_submitted(&self, at_once: bool) {
        if let Err(error) = self.send.hand_over(at_once) {
            self.fail(&fabric_error(&error));
        }
    }

    /// Runs `act` on the send side, and posts the operations that other tasks submitted meanwhile.
    fn with_send<T>(&self, act: impl FnOnce(&mut SendSide) -> T) -> T {
        let acted = self.send.with(act);
        self.post_submitted(true);
        acted
    }

    /// Passes on completions and posts submitted operations, on behalf of a task that is about to sleep.
    fn drive(&self) -> Look {
        // The task that has the lock passes everything on, and the driver looks again before it sleeps.
        let look = match self.polling.try_lock() {
            Ok(mut inbound) => found((0..TURN).take_while(|_| self.take_batch_locked(&mut inbound)).count()),
            Err(_) => Look::Busy,
        };
        self.post_submitted(true);
        look
    }

    fn lock_polling(&self) -> MutexGuard<'_, Receiving> {
        self.polling.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The result of a turn that took `batches` of completions.
pub(super) fn found(batches: usize) -> Look {
    match batches {
        0 => Look::Idle,
        TURN => Look::More,
        _ => Look::Worked,
    }
}

impl Child for VerbsLink {
    fn device_lost(&self, failure: &FabricError) {
        self.abandon(failure);
    }

    fn concerns(&self, event: DeviceEvent, failure: &FabricError) {
        let is_mine = match event {
            DeviceEvent::QueuePairFatal { number }
            | DeviceEvent::QueuePairRequest { number }
            | DeviceEvent::QueuePairAccess { number } => {
                self.with_send(|send| send.queue_pair.as_ref().is_some_and(|own| own.number() == number))
            }
            DeviceEvent::CompletionQueue { queue } => {
                self.completions().is_some_and(|completions| completions.raw() as usize == queue)
            }
            _ => false,
        };
        if is_mine {
            self.drive(); // a completion gives a more precise reason
            self.fail(failure);
        }
    }
}

impl Link for VerbsLink {
    fn submit(&self, key: SlotKey, request: &WorkRequest) {
        let aim = Aim { core: &self.core, domain: &self.domain };
        let ranges = match Ranges::of(request, key, &aim, &self.limits) {
            Ok(ranges) => ranges,
            Err(error) => {
                self.core.complete(key, 0, Err(error));
                return;
            }
        };
        let Some(waiting) = self.send.submit(ranges.into_iter()) else {
            self.core.complete(key, 0, Err(self.failure()));
            return;
        };
        self.post_submitted(waiting >= BATCH);
    }

    fn progress(&self, effort: Effort) -> Look {
        match effort {
            Effort::BeforeSleep => self.drive(),
            // If another thread has the lock, it passes on the completions.
            Effort::Poll => {
                let Ok(mut inbound) = self.polling.try_lock() else { return Look::Busy };
                if self.take_batch_locked(&mut inbound) { Look::Worked } else { Look::Idle }
            }
        }
    }

    fn start_close(&self) {
        self.leave(Message::Farewell);
    }
}

/// What a completion of the send queue implies for earlier requests.
fn send_status(completion: &WorkCompletion) -> SendStatus {
    match completion.completion {
        Completion::Ok { .. } => SendStatus::Done,
        Completion::Failed { status: Status::Flushed, .. } => SendStatus::Flushed,
        Completion::Failed { .. } => SendStatus::Failed,
    }
}

/// The reason that a failed request gives for the connection's failure; `None` if the connection had failed before the
/// request. `depth` is the peer's receive depth.
fn cause(tag: Tag, status: Status, vendor: u32, depth: u32) -> Option<FabricError> {
    let kind = FabricKind::VERBS;
    let device = |what: &str| {
        let source = std::io::Error::other(format!("{what} ({status:?}, vendor code {vendor})"));
        FabricError::device(kind, "the work request", source)
    };
    Some(match (tag, status) {
        (_, Status::Flushed) => return None,
        // The peer tried to write memory without permission, so this side's queue pair fails too.
        (Tag::Receive, Status::RemoteAccess | Status::Local(_)) => misbehaved(PeerViolation::WrongKey),
        (_, Status::RemoteAccess) => FabricError::RemoteRefused { kind, reason: PeerViolation::WrongKey },
        (_, Status::RetryExceeded) => lost(
            LossCause::RetryExceeded,
            &format!("the peer's device does not answer (vendor code {vendor})"),
        ),
        (_, Status::ReceiverNotReady) => FabricError::ReceiverNotReady { kind, depth },
        (_, Status::RemoteRefused(_)) => {
            FabricError::RemoteRefused { kind, reason: PeerViolation::Malformed }
        }
        // Soft-RoCE reports this while its port is going down, before it reports the port.
        (_, Status::Local(sys::IBV_WC_LOC_QP_OP_ERR) | Status::Other(_)) => lost(
            LossCause::DeviceLost,
            &format!("it cannot carry out a request now ({status:?}, vendor code {vendor})"),
        ),
        (_, Status::Local(_)) => device("this side's memory or request was refused"),
    })
}

fn lost(cause: LossCause, detail: &str) -> FabricError {
    FabricError::PeerLost { kind: FabricKind::VERBS, cause, detail: detail.to_owned() }
}

fn misbehaved(violation: PeerViolation) -> FabricError {
    FabricError::PeerMisbehaved { kind: FabricKind::VERBS, violation }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flushed_request_is_no_cause() {
        assert!(cause(Tag::Receive, Status::Flushed, 0, 8).is_none());
        assert!(cause(Tag::Send(0), Status::Flushed, 0, 8).is_none());
    }

    #[test]
    fn causes_name_the_side_at_fault() {
        let write = Tag::Send(0);
        let error = cause(write, Status::RetryExceeded, 129, 8);
        assert!(matches!(error, Some(FabricError::PeerLost { cause: LossCause::RetryExceeded, .. })));
        let error = cause(write, Status::RemoteAccess, 0, 8);
        assert!(matches!(error, Some(FabricError::RemoteRefused { reason: PeerViolation::WrongKey, .. })));
        let error = cause(Tag::Receive, Status::RemoteAccess, 0, 8);
        assert!(matches!(
            error,
            Some(FabricError::PeerMisbehaved { violation: PeerViolation::WrongKey, .. })
        ));
        let error = cause(write, Status::ReceiverNotReady, 0, 8);
        assert!(matches!(error, Some(FabricError::ReceiverNotReady { depth: 8, .. })));
        let error = cause(write, Status::Other(21), 0, 8);
        assert!(matches!(error, Some(FabricError::PeerLost { cause: LossCause::DeviceLost, .. })));
        let error = cause(write, Status::Local(4), 0, 8);
        assert!(matches!(error, Some(FabricError::Device { .. })));
    }
}
