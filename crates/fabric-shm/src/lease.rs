//! Memory that the peer views: the producer's half of a lease.
//!
//! Each lease has a slot and a generation. When the peer's last view is gone, it stores the generation in the slot's
//! word on its own page, which only it writes. A peer that stores a generation too early, twice or at random ends its
//! own leases only.

use std::{
    collections::BTreeMap,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use tensorwire_fabric::{FabricError, FabricKind};
use tensorwire_memory::{Buf, Retired};

use crate::{limits::LEASES_MAX, ring::PeerPage, sys::ProcessId};

/// Maximum number of leases that end under one hold of the producer's lock.
const BATCH: usize = 32;

/// The peer's process. It may hold leases through several connections, among them connections that have ended.
#[derive(Debug)]
pub(super) struct PeerProcess {
    /// Readable once the process is dead.
    pidfd: OwnedFd,
    /// Number of its leases, open and retired.
    held: AtomicU32,
    /// Bytes of those leases.
    bytes: AtomicU64,
    caps: LeaseCaps,
}

/// The limits of one peer process, for all its connections together, including ended ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LeaseCaps {
    pub(super) leases: u32,
    pub(super) bytes: u64,
}

impl PeerProcess {
    pub(super) fn pidfd(&self) -> &OwnedFd {
        &self.pidfd
    }

    /// Takes a lease of so many bytes. The contents that the process has `claimed` without a lease count, too.
    fn take(&self, bytes: u64, claimed: Claimed) -> Result<(), FabricError> {
        let LeaseCaps { leases: cap, bytes: bytes_cap } = self.caps;
        let more = |held: u32| (held.saturating_add(claimed.contents) < cap).then_some(held + 1);
        let taken = self.held.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        taken.map_err(|open| FabricError::LeasesExhausted { open, cap })?;
        let fits = |sum: &u64| sum.saturating_add(claimed.bytes) <= bytes_cap;
        let more = |held: u64| held.checked_add(bytes).filter(fits);
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

/// Contents of this side's catalogue that a process views.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Claimed {
    pub(super) contents: u32,
    pub(super) bytes: u64,
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

    /// A table without processes; `caps` are the limits of each.
    pub(super) fn new(caps: LeaseCaps) -> Self {
        Self { caps, known: Mutex::default() }
    }

    /// The entry of the process `id`, shared by all connections to it. `pidfd` refers to that process.
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

/// The memory of a lease, whose bytes stay unchanged while this exists.
#[derive(Debug)]
pub(super) enum LeasedMemory {
    /// The connection is up: the buffer itself.
    Buffer(Buf),
    /// The connection is over, but the peer may still read the bytes.
    Retired(Retired),
}

impl LeasedMemory {
    /// Releases the memory, because the peer no longer reads it. Buffers return to their pool, so no lock may be held.
    fn release(self) {
        match self {
            Self::Buffer(buffer) => drop(buffer),
            Self::Retired(retired) => retired.release(),
        }
    }
}

/// Leases that have ended. The caller [settles](Ended::settle) them after it has released its locks.
#[derive(Debug, Default)]
pub(super) struct Ended {
    memory: [Option<LeasedMemory>; BATCH],
}

impl Ended {
    /// Releases the memory. True if there was any.
    pub(super) fn settle(self) -> bool {
        self.memory.into_iter().flatten().map(LeasedMemory::release).count() > 0
    }
}

#[derive(Debug)]
struct Lease {
    /// Generation of the slot's present use, or of its next one if it is free.
    generation: u64,
    bytes: u64,
    memory: Option<LeasedMemory>,
}

/// The leases of one connection.
#[derive(Debug, Default)]
pub(super) struct Leases {
    leases: Vec<Lease>,
    /// Slots that have no lease.
    free: Vec<u32>,
    /// Slots that have one.
    open: Vec<u32>,
    /// The peer's count of releases when the latest pass over `open` began.
    seen: u64,
    /// Where the next call continues a pass over `open` that found more than a batch.
    cursor: Option<usize>,
}

impl Leases {
    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Opens a lease of `buffer` and what is attached to it, and returns its slot and generation.
    ///
    /// # Errors
    /// [`FabricError::LeasesExhausted`], [`FabricError::LeasedBytesExhausted`]; [`FabricError::Unsupported`] when the
    /// peer's process cannot be watched.
    pub(super) fn lend(
        &mut self,
        process: Option<(&Arc<PeerProcess>, Claimed)>,
        buffer: Buf,
    ) -> Result<(u32, u64), FabricError> {
        let what =
            "lend to a process that it cannot watch: run both in one process namespace, or send a copy";
        let (process, claimed) = process.ok_or(FabricError::Unsupported { kind: FabricKind::SHM, what })?;
        if self.open.len() >= LEASES_MAX as usize {
            return Err(FabricError::LeasesExhausted { open: LEASES_MAX, cap: LEASES_MAX });
        }
        let attached = buffer.attached().map(|attached| attached.len() as u64);
        let bytes = attached.fold(buffer.len() as u64, u64::saturating_add);
        process.take(bytes, claimed)?;
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                self.leases.push(Lease { generation: 1, bytes: 0, memory: None });
                (self.leases.len() - 1) as u32
            }
        };
        let lease = &mut self.leases[slot as usize];
        (lease.memory, lease.bytes) = (Some(LeasedMemory::Buffer(buffer)), bytes);
        self.open.push(slot);
        Ok((slot, lease.generation))
    }

    /// Ends leases that the peer has released, at most [`BATCH`] per call. The flag is true if there may be more.
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
        let mut room = ended.memory.iter_mut();
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
            *entry = lease.memory.take();
            lease.generation += 1;
            self.open.swap_remove(cursor);
            self.free.push(slot);
            if let Some(process) = process {
                process.give_back(lease.bytes);
            }
        }
        (ended, false)
    }

    /// Retires open leases, because the connection is over.
    pub(super) fn retire(&mut self) {
        for &slot in &self.open {
            let memory = &mut self.leases[slot as usize].memory;
            *memory = match memory.take() {
                Some(LeasedMemory::Buffer(buffer)) => Some(LeasedMemory::Retired(buffer.retire())),
                other => other,
            };
        }
    }

    /// Ends leases because the peer's process is dead, at most [`BATCH`] per call. The flag is true if there are more.
    pub(super) fn bury(&mut self, process: Option<&Arc<PeerProcess>>) -> (Ended, bool) {
        let mut ended = Ended::default();
        for entry in &mut ended.memory {
            let Some(slot) = self.open.pop() else { break };
            let lease = &mut self.leases[slot as usize];
            *entry = lease.memory.take();
            if let Some(process) = process {
                process.give_back(lease.bytes);
            }
        }
        (ended, !self.open.is_empty())
    }
}
