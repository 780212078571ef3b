//! [`OwnSet`]: a set that this worker commits.

use std::{collections::BTreeSet, fmt, sync::Arc};

use crate::{
    control::name::sought,
    error::WorkerError,
    peer_memory::import::yield_once,
    values::{
        published::check_published,
        sets::{
            Begun, Refusal, SetVersion,
            delta::{Compared, Comparison},
            encoded,
            manifest::{MANIFEST_BYTES_MAX, Manifest, ManifestEntry, TENSORS_MAX},
            manifest_delta::{self, Change},
            shares_memory,
        },
        tensor::Tensor,
    },
    worker::Worker,
};

/// A set of this worker, made by [`Worker::set`]. Cheap to clone. Dropping it changes nothing: the newest version stays until the worker
/// is shut down.
#[derive(Clone)]
pub struct OwnSet {
    worker: Worker,
    name: Arc<str>,
}

impl fmt::Debug for OwnSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnSet").field("name", &self.name).field("version", &self.version()).finish()
    }
}

impl Worker {
    /// The set of this worker called `name`. Sets and published tensors have separate names. Nothing is visible to peers before the
    /// first [`commit`](OwnSet::commit), which also checks the name.
    pub fn set(&self, name: &str) -> OwnSet {
        OwnSet { worker: self.clone(), name: name.into() }
    }
}

impl OwnSet {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The newest version; `None` before the first commit.
    pub fn version(&self) -> Option<u64> {
        self.worker.node.values().sets.newest(&self.name)
    }

    /// Allows only the workers called `names` to fetch and follow the set, instead of every peer. Names have proofs only under TLS, so
    /// this needs TLS.
    ///
    /// # Errors
    /// [`WorkerError::Config`] if this worker has no TLS identity.
    pub fn readers(&self, names: impl IntoIterator<Item = impl AsRef<str>>) -> Result<(), WorkerError> {
        if !self.worker.operations.defaults.proves_names {
            let remedy = "without TLS no peer proves its name: give the workers certificates, or let all members read the set";
            return Err(self.refused("readers", &self.name, remedy));
        }
        let names = names.into_iter().map(|name| sought(name.as_ref()));
        self.worker.node.values().sets.set_readers(&self.name, names.collect::<BTreeSet<_>>());
        Ok(())
    }

    /// Commits `version`, which consists of these tensors: peers see all of them, or none. Names, shapes and element types may differ
    /// from those of the version before. Tensors that are equal to their predecessors are not sent again.
    ///
    /// If peers follow the set, each tensor is compared with its predecessor, once for all of them. Other tasks have their turn after
    /// every 256 KiB.
    ///
    /// # Memory
    /// The worker holds the newest version, the version before it and their deltas. All sets together hold at most
    /// [`set_bytes`](crate::WorkerBuilder::set_bytes).
    ///
    /// # Errors
    /// [`WorkerError::SetTooLarge`]; [`WorkerError::Config`] if `version` is not greater than the newest one, or for names that occur
    /// twice or cannot be published; [`WorkerError::InvalidTensor`] for a dead value; [`WorkerError::ShutDown`]. Peers see nothing of a
    /// commit that fails.
    ///
    /// # Cancel safety
    /// Cancel-safe: peers see nothing of a commit whose future is dropped.
    pub async fn commit(
        &self,
        version: u64,
        tensors: impl IntoIterator<Item = (impl Into<String>, Tensor)>,
    ) -> Result<(), WorkerError> {
        self.worker.check_runs()?;
        check_published(&self.name)?;
        let tensors = self.sorted(tensors)?;
        let values = self.worker.node.values();
        let refused = |refusal| self.refusal(version, refusal);
        let begun = values.sets.begin(&self.name, version, &tensors).map_err(refused)?;
        let base = begun.newest.as_ref().map(|newest| newest.edition);
        let next = self.next(version, tensors, begun).await?;
        let head = values.sets.put(&self.name, base, next).map_err(refused)?;
        values.heads.publish_as(&self.name, version, head);
        Ok(())
    }

    fn sorted(
        &self,
        tensors: impl IntoIterator<Item = (impl Into<String>, Tensor)>,
    ) -> Result<Vec<(Arc<str>, Tensor)>, WorkerError> {
        let mut sorted: Vec<(Arc<str>, Tensor)> = Vec::new();
        for (name, tensor) in tensors {
            let name: String = name.into();
            check_published(&name)?;
            if tensor.is_dead() {
                let problem = format!("`{name}` is dead; commit only tensors with a content");
                return Err(WorkerError::InvalidTensor { problem });
            }
            sorted.push((name.into(), tensor.remember_checksums()));
        }
        sorted.sort_by(|(one, _), (other, _)| one.cmp(other));
        let mut pairs = sorted.iter().zip(sorted.iter().skip(1));
        if let Some(((twice, _), _)) = pairs.find(|((one, _), (other, _))| one == other) {
            return Err(self.refused(
                "name of a tensor",
                twice,
                "it occurs twice: give each tensor its own name",
            ));
        }
        if sorted.len() > TENSORS_MAX {
            let count = sorted.len().to_string();
            return Err(self.refused(
                "tensors of a set",
                &count,
                "a set has at most 65536: use several sets",
            ));
        }
        Ok(sorted)
    }

    /// The version to commit, compared with the one before.
    async fn next(
        &self,
        version: u64,
        tensors: Vec<(Arc<str>, Tensor)>,
        begun: Begun,
    ) -> Result<SetVersion, WorkerError> {
        let Begun { edition, newest, is_followed, mut delta_bytes } = begun;
        let mut next = Draft::new(self.worker.incarnation(), tensors.len());
        for (name, tensor) in tensors {
            let metadata = tensor.metadata().clone();
            let place = newest.as_ref().and_then(|newest| newest.manifest.place(&name));
            let base = place.zip(newest.as_ref()).and_then(|(place, newest)| {
                Some((newest.manifest.entries.get(place)?, newest.tensors.get(place)?))
            });
            let base = base.filter(|(entry, _)| entry.metadata == metadata);
            let (change, delta) = match base {
                Some((_, old)) if shares_memory(old, &tensor) => (Change::Same, None),
                Some((_, old)) if is_followed => change(old, &tensor, &mut delta_bytes).await,
                _ => (Change::Full, None),
            };
            match (change, base) {
                // The memory of the tensor is free, and followers have the content.
                (Change::Same, Some((entry, old))) => next.add(entry.clone(), old.clone(), (change, None)),
                _ => {
                    let checksum = match change {
                        Change::Runs { checksum, .. } => Some(checksum).filter(|&checksum| checksum > 0),
                        _ => None,
                    };
                    let entry = ManifestEntry { name, metadata, stamp: edition, checksum };
                    next.add(entry, tensor, (change, delta));
                }
            }
        }
        next.finish((edition, version), newest.as_deref()).ok_or_else(|| {
            let remedy = "the names and shapes take more than 16 MiB: use several sets";
            self.refused("set", &self.name, remedy)
        })
    }

    fn refusal(&self, version: u64, refusal: Refusal) -> WorkerError {
        let text = version.to_string();
        match refusal {
            Refusal::NotNewer(newest) => {
                let remedy = format!("the newest version of `{}` is {newest}: versions only grow", self.name);
                self.refused("version", &text, &remedy)
            }
            Refusal::Overtaken => self.refused(
                "version",
                &text,
                "another version was committed meanwhile: commit one after the other",
            ),
            Refusal::TooLarge(bytes) => WorkerError::SetTooLarge {
                set: self.name.to_string(),
                version,
                bytes,
                cap: self.worker.node.values().sets.bytes_max(),
            },
        }
    }

    fn refused(&self, field: &'static str, value: &str, remedy: &str) -> WorkerError {
        WorkerError::Config { field, value: value.to_owned(), remedy: remedy.to_owned() }
    }
}

/// How `new` differs from `old`, and its delta if that is the least to send and at most `bytes_max` long.
async fn change(old: &Tensor, new: &Tensor, bytes_max: &mut u64) -> (Change, Option<Tensor>) {
    let mut comparison = Comparison::new(new.metadata());
    let compared = loop {
        match comparison.go_on(old.bytes(), new.bytes()) {
            Some(compared) => break compared,
            None => yield_once().await,
        }
    };
    match compared {
        Compared::Same => (Change::Same, None),
        Compared::Runs(delta) if delta.len() as u64 <= *bytes_max => {
            let bytes = delta.len() as u64;
            *bytes_max -= bytes;
            let checksums = new.checksums().unwrap_or_default();
            let checksum = checksums.sum(tensorwire_protocol::Validation::Xxh3, new.bytes()).await;
            let checksum = checksum.unwrap_or_default();
            (Change::Runs { bytes, checksum }, Some(encoded(&delta)))
        }
        Compared::Runs(_) | Compared::Full => (Change::Full, None),
    }
}

/// A version that is being made.
struct Draft {
    manifest: Manifest,
    changes: Vec<Change>,
    tensors: Vec<Tensor>,
    deltas: Vec<Tensor>,
}

impl Draft {
    fn new(incarnation: u64, capacity: usize) -> Self {
        let manifest = Manifest { incarnation, entries: Vec::with_capacity(capacity) };
        Self { manifest, changes: Vec::new(), tensors: Vec::new(), deltas: Vec::new() }
    }

    fn add(&mut self, entry: ManifestEntry, tensor: Tensor, (change, delta): (Change, Option<Tensor>)) {
        self.manifest.entries.push(entry);
        self.changes.push(change);
        self.tensors.push(tensor);
        self.deltas.extend(delta);
    }

    /// The version; `None` if its manifest is too long.
    fn finish(self, (edition, version): (u64, u64), before: Option<&SetVersion>) -> Option<SetVersion> {
        let Self { manifest, changes, tensors, deltas } = self;
        let whole = manifest.encode();
        let difference = before.map(|before| manifest_delta::encode(&before.manifest, &manifest, &changes));
        let difference = difference.filter(|difference| difference.len() < whole.len());
        let base = before.map(|before| before.version).unwrap_or_default();
        (whole.len() <= MANIFEST_BYTES_MAX).then(|| SetVersion {
            edition,
            version,
            manifest,
            encoded: encoded(&whole),
            difference: difference.map(|difference| encoded(&difference)),
            base,
            tensors,
            deltas,
            pinned: Arc::default(),
        })
    }
}
