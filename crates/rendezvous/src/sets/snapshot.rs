//! [`Snapshot`]: the tensors of one version of a set.

use std::{fmt, sync::Arc};

use crate::{
    sets::shard_plan::Piece,
    values::{sets::manifest::Manifest, tensor::Tensor},
};

/// All tensors of one version of a set, by name. Cheap to clone. The tensors never change, and stay valid when newer versions are
/// committed.
#[derive(Clone)]
pub struct Snapshot {
    version: u64,
    contents: Arc<Contents>,
}

#[derive(Debug)]
struct Contents {
    manifest: Manifest,
    /// In the order of the manifest.
    tensors: Vec<Tensor>,
    /// Of a sharded set, what it was made of; otherwise nothing.
    sources: Sources,
}

/// What a version of a sharded set was made of.
#[derive(Debug, Default)]
pub(super) struct Sources {
    /// Of the publishers, by their numbers.
    pub(super) manifests: Vec<Manifest>,
    /// The pieces of each tensor, in the order of the version's own manifest.
    pub(super) pieces: Vec<Vec<Piece>>,
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").field("version", &self.version).field("tensors", &self.len()).finish()
    }
}

impl Snapshot {
    /// `tensors` are in the order of the manifest.
    pub(crate) fn new(version: u64, manifest: Manifest, tensors: Vec<Tensor>) -> Self {
        Self::of_shards(version, manifest, tensors, Sources::default())
    }

    /// As [`new`](Self::new), of a sharded set.
    pub(super) fn of_shards(
        version: u64,
        manifest: Manifest,
        tensors: Vec<Tensor>,
        sources: Sources,
    ) -> Self {
        Self { version, contents: Arc::new(Contents { manifest, tensors, sources }) }
    }

    /// The tensor called `name` of a sharded set, and its pieces.
    pub(super) fn with_pieces(&self, name: &str) -> Option<(&Tensor, &[Piece])> {
        let place = self.contents.manifest.place(name)?;
        Some((self.contents.tensors.get(place)?, self.contents.sources.pieces.get(place)?))
    }

    /// The version's manifest of the publisher with this number, of a sharded set.
    pub(super) fn manifest_of(&self, publisher: usize) -> Option<&Manifest> {
        self.contents.sources.manifests.get(publisher)
    }

    /// The version.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The tensor called `name`.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.contents.tensors.get(self.contents.manifest.place(name)?)
    }

    /// All names and tensors, sorted by name.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Tensor)> {
        let entries = self.contents.manifest.entries.iter().zip(&self.contents.tensors);
        entries.map(|(entry, tensor)| (&*entry.name, tensor))
    }

    /// The number of tensors.
    pub fn len(&self) -> usize {
        self.contents.tensors.len()
    }

    /// Whether it has no tensors.
    pub fn is_empty(&self) -> bool {
        self.contents.tensors.is_empty()
    }

    pub(crate) fn manifest(&self) -> &Manifest {
        &self.contents.manifest
    }

    /// In the order of the manifest.
    pub(crate) fn tensors(&self) -> &[Tensor] {
        &self.contents.tensors
    }
}
