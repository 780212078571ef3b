//! [`OwnSet`]: a set that this worker commits.

use std::{collections::BTreeSet, fmt, sync::Arc};

use tensorwire_memory::Pool;

use crate::{
    control::name::sought,
    error::WorkerError,
    sets::{
        comparing::{Difference, differences},
        shard::Shard,
    },
    values::{
        published::check_published,
        sets::{
            Begun, Refusal, SetVersion, Unzipped, encoded, loan,
            manifest::{MANIFEST_BYTES_MAX, Manifest, ManifestEntry, TENSORS_MAX},
            manifest_delta::{self, Change},
            sharding::Sharding,
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
    /// from those of the version before. Tensors that are equal to their predecessors are not sent again. Give a clone of the tensor for what
    /// has not changed: it need not be compared.
    ///
    /// A tensor of which other workers commit the rest is given as its [`shard`](crate::Tensor::shard).
    ///
    /// If peers follow the set over a network, each tensor is compared with its predecessor, once for all of them: by up to 4 tasks, one
    /// for each processor. Other tasks have their turn after every 256 KiB.
    ///
    /// # Memory
    /// The worker holds the newest version, the version before it and their deltas. All sets together hold at most
    /// [`set_bytes`](crate::WorkerBuilder::set_bytes).
    ///
    /// # Errors
    /// [`WorkerError::SetTooLarge`]; [`WorkerError::Config`] if `version` is not greater than the newest one, or for names that occur
    /// twice or cannot be published; [`WorkerError::InvalidTensor`] for a dead value and for a shard whose ranges do not fit it;
    /// [`WorkerError::ShutDown`]. Peers see nothing of a commit that fails.
    ///
    /// # Cancel safety
    /// Cancel-safe: peers see nothing of a commit whose future is dropped.
    pub async fn commit(
        &self,
        version: u64,
        tensors: impl IntoIterator<Item = (impl Into<String>, impl Into<Shard>)>,
    ) -> Result<(), WorkerError> {
        self.worker.check_runs()?;
        check_published(&self.name)?;
        let named: Unzipped = self.sorted(tensors)?.into_iter().unzip();
        let values = self.worker.node.values();
        let refused = |refusal| self.refusal(version, refusal);
        let begun = values.sets.begin(&self.name, version, &named).map_err(refused)?;
        let base = begun.newest.as_ref().map(|newest| newest.edition);
        let next = self.next(version, named, begun).await?;
        let head = values.sets.put(&self.name, base, next).map_err(refused)?;
        values.heads.publish_as(&self.name, version, head);
        Ok(())
    }

    fn sorted(
        &self,
        tensors: impl IntoIterator<Item = (impl Into<String>, impl Into<Shard>)>,
    ) -> Result<Vec<Named>, WorkerError> {
        let mut sorted: Vec<Named> = Vec::new();
        for (name, shard) in tensors {
            let (name, shard): (String, Shard) = (name.into(), shard.into());
            check_published(&name)?;
            shard.check(&name)?;
            let Shard { tensor, sharding } = shard;
            if tensor.is_dead() {
                let problem = format!("`{name}` is dead; commit only tensors with a content");
                return Err(WorkerError::InvalidTensor { problem });
            }
            sorted.push(((name.into(), tensor.remember_checksums()), sharding));
        }
        sorted.sort_by(|((one, _), _), ((other, _), _)| one.cmp(other));
        let mut pairs = sorted.iter().zip(sorted.iter().skip(1));
        if let Some((((twice, _), _), _)) = pairs.find(|(((one, _), _), ((other, _), _))| one == other) {
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
        (tensors, shardings): Unzipped,
        begun: Begun,
    ) -> Result<SetVersion, WorkerError> {
        let Begun { edition, newest, is_followed, delta_bytes } = begun;
        let bases = tensors.iter().zip(&shardings);
        let bases: Vec<_> =
            bases.map(|(named, sharding)| base(newest.as_deref()?, named, sharding.as_ref())).collect();
        let changes = self.changes(&tensors, &bases, is_followed.then_some(delta_bytes)).await;
        let mut next = Draft::new(self.worker.incarnation(), tensors.len());
        let compared = bases.into_iter().zip(changes);
        let shards = tensors.into_iter().zip(shardings);
        for (((name, tensor), sharding), (base, (change, delta))) in shards.zip(compared) {
            match (change, base) {
                // The memory of the tensor is free, and followers have the content.
                (Change::Same, Some((entry, old))) => next.add(entry.clone(), old.clone(), (change, None)),
                _ => {
                    let checksum = match change {
                        Change::Runs { checksum, .. } => Some(checksum).filter(|&checksum| checksum > 0),
                        _ => None,
                    };
                    let metadata = tensor.metadata().clone();
                    let entry = ManifestEntry { name, metadata, sharding, stamp: edition, checksum };
                    next.add(entry, tensor, (change, delta));
                }
            }
        }
        next.finish((edition, version), newest.as_deref(), self.worker.pool()).ok_or_else(|| {
            let remedy = "the names and shapes take more than 16 MiB: use several sets";
            self.refused("set", &self.name, remedy)
        })
    }

    /// How each tensor differs from its predecessor in `bases`. Contents are compared only if their deltas may have `delta_bytes`.
    async fn changes(
        &self,
        tensors: &[(Arc<str>, Tensor)],
        bases: &[Option<(&ManifestEntry, &Tensor)>],
        delta_bytes: Option<u64>,
    ) -> Vec<Difference> {
        let pairs = || tensors.iter().map(|(_, tensor)| tensor).zip(bases);
        let is_same = |(tensor, base): (&Tensor, &Option<(_, &Tensor)>)| {
            base.is_some_and(|(_, old)| shares_memory(old, tensor))
        };
        let compared = pairs().filter(|pair| delta_bytes.is_some() && !is_same(*pair));
        let compared = compared.filter_map(|(tensor, base)| Some(((*base)?.1.clone(), tensor.clone())));
        let runtime = &**self.worker.node.runtime();
        let found = differences(runtime, compared.collect(), delta_bytes.unwrap_or_default()).await;
        let mut found = found.into_iter();
        let changes = pairs().map(|(tensor, base)| match base {
            _ if is_same((tensor, base)) => (Change::Same, None),
            Some(_) if delta_bytes.is_some() => found.next().unwrap_or((Change::Full, None)),
            _ => (Change::Full, None),
        });
        changes.collect()
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

/// The predecessor of a tensor, if it has the same name, element type, shape and place in the whole tensor.
fn base<'a>(
    newest: &'a SetVersion,
    (name, tensor): &(Arc<str>, Tensor),
    sharding: Option<&Sharding>,
) -> Option<(&'a ManifestEntry, &'a Tensor)> {
    let place = newest.manifest.place(name)?;
    let (entry, old) = (newest.manifest.entries.get(place)?, newest.tensors.get(place)?);
    let is_alike = entry.metadata == *tensor.metadata() && entry.sharding.as_ref() == sharding;
    is_alike.then_some((entry, old))
}

/// A tensor with its name and its sharding.
type Named = ((Arc<str>, Tensor), Option<Sharding>);

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
    fn finish(
        self,
        (edition, version): (u64, u64),
        before: Option<&SetVersion>,
        pool: &Pool,
    ) -> Option<SetVersion> {
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
            loan: loan::table(pool, &tensors),
            tensors,
            deltas,
            pinned: Arc::default(),
        })
    }
}
