//! Memory that other ranks read and write by a key.
//!
//! The bytes of an export are a published tensor. A read fetches a slice of it, which needs no message on one host. A write ([`writing`])
//! is a call of the owner.
//!
//! [`writing`]: super::writing

use std::{
    collections::BTreeMap,
    fmt,
    ops::{Bound, Range, RangeBounds},
    slice,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tensorwire_memory::Buf;
use tensorwire_protocol::{Code, DataType, Metadata, Status};
use tensorwire_rendezvous::{Peer, Tensor, WorkerError};
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{I64, U32, U64},
};

use super::{Core, NO_LIMIT, Pairs, sending::part_of, wait::Wait};
use crate::{
    call::{Call, CallKind, hash},
    error::GroupError,
};

/// Bytes of an encoded [`ExportKey`].
pub const KEY_BYTES: usize = size_of::<EncodedKey>();

/// The first bytes of each key. They change with the format.
const MAGIC: u32 = 0x5457_4b02;

/// The writes to an export of this rank.
#[derive(Debug, Default)]
pub(super) struct Writes {
    /// By rank, the number of the last write that began.
    last: BTreeMap<usize, u64>,
    is_over: bool,
}

impl Writes {
    /// Begins the write `number` of `rank`, or goes on with it.
    ///
    /// # Errors
    /// The export was dropped, or a later write has begun. So this one was given up, and nobody waits for its answer.
    pub(super) fn begin(&mut self, rank: usize, number: u64) -> Result<(), Status> {
        if self.is_over {
            return Err(Self::gone());
        }
        let last = self.last.entry(rank).or_default();
        if number < *last {
            return Err(Status::new(Code::Cancelled, "a later write of this rank has begun"));
        }
        *last = number;
        Ok(())
    }

    /// The status of a write to an export that was dropped.
    pub(super) fn gone() -> Status {
        Status::new(Code::NotFound, "the export was dropped")
    }

    /// From here on, no write begins or goes on.
    fn end(&mut self) {
        self.is_over = true;
    }
}

/// An export of this rank. Its bytes are published, and only there: so they can be overwritten.
#[derive(Debug)]
pub(super) struct Exported {
    metadata: Metadata,
    /// Held while a version is made, so that no write is lost in the copy of another.
    writes: Mutex<Writes>,
}

impl Exported {
    /// In bytes.
    pub(super) fn length(&self) -> usize {
        usize::try_from(self.metadata.byte_length).unwrap_or(usize::MAX)
    }

    pub(super) fn writes(&self) -> MutexGuard<'_, Writes> {
        self.writes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The exports of a rank, by their numbers.
#[derive(Debug, Default)]
pub(super) struct Exports {
    by_number: Mutex<BTreeMap<u64, Arc<Exported>>>,
}

impl Exports {
    pub(super) fn find(&self, number: u64) -> Option<Arc<Exported>> {
        self.lock().get(&number).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Exported>>> {
        self.by_number.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The key of an [`Export`]. It can be sent as [bytes](Self::encode).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExportKey {
    /// The step of the group's operations between ranks. It differs between groups, runs and generations.
    group: i64,
    rank: u32,
    /// A random number, different for each export.
    export: u64,
    length: u64,
}

/// The encoded fields of a key.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Fields {
    magic: U32,
    rank: U32,
    group: I64,
    export: U64,
    length: U64,
}

/// An encoded key.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct EncodedKey {
    fields: Fields,
    /// A hash of the fields.
    sum: U64,
}

impl ExportKey {
    /// The rank that has the export.
    pub fn rank(&self) -> usize {
        self.rank as usize
    }

    /// The length of the export in bytes.
    pub fn length(&self) -> usize {
        usize::try_from(self.length).unwrap_or(usize::MAX)
    }

    /// Encodes the key for [`decode`](Self::decode).
    pub fn encode(&self) -> [u8; KEY_BYTES] {
        let fields = Fields {
            magic: MAGIC.into(),
            rank: self.rank.into(),
            group: self.group.into(),
            export: self.export.into(),
            length: self.length.into(),
        };
        let sum = hash(fields.as_bytes().iter().copied()).into();
        zerocopy::transmute!(EncodedKey { fields, sum })
    }

    /// Decodes a key.
    ///
    /// # Errors
    /// [`GroupError::Argument`] if the bytes are no key of this version, or were changed.
    pub fn decode(bytes: &[u8]) -> Result<Self, GroupError> {
        Self::of_bytes(bytes).ok_or_else(|| GroupError::Argument {
            field: "key",
            value: format!("{} bytes", bytes.len()),
            remedy: format!("give the {KEY_BYTES} bytes of `ExportKey::encode` of this version"),
        })
    }

    fn of_bytes(bytes: &[u8]) -> Option<Self> {
        let EncodedKey { fields, sum } = EncodedKey::ref_from_bytes(bytes).ok()?;
        let is_whole = *sum == hash(fields.as_bytes().iter().copied());
        let key = Self {
            rank: fields.rank.get(),
            group: fields.group.get(),
            export: fields.export.get(),
            length: fields.length.get(),
        };
        (fields.magic == MAGIC && is_whole).then_some(key)
    }

    /// The name under which the bytes are published.
    pub(super) fn name(&self) -> String {
        name(self.group, self.export)
    }

    /// The number of the export.
    pub(super) fn number(&self) -> u64 {
        self.export
    }

    pub(super) fn call(&self, kind: CallKind) -> Call {
        Call::plain(self.export, kind)
    }

    /// The error if the export was dropped.
    pub(super) fn gone(&self, kind: CallKind) -> GroupError {
        GroupError::Gone { call: Box::new(self.call(kind)), rank: self.rank(), what: "export" }
    }

    /// The error if the export is not what the key says.
    pub(super) fn broken(&self, kind: CallKind) -> GroupError {
        let rule = "an export has the length of its key";
        GroupError::Misbehaved { call: Box::new(self.call(kind)), rank: self.rank(), rule }
    }
}

/// The name under which the bytes of an export are published.
pub(super) fn name(group: i64, export: u64) -> String {
    format!("tensorwire export {group:016x} {export:016x}")
}

impl fmt::Display for ExportKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "export {:016x} of rank {}, {} bytes", self.export, self.rank, self.length)
    }
}

/// Memory of this rank that all ranks of the group may read and write until this is dropped. Made by
/// [`Group::export`](crate::Group::export).
#[must_use = "nobody can use the key once this is dropped"]
pub struct Export {
    pairs: Arc<Pairs>,
    key: ExportKey,
}

impl Export {
    /// Its key, for the other ranks.
    pub fn key(&self) -> ExportKey {
        self.key
    }

    /// Its current content. Later writes do not change the returned tensor.
    ///
    /// # Errors
    /// None while this lives.
    pub fn tensor(&self) -> Result<Tensor, GroupError> {
        let core = &self.pairs.core;
        let found = core.exports.find(self.key.export).zip(core.worker.published(&self.key.name()));
        let (exported, bytes) = found.ok_or_else(|| self.key.gone(CallKind::Get))?;
        let Metadata { dtype, shape, .. } = &exported.metadata;
        Ok(Tensor::shared(bytes.buf().clone(), *dtype, shape.dimensions())?)
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Export({})", self.key)
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        let core = &self.pairs.core;
        let Some(exported) = core.exports.lock().remove(&self.key.export) else { return };
        let mut writes = exported.writes();
        // Before it is withdrawn: no write publishes it again.
        writes.end();
        let bytes = core.worker.published(&self.key.name());
        core.worker.withdraw(&self.key.name());
        drop(writes);
        // Releases the memory, which may wake tasks.
        drop(bytes);
    }
}

/// As [`Group::export`](crate::Group::export).
pub(crate) fn export(pairs: &Arc<Pairs>, tensor: Tensor) -> Result<Export, GroupError> {
    if !tensor.dtype().is_plain() || tensor.is_dead() {
        return Err(GroupError::Argument {
            field: "tensor",
            value: format!("{tensor:?}"),
            remedy: "export a tensor of numbers".to_owned(),
        });
    }
    let core = &pairs.core;
    let key = ExportKey {
        group: core.step.id(),
        rank: u32::try_from(core.rank).unwrap_or(u32::MAX),
        export: core.runtime().random(),
        length: tensor.bytes().len() as u64,
    };
    let exported = Exported { metadata: tensor.metadata().clone(), writes: Mutex::default() };
    core.exports.lock().insert(key.export, Arc::new(exported));
    let export = Export { pairs: pairs.clone(), key };
    let bytes = bytes_of(tensor.buf())?;
    // A handle on the memory, which would keep the first write from going into it.
    drop(tensor);
    core.worker.publish(&key.name(), bytes)?;
    pairs.accept_writes()?;
    Ok(export)
}

/// What is published of an export: its bytes without a shape, so that each range is a slice.
pub(super) fn bytes_of(bytes: &Buf) -> Result<Tensor, WorkerError> {
    Tensor::shared(bytes.clone(), DataType::U8, &[bytes.len() as u64])
}

/// As [`Group::get`](crate::Group::get).
pub(crate) fn get(
    pairs: &Arc<Pairs>,
    key: &ExportKey,
    range: impl RangeBounds<usize>,
) -> Wait<'static, Tensor> {
    let (core, key, call) = (pairs.core.clone(), *key, key.call(CallKind::Get));
    let checked = core.checked(&key).and_then(|peer| Ok((peer.clone(), part_of_range(range, key.length())?)));
    let (peer, range) = match checked {
        Ok(checked) => checked,
        Err(error) => return Wait::failed(pairs, call, error),
    };
    Wait::new(pairs, call, vec![key.rank()], async move {
        let bytes = range.start as u64..range.end as u64;
        let fetched = peer.fetch_slice_within(&key.name(), slice::from_ref(&bytes), NO_LIMIT).await;
        let part = fetched.map_err(|error| match error {
            WorkerError::Remote { status, .. } if status.code == Code::NotFound => key.gone(CallKind::Get),
            WorkerError::Remote { status, .. } if status.code == Code::ResourceExhausted => {
                GroupError::NoMemory { call: Box::new(call), rank: key.rank() }
            }
            WorkerError::Config { field: "ranges", .. } | WorkerError::InvalidTensor { .. } => {
                key.broken(CallKind::Get)
            }
            error => GroupError::of_message(&call, key.rank(), error),
        })?;
        if part.dtype() == DataType::U8 && !part.is_dead() {
            Ok(part)
        } else {
            Err(key.broken(CallKind::Get))
        }
    })
}

/// The part of `whole` bytes that `range` selects.
fn part_of_range(range: impl RangeBounds<usize>, whole: usize) -> Result<Range<usize>, GroupError> {
    let start = match range.start_bound() {
        Bound::Included(start) => *start,
        Bound::Excluded(before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(last) => last.saturating_add(1),
        Bound::Excluded(end) => *end,
        Bound::Unbounded => whole.max(start),
    };
    match end.checked_sub(start) {
        Some(length) => part_of(("offset", start), length, whole),
        None => Err(GroupError::Argument {
            field: "range",
            value: format!("{start}..{end}"),
            remedy: "the end must not be before the start".to_owned(),
        }),
    }
}

impl Core {
    /// The rank of an export, which must belong to this group.
    pub(super) fn checked(&self, key: &ExportKey) -> Result<&Peer, GroupError> {
        if key.group != self.step.id() {
            return Err(GroupError::Argument {
                field: "key",
                value: key.to_string(),
                remedy: "the key is of another group, run or generation: export again in this group, and send the new key"
                    .to_owned(),
            });
        }
        self.peer(key.rank())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: ExportKey = ExportKey { group: -7, rank: 3, export: u64::MAX, length: 4096 };

    #[test]
    fn a_key_survives_its_encoding_and_a_damaged_one_is_refused() {
        let bytes = KEY.encode();
        assert_eq!(ExportKey::decode(&bytes).unwrap(), KEY);
        for at in 0..KEY_BYTES {
            let mut damaged = bytes;
            damaged[at] ^= 1;
            assert!(ExportKey::decode(&damaged).is_err(), "byte {at}");
        }
        let error = ExportKey::decode(&bytes[1..]).unwrap_err().to_string();
        assert_eq!(error, "key = `39 bytes`: give the 40 bytes of `ExportKey::encode` of this version");
    }

    #[test]
    fn a_write_that_was_given_up_changes_nothing_after_a_later_one() {
        let mut writes = Writes::default();
        writes.begin(0, 1).unwrap();
        writes.begin(0, 3).unwrap();
        writes.begin(0, 3).unwrap();
        assert_eq!(writes.begin(0, 2).unwrap_err().code, Code::Cancelled);
        // Numbers are of one rank.
        writes.begin(1, 2).unwrap();
    }

    #[test]
    fn ranges_are_those_of_slices() {
        assert_eq!(part_of_range(.., 8).unwrap(), 0..8);
        assert_eq!(part_of_range(2..=7, 8).unwrap(), 2..8);
        assert_eq!(part_of_range(8.., 8).unwrap(), 8..8);
        for (range, field) in
            [((9, 9), "offset"), ((0, 9), "length"), ((3, 2), "range"), ((9, usize::MAX), "offset")]
        {
            let error = part_of_range(range.0..range.1, 8).unwrap_err().to_string();
            assert!(error.starts_with(field), "{range:?}: {error}");
        }
    }
}
