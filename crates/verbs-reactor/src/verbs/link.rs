//! A verbs queue pair as a [`Link`].

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use futures::task::AtomicWaker;
use tokio::sync::Notify;

use crate::{
    Arrival, FabricError, FabricKind, Immediate, Link, LossCause, PeerViolation, Piece, QueuePairCore,
    SlotKey, WorkRequest,
};

use super::{
    VerbsError,
    completion::{Batch, Completion, CompletionQueue, Done, Status, WorkCompletion},
    domain::Registrations,
    error::fabric_error,
    message::Message,
    queue_pair::RawQueuePair,
    send::{Pending, Phase, SendSide},
    tag::Tag,
};

/// Batches of completions after which other tasks get a turn.
pub(super) const TURN: usize = 8;

/// The fabric's half of a queue pair. Locks are taken in the order of the fields, and never held while others'
/// code runs.
#[derive(Debug)]
pub(super) struct VerbsLink {
    core: Arc<QueuePairCore>,
    domain: Arc<Registrations>,
    completions: Arc<CompletionQueue>,
    /// Held while completions are taken and handed on, so that they are handed on in order.
    polling: Mutex<Inbound>,
    send: Mutex<SendSide>,
    established: AtomicBool,
    /// The phase is not [`Phase::Open`] any more.
    is_ending: AtomicBool,
    /// Batches of completions so far, whoever took them.
    finds: AtomicU64,
    connecting: AtomicWaker,
    /// Told when the phase leaves [`Phase::Open`].
    ending: Notify,
}

/// What came before the next immediate.
#[derive(Debug)]
struct Inbound {
    /// Into pieces of how many bytes the peer splits its writes.
    piece_bytes: u32,
    /// Bytes that the write whose immediate comes next has before its last piece.
    earlier_bytes: u64,
}

/// What a batch of completions asks for besides handing its parts on.
#[derive(Default)]
struct Tally {
    /// Bytes of each ended operation of the batch, in order.
    bytes: [u64; Batch::SIZE],
    trouble: Option<VerbsError>,
}

impl VerbsLink {
    pub(super) fn new(
        core: Arc<QueuePairCore>,
        domain: Arc<Registrations>,
        completions: Arc<CompletionQueue>,
        send: SendSide,
        peer_piece_bytes: u32,
    ) -> Self {
        Self {
            core,
            domain,
            completions,
            polling: Mutex::new(Inbound { piece_bytes: peer_piece_bytes, earlier_bytes: 0 }),
            send: Mutex::new(send),
            established: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            finds: AtomicU64::new(0),
            connecting: AtomicWaker::new(),
            ending: Notify::new(),
        }
    }

    pub(super) fn completions(&self) -> &Arc<CompletionQueue> {
        &self.completions
    }

    pub(super) fn ending(&self) -> &Notify {
        &self.ending
    }

    /// Whether the connection is over or coming to its end.
    pub(super) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    /// A number that changes with each batch of completions that anyone takes.
    pub(super) fn finds(&self) -> u64 {
        self.finds.load(Ordering::Relaxed)
    }

    /// Sends the greeting, whose arrival lets the peer's `connect` end and whose acknowledgement this side's.
    pub(super) fn greet(&self) {
        let result = self.lock_send().signal(Message::Greeting);
        if let Err(error) = result {
            self.fail(&fabric_error(&error));
        }
    }

    /// Ready once both ends are known to be ready.
    pub(super) fn poll_established(&self, context: &Context<'_>) -> Poll<Result<(), FabricError>> {
        self.connecting.register(context.waker());
        self.drive();
        if self.established.load(Ordering::Acquire) {
            return Poll::Ready(Ok(()));
        }
        self.core.failure().map_or(Poll::Pending, |failure| Poll::Ready(Err(failure)))
    }

    /// Takes one batch of completions and hands it on. Whether there was one.
    pub(super) fn progress(&self) -> bool {
        self.progress_locked(&mut self.polling.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn progress_locked(&self, inbound: &mut Inbound) -> bool {
        let mut batch = Batch::new();
        if let Err(error) = self.completions.poll(&mut batch) {
            self.abandon(&fabric_error(&error));
            return false;
        }
        if batch.is_empty() {
            return false;
        }
        self.finds.fetch_add(1, Ordering::Relaxed);
        let tally = self.settle(&batch);
        for (completion, bytes) in batch.iter().zip(tally.bytes) {
            self.hand_on(&completion, bytes, inbound);
        }
        if let Some(error) = &tally.trouble {
            self.fail(&fabric_error(error));
        }
        self.finish_if_idle();
        true
    }

    /// Keeps the queues full: counts what came back, posts receives anew before anyone sees what took the old
    /// ones, and posts what waited for room.
    fn settle(&self, batch: &Batch) -> Tally {
        let mut tally = Tally::default();
        let mut send = self.lock_send();
        let mut consumed = 0;
        for (completion, bytes) in batch.iter().zip(&mut tally.bytes) {
            match completion.tag {
                Tag::Receive => consumed += 1,
                tag => *bytes = send.returned(tag),
            }
        }
        send.receives = send.receives.saturating_sub(consumed);
        tally.trouble = send.replace_receives(consumed).and_then(|()| send.pump()).err();
        tally
    }

    fn hand_on(&self, completion: &WorkCompletion, bytes: u64, inbound: &mut Inbound) {
        match (completion.tag, completion.completion) {
            (_, Completion::Failed { status, vendor }) => self.failed(completion.tag, status, vendor, bytes),
            (Tag::Write(key), Completion::Ok { .. }) => self.core.complete(key, bytes, Ok(())),
            (Tag::Piece(_), Completion::Ok { .. }) => {}
            (Tag::Signal(bits), Completion::Ok { .. }) => match Message::from_bits(bits) {
                Some(Message::Greeting) => self.establish(),
                _ => self.go_down(),
            },
            (Tag::Receive, Completion::Ok { done }) => self.arrived(done, inbound),
        }
    }

    fn arrived(&self, done: Done, inbound: &mut Inbound) {
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
            Some(Message::Farewell) => self.fail(&lost(LossCause::ClosedByPeer, "the peer said farewell")),
            Some(Message::Overrun) => {
                let depth = self.core.config().receive_depth;
                self.fail(&FabricError::ReceiverNotReady { kind: FabricKind::Verbs, depth });
            }
            None => self.fail(&misbehaved(PeerViolation::Malformed)),
        }
    }

    fn written(&self, bytes: u32, immediate: u32, inbound: &mut Inbound) {
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

    /// A failed request: the queue pair is in its error state, or goes there.
    fn failed(&self, tag: Tag, status: Status, vendor: u32, bytes: u64) {
        let cause = cause(tag, status, vendor, self.core.config().receive_depth);
        if let Some(cause) = &cause {
            self.fail(cause);
        } else if self.core.failure().is_none() {
            self.fail(&lost(
                LossCause::Reset,
                "the queue pair failed: the peer reached for memory it may not write, or the device gave up",
            ));
        }
        if let Tag::Write(key) = tag {
            let failure = cause.or_else(|| self.core.failure()).unwrap_or(FabricError::Closed);
            self.core.complete(key, bytes, Err(failure));
        }
    }

    fn establish(&self) {
        self.established.store(true, Ordering::Release);
        self.connecting.wake();
    }

    /// The connection is over: no arrivals any more, and what is posted comes back.
    pub(super) fn fail(&self, failure: &FabricError) {
        self.core.fail_arrivals(failure);
        self.go_down();
    }

    /// Posts the last message, behind all work, and goes down when it is acknowledged or cannot be.
    fn leave(&self, farewell: Message) {
        {
            let mut send = self.lock_send();
            if send.phase != Phase::Open {
                return;
            }
            send.phase = Phase::Leaving;
            self.is_ending.store(true, Ordering::Relaxed);
            if self.established.load(Ordering::Acquire) && send.signal(farewell).is_ok() {
                drop(send);
                self.ending.notify_one();
                return;
            }
        }
        self.go_down();
    }

    fn go_down(&self) {
        {
            let mut send = self.lock_send();
            if send.phase >= Phase::Down {
                return;
            }
            send.phase = Phase::Down;
            self.is_ending.store(true, Ordering::Relaxed);
            let result = send.queue_pair.as_ref().map_or(Ok(()), RawQueuePair::fail);
            if let Err(error) = result {
                // The driver's time limit destroys the queue pair instead.
                tracing::warn!(%error, "a queue pair does not go into its error state");
            }
        }
        self.connecting.wake();
        self.ending.notify_one();
    }

    /// When everything is back, destroys the queue pair: nothing of the peer can touch memory after that.
    fn finish_if_idle(&self) {
        {
            let send = self.lock_send();
            if send.phase != Phase::Down || !send.is_idle() {
                return;
            }
        }
        self.abandon(&FabricError::Closed);
    }

    /// Destroys the queue pair with whatever is outstanding, which ends with `failure` or with what failed before.
    pub(super) fn abandon(&self, failure: &FabricError) {
        self.core.fail_arrivals(failure);
        let (queue_pair, unfinished) = {
            let mut send = self.lock_send();
            if send.phase == Phase::Drained {
                return;
            }
            send.phase = Phase::Drained;
            (send.queue_pair.take(), send.take_unfinished())
        };
        drop(queue_pair);
        let failure = self.core.failure().unwrap_or_else(|| failure.clone());
        for key in unfinished {
            self.core.complete(key, 0, Err(failure.clone()));
        }
        self.connecting.wake();
        self.ending.notify_one();
        self.core.mark_drained();
    }

    pub(super) fn is_drained(&self) -> bool {
        self.lock_send().phase == Phase::Drained
    }

    /// The ranges of `request`, all of them checked before the first is posted. Most have one only, and allocate
    /// nothing here. Each is split further, by what the device takes at once.
    fn resolve(&self, key: SlotKey, request: &WorkRequest) -> Result<(Pending, Vec<Pending>), FabricError> {
        let mut earlier = 0;
        let mut range = |piece: Piece| {
            let range = self.resolve_range(key, earlier, &piece)?;
            earlier += range.length;
            Ok(range)
        };
        let mut ranges = request.pieces(u64::MAX);
        let first = ranges.next().ok_or_else(|| request.unsupported(FabricKind::Verbs))?;
        Ok((range(first)?, ranges.map(range).collect::<Result<_, FabricError>>()?))
    }

    /// Where the bytes of `piece` are, here and there.
    fn resolve_range(&self, key: SlotKey, earlier: u64, piece: &Piece) -> Result<Pending, FabricError> {
        let Piece { local, remote, immediate, is_last } = piece;
        let length = local.len() as u64;
        let (here, local_key) = match local.block() {
            Some(block) => {
                (block.base().as_ptr() as u64 + local.offset() as u64, self.domain.local_key(block)?)
            }
            None if length > 0 => {
                let what = "send memory that is not a pool's: copy it into a pool first";
                return Err(FabricError::Unsupported { kind: FabricKind::Verbs, what });
            }
            None => (0, 0),
        };
        let region = self.core.remote_regions().aim(length, remote.as_ref())?;
        // The range lies inside the region, whose end a device's address space holds.
        let (there, remote_key) = match (remote, region) {
            (Some(range), Some(region)) => (region.base.wrapping_add(range.offset), region.key),
            _ => (0, 0),
        };
        Ok(Pending {
            key,
            local: here,
            local_key,
            remote: there,
            remote_key,
            length,
            immediate: immediate.map(|Immediate(value)| value),
            earlier,
            is_last: *is_last,
            posted: 0,
        })
    }

    fn lock_send(&self) -> MutexGuard<'_, SendSide> {
        self.send.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Link for VerbsLink {
    fn submit(&self, key: SlotKey, request: &WorkRequest) {
        let (first, rest) = match self.resolve(key, request) {
            Ok(ranges) => ranges,
            Err(error) => return self.core.complete(key, 0, Err(error)),
        };
        let result = {
            let mut send = self.lock_send();
            if send.phase == Phase::Open {
                send.push([first].into_iter().chain(rest));
                send.pump()
            } else {
                drop(send);
                let failure = self.core.failure().unwrap_or(FabricError::Closed);
                return self.core.complete(key, 0, Err(failure));
            }
        };
        if let Err(error) = result {
            self.fail(&fabric_error(&error));
        }
    }

    fn drive(&self) {
        // Whoever holds the lock hands everything on, and the driver looks again before it sleeps.
        if let Ok(mut inbound) = self.polling.try_lock() {
            for _ in 0..TURN {
                if !self.progress_locked(&mut inbound) {
                    break;
                }
            }
        }
    }

    fn start_close(&self) {
        self.leave(Message::Farewell);
    }
}

/// What a failed request says about the connection; `None` if only that it had failed before. `depth` is this
/// side's receive depth, which stands for the peer's.
fn cause(tag: Tag, status: Status, vendor: u32, depth: u32) -> Option<FabricError> {
    let kind = FabricKind::Verbs;
    let device = |what: &str| {
        let source = std::io::Error::other(format!("{what} ({status:?}, vendor code {vendor})"));
        FabricError::device(kind, "the work request", source)
    };
    Some(match (tag, status) {
        (_, Status::Flushed) => return None,
        // The peer reached for memory that it may not write: this side's queue pair fails with it.
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
        (_, Status::Local(_)) => device("this side's memory or request was refused"),
        (_, Status::Other(_)) => device("the device gave up"),
    })
}

fn lost(cause: LossCause, detail: &str) -> FabricError {
    FabricError::PeerLost { kind: FabricKind::Verbs, cause, detail: detail.to_owned() }
}

fn misbehaved(violation: PeerViolation) -> FabricError {
    FabricError::PeerMisbehaved { kind: FabricKind::Verbs, violation }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flushed_request_is_no_cause() {
        assert!(cause(Tag::Receive, Status::Flushed, 0, 8).is_none());
        assert!(cause(Tag::Signal(Message::Farewell.to_bits()), Status::Flushed, 0, 8).is_none());
    }

    #[test]
    fn causes_name_the_side_at_fault() {
        let write = Tag::Write(SlotKey::from_bits(0));
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
        let error = cause(write, Status::Local(4), 0, 8);
        assert!(matches!(error, Some(FabricError::Device { .. })));
    }
}
