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
    /// Of each tensor of a sharded set, the contents of its pieces; otherwise none.
    origins: Vec<Vec<Origin>>,
}

/// A piece of a tensor of a sharded set. Two with equal origins have equal contents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Origin {
    /// The incarnation of the publisher.
    pub(super) incarnation: u64,
    pub(super) stamp: u64,
    pub(super) piece: Piece,
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").field("version", &self.version).field("tensors", &self.len()).finish()
    }
}

impl Snapshot {
    /// `tensors` are in the order of the manifest.
    pub(crate) fn new(version: u64, manifest: Manifest, tensors: Vec<Tensor>) -> Self {
        Self { version, contents: Arc::new(Contents { manifest, tensors, origins: Vec::new() }) }
    }

    /// As [`new`](Self::new), of a sharded set.
    pub(super) fn of_shards(
        version: u64,
        manifest: Manifest,
        (tensors, origins): (Vec<Tensor>, Vec<Vec<Origin>>),
    ) -> Self {
        Self { version, contents: Arc::new(Contents { manifest, tensors, origins }) }
    }

    /// The tensor called `name`, and the contents of its pieces.
    pub(super) fn with_origins(&self, name: &str) -> Option<(&Tensor, &[Origin])> {
        let place = self.contents.manifest.place(name)?;
        Some((self.contents.tensors.get(place)?, self.contents.origins.get(place)?))
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
