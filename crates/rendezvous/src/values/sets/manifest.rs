//! Manifests: which tensors a version of a set has.

use std::sync::Arc;

use tensorwire_protocol::{
    DataType, Metadata, Shape, Validation,
    limits::{NAME_BYTES_MAX, RANK_MAX, TENSOR_BYTES_MAX},
    text::check_name,
};
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

use super::{
    reading::{Problem, Reader, write_number},
    sharding::{Sharding, read_sharding, write_sharding},
};

/// Most tensors of one set.
pub(crate) const TENSORS_MAX: usize = 64 << 10;

/// Longest encoded manifest, and longest encoded difference of two manifests, in bytes.
pub(crate) const MANIFEST_BYTES_MAX: usize = 16 << 20;

/// The number of the manifest among the contents of a version.
pub(crate) const MANIFEST: u32 = 0;

/// The number of the difference between the manifest and the previous one.
pub(crate) const MANIFEST_DELTA: u32 = 1;

/// The number of the [loan](super::loan) of all tensors.
pub(crate) const LOAN: u32 = 2;

/// The number of the first tensor. The deltas follow the last one.
pub(crate) const FIRST_TENSOR: u32 = 3;

/// A tensor in a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ManifestEntry {
    pub(crate) name: Arc<str>,
    pub(crate) metadata: Metadata,
    /// How it is part of a larger tensor.
    pub(crate) sharding: Option<Sharding>,
    /// The edition in which this content was committed first. Two contents with the same stamp are equal.
    pub(crate) stamp: u64,
    /// XXH3-64 of the content, if it has been encoded as a delta.
    pub(crate) checksum: Option<u64>,
}

impl ManifestEntry {
    /// Whether both have contents of one kind.
    pub(crate) fn is_alike(&self, other: &Self) -> bool {
        self.metadata == other.metadata && self.sharding == other.sharding
    }
}

/// The tensors of a version, sorted by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Manifest {
    /// The incarnation of the publisher.
    pub(crate) incarnation: u64,
    pub(crate) entries: Vec<ManifestEntry>,
}

impl Manifest {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = self.incarnation.to_le_bytes().to_vec();
        write_number(&mut bytes, self.entries.len() as u64);
        for entry in &self.entries {
            write_name(&mut bytes, &entry.name);
            write_description(&mut bytes, entry);
            bytes.extend(entry.stamp.to_le_bytes());
            bytes.extend(entry.checksum.unwrap_or_default().to_le_bytes());
        }
        bytes
    }

    /// The manifest that `bytes` of a peer encode.
    ///
    /// # Errors
    /// What is wrong with them.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Problem> {
        let mut reader = Reader::new(bytes);
        let incarnation = reader.u64()?;
        let count = reader.count(22)?;
        let mut entries = Vec::with_capacity(count);
        for _ in 0..count {
            let (name, (metadata, sharding)) = (read_name(&mut reader)?, read_description(&mut reader)?);
            let (stamp, checksum) = (reader.u64()?, reader.u64()?);
            let checksum = Some(checksum).filter(|&checksum| checksum > 0);
            entries.push(ManifestEntry { name, metadata, sharding, stamp, checksum });
        }
        reader.end()?;
        let manifest = Self { incarnation, entries };
        manifest.check()?;
        Ok(manifest)
    }

    /// Checks the number of tensors, their order and their length.
    pub(super) fn check(&self) -> Result<(), Problem> {
        if self.entries.len() > TENSORS_MAX {
            return Err("a set has at most 65,536 tensors");
        }
        let mut pairs = self.entries.iter().zip(self.entries.iter().skip(1));
        if pairs.any(|(first, second)| first.name >= second.name) {
            return Err("the names are not in order");
        }
        if self.bytes() > TENSOR_BYTES_MAX {
            return Err("the tensors are too long");
        }
        Ok(())
    }

    /// Bytes of all tensors.
    pub(crate) fn bytes(&self) -> u64 {
        self.entries.iter().fold(0, |bytes, entry| bytes.saturating_add(entry.metadata.byte_length))
    }

    /// The place of the tensor called `name`.
    pub(crate) fn place(&self, name: &str) -> Option<usize> {
        self.entries.binary_search_by(|entry| (*entry.name).cmp(name)).ok()
    }
}

pub(super) fn write_name(into: &mut Vec<u8>, name: &str) {
    write_number(into, name.len() as u64);
    into.extend(name.as_bytes());
}

pub(super) fn read_name(reader: &mut Reader<'_>) -> Result<Arc<str>, Problem> {
    let length = reader.count(1)?;
    let name = str::from_utf8(reader.bytes(length)?).map_err(|_| "a name is not UTF-8")?;
    if !(1..=NAME_BYTES_MAX).contains(&length) || check_name(name).is_err() {
        return Err("a name has a wrong length or character");
    }
    Ok(name.into())
}

/// Writes what a tensor is, without its name and content.
pub(super) fn write_description(into: &mut Vec<u8>, entry: &ManifestEntry) {
    write_metadata(into, &entry.metadata);
    write_sharding(into, entry.sharding.as_ref());
}

pub(super) fn read_description(reader: &mut Reader<'_>) -> Result<(Metadata, Option<Sharding>), Problem> {
    let metadata = read_metadata(reader)?;
    let sharding = read_sharding(reader, metadata.shape.dimensions())?;
    Ok((metadata, sharding))
}

fn write_metadata(into: &mut Vec<u8>, metadata: &Metadata) {
    write_number(into, metadata.dtype as u64);
    let dimensions = metadata.shape.dimensions();
    write_number(into, dimensions.len() as u64);
    dimensions.iter().for_each(|&dimension| write_number(into, dimension));
    if !metadata.dtype.is_plain() {
        write_number(into, metadata.byte_length);
    }
}

fn read_metadata(reader: &mut Reader<'_>) -> Result<Metadata, Problem> {
    let number = u32::try_from(reader.number()?).map_err(|_| "an element type is unknown")?;
    let dtype = DataType::from_number(number).map_err(|_| "an element type is unknown")?;
    let rank = reader.count(1)?;
    if rank > RANK_MAX {
        return Err("a shape has too many dimensions");
    }
    let dimensions = (0..rank).map(|_| reader.number()).collect::<Result<Vec<_>, _>>()?;
    let shape = Shape::new(dimensions).ok_or("a shape is too large")?;
    let metadata = match dtype.is_plain() {
        true => Metadata::new(dtype, shape),
        false => Metadata::encoded(dtype, shape, reader.number()?),
    };
    let is_short = |metadata: &Metadata| metadata.byte_length <= TENSOR_BYTES_MAX;
    metadata.filter(is_short).ok_or("a tensor is too long")
}

/// A version in a head.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub(crate) struct VersionHead {
    edition: U64,
    version: U64,
    checksum: U64,
    manifest_bytes: U32,
    delta_bytes: U32,
}

impl VersionHead {
    /// Of a version whose encoded manifest is `manifest`, and its difference from the one before is `delta_bytes` long.
    pub(crate) fn new(edition: u64, version: u64, manifest: &[u8], delta_bytes: usize) -> Self {
        Self {
            edition: edition.into(),
            version: version.into(),
            checksum: checksum(manifest).into(),
            // Both are limited by `MANIFEST_BYTES_MAX`.
            manifest_bytes: (manifest.len() as u32).into(),
            delta_bytes: (delta_bytes as u32).into(),
        }
    }

    /// Its edition; 0 if there is no version.
    pub(crate) fn edition(&self) -> u64 {
        self.edition.get()
    }

    pub(crate) fn version(&self) -> u64 {
        self.version.get()
    }

    pub(crate) fn manifest_bytes(&self) -> u64 {
        self.manifest_bytes.get().into()
    }

    /// Length of the difference from the version before; `None` if there is none.
    pub(crate) fn delta_bytes(&self) -> Option<u64> {
        Some(self.delta_bytes.get().into()).filter(|&bytes| bytes > 0)
    }

    /// Whether `manifest` is the encoded manifest of this version.
    pub(crate) fn is_of(&self, manifest: &[u8]) -> bool {
        self.checksum.get() == checksum(manifest)
    }

    fn is_bounded(&self) -> bool {
        let most = MANIFEST_BYTES_MAX as u32;
        self.manifest_bytes.get() <= most && self.delta_bytes.get() <= most
    }
}

pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    Validation::Xxh3.checksum(bytes).unwrap_or_default()
}

/// What a publisher answers to a request for a version of a set.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub(crate) struct Head {
    incarnation: U64,
    /// The newest version.
    pub(crate) newest: VersionHead,
    /// The version before it, which the publisher still has; of edition 0 if there is none.
    pub(crate) before: VersionHead,
    /// The version before that, from which `before` has a difference.
    oldest: U64,
}

/// Length of an encoded head.
pub(crate) const HEAD_BYTES: u64 = size_of::<Head>() as u64;

impl Head {
    pub(crate) fn new(incarnation: u64, newest: VersionHead, before: VersionHead, oldest: u64) -> Self {
        Self { incarnation: incarnation.into(), newest, before, oldest: oldest.into() }
    }

    /// The head that `bytes` of a peer encode.
    ///
    /// # Errors
    /// What is wrong with them.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Problem> {
        let head = Self::read_from_bytes(bytes).map_err(|_| "a head has another length")?;
        let is_sound = head.newest.edition() > 0
            && head.newest.is_bounded()
            && head.before.is_bounded()
            && (head.before.edition() == 0 || head.before.version() < head.newest.version());
        if is_sound { Ok(head) } else { Err("a head contradicts itself") }
    }

    pub(crate) fn incarnation(&self) -> u64 {
        self.incarnation.get()
    }

    /// The version before the newest one.
    pub(crate) fn before(&self) -> Option<&VersionHead> {
        Some(&self.before).filter(|before| before.edition() > 0)
    }

    /// The versions that the publisher has, newest first.
    pub(crate) fn versions(&self) -> impl Iterator<Item = &VersionHead> {
        [Some(&self.newest), self.before()].into_iter().flatten()
    }

    /// The version with this number, if the publisher has it.
    pub(crate) fn version(&self, version: u64) -> Option<&VersionHead> {
        self.versions().find(|head| head.version() == version)
    }

    /// The version that was the newest when `before` was committed; 0 if there was none.
    pub(crate) fn base_of_before(&self) -> u64 {
        self.oldest.get()
    }

    /// The version from which `before` has a difference.
    pub(crate) fn oldest(&self) -> Option<u64> {
        self.before()?.delta_bytes().map(|_| self.oldest.get())
    }
}

const _: () = assert!(HEAD_BYTES <= 96, "it travels inside a message that needs no memory");

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // tensors of one dimension
pub(super) mod tests {
    use super::*;

    /// A manifest whose entries have these names, lengths and stamps.
    pub(in crate::values::sets) fn manifest(entries: &[(&str, u64, u64)]) -> Manifest {
        let entries = entries.iter().map(|&(name, length, stamp)| {
            let metadata = Metadata::new(DataType::Bf16, Shape::new([length]).unwrap()).unwrap();
            ManifestEntry { name: name.into(), metadata, sharding: None, stamp, checksum: None }
        });
        Manifest { incarnation: 7, entries: entries.collect() }
    }

    #[test]
    fn manifests_lead_back() {
        let mut whole = manifest(&[("a", 0, 1), ("b.weight", 1 << 40, 2), ("c", 300, u64::MAX)]);
        let strings = Metadata::encoded(DataType::String, Shape::new([2, 3]).unwrap(), 99).unwrap();
        whole.entries[1].metadata = strings;
        whole.entries[2].checksum = Some(5);
        whole.entries[2].sharding = Some(Sharding { axis: 0, length: 900, ranges: vec![0..100, 300..500] });
        assert_eq!(Manifest::decode(&whole.encode()), Ok(whole.clone()));
        assert_eq!((whole.place("c"), whole.place("d")), (Some(2), None));
        let none = manifest(&[]);
        assert_eq!(Manifest::decode(&none.encode()), Ok(none));
    }

    #[test]
    fn s5_manifests_that_contradict_themselves_are_refused() {
        let whole = manifest(&[("a", 2, 1), ("b", 3, 2)]).encode();
        for cut in 0..whole.len() {
            assert!(Manifest::decode(&whole[..cut]).is_err(), "cut at {cut}");
        }
        assert!(Manifest::decode(&[&whole[..], &[0]].concat()).is_err());
        let disordered = [("b", 2, 1), ("a", 3, 2)];
        assert_eq!(Manifest::decode(&manifest(&disordered).encode()), Err("the names are not in order"));
        assert!(Manifest::decode(&manifest(&[("a", 2, 1), ("a", 2, 1)]).encode()).is_err());
        assert!(Manifest::decode(&manifest(&[("", 2, 1)]).encode()).is_err());
        assert!(Manifest::decode(&manifest(&[("a\n", 2, 1)]).encode()).is_err());
        let long = [("a", 1 << 44, 1), ("b", 1 << 44, 1), ("c", 1 << 44, 1)];
        assert_eq!(Manifest::decode(&manifest(&long).encode()), Err("the tensors are too long"));
        let mut endless = 7_u64.to_le_bytes().to_vec();
        write_number(&mut endless, u64::MAX);
        assert_eq!(Manifest::decode(&endless), Err("a count exceeds the bytes"));
    }

    #[test]
    fn s5_heads_that_contradict_themselves_are_refused() {
        let (newest, before) = (VersionHead::new(3, 9, b"x", 5), VersionHead::new(2, 8, b"y", 0));
        let head = Head::new(7, newest, before, 4);
        assert_eq!(Head::decode(head.as_bytes()), Ok(head));
        assert_eq!((head.before(), head.oldest(), newest.delta_bytes()), (Some(&before), None, Some(5)));
        assert!(newest.is_of(b"x") && !newest.is_of(b"y"));
        let lies = [
            Head::new(7, before, newest, 0),
            Head::new(7, newest, newest, 0),
            Head::new(7, VersionHead::default(), VersionHead::default(), 0),
            Head::new(7, VersionHead::new(3, 9, b"x", MANIFEST_BYTES_MAX + 1), before, 0),
        ];
        assert!(lies.iter().all(|head| Head::decode(head.as_bytes()).is_err()));
        assert!(Head::decode(&head.as_bytes()[1..]).is_err());
    }
}
