//! [`Follow`]: the versions of a peer's set, as they are committed.

use std::{
    fmt,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use futures::{FutureExt as _, Stream, StreamExt, stream::Next};
use tensorwire_fabric::BoxFuture;
use tensorwire_protocol::Wanted;

use crate::{
    error::WorkerError,
    sets::{
        fetching::{Link, Moved, NotMoved, PeerSet},
        publisher_loss::{Pause, is_loss, warn_of_loss},
        sharded::ShardedSet,
        snapshot::Snapshot,
    },
    values::{
        published::check_published,
        sets::manifest::{Head, VersionHead},
    },
};

/// Which versions of a set a follower gets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Policy {
    /// Every version, in order. The publisher has the newest two; a follower that needs an older one gets
    /// [`WorkerError::Superseded`], and then the newest.
    Every,
    /// The newest version; a slow follower leaves out versions.
    #[default]
    Latest,
}

impl PeerSet {
    /// Follows the set: a stream of the versions that the peer commits, beginning with the newest one now, or with the first one.
    pub fn follow(&self, policy: Policy) -> Follow {
        Follow::new(Source::Peer(self.clone()), policy)
    }
}

impl ShardedSet {
    /// Follows the set: a stream of the newest versions that all peers have. Tensors that have not changed are shared with the version
    /// before, and unchanged pieces of others are copied out of it. Between hosts, pieces that changed in few elements are made of it and
    /// of the deltas of the publishers' tensors, if these are less than the pieces.
    ///
    /// If some peers do not have a version that the others have, for the worker's [`liveness`](crate::WorkerBuilder::liveness),
    /// the stream returns [`WorkerError::Incomplete`], which names them, and then waits again: the program keeps the last complete
    /// version. Peers that have restarted below that version are waited for.
    pub fn follow(&self) -> Follow {
        Follow::new(Source::Shards(self.clone()), Policy::Latest)
    }
}

/// The versions of a set, made by [`PeerSet::follow`] or [`ShardedSet::follow`]: a [`Stream`] of [`Staged`] versions.
///
/// A version is moved while the program goes on with the one before. Tensors that have not changed are shared with it, and those that
/// changed in few elements are made of it and of a delta; tensors that the program has are never changed.
///
/// Therefore the stream holds the version that it has returned last, whether the program keeps it or not: between hosts in the receive pool,
/// and on one host as views, for which the peer's memory stays. Dropping the stream ends that.
///
/// A lost peer is asked again, after pauses of 50 ms to 2 s, for as long as the stream is polled; the stream returns nothing meanwhile, and
/// one line is logged. If the peer comes back below the version that this stream has returned, the stream returns
/// [`WorkerError::WentBack`] once, and then waits for a newer version, unless the program accepts the restart.
///
/// Other errors are those of [`PeerSet::fetch`]. A version that the receive pool cannot hold beside the one that the stream has returned
/// last is refused with [`WorkerError::VersionTooLarge`]. If a version waits for memory that others hold, and nothing arrives during the
/// [`timeout`](PeerSet::timeout), the stream returns [`WorkerError::DeadlineExceeded`], and then asks again. The stream goes on after each
/// error but [`WorkerError::ShutDown`] and those of a set that cannot exist: without peers, or with a name that is none.
///
/// ```no_run
/// use tensorwire::{Peer, WorkerError, sets::Policy};
///
/// # async fn example(peer: Peer) -> Result<(), WorkerError> {
/// let mut versions = peer.set("policy").follow(Policy::Latest);
/// while let Some(staged) = versions.next().await {
///     let staged = staged?;
///     println!("version {}: {} bytes moved", staged.version(), staged.bytes_moved());
///     let weights = staged.apply();
///     println!("{} tensors", weights.len());
/// }
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is fetched until the stream is polled"]
pub struct Follow {
    place: Place,
    step: Option<BoxFuture<'static, (Place, Result<Moved, WorkerError>)>>,
    is_over: bool,
    current: Current,
}

/// The version that was applied last.
type Current = Arc<Mutex<Option<Snapshot>>>;

impl fmt::Debug for Follow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Place { source, policy, held, .. } = &self.place;
        f.debug_struct("Follow").field("source", source).field("policy", policy).field("held", held).finish()
    }
}

impl Follow {
    fn new(source: Source, policy: Policy) -> Self {
        let place = Place {
            source,
            policy,
            held: None,
            floor: None,
            incarnation: 0,
            catches_up: false,
            pause: Pause::default(),
        };
        Self { place, step: None, is_over: false, current: Arc::default() }
    }

    /// The next version, as from the stream. `None` when the stream is over.
    ///
    /// # Errors
    /// See [`Follow`].
    ///
    /// # Cancel safety
    /// Cancel-safe: the next call goes on with the transfer.
    #[allow(clippy::should_implement_trait)] // streams have this method through `StreamExt`
    pub fn next(&mut self) -> Next<'_, Self> {
        StreamExt::next(self)
    }

    /// The version that was [applied](Staged::apply) last.
    pub fn current(&self) -> Option<Snapshot> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Accepts a version below the one that this stream has returned: the next version is the newest one that the peer has, whatever its
    /// number.
    pub fn accept_restart(&mut self) {
        (self.place.floor, self.place.incarnation) = (None, 0);
        self.step = None;
    }
}

impl Stream for Follow {
    type Item = Result<Staged, WorkerError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.is_over {
            return Poll::Ready(None);
        }
        let step = this.step.get_or_insert_with(|| this.place.clone().next().boxed());
        let Poll::Ready((place, moved)) = step.poll_unpin(context) else { return Poll::Pending };
        (this.step, this.place) = (None, place);
        this.is_over = matches!(moved, Err(WorkerError::ShutDown)) || this.place.source.first().is_err();
        let current = this.current.clone();
        Poll::Ready(Some(moved.map(|moved| Staged { moved, current })))
    }
}

/// A version of a set that is complete here and not in use yet.
#[must_use = "the version is not in use until it is applied"]
pub struct Staged {
    moved: Moved,
    current: Current,
}

impl fmt::Debug for Staged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Staged").field("snapshot", &self.moved.snapshot).finish_non_exhaustive()
    }
}

impl Staged {
    /// The version.
    pub fn version(&self) -> u64 {
        self.moved.snapshot.version()
    }

    /// The names of the tensors that are new, or differ from those of the version that the stream returned before, sorted. Of the first
    /// version these are all names, and after a restart of a peer all of its tensors count as different. Equal elements in other memory
    /// count as different, too, unless the peer has compared them, which it does while the set is followed over a network.
    ///
    /// A program that copies these tensors of each version into a model of its own has the whole version there. Names that the version
    /// does not have any more are not among them.
    pub fn changed(&self) -> impl ExactSizeIterator<Item = &str> {
        self.moved.changed.iter().map(|name| &**name)
    }

    /// The bytes that this version took: of contents, deltas and the manifest. Views take none.
    pub fn bytes_moved(&self) -> u64 {
        self.moved.volume.bytes
    }

    /// How many contents were copied into this worker's memory. On one host that is 0, unless the limit of views is reached.
    pub fn copied(&self) -> usize {
        self.moved.volume.copies
    }

    /// The tensors, without applying them.
    pub fn snapshot(&self) -> &Snapshot {
        &self.moved.snapshot
    }

    /// Makes this version the [current](Follow::current) one, and returns it. No memory of the program is written, and the stream goes on
    /// without this, too.
    pub fn apply(self) -> Snapshot {
        let snapshot = self.moved.snapshot;
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = Some(snapshot.clone());
        snapshot
    }
}

/// What a stream follows.
#[derive(Debug, Clone)]
enum Source {
    Peer(PeerSet),
    Shards(ShardedSet),
}

impl Source {
    /// The set of the first peer, or of the only one.
    fn first(&self) -> Result<&PeerSet, WorkerError> {
        match self {
            Self::Peer(set) => check_published(set.name()).map(|()| set),
            Self::Shards(sharded) => sharded.first(),
        }
    }
}

/// How far a stream is.
#[derive(Clone)]
struct Place {
    source: Source,
    policy: Policy,
    /// The version that was returned last.
    held: Option<Snapshot>,
    /// The next version must be above this one.
    floor: Option<u64>,
    /// The incarnation of the peer that has answered last.
    incarnation: u64,
    /// The next version is the newest one, whichever were left out.
    catches_up: bool,
    /// The pause before the next request.
    pause: Pause,
}

impl Place {
    /// Waits for the next version, and moves it.
    async fn next(mut self) -> (Self, Result<Moved, WorkerError>) {
        let set = match self.source.first() {
            Ok(first) => first.clone(),
            Err(error) => return (self, Err(error)),
        };
        let worker = &set.peer.worker;
        loop {
            if let Err(over) = worker.check_runs() {
                return (self, Err(over));
            }
            tokio::task::coop::consume_budget().await;
            self.pause.sleep(&**worker.runtime()).await;
            match self.attempt(&set).await {
                Ok(Some(moved)) => {
                    (self.pause, self.catches_up) = (Pause::default(), false);
                    self.floor = Some(moved.snapshot.version());
                    self.held = Some(moved.snapshot.clone());
                    return (self, Ok(moved));
                }
                Ok(None) | Err(NotMoved::Superseded) => {}
                Err(NotMoved::Failed(error)) => {
                    let is_first = self.pause.is_none();
                    if !matches!(error, WorkerError::WentBack { .. } | WorkerError::Superseded { .. }) {
                        self.pause.lengthen();
                    }
                    if !is_loss(&error) {
                        return (self, Err(error));
                    }
                    if is_first {
                        warn_of_loss(&set, &error);
                    }
                }
            }
        }
    }

    /// Waits for a head, and moves a version of it. `None` if no version is wanted.
    async fn attempt(&mut self, set: &PeerSet) -> Result<Option<Moved>, NotMoved> {
        if let Source::Shards(sharded) = &self.source {
            return Ok(sharded.next(self.floor, self.held.as_ref()).await.map(Some)?);
        }
        let link = set.link().await?;
        match self.attempt_over((set, &link)).await {
            // The peer is not lost.
            Err(NotMoved::Failed(WorkerError::PeerLost { .. })) if link.is_replaced() => Ok(None),
            attempted => attempted,
        }
    }

    async fn attempt_over(&mut self, (set, link): (&PeerSet, &Link)) -> Result<Option<Moved>, NotMoved> {
        let (incarnation, version) = (self.incarnation, self.floor.unwrap_or_default());
        let head = set.head(link, Wanted::NewerThan { incarnation, version }).await?;
        self.pause = Pause::default();
        let is_restarted = self.incarnation != head.incarnation();
        self.incarnation = head.incarnation();
        if let Some(held) = self.floor.filter(|&held| head.newest.version() <= held) {
            return match head.newest.version() {
                offered if offered < held && is_restarted => Err(went_back(set, held, offered).into()),
                _ if is_restarted => Ok(None),
                _ => Err(set.misbehaved("a version is not newer than the one before").into()),
            };
        }
        let target = self.target(set, &head)?;
        let moved = set.moved(link, (&head, &target), self.held.as_ref()).await?;
        Ok(Some(moved))
    }

    /// The version to move.
    fn target(&mut self, set: &PeerSet, head: &Head) -> Result<VersionHead, WorkerError> {
        let (Policy::Every, Some(held), false) = (self.policy, self.floor, self.catches_up) else {
            return Ok(head.newest);
        };
        let Some(before) = head.before().filter(|before| before.version() > held) else {
            return Ok(head.newest);
        };
        if head.base_of_before() > held {
            self.catches_up = true;
            let (transfer, newest) = (set.transfer().name(), head.newest.version());
            return Err(WorkerError::Superseded { transfer, held, newest });
        }
        Ok(*before)
    }
}

fn went_back(set: &PeerSet, held: u64, offered: u64) -> WorkerError {
    WorkerError::WentBack { transfer: set.transfer().name(), held, offered }
}
