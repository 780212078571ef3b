//! The fabric's half of a connected queue pair.

use std::sync::{
    Arc, MutexGuard, PoisonError, TryLockError,
    atomic::{AtomicBool, AtomicU64, Ordering, fence},
};

use futures::task::AtomicWaker;
use tensorwire_fabric::{
    Board, Catalogue, Effort, FabricError, FabricKind, Immediate, Link, Look, PeerCatalogue, PeerViolation,
    RemoteRange, SharedMemory, SlotKey, WorkRequest,
};
use tensorwire_memory::Buf;
use tensorwire_testpoints::sync::Mutex;

use crate::{
    catalogue::Reader,
    connection::Connection,
    ending::End,
    limits::INLINE_BYTES,
    producer::{self, Post, Producer, Returned},
    target::{Progress, Target},
};

/// One side of a connection. Tasks that await it and one [driver](super::driver) task drive it.
///
/// There are two locks. `target` is locked while the peer's writes are executed and their arrivals are passed to the user. It is only
/// ever *tried*, so no task waits for a copy, and a sink may call back into this link. `producer` is locked for the few instructions
/// of posting or reaping. `target` comes first where both are locked. `producer` is not locked while arrivals and completions are
/// passed on. A short write that nobody awaits is posted [without a lock](crate::tail).
#[derive(Debug)]
pub(super) struct ShmLink {
    connection: Connection,
    producer: Mutex<Producer>,
    target: Mutex<Target>,
    /// Wakes this side's driver.
    pub(super) driver: Arc<AtomicWaker>,
    /// The peer as a reader of this side's catalogue; `None` where its process cannot be watched.
    reader: Option<Arc<Reader>>,
    /// Whether the user has closed this side, or the runtime has dropped the driver.
    closing: AtomicBool,
    /// Whether the socket has something to read.
    frames: AtomicBool,
    /// Whether the peer still has to be rung for returned completions.
    owed: AtomicBool,
    /// Descriptors executed and completions reaped after the latest round. Read without a lock.
    executed: AtomicU64,
    reaped: AtomicU64,
    /// [`Producer::awaited`] after the latest post.
    awaited: AtomicU64,
    /// The peer's count of released leases when leases were last reclaimed.
    released: AtomicU64,
    /// [`Producer::copied_by_peer`] after the latest post or completion.
    copied_by_peer: AtomicU64,
    /// Whether operations, reads or answers waited for room after the latest change.
    waits: AtomicBool,
    /// Whether memory was ever lent to the peer.
    has_lent: AtomicBool,
    /// Whether the peer's process is known to be dead.
    died: AtomicBool,
    /// Whether the peer's count of completions was impossible.
    lied: AtomicBool,
    /// Whether the driver found the target locked and must be woken when it is free.
    contended: AtomicBool,
}

impl ShmLink {
    pub(super) fn new(connection: Connection) -> Self {
        let driver = Arc::new(AtomicWaker::new());
        let reader = connection.process.clone().map(|process| {
            let reader = connection.catalogue.join(connection.peer.clone(), process, driver.clone());
            connection.own.set_claimable();
            reader
        });
        Self {
            connection,
            reader,
            producer: Mutex::default(),
            target: Mutex::default(),
            driver,
            closing: AtomicBool::new(false),
            frames: AtomicBool::new(false),
            owed: AtomicBool::new(false),
            executed: AtomicU64::new(0),
            reaped: AtomicU64::new(0),
            awaited: AtomicU64::new(0),
            released: AtomicU64::new(0),
            copied_by_peer: AtomicU64::new(0),
            waits: AtomicBool::new(false),
            has_lent: AtomicBool::new(false),
            died: AtomicBool::new(false),
            lied: AtomicBool::new(false),
            contended: AtomicBool::new(false),
        }
    }

    pub(super) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Whether the connection is over or closing.
    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    /// Records that the socket became readable.
    pub(super) fn frames_came(&self) {
        self.frames.store(true, Ordering::Release);
    }

    /// Whether the socket became readable since the last call. A load if it did not.
    fn take_frames(&self) -> bool {
        self.frames.load(Ordering::Relaxed) && self.frames.swap(false, Ordering::AcqRel)
    }

    /// Records that the peer's process has ended, even if another process has its sockets open.
    pub(super) fn peer_died(&self) {
        self.died.store(true, Ordering::Release);
    }

    /// Whether the peer views memory that this side has lent.
    pub(super) fn has_leases(&self) -> bool {
        self.has_lent.load(Ordering::Acquire) && !self.producer().leases().is_empty()
    }

    /// Whether memory may become free when the peer ends a view.
    pub(super) fn awaits_releases(&self) -> bool {
        self.has_leases() || self.connection.catalogue.has_retired()
    }

    /// Whether the peer of a connection that is over views memory of this side.
    pub(super) fn is_viewed(&self) -> bool {
        let catalogue = &self.connection.catalogue;
        self.has_leases() || self.reader.as_ref().is_some_and(|reader| catalogue.is_viewed_by(reader))
    }

    /// Removes the reader, because the connection is over and its peer has no views any more.
    pub(super) fn forget_reader(&self) {
        if let Some(reader) = &self.reader {
            drop(self.connection.catalogue.leave(reader));
        }
    }

    /// Whether the peer has stopped viewing memory since [`reclaim`](Self::reclaim): two loads.
    fn has_releases(&self) -> bool {
        self.connection.peer.released() != self.released.load(Ordering::Relaxed)
    }

    /// Reclaims memory that the peer has stopped viewing. Returns whether there was any.
    pub(super) fn reclaim(&self) -> bool {
        let connection = &self.connection;
        let counted = connection.peer.released();
        if self.released.load(Ordering::Relaxed) == counted {
            return false;
        }
        let mut any = false;
        loop {
            let process = connection.process.as_ref();
            let (ended, more) = self.producer().leases().released(&connection.peer, process);
            any |= ended.settle();
            // Open leases bound the loop.
            if !more {
                break;
            }
        }
        any |= !self.connection.catalogue.reclaim().is_empty();
        // Only now: a task that finds the counts equal assumes that everything is reclaimed, and may sleep.
        self.released.store(counted, Ordering::Relaxed);
        any
    }

    /// Reclaims everything that a dead process viewed.
    pub(super) fn bury(&self) {
        loop {
            let (ended, more) = self.producer().leases().bury(self.connection.process.as_ref());
            ended.settle();
            if !more {
                break;
            }
        }
        self.forget_reader();
    }

    /// Whether operations wait for the socket to become writable.
    pub(super) fn waits_for_socket(&self) -> bool {
        self.waits.load(Ordering::Relaxed) && self.producer().is_waiting()
    }

    /// Whether the peer has posted work for this side. Takes no lock.
    pub(super) fn may_have_work(&self) -> bool {
        let peer = &self.connection.peer;
        peer.may_have(self.executed.load(Ordering::Relaxed))
            || self.has_completions()
            || peer.closed() != 0
            || self.has_releases()
    }

    /// Whether the peer has returned completions that matter to this side. While none is awaited, its count is not
    /// read: each change of the count takes the cache line from this side.
    fn has_completions(&self) -> bool {
        let reaped = self.reaped.load(Ordering::Relaxed);
        self.awaited.load(Ordering::Relaxed) > reaped && self.connection.peer.consumed() != reaped
    }

    /// Notes an impossible count of completions. Nothing else reads the count while no completion is awaited.
    fn check_count(&self) {
        let Connection { peer, own, .. } = &self.connection;
        let consumed = peer.consumed();
        // Another task may have reaped meanwhile.
        let known = self.reaped.load(Ordering::Relaxed)..=own.tail.next();
        if !known.contains(&consumed) && self.producer().consumed(&self.connection).is_err() {
            self.lied.store(true, Ordering::Relaxed);
        }
    }

    /// Whether [`turn`](Self::turn) may find anything to do: a few loads.
    fn has_something(&self) -> bool {
        self.may_have_work()
            || self.waits.load(Ordering::Relaxed)
            || self.frames.load(Ordering::Relaxed)
            || self.closing.load(Ordering::Relaxed)
            || self.died.load(Ordering::Relaxed)
            || self.is_cheated()
    }

    /// Whether the peer has broken a rule that only the driver checks.
    fn is_cheated(&self) -> bool {
        self.connection.ringer.is_spoilt() || self.lied.load(Ordering::Relaxed)
    }

    /// Bytes that the peer must copy before it can complete everything that this side has posted.
    pub(super) fn copied_by_peer(&self) -> u64 {
        self.copied_by_peer.load(Ordering::Relaxed)
    }

    /// A number that changes whenever any task has found work.
    pub(super) fn work_done(&self) -> u64 {
        self.executed.load(Ordering::Relaxed).wrapping_add(self.reaped.load(Ordering::Relaxed))
    }

    /// Whether the peer may wait for completions for which it was not rung.
    pub(super) fn owes_ring(&self) -> bool {
        self.owed.load(Ordering::Relaxed)
    }

    /// Rings the peer for completions for which it was not rung. The driver does so only after the user's tasks that
    /// arrivals woke have run. If one of them answers, the answer rings, too, and the peer wakes once for both.
    pub(super) fn settle(&self) {
        if self.owed.swap(false, Ordering::AcqRel) {
            self.connection.ringer.ring_if_asleep(&self.connection.peer);
        }
    }

    /// Reaps completions, executes some of the peer's writes, and carries out a close.
    pub(super) fn turn(&self) -> Look {
        loop {
            let mut target = match self.target.try_lock() {
                Ok(target) => target,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return Look::Busy,
            };
            let look = self.turn_locked(&mut target);
            drop(target);
            // Pairs with the fences in `start_close` and `turn_or_be_woken`: a task that finds the lock taken
            // meanwhile relies on this one.
            fence(Ordering::SeqCst);
            if self.contended.load(Ordering::Relaxed) {
                self.contended.store(false, Ordering::Relaxed);
                self.driver.wake();
            }
            if look == Look::Over || !self.closing.load(Ordering::Relaxed) {
                return look;
            }
        }
    }

    /// As [`turn`](Self::turn), for the driver: after `Busy`, the task that has the lock wakes the driver.
    pub(super) fn turn_or_be_woken(&self) -> Look {
        self.check_count();
        if !self.has_something() {
            return Look::Idle;
        }
        match self.turn() {
            Look::Busy => {
                self.contended.store(true, Ordering::Relaxed);
                fence(Ordering::SeqCst);
                self.turn()
            }
            look => look,
        }
    }

    fn turn_locked(&self, target: &mut Target) -> Look {
        if target.is_over() {
            return Look::Over;
        }
        let result = if self.closing.load(Ordering::Acquire) { Err(End::closed()) } else { self.go(target) };
        result.unwrap_or_else(|end| {
            self.end(target, &end);
            Look::Over
        })
    }

    /// One bounded round of all pending work.
    fn go(&self, target: &mut Target) -> Result<Look, End> {
        let connection = &self.connection;
        let mut worked = self.has_completions() && self.reap()?;
        let mut more = false;
        if self.take_frames() && target.read_frames(connection)? {
            self.frames_came();
            more = true;
        }
        let closed = connection.peer.closed();
        if closed != 0 {
            return Err(End::from_peer(closed, connection.peer_receive_depth));
        }
        if self.died.load(Ordering::Acquire) {
            return Err(End::end_of_file("its process has ended"));
        }
        if self.is_cheated() {
            return Err(PeerViolation::Malformed.into());
        }
        let mut more_reads = false;
        if self.waits.load(Ordering::Relaxed) {
            worked |= self.retry_waiting();
            let (served, may_serve) = self.serve_reads()?;
            worked |= served;
            more_reads = may_serve;
        }
        worked |= self.has_releases() && self.reclaim();
        let before = target.executed();
        let run = target.run(connection, &self.producer);
        self.executed.store(target.executed(), Ordering::Relaxed);
        if target.take_awaited() {
            self.owed.store(true, Ordering::Release);
        }
        more |= run? == Progress::More;
        if target.take_reads() {
            more_reads |= self.serve_reads()?.1;
        }
        more |= more_reads;
        worked |= target.executed() != before;
        Ok(match (more, worked) {
            (true, _) => Look::More,
            (false, true) => Look::Worked,
            (false, false) => Look::Idle,
        })
    }

    /// Passes on completions that the peer returned. Returns whether there were any.
    fn reap(&self) -> Result<bool, PeerViolation> {
        let mut any = false;
        // The producer bounds the loop: only descriptors in the ring can be returned.
        while self.has_completions() {
            let returned = {
                let mut producer = self.producer();
                let returned = producer.reap(&self.connection)?;
                self.reaped.store(producer.completed(), Ordering::Relaxed);
                self.note(&producer);
                returned
            };
            any = true;
            match returned {
                Some(Returned::Operation(posted)) => {
                    self.connection.core.complete(posted.key, posted.length, Ok(()));
                }
                Some(Returned::Bytes(read)) => drop(read),
                None => {}
            }
        }
        Ok(any)
    }

    /// As [`Tail::take_quiet`](crate::tail::Tail::take_quiet), once no more positions are allowed.
    #[cold]
    fn take_quiet(&self) -> Option<u64> {
        let mut producer = self.producer();
        let position = producer.take_quiet(&self.connection);
        self.reaped.store(producer.completed(), Ordering::Relaxed);
        position
    }

    /// Updates the fields that are read without a lock.
    fn note(&self, producer: &Producer) {
        producer.check_counts();
        self.copied_by_peer.store(producer.copied_by_peer(), Ordering::Relaxed);
        self.awaited.store(producer.awaited(), Ordering::Relaxed);
        self.waits.store(producer.is_waiting() || producer.has_reads_waiting(), Ordering::Relaxed);
    }

    /// Posts answers to the peer's reads, and further reads of this side, as far as there is room. Returns whether
    /// anything was posted, and whether completions will make room for more.
    fn serve_reads(&self) -> Result<(bool, bool), End> {
        let (posted, more) = {
            let mut producer = self.producer();
            if !producer.has_reads_waiting() {
                self.note(&producer);
                return Ok((false, false));
            }
            let served = producer.serve_reads(&self.connection).map_err(End::failed)?;
            self.note(&producer);
            served
        };
        if posted {
            self.connection.ringer.ring_if_asleep(&self.connection.peer);
        }
        Ok((posted, more))
    }

    /// Posts operations that waited for the socket, as far as it has room now.
    fn retry_waiting(&self) -> bool {
        let mut any = false;
        loop {
            let retried = {
                let mut producer = self.producer();
                let retried = producer.retry(&self.connection);
                self.note(&producer);
                retried
            };
            let Some((posted, post)) = retried else { break };
            match post {
                Post::Waiting => break,
                Post::Published => any = true,
                Post::Failed(error) => {
                    self.connection.core.complete(posted.key, posted.length, Err(error));
                }
            }
        }
        if any {
            self.connection.ringer.ring_if_asleep(&self.connection.peer);
        }
        any
    }

    /// Ends the connection. The order matters: once the `closed` word is stored, the peer delivers nothing that it
    /// copied later. Only then may the sources of unfinished writes return to their owners.
    fn end(&self, target: &mut Target, end: &End) {
        // From now on every poll finds that the connection is over.
        self.closing.store(true, Ordering::Release);
        target.decline_loans(&self.connection);
        target.end(&self.connection);
        self.connection.own.set_closed(end.code);
        // Writes that the peer has executed already succeed. An invalid page has no effect any more.
        let _nonsense_is_ignored = self.reap();
        let read_by_peer = self.producer().end(&self.connection, &end.error);
        drop(read_by_peer);
        // From here on a lease ends only when the peer releases it, or is dead, for which the driver waits.
        self.connection.own.set_listens(true);
        self.producer().leases().retire();
        self.connection.core.fail(&end.error);
        // The peer reads end of file. A socket that is disconnected already is no error.
        let _ = rustix::net::shutdown(self.connection.socket.get_ref(), rustix::net::Shutdown::Both);
        log!(DEBUG, error = %end.error, "shm: connection ended");
        self.connection.core.mark_drained();
        self.driver.wake();
    }

    /// Prevents other tasks from executing writes, as a long copy on another thread would.
    #[cfg(test)]
    pub(super) fn hold_target(&self) -> MutexGuard<'_, Target> {
        self.target.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn producer(&self) -> MutexGuard<'_, Producer> {
        self.producer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Link for ShmLink {
    fn submit(&self, key: SlotKey, request: &WorkRequest) {
        if matches!(request, WorkRequest::Lend { .. }) {
            self.has_lent.store(true, Ordering::Release);
            self.reclaim();
        }
        let post = {
            let mut producer = self.producer();
            let post = producer.submit(&self.connection, key, request);
            self.note(&producer);
            post
        };
        match post {
            Post::Published => self.connection.ringer.ring_if_asleep(&self.connection.peer),
            Post::Waiting => self.driver.wake(),
            Post::Failed(error) => self.connection.core.complete(key, request.length(), Err(error)),
        }
    }

    fn submit_inline(
        &self,
        bytes: &[u8],
        remote: Option<&RemoteRange>,
        immediate: Option<Immediate>,
    ) -> Option<Result<(), FabricError>> {
        if bytes.len() > INLINE_BYTES {
            return None;
        }
        let Connection { core, own, latest, ringer, peer, .. } = &self.connection;
        let length = bytes.len() as u64;
        let region = match latest.aim(core.remote_regions(), length, remote) {
            Ok(region) => region,
            Err(error) => return Some(Err(error)),
        };
        let position = own.tail.take_quiet().or_else(|| self.take_quiet())?;
        let remote = remote.zip(region).map(|(range, region)| (*range, region.key));
        producer::put_quiet(&self.connection, position, bytes, remote, immediate);
        core.count_sent(length);
        ringer.ring_if_asleep(peer);
        Some(Ok(()))
    }

    /// For a user's task, the driver does the rest of a long copy, so that other tasks get their turn.
    fn progress(&self, effort: Effort) -> Look {
        let may_find = match effort {
            Effort::BeforeSleep => self.has_something(),
            Effort::Poll => self.may_have_work(),
        };
        if !may_find {
            return Look::Idle;
        }
        let look = self.turn();
        if look == Look::More {
            self.driver.wake();
        }
        look
    }

    fn withdraw(&self, key: SlotKey) {
        // A separate statement, so that completions are passed on without the lock.
        let withdrawn = {
            let mut producer = self.producer();
            let withdrawn = producer.withdraw(key);
            self.note(&producer);
            withdrawn
        };
        if withdrawn {
            let busy = FabricError::Busy { kind: FabricKind::SHM, what: "lend memory of another block" };
            self.connection.core.complete(key, 0, Err(busy));
        }
    }

    fn shared_memory(&self) -> Option<&dyn SharedMemory> {
        Some(self)
    }

    fn start_close(&self) {
        self.closing.store(true, Ordering::Release);
        self.connection.ringer.free();
        // Pairs with the fence in `turn`: either this task gets the lock, or its holder sees `contended`.
        fence(Ordering::SeqCst);
        if self.turn() == Look::Busy {
            self.driver.wake();
        }
    }
}

impl SharedMemory for ShmLink {
    fn peer_is_here(&self) -> bool {
        self.connection.peer.is_here()
    }

    fn free_threads(&self) {
        self.connection.ringer.free();
    }

    fn catalogue(&self) -> Option<Arc<dyn Catalogue>> {
        Some(self.connection.catalogue.clone())
    }

    fn peer_catalogue(&self) -> Option<Arc<dyn PeerCatalogue>> {
        Some(self.connection.peer_catalogue.clone())
    }

    fn board(&self) -> Option<Arc<dyn Board>> {
        Some(Arc::new(self.connection.board()))
    }

    fn share(&self, bytes: &Buf) {
        // The result is not needed: if the block cannot be sent now, the peer requests the content by a message.
        let _shared = self.producer().share_block_of(&self.connection, bytes);
    }
}
