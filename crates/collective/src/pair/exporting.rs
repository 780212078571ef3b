//! Memory that other ranks read and write by a key.
//!
//! The bytes of an export are a published tensor. A read fetches a slice of it, which needs no message on one host. A write is a message
//! to the owner, where one task makes a new version of the tensor: in the same memory if nobody reads that, otherwise in a copy. So a
//! reader gets one version or another, and never parts of two.

use std::{
    collections::BTreeMap,
    fmt,
    ops::{Bound, Range, RangeBounds},
    slice,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    time::Duration,
};

use futures::stream::{FuturesUnordered, StreamExt as _};
use tensorwire_memory::{
    Buf,
    copy::{CopyReason, copy_bytes},
};
use tensorwire_protocol::{Code, DataType, Metadata};
use tensorwire_rendezvous::{Peer, Tensor, WorkerError};
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{I64, U32, U64},
};

use super::{
    Core, NO_LIMIT, Pairs,
    sending::part_of,
    wait::Wait,
    wire::{Frame, Lane, Receipt},
};
use crate::{
    call::{Call, CallKind, hash},
    error::GroupError,
};

/// Bytes of an encoded [`ExportKey`].
pub const KEY_BYTES: usize = size_of::<EncodedKey>();

/// The first bytes of each key. They change with the format.
const MAGIC: u32 = 0x5457_4b02;

/// The shortest and longest pause before a rank is asked for writes again, after it could not be reached.
const PAUSE_MIN: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(4);

/// Element type and shape of a rank's exports, by the number of the export. Their bytes are published, and only there: so they can be
/// overwritten.
#[derive(Debug, Default)]
pub(super) struct Exports {
    metadata: Mutex<BTreeMap<u64, Metadata>>,
}

impl Exports {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Metadata>> {
        self.metadata.lock().unwrap_or_else(PoisonError::into_inner)
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
    fn name(&self) -> String {
        name(self.group, self.export)
    }

    fn call(&self, kind: CallKind) -> Call {
        Call::plain(self.export, kind)
    }

    /// The error if the export was dropped.
    fn gone(&self, kind: CallKind) -> GroupError {
        GroupError::Gone { call: Box::new(self.call(kind)), rank: self.rank(), what: "export" }
    }

    /// The error if the export is not what the key says.
    fn broken(&self, kind: CallKind) -> GroupError {
        let rule = "an export has the length of its key";
        GroupError::Misbehaved { call: Box::new(self.call(kind)), rank: self.rank(), rule }
    }
}

fn name(group: i64, export: u64) -> String {
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
        let metadata = core.exports.lock().get(&self.key.export).cloned();
        let found = metadata.zip(core.worker.published(&self.key.name()));
        let (metadata, bytes) = found.ok_or_else(|| self.key.gone(CallKind::Get))?;
        Ok(Tensor::shared(bytes.buf().clone(), metadata.dtype, metadata.shape.dimensions())?)
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
        let mut exports = core.exports.lock();
        exports.remove(&self.key.export);
        let bytes = core.worker.published(&self.key.name());
        // Under the lock, so that `replace` cannot publish it again.
        core.worker.withdraw(&self.key.name());
        drop(exports);
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
    core.exports.lock().insert(key.export, tensor.metadata().clone());
    let export = Export { pairs: pairs.clone(), key };
    let bytes = bytes_of(tensor.buf())?;
    // A handle on the memory, which would keep the first write from going into it.
    drop(tensor);
    core.worker.publish(&key.name(), bytes)?;
    if !core.serves.swap(true, Ordering::Relaxed) {
        core.spawn("exports", Box::pin(core.clone().serve()));
    }
    Ok(export)
}

/// What is published of an export: its bytes without a shape, so that each range is a slice.
fn bytes_of(bytes: &Buf) -> Result<Tensor, WorkerError> {
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

/// As [`Group::put`](crate::Group::put).
pub(crate) fn put<'a>(pairs: &Arc<Pairs>, key: &ExportKey, offset: usize, bytes: &'a [u8]) -> Wait<'a, ()> {
    let (core, key, call) = (pairs.core.clone(), *key, key.call(CallKind::Put));
    let part = part_of(("offset", offset), bytes.len(), key.length());
    if let Err(error) = core.checked(&key).and_then(|_| part.map(drop)) {
        return Wait::failed(pairs, call, error);
    }
    Wait::new(pairs, call, vec![key.rank()], async move {
        let frame = Frame::Put { at: offset as u64, export: key.export };
        let message = core.framed(frame, bytes).await?;
        match core.post(key.rank(), Lane::Puts, message, &call)?.receipt(&call).await? {
            Receipt::Taken => Ok(()),
            Receipt::Gone => Err(key.gone(CallKind::Put)),
            Receipt::NoMemory => Err(GroupError::NoMemory { call: Box::new(call), rank: key.rank() }),
            Receipt::Outside(_) => Err(key.broken(CallKind::Put)),
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
    fn checked(&self, key: &ExportKey) -> Result<&Peer, GroupError> {
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

    /// Applies the writes of all ranks, one after the other. One write of each rank is requested at a time; further ones wait on
    /// their ranks.
    async fn serve(self: Arc<Self>) {
        let key = Lane::Puts.key();
        let ask = async |rank, peer| (rank, peer, self.next_put(peer, &key).await);
        let mut asked: FuturesUnordered<_> =
            self.peers.iter().enumerate().map(|(rank, peer)| ask(rank, peer)).collect();
        while let Some((rank, peer, message)) = asked.next().await {
            match message {
                Ok(message) => {
                    let receipt = self.apply(&message).await;
                    self.acknowledge(rank, Lane::Puts, receipt);
                    asked.push(ask(rank, peer));
                }
                // The rank has left the group, its connection broke and ended the step between the two, or this worker ends.
                Err(error) => log!(DEBUG, rank, %error, "this rank sends no more writes to exports"),
            }
        }
    }

    /// The next write of a rank. Requested again after growing pauses while the rank cannot be reached.
    async fn next_put(&self, peer: &Peer, key: &str) -> Result<Tensor, WorkerError> {
        let mut pause = PAUSE_MIN;
        loop {
            match self.next(peer, key).await {
                Err(WorkerError::NoFabric { .. } | WorkerError::Control(_)) => {
                    self.runtime().sleep(pause).await;
                }
                ended => return ended,
            }
            pause = PAUSE_MAX.min(2 * pause);
        }
    }

    /// Makes a new version of an export with the content of `message`.
    async fn apply(&self, message: &Tensor) -> Receipt {
        let Some((Frame::Put { at, export }, content)) = Frame::decode(message.bytes()) else {
            return Receipt::Gone;
        };
        let Some(length) = self.exports.lock().get(&export).map(|metadata| metadata.byte_length) else {
            return Receipt::Gone;
        };
        let (at, whole) = (usize::try_from(at).unwrap_or(usize::MAX), length as usize);
        let Ok(part) = part_of(("offset", at), content.len(), whole) else {
            return Receipt::Outside(length);
        };
        let name = name(self.step.id(), export);
        if self.worker.overwrite(&name, at, content) {
            tensorwire_testpoints::mark!("an export was overwritten in place");
            return Receipt::Taken;
        }
        tensorwire_testpoints::mark!("an export that is read was copied");
        let Ok(mut buffer) = self.worker.pool().alloc(whole).await else { return Receipt::NoMemory };
        // Held until `replace` has released its lock.
        let Some(bytes) = self.worker.published(&name) else { return Receipt::Gone };
        copy_bytes(&mut buffer, bytes.bytes(), CopyReason::Local);
        if let Some(target) = buffer.get_mut(part) {
            copy_bytes(target, content, CopyReason::Local);
        }
        self.replace(export, &buffer.freeze())
    }

    /// Publishes the next version of an export, unless it was dropped.
    fn replace(&self, export: u64, next: &Buf) -> Receipt {
        let exports = self.exports.lock();
        if !exports.contains_key(&export) {
            return Receipt::Gone;
        }
        let name = name(self.step.id(), export);
        let published = bytes_of(next).and_then(|bytes| self.worker.publish(&name, bytes));
        if published.is_ok() { Receipt::Taken } else { Receipt::NoMemory }
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
