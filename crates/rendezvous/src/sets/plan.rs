//! Where each tensor of a version comes from.

use crate::{
    sets::snapshot::Snapshot,
    values::{
        sets::{
            manifest::{FIRST_TENSOR, Manifest},
            manifest_delta::Origin,
        },
        tensor::Tensor,
    },
};

/// A delta, which is a content of a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Delta {
    pub(crate) edition: u64,
    pub(crate) number: u32,
    pub(crate) bytes: u64,
}

/// Where a tensor comes from.
#[derive(Debug)]
pub(crate) enum Way {
    /// It is one that this worker has.
    Held(Tensor),
    /// It is one that this worker has, changed by these deltas.
    Deltas(Tensor, Vec<Delta>),
    /// It is the content with this number.
    Whole(u32),
}

/// Where the tensors of a version come from, in terms of a version that this worker has.
#[derive(Debug, Clone)]
pub(crate) struct Derivation {
    /// The deltas of each tensor; `None` if the whole content is needed.
    deltas: Vec<Option<Vec<Delta>>>,
}

impl Derivation {
    /// Of the version that this worker has, from itself.
    pub(crate) fn start(held: &Manifest) -> Self {
        Self { deltas: vec![Some(Vec::new()); held.entries.len()] }
    }

    /// The deltas of the tensor at `place`; `None` if there are none, or the whole content is needed.
    pub(crate) fn deltas(&self, place: usize) -> Option<&[Delta]> {
        self.deltas.get(place)?.as_deref().filter(|deltas| !deltas.is_empty())
    }

    /// Of the version of `edition`, whose tensors have these origins in the version before.
    pub(crate) fn then(&self, edition: u64, origins: &[Origin]) -> Self {
        let before = |place: usize| self.deltas.get(place).cloned().flatten();
        let deltas = origins.iter().map(|origin| match *origin {
            Origin::Same(place) => before(place),
            Origin::Runs { place, number, bytes } => {
                let mut deltas = before(place)?;
                deltas.push(Delta { edition, number, bytes });
                Some(deltas)
            }
            Origin::Full => None,
        });
        Self { deltas: deltas.collect() }
    }
}

/// Where each tensor of `manifest` comes from. Deltas are used if their sum is less than the content, and `uses_deltas`.
pub(crate) fn ways(
    manifest: &Manifest,
    held: Option<&Snapshot>,
    derivation: Option<&Derivation>,
    uses_deltas: bool,
) -> Vec<Way> {
    let entries = manifest.entries.iter().enumerate();
    let ways = entries.map(|(place, entry)| {
        let whole = Way::Whole(FIRST_TENSOR + place as u32);
        let Some(held) = held else { return whole };
        let held_as = |name: &str| {
            let place = held.manifest().place(name)?;
            Some((held.manifest().entries.get(place)?, held.tensors().get(place)?))
        };
        let is_alike = held.manifest().incarnation == manifest.incarnation;
        let found = held_as(&entry.name).filter(|(other, _)| is_alike && other.metadata == entry.metadata);
        let Some((other, tensor)) = found else { return whole };
        if other.stamp == entry.stamp {
            return Way::Held(tensor.clone());
        }
        let derived = derivation.and_then(|derivation| derivation.deltas(place));
        let Some(deltas) = derived.filter(|_| uses_deltas && entry.checksum.is_some()) else { return whole };
        match bytes(deltas) < entry.metadata.byte_length {
            true => Way::Deltas(tensor.clone(), deltas.to_vec()),
            false => whole,
        }
    });
    ways.collect()
}

/// Bytes of these deltas.
pub(crate) fn bytes(deltas: &[Delta]) -> u64 {
    deltas.iter().fold(0, |bytes, delta| bytes.saturating_add(delta.bytes))
}
