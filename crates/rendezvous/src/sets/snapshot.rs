//! [`Snapshot`]: the tensors of one version of a set.

use std::{fmt, sync::Arc};

use crate::values::{sets::manifest::Manifest, tensor::Tensor};

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
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").field("version", &self.version).field("tensors", &self.len()).finish()
    }
}

impl Snapshot {
    /// `tensors` are in the order of the manifest.
    pub(crate) fn new(version: u64, manifest: Manifest, tensors: Vec<Tensor>) -> Self {
        Self { version, contents: Arc::new(Contents { manifest, tensors }) }
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
