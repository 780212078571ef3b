//! Registered memory, and the checks that a NIC makes before it accesses it.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use tensorwire_memory::{Block, BlockId, Buf, RemoteAccess, RemoteTarget};
use tensorwire_testpoints::sync::{Mutex, RwLock};

use crate::{
    FabricError, FabricKind, PeerViolation, ReadSegment, RegionGeneration, RegionId, RemoteRange, Runtime,
    Segment, noted::Noted,
};

/// The purpose of a region. It decides only how copies into the region are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Tensor bytes.
    Payload,
    /// A message ring.
    Messages,
}

/// Rights on a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Access {
    /// Peers may write granted ranges.
    pub remote_write: bool,
    /// Peers may read exposed ranges. Over verbs they may read the whole region, because a NIC checks regions only.
    pub remote_read: bool,
    /// The region's purpose.
    pub purpose: Purpose,
}

impl Access {
    /// A source of writes: peers have no access.
    pub const LOCAL: Self = Self { remote_write: false, remote_read: false, purpose: Purpose::Payload };
    /// A source of writes whose [exposed](tensorwire_memory::Buf::expose) ranges peers may read.
    pub const READABLE: Self = Self { remote_read: true, ..Self::LOCAL };
    /// A destination of tensor bytes.
    pub const RECEIVE: Self = Self { remote_write: true, ..Self::LOCAL };
    /// A message ring.
    pub const RING: Self = Self { purpose: Purpose::Messages, ..Self::RECEIVE };
}

/// The data that a peer needs to access a region. The control plane announces it (REGION_ADD), and the peer passes it
/// to [`QueuePair::add_remote_region`](crate::QueuePair::add_remote_region).
///
/// `Debug` leaves the key out, because keys are never logged.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RemoteRegion {
    /// The region.
    pub region: RegionId,
    /// The region's generation.
    pub generation: RegionGeneration,
    /// Virtual address of the first byte if the fabric needs it (verbs), otherwise 0.
    pub base: u64,
    /// Length in bytes.
    pub length: u64,
    /// Remote key.
    pub key: u32,
}

impl std::fmt::Debug for RemoteRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteRegion")
            .field("region", &self.region)
            .field("generation", &self.generation)
            .field("length", &self.length)
            .finish_non_exhaustive()
    }
}

/// The peer's regions on one queue pair, with the checks that a NIC makes before it sends a request.
#[derive(Debug, Default)]
pub struct RemoteRegions {
    known: RwLock<HashMap<RegionId, RemoteRegion>>,
    /// How often `known` has changed. Written under its lock.
    changes: AtomicU64,
}

/// A cache of the two regions that were used last. Most writes find their region in it and take no lock.
#[derive(Debug)]
pub struct LatestRegions {
    regions: [Noted<NOTED_WORDS>; 2],
    /// How many regions were written into the cache.
    noted: AtomicU64,
}

/// Words of a region in the cache.
const NOTED_WORDS: usize = 5;

impl Default for LatestRegions {
    fn default() -> Self {
        Self { regions: [Noted::new(), Noted::new()], noted: AtomicU64::new(0) }
    }
}

impl LatestRegions {
    /// As [`RemoteRegions::aim`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn aim(
        &self,
        known: &RemoteRegions,
        bytes: u64,
        range: Option<&RemoteRange>,
    ) -> Result<Option<RemoteRegion>, FabricError> {
        let Some(range) = range else { return known.aim(bytes, None) };
        let changes = known.changes.load(Ordering::Acquire);
        let latest = self.regions.iter().find_map(|noted| {
            let (of, region) = unpacked(noted.read()?);
            (of == changes && region.region == range.region).then_some(region)
        });
        match latest {
            Some(region) => aim_at(region, bytes, range).map(Some),
            None => self.look_up(known, changes, bytes, range),
        }
    }

    /// Like [`aim`](Self::aim), for a region that is not in the cache.
    #[cold]
    fn look_up(
        &self,
        known: &RemoteRegions,
        changes: u64,
        bytes: u64,
        range: &RemoteRange,
    ) -> Result<Option<RemoteRegion>, FabricError> {
        let region = known.aim(bytes, Some(range))?;
        if let Some(region) = region {
            let oldest = self.noted.fetch_add(1, Ordering::Relaxed) % self.regions.len() as u64;
            self.regions[oldest as usize].note(packed(changes, region));
        }
        Ok(region)
    }
}

/// A cache entry: a region, and the value of `changes` when it was looked up.
fn packed(changes: u64, region: RemoteRegion) -> [u64; NOTED_WORDS] {
    let RemoteRegion { region, generation, base, length, key } = region;
    [changes, u64::from(region.0) | u64::from(generation.0) << 32, base, length, key.into()]
}

fn unpacked([changes, name, base, length, key]: [u64; NOTED_WORDS]) -> (u64, RemoteRegion) {
    let (region, generation) = (RegionId(name as u32), RegionGeneration((name >> 32) as u32));
    (changes, RemoteRegion { region, generation, base, length, key: key as u32 })
}

/// The checks of a write of `bytes` bytes to `range`, which names `region`.
fn aim_at(region: RemoteRegion, bytes: u64, range: &RemoteRange) -> Result<RemoteRegion, FabricError> {
    let mismatch = |remote| FabricError::LengthMismatch { local: bytes, remote };
    if region.generation != range.generation {
        return Err(FabricError::UnknownRemoteRegion { region: range.region });
    }
    if range.length != bytes {
        return Err(mismatch(range.length));
    }
    let room = region.length.saturating_sub(range.offset);
    if bytes > room { Err(mismatch(room)) } else { Ok(region) }
}

impl RemoteRegions {
    pub(crate) fn add(&self, region: RemoteRegion) {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        known.insert(region.region, region);
        self.changes.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn count(&self) -> usize {
        self.known.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    pub(crate) fn remove(&self, region: RegionId) {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        known.remove(&region);
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// The target region of a write of `bytes` bytes to `range`; `None` for a notification without bytes.
    ///
    /// # Errors
    /// [`FabricError::UnknownRemoteRegion`], [`FabricError::LengthMismatch`]. They end this operation only.
    pub fn aim(&self, bytes: u64, range: Option<&RemoteRange>) -> Result<Option<RemoteRegion>, FabricError> {
        let Some(range) = range else {
            let mismatch = FabricError::LengthMismatch { local: bytes, remote: 0 };
            return if bytes == 0 { Ok(None) } else { Err(mismatch) };
        };
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        let region = known.get(&range.region);
        let region = region.ok_or(FabricError::UnknownRemoteRegion { region: range.region })?;
        aim_at(*region, bytes, range).map(Some)
    }

    /// Checks every segment of a vectored read, before any of it is posted.
    ///
    /// # Errors
    /// As [`aim`](Self::aim).
    pub(crate) fn aim_all_reads(&self, segments: &[ReadSegment]) -> Result<(), FabricError> {
        segments
            .iter()
            .try_for_each(|segment| self.aim(segment.into.length(), Some(&segment.remote)).map(drop))
    }

    /// Checks every segment of a vectored write, before any of it is posted.
    ///
    /// # Errors
    /// As [`aim`](Self::aim), and [`FabricError::OverlappingSegments`].
    pub(crate) fn aim_all(&self, segments: &[Segment]) -> Result<(), FabricError> {
        for segment in segments {
            self.aim(segment.local.len() as u64, Some(&segment.remote))?;
        }
        check_apart(segments)
    }
}

/// Refuses segments that overlap at the peer: it would be undefined which segment's bytes remain.
fn check_apart(segments: &[Segment]) -> Result<(), FabricError> {
    let order = |range: &RemoteRange| (range.region, range.offset);
    let named = || segments.iter().map(|segment| segment.remote).filter(|range| range.length > 0);
    if named().is_sorted_by_key(|range| order(&range)) {
        return check_neighbours(named());
    }
    let mut sorted: Vec<RemoteRange> = named().collect();
    sorted.sort_unstable_by_key(order);
    check_neighbours(sorted.into_iter())
}

fn check_neighbours(mut ranges: impl Iterator<Item = RemoteRange>) -> Result<(), FabricError> {
    let Some(mut before) = ranges.next() else { return Ok(()) };
    for range in ranges {
        if before.region == range.region && before.offset.saturating_add(before.length) > range.offset {
            return Err(FabricError::OverlappingSegments { region: range.region, offset: range.offset });
        }
        before = range;
    }
    Ok(())
}

/// The regions of one domain of a software fabric, with the checks that a NIC makes on each access.
#[derive(Debug)]
pub struct RegionTable {
    generation: RegionGeneration,
    state: Mutex<Registered>,
    /// Increases under the lock when a block is deregistered.
    changes: AtomicU64,
}

#[derive(Debug, Default)]
struct Registered {
    /// The regions by number; `None` once deregistered. Numbers are never reused.
    regions: Vec<Option<Entry>>,
    by_block: HashMap<BlockId, RegionId>,
}

#[derive(Clone)]
struct Entry {
    block: Block,
    access: Access,
    key: u32,
}

impl Entry {
    /// The checks that every access begins with.
    #[inline]
    fn check(&self, range: &RemoteRange, key: u32) -> Result<(), PeerViolation> {
        if self.key != key {
            return Err(PeerViolation::WrongKey);
        }
        let end = range.offset.checked_add(range.length).ok_or(PeerViolation::OutOfBounds)?;
        if end > self.block.length() as u64 { Err(PeerViolation::OutOfBounds) } else { Ok(()) }
    }

    /// The whole grant that contains `range`.
    fn grant(&self, range: &RemoteRange) -> Result<RemoteTarget, PeerViolation> {
        if !self.access.remote_write {
            return Err(PeerViolation::NoRight);
        }
        self.block.grant_around(range.offset, range.length).map_err(|_| PeerViolation::NotGranted)
    }
}

/// The regions and grants that a peer wrote last, for one thread at a time. Most writes then take no lock of the table,
/// and writes into the same grant take no lock of its block.
#[derive(Debug, Default)]
pub struct LatestTargets {
    changes: u64,
    /// The newest entry is the first.
    regions: [Option<LatestTarget>; 2],
}

#[derive(Debug)]
struct LatestTarget {
    region: RegionId,
    entry: Entry,
    grant: RemoteTarget,
}

impl LatestTargets {
    /// As [`RegionTable::write_target`].
    ///
    /// # Errors
    /// As there.
    pub fn write_target(
        &mut self,
        table: &RegionTable,
        range: &RemoteRange,
        key: u32,
    ) -> Result<(RemoteTarget, Purpose), PeerViolation> {
        self.with_grant(table, range, key, |grant, purpose| {
            Some((grant.part(range.offset, range.length)?, purpose))
        })
    }

    /// Like [`write_target`](Self::write_target), but calls `written` to write the bytes at once.
    ///
    /// # Errors
    /// As [`write_target`](Self::write_target). Nothing was written.
    #[inline]
    pub fn write(
        &mut self,
        table: &RegionTable,
        range: &RemoteRange,
        key: u32,
        mut written: impl FnMut(&RemoteAccess<'_>, Purpose),
    ) -> Result<(), PeerViolation> {
        self.with_grant(table, range, key, |grant, purpose| {
            written(&grant.access_part(range.offset, range.length)?, purpose);
            Some(())
        })
    }

    /// Applies `used` to the grant around `range`. `used` returns `None` if its grant is another one, or has ended.
    #[inline]
    fn with_grant<T>(
        &mut self,
        table: &RegionTable,
        range: &RemoteRange,
        key: u32,
        mut used: impl FnMut(&RemoteTarget, Purpose) -> Option<T>,
    ) -> Result<T, PeerViolation> {
        let changes = table.changes.load(Ordering::Acquire);
        if self.changes != changes {
            *self = Self { changes, ..Self::default() };
        }
        let mut latest = self.regions.iter_mut().flatten();
        let latest =
            latest.find(|latest| latest.region == range.region && range.generation == table.generation);
        let Some(latest) = latest else { return self.with_newest(table, range, key, used) };
        latest.entry.check(range, key)?;
        let purpose = latest.entry.access.purpose;
        if let Some(used) = used(&latest.grant, purpose) {
            return Ok(used);
        }
        latest.grant = latest.entry.grant(range)?;
        used(&latest.grant, purpose).ok_or(PeerViolation::NotGranted)
    }

    /// Like [`with_grant`](Self::with_grant), for a region that is not in the cache.
    #[cold]
    fn with_newest<T>(
        &mut self,
        table: &RegionTable,
        range: &RemoteRange,
        key: u32,
        mut used: impl FnMut(&RemoteTarget, Purpose) -> Option<T>,
    ) -> Result<T, PeerViolation> {
        let (entry, grant) =
            table.with_range(range, key, |entry| Ok((entry.clone(), entry.grant(range)?)))?;
        let used = used(&grant, entry.access.purpose).ok_or(PeerViolation::NotGranted)?;
        // A user's memory is not cached: its owner waits until the last handle is dropped.
        if entry.block.shareable() {
            let newest = LatestTarget { region: range.region, entry, grant };
            self.regions = [Some(newest), self.regions[0].take()];
        }
        Ok(used)
    }
}

// Without the key, as keys are never shown.
impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry")
            .field("block", &self.block)
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}

impl RegionTable {
    /// An empty table. Its generation is a random number of `runtime`.
    pub fn new(runtime: &dyn Runtime) -> Self {
        Self {
            generation: RegionGeneration(low_bits(runtime.random())),
            state: Mutex::default(),
            changes: AtomicU64::new(0),
        }
    }

    /// Registers `block`. Registering a block again returns its existing region.
    pub fn register(&self, runtime: &dyn Runtime, block: &Block, access: Access) -> RemoteRegion {
        let mut state = self.lock();
        let known = state.by_block.get(&block.id()).copied();
        let known =
            known.and_then(|region| Some((region, state.regions.get(region.0 as usize)?.as_ref()?.key)));
        let (region, key) = known.unwrap_or_else(|| {
            let region = RegionId(u32::try_from(state.regions.len()).unwrap_or(u32::MAX));
            let key = low_bits(runtime.random());
            state.regions.push(Some(Entry { block: block.clone(), access, key }));
            state.by_block.insert(block.id(), region);
            (region, key)
        });
        RemoteRegion { region, generation: self.generation, base: 0, length: block.length() as u64, key }
    }

    /// Removes a block: after this, nothing can be sent from it and peers cannot access it.
    pub fn deregister(&self, block: BlockId) {
        let gone = {
            let mut state = self.lock();
            let region = state.by_block.remove(&block);
            self.changes.fetch_add(1, Ordering::Release);
            region.and_then(|region| state.regions.get_mut(region.0 as usize)?.take())
        };
        // Dropped without the lock, because it may be the block's last handle.
        drop(gone);
    }

    /// Checks that `block`, which contains the local bytes of an operation, is registered, as a NIC checks local keys.
    /// An operation without bytes has no block. `kind` is the queue pair's fabric, for the error.
    ///
    /// # Errors
    /// [`FabricError::NotRegistered`].
    pub fn check_local(&self, kind: FabricKind, block: Option<BlockId>) -> Result<(), FabricError> {
        match block.filter(|block| !self.lock().by_block.contains_key(block)) {
            Some(block) => Err(FabricError::NotRegistered { kind, block: block.get() }),
            None => Ok(()),
        }
    }

    /// Checks a peer's write as a NIC does, and returns the memory that it may write.
    ///
    /// # Errors
    /// The rule that the access breaks. No memory was touched.
    pub fn write_target(
        &self,
        range: &RemoteRange,
        key: u32,
    ) -> Result<(RemoteTarget, Purpose), PeerViolation> {
        self.with_range(range, key, |entry| {
            let target = entry.grant(range)?.part(range.offset, range.length);
            Ok((target.ok_or(PeerViolation::NotGranted)?, entry.access.purpose))
        })
    }

    /// Checks a peer's read as a NIC does, and returns the bytes. They stay alive and unchanged while the buffer
    /// exists.
    ///
    /// # Errors
    /// The rule that the access breaks.
    pub fn read_source(&self, range: &RemoteRange, key: u32) -> Result<Buf, PeerViolation> {
        self.with_range(range, key, |entry| {
            if !entry.access.remote_read {
                return Err(PeerViolation::NoRight);
            }
            entry.block.exposed(range.offset, range.length).map_err(|_| PeerViolation::NotExposed)
        })
    }

    /// Makes the checks that every access begins with, and applies a function to the entry.
    fn with_range<T>(
        &self,
        range: &RemoteRange,
        key: u32,
        access: impl FnOnce(&Entry) -> Result<T, PeerViolation>,
    ) -> Result<T, PeerViolation> {
        let state = self.lock();
        let entry = state.regions.get(range.region.0 as usize).and_then(Option::as_ref);
        let entry =
            entry.filter(|_| range.generation == self.generation).ok_or(PeerViolation::UnknownRegion)?;
        entry.check(range, key)?;
        access(entry)
    }

    fn lock(&self) -> MutexGuard<'_, Registered> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn low_bits(random: u64) -> u32 {
    (random & u64::from(u32::MAX)) as u32
}
