//! The sets of this worker: many tensors under one name, which change together.
//!
//! A version of a set is a table of contents under one edition: the manifest, its difference from the one before, the tensors, and their
//! deltas. The worker holds the newest version and the one before it. `docs/src/weights.md` describes a commit and a follower.

pub(crate) mod delta;
#[cfg(any(test, fuzzing))]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a finding
pub(crate) mod fuzzing;
pub(crate) mod listing;
pub(crate) mod loan;
pub(crate) mod manifest;
pub(crate) mod manifest_delta;
pub(crate) mod reading;
pub(crate) mod sharding;

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    sync::{Arc, MutexGuard, PoisonError},
};

use tensorwire_memory::{Buf, copy::CopyReason};
use tensorwire_protocol::{Code, DataType, Metadata, SetContent, Shape, Status};
use tensorwire_testpoints::sync::Mutex;
use zerocopy::IntoBytes as _;

use self::{
    listing::ListedSet,
    manifest::{FIRST_TENSOR, Head, LOAN, MANIFEST, MANIFEST_DELTA, Manifest, VersionHead},
    sharding::Sharding,
};
use crate::values::tensor::Tensor;

/// Tensors with their names, sorted by these, and their shardings.
pub(crate) type Unzipped = (Vec<(Arc<str>, Tensor)>, Vec<Option<Sharding>>);

/// A version of a set.
#[derive(Debug)]
pub(crate) struct SetVersion {
    pub(crate) edition: u64,
    pub(crate) version: u64,
    pub(crate) manifest: Manifest,
    pub(crate) encoded: Tensor,
    /// The encoded difference from the manifest of version `base`.
    pub(crate) difference: Option<Tensor>,
    pub(crate) base: u64,
    /// In the order of the manifest.
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) deltas: Vec<Tensor>,
    pub(crate) loan: Tensor,
    /// Held by the pins.
    pub(crate) pinned: Arc<()>,
}

impl SetVersion {
    /// The content with this number.
    fn content(&self, number: u32) -> Option<&Tensor> {
        match number {
            MANIFEST => Some(&self.encoded),
            MANIFEST_DELTA => self.difference.as_ref(),
            LOAN => Some(&self.loan),
            number => {
                let place = (number - FIRST_TENSOR) as usize;
                self.tensors.get(place).or_else(|| self.deltas.get(place.checked_sub(self.tensors.len())?))
            }
        }
    }

    fn is_pinned(&self) -> bool {
        Arc::strong_count(&self.pinned) > 1
    }

    fn head(&self) -> VersionHead {
        let difference = self.difference.as_ref().map_or(0, |difference| difference.bytes().len());
        VersionHead::new(self.edition, self.version, self.encoded.bytes(), difference)
    }

    /// Bytes of its own contents, without the tensors.
    fn extra_bytes(&self) -> u64 {
        let deltas = self.deltas.iter().chain(&self.difference).chain([&self.encoded, &self.loan]);
        deltas.map(|content| content.bytes().len() as u64).sum()
    }

    /// Bytes that this version holds beside those of `newer`.
    fn bytes_beside(&self, newer: &[(Arc<str>, Tensor)]) -> u64 {
        let named = self.manifest.entries.iter().zip(&self.tensors);
        let held = named.filter(|(entry, tensor)| {
            !find(newer, &entry.name).is_some_and(|other| shares_memory(other, tensor))
        });
        held.map(|(_, tensor)| tensor.bytes().len() as u64).sum::<u64>() + self.extra_bytes()
    }
}

/// The tensor called `name`; `sorted` is sorted by name.
pub(crate) fn find<'a>(sorted: &'a [(Arc<str>, Tensor)], name: &str) -> Option<&'a Tensor> {
    let place = sorted.binary_search_by(|(other, _)| (**other).cmp(name)).ok()?;
    sorted.get(place).map(|(_, tensor)| tensor)
}

/// Whether both tensors have the same bytes in the same memory.
pub(crate) fn shares_memory(one: &Tensor, other: &Tensor) -> bool {
    one.bytes().len() == other.bytes().len() && one.bytes().as_ptr() == other.bytes().as_ptr()
}

/// A tensor of bytes that the library made.
pub(crate) fn encoded(bytes: &[u8]) -> Tensor {
    let metadata = bytes_of(bytes.len() as u64);
    Tensor::received(metadata, Buf::on_heap(bytes, CopyReason::Local), None).remember_checksums()
}

/// The metadata of so many bytes.
pub(crate) fn bytes_of(length: u64) -> Metadata {
    let (dtype, shape) = (DataType::U8, Shape::new([length]).unwrap_or_default());
    Metadata { dtype, shape, is_dead: false, byte_length: length }
}

/// Most bytes of an entry of an encoded manifest, besides its name, its dimensions and its sharding, and of a number in it.
const ENTRY_BYTES: usize = 40;
const NUMBER_BYTES: usize = 10;

/// Most older versions of a set that are held because peers are fetching them.
const PINNED_MAX: usize = 2;

/// Deltas are made for so many commits after a peer that uses them has asked for a version. A follower asks once for several commits if
/// these are faster than its transfers.
const FOLLOWED_FOR: u32 = 8;

/// The sets of a worker.
#[derive(Debug)]
pub(crate) struct Sets {
    incarnation: u64,
    bytes_max: u64,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    editions: u64,
    sets: BTreeMap<Arc<str>, CommittedSet>,
}

#[derive(Debug, Default)]
struct CommittedSet {
    /// The peers that may read it; `None` for all.
    readers: Option<Arc<BTreeSet<String>>>,
    /// Commits until deltas are no longer made, unless a peer that uses them asks for a version.
    followed_for: u32,
    newest: Option<Arc<SetVersion>>,
    before: Option<Arc<SetVersion>>,
    /// Older versions that peers are fetching, newest first.
    pinned: Vec<Arc<SetVersion>>,
}

impl CommittedSet {
    /// Keeps `version`, which is neither of the newest two any more, if it is pinned. Returns what is not held any more.
    fn retire(&mut self, version: Option<Arc<SetVersion>>) -> Vec<Arc<SetVersion>> {
        self.pinned.splice(0..0, version);
        let (pinned, mut dropped): (Vec<_>, Vec<_>) =
            mem::take(&mut self.pinned).into_iter().partition(|version| version.is_pinned());
        self.pinned = pinned;
        dropped.extend(self.pinned.drain(self.pinned.len().min(PINNED_MAX)..));
        dropped
    }

    /// The version of this edition, if it is held.
    fn of_edition(&self, edition: u64) -> Option<&Arc<SetVersion>> {
        let mut held = self.newest.iter().chain(&self.before).chain(&self.pinned);
        held.find(|version| version.edition == edition)
    }

    /// Bytes that it holds, with `newer` instead of its newest version.
    fn bytes_with(&self, (newer, shardings): &Unzipped) -> u64 {
        let newer_bytes = newer.iter().zip(shardings).map(|((name, tensor), sharding)| {
            let numbers = tensor.shape().len() + sharding.as_ref().map_or(0, Sharding::numbers);
            let manifest = name.len() + ENTRY_BYTES + NUMBER_BYTES * numbers;
            // The manifest, and its difference from the one before.
            (tensor.bytes().len() + 2 * manifest) as u64
        });
        let newer_bytes = newer_bytes.sum::<u64>() + loan::table_bytes(newer.len()) as u64;
        let newest = self.newest.as_ref().map_or(0, |newest| newest.bytes_beside(newer));
        self.pinned_bytes() + newer_bytes + newest
    }

    /// Bytes that it holds.
    fn bytes(&self) -> u64 {
        let Some(newest) = &self.newest else { return 0 };
        let named = newest.manifest.entries.iter().zip(&newest.tensors);
        let named: Vec<_> = named.map(|(entry, tensor)| (entry.name.clone(), tensor.clone())).collect();
        let tensors = named.iter().map(|(_, tensor)| tensor.bytes().len() as u64).sum::<u64>();
        let before = self.before.as_ref().map_or(0, |before| before.bytes_beside(&named));
        self.pinned_bytes() + tensors + newest.extra_bytes() + before
    }

    fn pinned_bytes(&self) -> u64 {
        self.pinned.iter().map(|version| version.bytes_beside(&[])).sum()
    }
}

/// What a commit starts from.
#[derive(Debug)]
pub(crate) struct Begun {
    /// The edition of the new version.
    pub(crate) edition: u64,
    pub(crate) newest: Option<Arc<SetVersion>>,
    /// Whether a peer may use deltas.
    pub(crate) is_followed: bool,
    /// Bytes that the deltas may have.
    pub(crate) delta_bytes: u64,
}

/// Why a version is not committed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Refusal {
    /// The set has this version already.
    NotNewer(u64),
    /// All sets would hold so many bytes.
    TooLarge(u64),
    /// Another version was committed meanwhile.
    Overtaken,
}

impl Sets {
    pub(crate) fn new(incarnation: u64, bytes_max: u64) -> Self {
        Self { incarnation, bytes_max, table: Mutex::default() }
    }

    /// The most bytes that all sets may hold.
    pub(crate) fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// Allows only these peers to read the set.
    pub(crate) fn set_readers(&self, name: &str, readers: BTreeSet<String>) {
        self.table().set(name).readers = Some(Arc::new(readers));
    }

    /// Checks whether `peer` may read the set.
    ///
    /// # Errors
    /// PERMISSION_DENIED.
    pub(crate) fn check_reader(&self, name: &str, peer: &str) -> Result<(), Status> {
        let readers = self.table().sets.get(name).and_then(|set| set.readers.clone());
        if readers.is_none_or(|readers| readers.contains(peer)) {
            return Ok(());
        }
        let message = format!("{peer} is not among the readers of the set `{name}`");
        Err(Status::new(Code::PermissionDenied, message))
    }

    /// A peer that uses deltas asks for a version of the set.
    pub(crate) fn note_follower(&self, name: &str) {
        if let Some(set) = self.table().sets.get_mut(name) {
            set.followed_for = FOLLOWED_FOR;
        }
    }

    /// The newest version of the set, if there is one.
    pub(crate) fn newest(&self, name: &str) -> Option<u64> {
        self.table().sets.get(name)?.newest.as_ref().map(|newest| newest.version)
    }

    /// Begins the commit of `version`, which has these tensors.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(crate) fn begin(&self, name: &str, version: u64, tensors: &Unzipped) -> Result<Begun, Refusal> {
        let mut table = self.table();
        let newest = table.sets.get(name).and_then(|set| set.newest.clone());
        if let Some(newest) = newest.as_ref().filter(|newest| newest.version >= version) {
            return Err(Refusal::NotNewer(newest.version));
        }
        let mut dropped = Vec::new();
        let mut bytes = table.bytes_with(name, tensors);
        if bytes > self.bytes_max {
            dropped = table.unpin();
            bytes = table.bytes_with(name, tensors);
        }
        let Some(room) = self.bytes_max.checked_sub(bytes) else {
            drop(table);
            return Err(Refusal::TooLarge(bytes));
        };
        table.editions += 1;
        let edition = self.incarnation.wrapping_add(table.editions).max(1);
        let set = table.set(name);
        let is_followed = set.followed_for > 0;
        set.followed_for = set.followed_for.saturating_sub(1);
        drop(table);
        drop(dropped);
        Ok(Begun { edition, newest, is_followed, delta_bytes: room })
    }

    /// Makes `next` the newest version of the set. Returns its head.
    ///
    /// # Errors
    /// [`Refusal::Overtaken`], if the newest version is not that of edition `base`.
    pub(crate) fn put(&self, name: &str, base: Option<u64>, next: SetVersion) -> Result<Tensor, Refusal> {
        let mut table = self.table();
        let set = table.set(name);
        if set.newest.as_ref().map(|newest| newest.edition) != base {
            return Err(Refusal::Overtaken);
        }
        let before = set.newest.replace(Arc::new(next));
        let retired = mem::replace(&mut set.before, before);
        let mut dropped = set.retire(retired);
        if table.bytes() > self.bytes_max {
            dropped.append(&mut table.unpin());
        }
        let set = table.set(name);
        let newest = set.newest.as_ref().map(|newest| newest.head()).unwrap_or_default();
        let before = set.before.as_ref();
        let oldest = before.map(|before| before.base).unwrap_or_default();
        let head =
            Head::new(self.incarnation, newest, before.map(|it| it.head()).unwrap_or_default(), oldest);
        drop(table);
        // Without the lock: the last drop of a tensor frees memory of a pool, which may wake tasks.
        drop(dropped);
        Ok(encoded(head.as_bytes()))
    }

    /// Drops all versions: the worker is shut down.
    pub(crate) fn close(&self) {
        let sets = mem::take(&mut self.table().sets);
        // Without the lock, as in `put`.
        drop(sets);
    }

    /// The sets that `reader` may read, sorted by name.
    pub(crate) fn list(&self, reader: Option<&str>) -> Vec<ListedSet> {
        let table = self.table();
        let readable = table.sets.iter().filter(|(_, set)| match (reader, &set.readers) {
            (Some(reader), Some(readers)) => readers.contains(reader),
            _ => true,
        });
        let listed = readable.filter_map(|(name, set)| {
            let SetVersion { version, manifest, .. } = &**set.newest.as_ref()?;
            let (tensors, bytes) = (manifest.entries.len() as u64, manifest.bytes());
            Some(ListedSet { name: name.to_string(), version: *version, tensors, bytes })
        });
        listed.collect()
    }

    /// A content of the set.
    ///
    /// # Errors
    /// NOT_FOUND, if the worker does not hold the version any more.
    pub(crate) fn content(&self, name: &str, content: SetContent) -> Result<Tensor, Status> {
        let table = self.table();
        let set = table.sets.get(name);
        let version = set.and_then(|set| set.of_edition(content.edition));
        let found = version.and_then(|version| version.content(content.number)).cloned();
        found.ok_or_else(|| Status::new(Code::NotFound, format!("the version of `{name}` is superseded")))
    }

    /// Holds the version of this edition as long as the pin exists, and is among the newest.
    pub(crate) fn pin(&self, name: &str, edition: u64) -> Option<Arc<()>> {
        let table = self.table();
        Some(table.sets.get(name)?.of_edition(edition)?.pinned.clone())
    }

    /// Drops the versions of the set that are not pinned any more.
    pub(crate) fn release(&self, name: &str) {
        let dropped = self.table().sets.get_mut(name).map(|set| set.retire(None));
        drop(dropped);
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// Bytes that all sets hold.
    fn bytes(&self) -> u64 {
        self.sets.values().map(CommittedSet::bytes).sum()
    }

    /// Bytes that all sets would hold with these tensors as the newest version of `name`.
    fn bytes_with(&mut self, name: &str, tensors: &Unzipped) -> u64 {
        let others = self.sets.iter().filter(|(other, _)| ***other != *name);
        let others = others.map(|(_, set)| set.bytes()).sum::<u64>();
        others.saturating_add(self.set(name).bytes_with(tensors))
    }

    /// Gives up all pins. Returns what is not held any more.
    fn unpin(&mut self) -> Vec<Arc<SetVersion>> {
        self.sets.values_mut().flat_map(|set| mem::take(&mut set.pinned)).collect()
    }

    fn set(&mut self, name: &str) -> &mut CommittedSet {
        self.sets.entry(name.into()).or_default()
    }
}
