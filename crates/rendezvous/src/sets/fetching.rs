//! [`PeerSet`]: a set of a peer.

use std::{pin::pin, sync::Arc, time::Duration};

use futures::future::try_join_all;
use tensorwire_protocol::{Awaiting, Code, Metadata, ReceiveOptions, Scope, SetContent, Sharing, Wanted};

use crate::{
    connection::DataConnection,
    error::{Transfer, WorkerError},
    sets::{
        assembly::{Doubt, assembled},
        plan::{Delta, Derivation, Way, ways},
        snapshot::Snapshot,
    },
    values::{
        published::check_published,
        sets::{
            bytes_of,
            manifest::{
                FIRST_TENSOR, HEAD_BYTES, Head, MANIFEST, MANIFEST_DELTA, Manifest, ManifestEntry,
                VersionHead,
            },
            manifest_delta,
        },
        tensor::Tensor,
    },
    worker::{fetch::attempt::is_repeatable, metrics::count_whole_content, peer::Peer},
};

/// A set of a peer, made by [`Peer::set`]. Cheap to clone. It stays valid when the peer is restarted.
#[derive(Debug, Clone)]
pub struct PeerSet {
    pub(super) peer: Peer,
    pub(super) name: Arc<str>,
    pub(super) limit: Duration,
    pub(super) sharing: Sharing,
}

impl Peer {
    /// The set that the peer commits under `name`, now or later. Nothing is sent.
    pub fn set(&self, name: &str) -> PeerSet {
        let limit = self.worker.operations.defaults.limit;
        PeerSet { peer: self.clone(), name: name.into(), limit, sharing: Sharing::View }
    }
}

/// What a version needs beside what this worker has, and has got.
pub(super) struct Moved {
    pub(super) snapshot: Snapshot,
    /// The names of the tensors that differ from those of the version that this worker has.
    pub(super) changed: Vec<Arc<str>>,
    pub(super) volume: Volume,
}

/// What was moved.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Volume {
    /// Bytes of contents, deltas and manifests. Views take none.
    pub(super) bytes: u64,
    /// Contents that were copied.
    pub(super) copies: usize,
}

impl Volume {
    /// Of a content of `set` that came over `link`.
    pub(super) fn of((set, link): (&PeerSet, &Link), content: &Tensor) -> Self {
        let is_view = link.lends(set.sharing) && content.buf().is_foreign();
        match matches!(link, Link::Own) || is_view {
            true => Self::default(),
            false => Self { bytes: content.bytes().len() as u64, copies: 1 },
        }
    }

    /// Both together.
    pub(super) fn and(self, other: Self) -> Self {
        Self { bytes: self.bytes.saturating_add(other.bytes), copies: self.copies + other.copies }
    }
}

/// Why a version was not moved.
pub(super) enum NotMoved {
    /// The publisher does not have it any more.
    Superseded,
    Failed(WorkerError),
}

impl NotMoved {
    /// Because a content of a version was not received.
    pub(super) fn of_content(error: WorkerError) -> Self {
        match error {
            WorkerError::Remote { status, .. } if status.code == Code::NotFound => Self::Superseded,
            error => Self::Failed(error),
        }
    }

    /// Whether to try again: with the newest version, or once after the connection broke.
    ///
    /// # Errors
    /// Why not.
    pub(super) fn or_repeat(self, is_repeated: &mut bool) -> Result<(), WorkerError> {
        match self {
            Self::Superseded => Ok(()),
            Self::Failed(lost) if is_repeatable(&lost) && !*is_repeated => {
                *is_repeated = true;
                Ok(())
            }
            Self::Failed(error) => Err(error),
        }
    }
}

impl From<WorkerError> for NotMoved {
    fn from(error: WorkerError) -> Self {
        Self::Failed(error)
    }
}

/// How a set is asked for.
pub(super) enum Link {
    /// It is this worker's own.
    Own,
    Connected(Arc<DataConnection>),
}

impl PeerSet {
    /// The name of the set.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The peer.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// The deadline of [`fetch`](Self::fetch), including the time to connect. Default: the worker's
    /// [`timeout`](crate::WorkerBuilder::timeout). Following has none, but a version that waits for memory ends with an error if
    /// nothing has arrived during this time.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Whether tensors are views of the peer's memory where the connection allows it, or copies. Default: views, because a version
    /// never changes.
    pub fn sharing(mut self, sharing: Sharing) -> Self {
        self.sharing = sharing;
        self
    }

    /// Fetches the newest version: all of its tensors, and none of any other version.
    ///
    /// On one host the tensors are views of the peer's memory, up to the limit of views
    /// ([`viewed_bytes_per_peer_max`](crate::Memory::viewed_bytes_per_peer_max)); beyond it, and between hosts, they are copies.
    ///
    /// If the connection breaks, the fetch is repeated once within its deadline. If the peer commits two versions meanwhile, the newest
    /// one is fetched.
    ///
    /// # Errors
    /// [`WorkerError::Remote`] with NOT_FOUND if the peer has committed no version, and with PERMISSION_DENIED if this worker is not
    /// among the [readers](crate::sets::OwnSet::readers); [`WorkerError::VersionTooLarge`] if the receive pool cannot hold the version;
    /// [`WorkerError::PeerLost`], [`WorkerError::NoFabric`], [`WorkerError::DeadlineExceeded`]; [`WorkerError::Local`] with
    /// INVALID_ARGUMENT if the peer's answer contradicts itself.
    ///
    /// # Cancel safety
    /// Cancel-safe: nothing is lost by dropping the future.
    pub async fn fetch(&self) -> Result<Snapshot, WorkerError> {
        check_published(&self.name)?;
        let fetched = async {
            let mut is_repeated = false;
            loop {
                tokio::task::coop::consume_budget().await;
                match self.fetch_once().await {
                    Ok(moved) => return Ok(moved.snapshot),
                    Err(not_moved) => not_moved.or_repeat(&mut is_repeated)?,
                }
            }
        };
        let what = || format!("fetching the set {}{}", self.transfer(), self.lack().unwrap_or_default());
        let hint = "does the peer run, and does it commit this set?";
        self.peer.worker.within(self.limit, what, hint, pin!(fetched)).await
    }

    async fn fetch_once(&self) -> Result<Moved, NotMoved> {
        let link = self.link().await?;
        let head = self.head(&link, Wanted::Now).await?;
        self.moved(&link, (&head, &head.newest), None).await
    }

    pub(super) fn transfer(&self) -> Transfer<'_> {
        Transfer { peer: self.peer.name(), key: &self.name, step: None }
    }

    pub(super) async fn link(&self) -> Result<Link, WorkerError> {
        let node = &self.peer.worker.node;
        if node.is_own(&self.peer.known) {
            return Ok(Link::Own);
        }
        node.connected(&self.peer.known).await.map(Link::Connected)
    }

    /// The head of the wanted version.
    pub(super) async fn head(&self, link: &Link, wanted: Wanted) -> Result<Head, WorkerError> {
        let scope = Scope::Set(wanted);
        let options = ReceiveOptions::default();
        let head = self.receive(link, scope, bytes_of(HEAD_BYTES), &options).await?;
        Head::decode(head.bytes()).map_err(|problem| self.misbehaved(problem))
    }

    pub(super) fn misbehaved(&self, problem: &str) -> WorkerError {
        let message = format!("the peer's answer contradicts itself: {problem}");
        let status = tensorwire_protocol::Status::new(Code::InvalidArgument, message);
        WorkerError::Local { transfer: self.transfer().name(), status }
    }

    pub(super) async fn receive(
        &self,
        link: &Link,
        scope: Scope,
        expected: Metadata,
        options: &ReceiveOptions,
    ) -> Result<Tensor, WorkerError> {
        let transfer = self.transfer();
        match link {
            Link::Own => {
                let edition = self.peer.worker.node.values().own(scope, &self.name).await;
                let remote = |status| WorkerError::Remote { transfer: transfer.name(), status };
                edition.map(|edition| edition.tensor).map_err(remote)
            }
            Link::Connected(connection) => {
                connection.receive_expected((&scope, &transfer), expected, options).await
            }
        }
    }

    /// A content of a version.
    pub(super) async fn content(
        &self,
        link: &Link,
        (content, expected): (SetContent, Metadata),
        options: ReceiveOptions,
    ) -> Result<Tensor, NotMoved> {
        let received = self.receive(link, Scope::SetContent(content), expected, &options).await;
        received.map_err(NotMoved::of_content)
    }

    /// Moves the version `target`, which `head` describes, as far as it differs from `held`.
    pub(super) async fn moved(
        &self,
        link: &Link,
        (head, target): (&Head, &VersionHead),
        held: Option<&Snapshot>,
    ) -> Result<Moved, NotMoved> {
        let mut move_ = Move::new(self, link);
        let known = held.map(|held| (held.version(), held.manifest()));
        let (manifest, derivation) = move_.manifest((head, target), known).await?;
        let uses_deltas = !link.lends(self.sharing);
        let ways = ways(&manifest, held, derivation.as_ref(), uses_deltas);
        let is_changed =
            |(entry, way): (&ManifestEntry, &Way)| (!matches!(way, Way::Held(_))).then(|| entry.name.clone());
        let changed = manifest.entries.iter().zip(&ways).filter_map(is_changed).collect();
        if uses_deltas {
            self.check_room(target.version(), (&manifest, &ways), held)?;
        }
        let tensors = move_.tensors(target.edition(), &manifest, ways).await?;
        let snapshot = Snapshot::new(target.version(), manifest, tensors);
        Ok(Moved { snapshot, changed, volume: move_.volume })
    }
}

impl Link {
    /// Whether another connection has taken the place of this one.
    pub(super) fn is_replaced(&self) -> bool {
        matches!(self, Self::Connected(connection) if connection.protocol.is_retired())
    }

    /// Whether the peer lends its memory for views.
    pub(super) fn lends(&self, sharing: Sharing) -> bool {
        match self {
            Self::Own => true,
            Self::Connected(connection) => sharing == Sharing::View && connection.may_view(),
        }
    }
}

/// A version that this worker has, and its manifest.
pub(super) type Known<'a> = (u64, &'a Manifest);

/// A version that is being moved.
pub(super) struct Move<'a> {
    pub(super) set: &'a PeerSet,
    pub(super) link: &'a Link,
    pub(super) volume: Volume,
}

impl<'a> Move<'a> {
    pub(super) fn new(set: &'a PeerSet, link: &'a Link) -> Self {
        Self { set, link, volume: Volume::default() }
    }

    /// The manifest of `target`, and how its contents derive from those of the version `known`, if that is known.
    pub(super) async fn manifest(
        &mut self,
        (head, target): (&Head, &VersionHead),
        known: Option<Known<'_>>,
    ) -> Result<(Manifest, Option<Derivation>), NotMoved> {
        let (manifest, derivation) = self.named_manifest((head, target), known).await?;
        if manifest.incarnation != head.incarnation() {
            return Err(self.set.misbehaved("a manifest is of another incarnation").into());
        }
        Ok((manifest, derivation))
    }

    async fn named_manifest(
        &mut self,
        (head, target): (&Head, &VersionHead),
        known: Option<Known<'_>>,
    ) -> Result<(Manifest, Option<Derivation>), NotMoved> {
        if let Some((version, known)) = known.filter(|(_, known)| known.incarnation == head.incarnation())
            && let Some(steps) = steps(head, target, version)
        {
            if let Some((manifest, derivation)) = self.derived(known, &steps).await? {
                return Ok((manifest, Some(derivation)));
            }
            count_whole_content("manifest");
        }
        let bytes = target.manifest_bytes();
        let content = SetContent { edition: target.edition(), number: MANIFEST, is_last: false };
        let encoded = self.bytes((content, bytes)).await?;
        let manifest = Manifest::decode(encoded.bytes()).map_err(|problem| self.set.misbehaved(problem))?;
        if !target.is_of(encoded.bytes()) {
            return Err(self.set.misbehaved("the checksum of a manifest differs").into());
        }
        Ok((manifest, None))
    }

    /// The manifest that the differences of `steps` make of `known`. `None` if it is not that of the last step.
    async fn derived(
        &mut self,
        known: &Manifest,
        steps: &[(VersionHead, u64)],
    ) -> Result<Option<(Manifest, Derivation)>, NotMoved> {
        let (mut manifest, mut derivation) = (known.clone(), Derivation::start(known));
        for (step, bytes) in steps {
            let content = SetContent { edition: step.edition(), number: MANIFEST_DELTA, is_last: false };
            let difference = self.bytes((content, *bytes)).await?;
            let Ok((next, origins)) = manifest_delta::decode(&manifest, step.edition(), difference.bytes())
            else {
                return Ok(None);
            };
            derivation = derivation.then(step.edition(), &origins);
            manifest = next;
        }
        let is_right = steps.last().is_some_and(|(last, _)| last.is_of(&manifest.encode()));
        Ok(is_right.then_some((manifest, derivation)))
    }

    /// Bytes that the publisher has encoded.
    async fn bytes(&mut self, (content, bytes): (SetContent, u64)) -> Result<Tensor, NotMoved> {
        if matches!(self.link, Link::Connected(_)) {
            self.volume = self.volume.and(Volume { bytes, copies: 0 });
        }
        self.set.content(self.link, (content, bytes_of(bytes)), ReceiveOptions::default()).await
    }

    /// The tensors of the version of `edition`, which come in these ways.
    async fn tensors(
        &mut self,
        edition: u64,
        manifest: &Manifest,
        ways: Vec<Way>,
    ) -> Result<Vec<Tensor>, NotMoved> {
        let mut wanted = Vec::new();
        for (entry, way) in manifest.entries.iter().zip(&ways) {
            match way {
                Way::Held(_) => {}
                Way::Whole(number) => {
                    wanted.push((
                        SetContent { edition, number: *number, is_last: false },
                        entry.metadata.clone(),
                    ));
                }
                Way::Deltas(_, deltas) => {
                    wanted.extend(deltas.iter().map(|&Delta { edition, number, bytes }| {
                        (SetContent { edition, number, is_last: false }, bytes_of(bytes))
                    }));
                }
            }
        }
        if wanted.len() > 1
            && self.link.lends_versions()
            && let Some(views) = self.borrowed(edition, manifest).await?
        {
            return match self.set.sharing {
                Sharing::View => Ok(views),
                _ => self.copied(views, ways).await,
            };
        }
        let mut contents = self.contents(wanted).await?.into_iter();
        let mut tensors = Vec::with_capacity(ways.len());
        for (place, (entry, way)) in manifest.entries.iter().zip(ways).enumerate() {
            tensors.push(match way {
                Way::Held(tensor) => tensor,
                Way::Whole(_) => contents.next().ok_or_else(WorkerError::handed_out)?,
                Way::Deltas(base, deltas) => {
                    let deltas: Vec<_> = contents.by_ref().take(deltas.len()).collect();
                    let number = FIRST_TENSOR + place as u32;
                    let whole = SetContent { edition, number, is_last: true };
                    self.assembled((&base, &deltas), (entry, whole)).await?
                }
            });
        }
        Ok(tensors)
    }

    /// Requests all contents at once, in as few messages as possible.
    pub(super) async fn contents(
        &mut self,
        wanted: Vec<(SetContent, Metadata)>,
    ) -> Result<Vec<Tensor>, NotMoved> {
        let before_last = wanted.len().saturating_sub(1);
        let (set, link) = (self.set, self.link);
        let contents = wanted.into_iter().enumerate().map(|(at, mut wanted)| {
            wanted.0.is_last = at == before_last;
            // The message of the last request carries the earlier ones.
            let awaiting = if at < before_last { Awaiting::Together } else { Awaiting::Alone };
            set.content(link, wanted, ReceiveOptions { sharing: set.sharing, awaiting })
        });
        let contents = pin!(try_join_all(contents));
        let contents = set.unless_starved(&[link], contents).await?;
        let volumes = contents.iter().map(|content| Volume::of((set, link), content));
        self.volume = volumes.fold(self.volume, Volume::and);
        Ok(contents)
    }

    /// The content of `entry`, made of deltas; the whole content if there is any doubt.
    async fn assembled(
        &mut self,
        (base, deltas): (&Tensor, &[Tensor]),
        (entry, whole): (&ManifestEntry, SetContent),
    ) -> Result<Tensor, NotMoved> {
        let pool = self.set.peer.worker.receive_pool();
        match assembled(pool, base, deltas, entry).await {
            Ok(tensor) => return Ok(tensor),
            Err(Doubt::NoMemory) => count_whole_content("memory"),
            Err(Doubt::Wrong(problem)) => {
                log!(DEBUG, peer = self.set.peer.name(), name = &*entry.name, problem, "a delta is not used");
                count_whole_content("delta");
            }
        }
        let mut contents = self.contents(vec![(whole, entry.metadata.clone())]).await?;
        contents.pop().ok_or_else(|| WorkerError::handed_out().into())
    }
}

/// The versions whose differences lead from version `held` to `target`, with the lengths of these.
fn steps(head: &Head, target: &VersionHead, held: u64) -> Option<Vec<(VersionHead, u64)>> {
    let newest = (head.newest, head.newest.delta_bytes());
    let before = head.before().map(|before| (*before, before.delta_bytes()));
    let is_newest = target.edition() == head.newest.edition();
    let path = match before {
        Some(before) if is_newest && before.0.version() == held => vec![newest],
        Some(before) if head.oldest() == Some(held) && is_newest => vec![before, newest],
        Some(before) if head.oldest() == Some(held) => vec![before],
        _ => return None,
    };
    path.into_iter().map(|(version, bytes)| Some((version, bytes?))).collect()
}
