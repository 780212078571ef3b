//! [`ShardedSet`]: a set of which several peers have parts.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    mem,
    ops::Range,
    pin::pin,
    sync::Arc,
};

use futures::{
    StreamExt as _, TryStreamExt as _,
    future::{Either, select, try_join_all},
    stream::{self, FuturesUnordered},
};
use tensorwire_protocol::Wanted;

use crate::{
    error::WorkerError,
    sets::{
        fetching::{Move, Moved, NotMoved, PeerSet, Volume},
        making::{Form, Made, Making},
        part::Part,
        publisher_loss::{Pause, is_loss, warn_of_loss},
        shard_plan::{Misfit, Offer, Piece, Planned, plan},
        slices::entry,
        snapshot::{Snapshot, Sources},
        tasks::in_tasks,
    },
    values::{
        published::check_published,
        sets::manifest::{Head, Manifest, ManifestEntry, VersionHead},
        tensor::Tensor,
    },
};

/// Tensors that are made at a time.
const TENSORS_AT_A_TIME: usize = 8;

/// The parts of tensors that a follower of a sharded set wants, by the names of the tensors. Tensors without a name here are wanted whole.
///
/// ```
/// use tensorwire::sets::Layout;
///
/// // The first of two halves of the rows, and half of each of three fused matrices.
/// let layout = Layout::new().part("dense", 0, &[0..512]).part("qkv", 0, &[0..64, 128..192, 256..320]);
/// # drop(layout);
/// ```
#[derive(Debug, Clone, Default)]
pub struct Layout {
    wanted: BTreeMap<String, (usize, Vec<Range<u64>>)>,
}

impl Layout {
    /// All tensors are wanted whole.
    pub fn new() -> Self {
        Self::default()
    }

    /// Of the tensor called `name`, the concatenation of `ranges` of dimension `axis` is wanted. The ranges ascend.
    pub fn part(mut self, name: &str, axis: usize, ranges: &[Range<u64>]) -> Self {
        self.wanted.insert(name.to_owned(), (axis, ranges.to_vec()));
        self
    }
}

/// A set of which several peers have parts: each commits its own [shards](crate::Tensor::shard) of the tensors under the same version.
/// Cheap to clone.
///
/// A version is complete when all peers have it. Each element is moved once, from a peer that has it. Publishers that have exactly the
/// same part of a tensor, or all of it, are replicas: the part is fetched from one of them.
///
/// ```
/// use tensorwire::{Tensor, Worker, sets::ShardedSet};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tensorwire::WorkerError> {
/// let (one, other) = (Worker::builder("one").start().await?, Worker::builder("other").start().await?);
/// // Each has one of two rows.
/// for (row, trainer) in [(0, &one), (1, &other)] {
///     let part = Tensor::from_values(trainer.pool(), &[1, 2], &[row, row + 10])?;
///     trainer.set("policy").commit(1, [("weight", part.shard(0, 2, &[row..row + 1]))]).await?;
/// }
/// let server = Worker::client().start().await?;
/// let peers = [server.peer_at(one.address()).await?, server.peer_at(other.address()).await?];
/// let weights = ShardedSet::new(peers.map(|peer| peer.set("policy"))).fetch().await?;
/// let weight = weights.get("weight").expect("both have committed it");
/// assert_eq!(weight.values::<u64>()?, [0, 10, 1, 11]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct ShardedSet {
    parts: Arc<[PeerSet]>,
    layout: Layout,
}

impl ShardedSet {
    /// The set that these peers commit together, under names of theirs. Nothing is sent. Tensors are wanted whole.
    pub fn new(parts: impl IntoIterator<Item = PeerSet>) -> Self {
        Self { parts: parts.into_iter().collect(), layout: Layout::new() }
    }

    /// Wants these parts of the tensors.
    pub fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// Fetches the newest version that all peers have. The deadline is that of the first peer's set
    /// ([`PeerSet::timeout`]).
    ///
    /// # Memory
    /// Between hosts, if all pieces of a tensor are runs of bytes of the result, such as whole rows, they arrive in their places. Others
    /// take memory of the receive pool until they are copied there. Up to 8 tensors are received at a time, and room for the results and
    /// for the longest piece is enough. On one host each peer lends its version once, and pieces are copied out of that memory, or are
    /// views of it. A version that is not lent, because of the limit of views or because contents are validated, comes as between hosts.
    ///
    /// # Errors
    /// [`WorkerError::Incomplete`] if some peers do not have a version that the others have, or have none, for the worker's
    /// [`liveness`](crate::WorkerBuilder::liveness); [`WorkerError::Config`] with the field `shards` if parts that differ overlap,
    /// are missing or differ in their element types, which names two of the peers; otherwise as [`PeerSet::fetch`].
    ///
    /// # Cancel safety
    /// Cancel-safe: nothing is lost by dropping the future.
    pub async fn fetch(&self) -> Result<Snapshot, WorkerError> {
        let first = self.first()?;
        let lack = || first.lack().unwrap_or_default();
        let what = || format!("fetching the parts of the set `{}`{}", first.name(), lack());
        let hint = "do all peers run, and do they commit the same version of this set?";
        let moved = first.peer.worker.within(first.limit, what, hint, pin!(self.next(None, None))).await;
        moved.map(|moved| moved.snapshot)
    }

    pub(super) fn first(&self) -> Result<&PeerSet, WorkerError> {
        self.parts.iter().try_for_each(|part| check_published(&part.name))?;
        let remedy = "a sharded set has at least one peer".to_owned();
        self.parts.first().ok_or(WorkerError::Config { field: "peers", value: "none".to_owned(), remedy })
    }

    /// Waits for a version above `floor`, and moves what differs from `held`.
    pub(super) async fn next(
        &self,
        floor: Option<u64>,
        held: Option<&Snapshot>,
    ) -> Result<Moved, WorkerError> {
        // What each publisher has said last.
        let mut seen = vec![None; self.parts.len()];
        let mut pause = Pause::default();
        loop {
            tokio::task::coop::consume_budget().await;
            let version = self.complete(&mut seen, floor).await?;
            match self.moved(version, &seen, held).await {
                Ok(moved) => return Ok(moved),
                Err(NotMoved::Failed(error)) if !is_loss(&error) => return Err(error),
                Err(NotMoved::Superseded) => {}
                Err(NotMoved::Failed(_)) => {
                    pause.lengthen();
                    pause.sleep(&**self.first()?.peer.worker.runtime()).await;
                }
            }
            // They are asked for what they have now.
            seen.fill(None);
        }
    }

    /// The newest version above `floor` that all publishers have, when they have one.
    async fn complete(&self, seen: &mut [Option<Head>], floor: Option<u64>) -> Result<u64, WorkerError> {
        let worker = &self.first()?.peer.worker;
        let liveness = worker.node.liveness();
        // From the moment on at which a version could be complete.
        let mut patience = None;
        let (mut asked, mut is_asked) = (FuturesUnordered::new(), vec![false; seen.len()]);
        loop {
            let newest = seen.iter().copied().filter_map(newest_of).max();
            if let Some(version) = common(seen, floor) {
                return Ok(version);
            }
            if floor.is_none() || newest > floor {
                patience.get_or_insert_with(|| Box::pin(worker.runtime().sleep(liveness)));
            }
            let is_late = |seen| newest_of(seen) != newest || newest <= floor || newest.is_none();
            let late: Vec<_> =
                (0..).zip(&*seen).filter(|(_, seen)| is_late(**seen)).map(|(at, _)| at).collect();
            // An answer of one publisher leaves the requests to the others as they are.
            for &at in &late {
                if !mem::replace(&mut is_asked[at], true) {
                    asked.push(self.ask(at, seen));
                }
            }
            let answered = match &mut patience {
                None => asked.next().await,
                Some(patience) => match select(asked.next(), patience).await {
                    Either::Left((answered, _)) => answered,
                    Either::Right(_) => None,
                },
            };
            let Some(answered) = answered else { return Err(self.incomplete(newest, &late)) };
            let (at, head) = answered?;
            (seen[at], is_asked[at]) = (Some(head), false);
        }
    }

    fn incomplete(&self, version: Option<u64>, late: &[usize]) -> WorkerError {
        let parts = late.iter().filter_map(|&at| self.parts.get(at));
        let set = self.parts.first().map(|part| part.name().to_owned()).unwrap_or_default();
        let parts = parts.map(|part| part.peer.name().to_owned()).collect();
        WorkerError::Incomplete { set, version, parts }
    }

    /// The next head of the publisher with this number, which is asked again while it is lost.
    fn ask(
        &self,
        at: usize,
        seen: &[Option<Head>],
    ) -> impl Future<Output = Result<(usize, Head), WorkerError>> + use<> {
        let set = self.parts.get(at).cloned();
        let said = seen.get(at).copied().flatten().unwrap_or_default();
        let wanted = Wanted::NewerThan { incarnation: said.incarnation(), version: said.newest.version() };
        async move {
            let set = set.ok_or_else(WorkerError::handed_out)?;
            let mut pause = Pause::default();
            loop {
                set.peer.worker.check_runs()?;
                let asked = async {
                    let link = set.link().await?;
                    set.head(&link, wanted).await
                };
                match asked.await {
                    Ok(head) => return Ok((at, head)),
                    Err(error) if is_loss(&error) => {
                        if pause.is_none() {
                            warn_of_loss(&set, &error);
                        }
                        pause.lengthen();
                        pause.sleep(&**set.peer.worker.runtime()).await;
                    }
                    Err(error) => return Err(error),
                }
            }
        }
    }

    async fn moved(
        &self,
        version: u64,
        seen: &[Option<Head>],
        held: Option<&Snapshot>,
    ) -> Result<Moved, NotMoved> {
        let parts = self.parts.iter().zip(seen).enumerate();
        let parts = parts.map(|(publisher, (set, seen))| async move {
            let head = seen.as_ref().ok_or(NotMoved::Superseded)?;
            let target = head.version(version).ok_or(NotMoved::Superseded)?;
            let link = set.link().await?;
            let mut move_ = Move::new(set, &link);
            let known = held.and_then(|held| Some((held.version(), held.manifest_of(publisher)?)));
            let described = move_.manifest((head, target), known).await?;
            let volume = move_.volume;
            Ok::<_, NotMoved>((Part::new((set, link), target.edition(), described), volume))
        });
        let (parts, volumes): (Vec<_>, Vec<_>) = try_join_all(parts).await?.into_iter().unzip();
        let planned = self.planned(&parts)?;
        let made = self.made(version, &parts, &planned, held).await?;
        let volumes = volumes.into_iter().chain(made.iter().map(|made| made.volume));
        let volume = volumes.fold(Volume::default(), Volume::and);
        let names = planned.iter().zip(&made).filter(|(_, made)| made.is_changed);
        let changed = names.map(|((name, _), _)| name.clone()).collect();
        let tensors = self.copied(made.into_iter().map(|made| made.form).collect()).await?;
        let manifests = parts.into_iter().map(|part| part.manifest).collect();
        let (entries, pieces) = planned.into_iter().map(described).unzip();
        let manifest = Manifest { incarnation: 0, entries };
        let snapshot = Snapshot::of_shards(version, manifest, tensors, Sources { manifests, pieces });
        Ok(Moved { snapshot, changed, volume })
    }

    /// Makes the tensors, in the order of `planned`.
    async fn made(
        &self,
        version: u64,
        parts: &[Part<'_>],
        planned: &[(Arc<str>, Planned)],
        held: Option<&Snapshot>,
    ) -> Result<Vec<Made>, NotMoved> {
        let first = self.first()?;
        let pool = first.peer.worker.receive_pool();
        let making = planned.iter().map(|(name, planned)| Making::new(parts, (name, planned), held));
        let mut making: Vec<_> = making.collect();
        let needed: BTreeSet<_> = making.iter().flat_map(Making::publishers).collect();
        try_join_all(needed.into_iter().filter_map(|at| parts.get(at)).map(Part::borrow)).await?;
        making.iter_mut().for_each(Making::borrowed);
        let room = |making: &[Making<'_>]| {
            first.check_room_for_shards(version, making.iter().map(Making::needs), held)
        };
        if room(&making).is_err() {
            making.iter_mut().for_each(Making::derive_nothing);
            room(&making)?;
        }
        making.iter().for_each(Making::count_requests);
        let made = pin!(async {
            for making in &mut making {
                tokio::task::coop::consume_budget().await;
                making.reserve(pool).await?;
            }
            let made: Vec<_> = making.into_iter().map(Making::made).collect();
            stream::iter(made).buffered(TENSORS_AT_A_TIME).try_collect().await
        });
        let links: Vec<_> = parts.iter().map(|part| &part.link).collect();
        first.unless_starved(&links, made).await
    }

    /// The tensors, after what is left to copy was copied.
    async fn copied(&self, forms: Vec<Form>) -> Result<Vec<Tensor>, WorkerError> {
        let (mut tensors, mut places, mut copies) = (Vec::new(), Vec::new(), Vec::new());
        for (at, form) in forms.into_iter().enumerate() {
            match form {
                Form::Ready(tensor) => tensors.push(Some(tensor)),
                Form::Copies(copy) => {
                    tensors.push(None);
                    places.push(at);
                    copies.push(copy);
                }
            }
        }
        let copied = in_tasks(&**self.first()?.peer.worker.runtime(), copies).await;
        for (at, tensor) in places.into_iter().zip(copied) {
            if let Some(place) = tensors.get_mut(at) {
                *place = tensor;
            }
        }
        tensors.into_iter().map(|tensor| tensor.ok_or_else(WorkerError::handed_out)).collect()
    }

    /// How each tensor is made, sorted by name.
    fn planned(&self, parts: &[Part<'_>]) -> Result<Vec<(Arc<str>, Planned)>, WorkerError> {
        let entries = parts.iter().flat_map(|part| part.manifest.entries.iter());
        let names: BTreeSet<_> = entries.map(|entry| entry.name.clone()).collect();
        let nobody = self.layout.wanted.keys().find(|name| !names.contains(name.as_str()));
        if let Some(name) = nobody {
            return Err(misfit(parts, name, &Misfit::Wanted("no peer has this tensor")));
        }
        let planned = names.into_iter().map(|name| {
            let offers = parts.iter().enumerate().filter_map(|(publisher, part)| {
                let (_, entry) = entry(&part.manifest, &name)?;
                Some(Offer { publisher, metadata: &entry.metadata, sharding: entry.sharding.as_ref() })
            });
            let offers: Vec<_> = offers.collect();
            let wanted = self.layout.wanted.get(&*name).map(|(axis, ranges)| (*axis, &**ranges));
            let planned = plan(&offers, wanted, spread(&name));
            planned.map_err(|unfit| misfit(parts, &name, &unfit)).map(|planned| (name, planned))
        });
        planned.collect()
    }
}

/// The entry of a tensor in the follower's own manifest, and its pieces.
fn described((name, planned): (Arc<str>, Planned)) -> (ManifestEntry, Vec<Piece>) {
    let Planned { metadata, pieces } = planned;
    (ManifestEntry { name, metadata, sharding: None, stamp: 0, checksum: None }, pieces)
}

/// A number for each name, to divide tensors among those who have them.
fn spread(name: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

/// The newest version of a publisher that has said one.
fn newest_of(seen: Option<Head>) -> Option<u64> {
    seen.map(|head| head.newest.version())
}

/// The newest version above `floor` that all have.
fn common(seen: &[Option<Head>], floor: Option<u64>) -> Option<u64> {
    let heads = seen.iter().copied().collect::<Option<Vec<_>>>()?;
    let mut versions = heads.first()?.versions().map(VersionHead::version);
    versions
        .find(|&version| Some(version) > floor && heads.iter().all(|head| head.version(version).is_some()))
}

fn misfit(parts: &[Part<'_>], name: &str, misfit: &Misfit) -> WorkerError {
    let of = |publisher: &usize| parts.get(*publisher).map_or("nobody", |part| part.set.peer.name());
    let remedy = match misfit {
        Misfit::Unlike(one, other) => {
            format!("{} and {} differ in its element type, shape or dimension", of(one), of(other))
        }
        Misfit::Overlap(one, other, Range { start, end }) => {
            format!("{} and {} both have {start}..{end} of it", of(one), of(other))
        }
        Misfit::Gap(before, behind, Range { start, end }) => {
            let of = |publisher: &Option<usize>| publisher.as_ref().map_or("its end", of);
            format!("nobody has {start}..{end} of it, between {} and {}", of(before), of(behind))
        }
        Misfit::Wanted(problem) => (*problem).to_owned(),
    };
    WorkerError::Config { field: "shards", value: name.to_owned(), remedy }
}
