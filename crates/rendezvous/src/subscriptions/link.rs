//! How far a subscription is, and the connection that its values come over.

use std::{fmt, pin::pin, sync::Arc};

use futures::{StreamExt as _, stream::BoxStream};
use tensorwire_protocol::{Key, ReceiveOptions, Scope, Sharing, Status, Subscription, Wanted};

use super::{Policy, StepKey, Update, check_ahead};
use crate::{
    connection::{DataConnection, fabric_channel::FabricChannel, subscribing::Subscribed},
    error::{Transfer, WorkerError},
    sets::publisher_loss::{Pause, is_loss},
    values::{
        arguments::{CancellationToken, RecvArgs},
        published::{Edition, Version, check_published},
        tensor::Tensor,
        versions::versions,
    },
    worker::{
        Worker,
        peer::Peer,
        step::{Receiving, Step},
    },
};

/// What is subscribed to.
pub(super) enum Source {
    Published { peer: Peer, name: Arc<str> },
    Step { step: Step, key: StepKey },
}

/// Where the values come from.
pub(super) enum Link {
    /// Not connected.
    None,
    /// This worker's own published tensors.
    Own(BoxStream<'static, Result<Edition, Status>>),
    /// This worker's own step.
    OwnStep,
    Connected {
        connection: Arc<DataConnection>,
        /// The key, with the incarnation of the peer.
        key: Arc<str>,
        subscription: Box<Subscription<FabricChannel>>,
    },
}

/// The value that was returned last.
#[derive(Debug, Clone, Copy)]
pub(super) struct Held {
    version: Option<Version>,
    sequence: u64,
}

/// How far a subscription is.
pub(super) struct Place {
    pub(super) source: Source,
    pub(super) policy: Policy,
    pub(super) ahead: u8,
    pub(super) sharing: Sharing,
    pub(super) link: Link,
    pub(super) held: Option<Held>,
    /// The version that was returned before that one; 0 if there was none in the life of the publisher.
    pub(super) before: u64,
    /// The pause before the peer is asked again.
    pub(super) pause: Pause,
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Place");
        match &self.source {
            Source::Published { peer, name } => shown.field("peer", peer).field("name", name),
            Source::Step { step, key } => shown.field("step", step).field("key", key),
        };
        shown.field("policy", &self.policy).field("held", &self.held).finish_non_exhaustive()
    }
}

impl Place {
    fn worker(&self) -> &Worker {
        match &self.source {
            Source::Published { peer, .. } => &peer.worker,
            Source::Step { step, .. } => &step.worker,
        }
    }

    /// Whether no value follows this error.
    pub(super) fn ends_with(&self, error: &WorkerError) -> bool {
        match error {
            WorkerError::ShutDown | WorkerError::Config { .. } => true,
            WorkerError::Corrupted { .. } => false,
            _ => matches!(self.source, Source::Step { .. }),
        }
    }

    /// The error that says that versions before `update` are missing, if every version is wanted.
    pub(super) fn gap_before(&self, update: &Update) -> Option<WorkerError> {
        let Source::Published { peer, name } = &self.source else { return None };
        let newest = update.version.filter(|_| update.dropped > 0 && self.policy == Policy::Every)?;
        let transfer = Transfer { peer: peer.name(), key: name, step: None }.name();
        Some(WorkerError::Superseded { transfer, held: self.before, newest: newest.number() })
    }

    /// Waits for the next value.
    pub(super) async fn next(mut self) -> (Self, Result<Update, WorkerError>) {
        let update = self.wait().await;
        (self, update)
    }

    async fn wait(&mut self) -> Result<Update, WorkerError> {
        loop {
            self.worker().check_runs()?;
            tokio::task::coop::consume_budget().await;
            let runtime = self.worker().runtime().clone();
            self.pause.sleep(&*runtime).await;
            let error = match self.attempt().await {
                Ok(subscribed) => {
                    self.pause = Pause::default();
                    return Ok(self.update(subscribed));
                }
                Err(error) => error,
            };
            if matches!(error, WorkerError::Corrupted { .. }) {
                return Err(error);
            }
            let is_replaced = self.leave();
            if is_replaced && matches!(error, WorkerError::PeerLost { .. }) {
                // It was not requested: another connection has taken this one's place.
                continue;
            }
            let is_first = self.pause.is_none();
            self.pause.lengthen();
            let Source::Published { peer, name } = &self.source else { return Err(error) };
            if !is_loss(&error) {
                return Err(error);
            }
            if is_first {
                let peer = peer.name();
                log!(WARN, peer, name = &**name, %error, "the publisher of a subscription is lost; asking again");
            }
        }
    }

    /// Ends the subscription at the connection. Returns whether another connection has taken the place of this one.
    fn leave(&mut self) -> bool {
        let left = std::mem::replace(&mut self.link, Link::None);
        matches!(left, Link::Connected { connection, .. } if connection.protocol.is_retired())
    }

    /// The value, with the number of those that were left out.
    fn update(&mut self, subscribed: Subscribed) -> Update {
        let Subscribed { tensor, version, sequence, began } = subscribed;
        let Some(sequence) = sequence else { return Update { tensor, version, dropped: 0 } };
        let incarnation = version.map(Version::incarnation);
        let held = self.held.replace(Held { version, sequence });
        let Some(held) = held else { return Update { tensor, version, dropped: 0 } };
        let (number, count) = (held.version.map_or(0, Version::number), held.sequence);
        // Otherwise the tensor was withdrawn, and published again.
        let goes_on = held.version.map(Version::incarnation) == incarnation && began <= number;
        let (before, count) = if goes_on { (number, count) } else { (0, 0) };
        self.before = before;
        Update { tensor, version, dropped: sequence.saturating_sub(count + 1) }
    }

    async fn attempt(&mut self) -> Result<Subscribed, WorkerError> {
        if matches!(self.link, Link::None) {
            check_ahead(self.ahead)?;
            let terms = (self.ahead, self.policy == Policy::Every, self.sharing);
            let held = self.held.and_then(|held| held.version);
            self.link = match &self.source {
                Source::Published { peer, name } => link_to(peer, (name, held), terms).await?,
                Source::Step { step, key } => link_of(step, key, terms).await?,
            };
        }
        match (&self.source, &mut self.link) {
            (Source::Published { peer, name }, Link::Own(editions)) => {
                let transfer = Transfer { peer: peer.name(), key: name, step: None };
                let remote = |status| WorkerError::Remote { transfer: transfer.name(), status };
                let edition = editions.next().await.ok_or(WorkerError::ShutDown)?.map_err(remote)?;
                let version = Version { incarnation: peer.worker.incarnation(), number: edition.version };
                let Edition { tensor, sequence, began, .. } = edition;
                Ok(Subscribed { tensor, version: Some(version), sequence: Some(sequence), began })
            }
            (Source::Published { peer, .. }, Link::Connected { connection, key, subscription }) => {
                let transfer = Transfer { peer: peer.name(), key, step: None };
                connection.next_value(subscription, transfer).await
            }
            (Source::Step { step, .. }, Link::Connected { connection, key, subscription }) => {
                let live = step.live()?;
                let peer = connection.values.peer.clone();
                let transfer = Transfer { peer: &peer, key, step: Some(step.id.0) };
                let next = pin!(connection.next_value(subscription, transfer));
                live.or_aborted(next).await.map_err(|status| step.aborted(status))?
            }
            (Source::Step { step, key }, _) => {
                let key = (**key).clone()?;
                let tensor = own_value(step, &key, self.policy).await?;
                Ok(Subscribed { tensor, version: None, sequence: None, began: 0 })
            }
            (Source::Published { .. }, _) => Err(WorkerError::ShutDown),
        }
    }
}

/// How many values may be sent ahead, whether every one is wanted, and in which memory.
type Terms = (u8, bool, Sharing);

async fn link_to(
    peer: &Peer,
    (name, held): (&Arc<str>, Option<Version>),
    terms: Terms,
) -> Result<Link, WorkerError> {
    check_published(name)?;
    let node = &peer.worker.node;
    let wanted = Wanted::NewerThan {
        incarnation: held.map_or(0, Version::incarnation),
        version: held.map_or(0, Version::number),
    };
    if node.is_own(&peer.known) {
        return Ok(Link::Own(versions(node.values().clone(), (name.clone(), wanted), terms.1, None)));
    }
    let connection = node.connected(&peer.known).await?;
    let subscription = Box::new(connection.subscribe((Scope::Versioned(wanted), name), terms));
    Ok(Link::Connected { connection, key: name.clone(), subscription })
}

async fn link_of(step: &Step, key: &StepKey, terms: Terms) -> Result<Link, WorkerError> {
    let key = (**key).clone()?;
    let (_, is_from_here) = step.admits(&key)?;
    if is_from_here {
        return Ok(Link::OwnStep);
    }
    let peer = step.source_of(&key)?;
    let (connection, key) = step.connection_for(&peer, &key).await?;
    let subscription = Box::new(connection.subscribe((Scope::Step(step.id), &key), terms));
    Ok(Link::Connected { connection, key: Arc::from(&*key), subscription })
}

/// The next value of this worker's own step.
async fn own_value(step: &Step, key: &Key, policy: Policy) -> Result<Tensor, WorkerError> {
    let received = step.receive_held(key, Receiving::AtOnce(ReceiveOptions::default()));
    let mut tensor = received.await?.into_tensor()?;
    if policy == Policy::Every {
        return Ok(tensor);
    }
    // A value that is there takes precedence over a token that is cancelled.
    let token = CancellationToken::new();
    token.cancel();
    loop {
        let args = RecvArgs { cancellation: Some(token.clone()), ..RecvArgs::default() };
        match step.recv(key).with(args).await {
            Ok(newer) => tensor = newer.tensor,
            Err(WorkerError::Cancelled { .. }) => return Ok(tensor),
            Err(error) => return Err(error),
        }
    }
}
