//! Memory that the peer views, as the producer counts it.
//!
//! Each lease has a slot and a generation. The peer, which alone writes its page, stores the generation in the
//! slot's word when its last view is gone. What it stores too early, twice or at random costs it the leases it
//! holds, nothing else.

use std::{
    collections::BTreeMap,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use tensorwire_memory::{Buf, Retired};
use tensorwire_verbs_reactor::{FabricError, FabricKind};

use crate::{limits::LEASES_MAX, ring::PeerPage, sys::ProcessId};

/// Leases that are ended per lock of the producer.
const BATCH: usize = 32;

/// The other process, which may hold leases through several connections, also through ended ones.
#[derive(Debug)]
pub(super) struct PeerProcess {
    /// Readable when it is dead.
    pidfd: OwnedFd,
    /// Leases open and retired.
    held: AtomicU32,
    /// Their bytes.
    bytes: AtomicU64,
    caps: LeaseCaps,
}

/// What one process may hold through all its connections, ended ones included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LeaseCaps {
    pub(super) leases: u32,
    pub(super) bytes: u64,
}

impl PeerProcess {
    pub(super) fn pidfd(&self) -> &OwnedFd {
        &self.pidfd
    }

    fn take(&self, bytes: u64) -> Result<(), FabricError> {
        let LeaseCaps { leases: cap, bytes: bytes_cap } = self.caps;
        let more = |held: u32| (held < cap).then_some(held + 1);
        let taken = self.held.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        taken.map_err(|open| FabricError::LeasesExhausted { open, cap })?;
        let more = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= bytes_cap);
        let taken = self.bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        taken.map(drop).map_err(|held| {
            self.held.fetch_sub(1, Ordering::AcqRel);
            FabricError::LeasedBytesExhausted { held, wanted: bytes, cap: bytes_cap }
        })
    }

    fn give_back(&self, bytes: u64) {
        self.held.fetch_sub(1, Ordering::AcqRel);
        self.bytes.fetch_sub(bytes, Ordering::AcqRel);
    }
}

/// The processes that one fabric is connected to.
#[derive(Debug)]
pub(super) struct Processes {
    caps: LeaseCaps,
    known: Mutex<BTreeMap<ProcessId, Weak<PeerProcess>>>,
}

impl Processes {
    pub(super) fn caps(&self) -> LeaseCaps {
        self.caps
    }

    /// Each process may hold so much.
    pub(super) fn new(caps: LeaseCaps) -> Self {
        Self { caps, known: Mutex::default() }
    }

    /// The process `id`, of which `pidfd` is a handle.
    pub(super) fn join(&self, id: ProcessId, pidfd: OwnedFd) -> Arc<PeerProcess> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, process| process.strong_count() > 0);
        if let Some(process) = known.get(&id).and_then(Weak::upgrade) {
            return process;
        }
        let (held, bytes) = (AtomicU32::new(0), AtomicU64::new(0));
        let process = Arc::new(PeerProcess { pidfd, held, bytes, caps: self.caps });
        known.insert(id, Arc::downgrade(&process));
        process
    }
}

/// Why the bytes must stay as they are.
#[derive(Debug)]
pub(super) enum Kept {
    /// The connection is up.
    Lent(Buf),
    /// The connection is over, and the peer may still read.
    Retired(Retired),
}

impl Kept {
    /// The peer reads no more. Buffers go back to their pool, so no lock may be held.
    fn release(self) {
        match self {
            Self::Lent(buffer) => drop(buffer),
            Self::Retired(retired) => retired.release(),
        }
    }
}

/// Leases that have ended, to be [settled](Ended::settle) without a lock.
#[derive(Debug, Default)]
pub(super) struct Ended {
    kept: [Option<Kept>; BATCH],
}

impl Ended {
    /// Gives the memory back. True if there was any.
    pub(super) fn settle(self) -> bool {
        self.kept.into_iter().flatten().map(Kept::release).count() > 0
    }
}

#[derive(Debug)]
struct Lease {
    /// Of the slot's present or next use.
    generation: u64,
    bytes: u64,
    kept: Option<Kept>,
}

/// The leases of one connection.
#[derive(Debug, Default)]
pub(super) struct Leases {
    leases: Vec<Lease>,
    /// Slots without a lease.
    free: Vec<u32>,
    /// Slots with one.
    open: Vec<u32>,
    /// How many releases the peer had counted when its page was last looked through.
    seen: u64,
    /// Where a pass over `open` that was cut short goes on.
    cursor: Option<usize>,
}

impl Leases {
    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Opens a lease of `buffer`: its slot and generation.
    ///
    /// # Errors
    /// [`FabricError::LeasesExhausted`], [`FabricError::LeasedBytesExhausted`]; [`FabricError::Unsupported`] when the
    /// peer's process cannot be watched.
    pub(super) fn lend(
        &mut self,
        process: Option<&Arc<PeerProcess>>,
        buffer: Buf,
    ) -> Result<(u32, u64), FabricError> {
        let what = "lend to a process that it can't watch: run both in one process namespace, or send a copy";
        let process = process.ok_or(FabricError::Unsupported { kind: FabricKind::SHM, what })?;
        if self.open.len() >= LEASES_MAX as usize {
            return Err(FabricError::LeasesExhausted { open: LEASES_MAX, cap: LEASES_MAX });
        }
        let bytes = buffer.len() as u64;
        process.take(bytes)?;
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                self.leases.push(Lease { generation: 1, bytes: 0, kept: None });
                (self.leases.len() - 1) as u32
            }
        };
        let lease = &mut self.leases[slot as usize];
        (lease.kept, lease.bytes) = (Some(Kept::Lent(buffer)), bytes);
        self.open.push(slot);
        Ok((slot, lease.generation))
    }

    /// Ends leases that the peer has released, a bounded number at a time. The flag is true if there may be more.
    pub(super) fn released(&mut self, peer: &PeerPage, process: Option<&Arc<PeerProcess>>) -> (Ended, bool) {
        let mut ended = Ended::default();
        if self.open.is_empty() {
            return (ended, false);
        }
        let counted = peer.released();
        let mut cursor = match self.cursor.take() {
            Some(cursor) => cursor,
            None if counted == self.seen => return (ended, false),
            None => {
                self.seen = counted;
                0
            }
        };
        let mut room = ended.kept.iter_mut();
        while let Some(&slot) = self.open.get(cursor) {
            let lease = &mut self.leases[slot as usize];
            if peer.lease(slot) != lease.generation {
                cursor += 1;
                continue;
            }
            let Some(entry) = room.next() else {
                self.cursor = Some(cursor);
                return (ended, true);
            };
            *entry = lease.kept.take();
            lease.generation += 1;
            self.open.swap_remove(cursor);
            self.free.push(slot);
            if let Some(process) = process {
                process.give_back(lease.bytes);
            }
        }
        (ended, false)
    }

    /// The connection is over: open leases become retired ones.
    pub(super) fn retire(&mut self) {
        for &slot in &self.open {
            let kept = &mut self.leases[slot as usize].kept;
            *kept = match kept.take() {
                Some(Kept::Lent(buffer)) => Some(Kept::Retired(buffer.retire())),
                other => other,
            };
        }
    }

    /// The peer's process is dead, so that it reads nothing any more. The flag is true if there are more leases.
    pub(super) fn bury(&mut self, process: Option<&Arc<PeerProcess>>) -> (Ended, bool) {
        let mut ended = Ended::default();
        for entry in &mut ended.kept {
            let Some(slot) = self.open.pop() else { break };
            let lease = &mut self.leases[slot as usize];
            *entry = lease.kept.take();
            if let Some(process) = process {
                process.give_back(lease.bytes);
            }
        }
        (ended, !self.open.is_empty())
    }
}
