//! The state of a discovery: the addresses of its name, and the workers at them.
//!
//! ```text
//!  fresh ──▶ dialling ──▶ up
//!             │  │ ▲      │
//!             │  ▼ │      │ its worker is lost
//!             │  later ◀──┘
//!             ▼
//!        this worker
//! ```
//! An address that the name no longer has is removed in any stage.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    future::pending,
    time::Duration,
};

use futures::{FutureExt as _, StreamExt as _, stream::FuturesUnordered};
use tensorwire_fabric::{BoxFuture, timeout};

use super::{Discovered, lookup::Lookup};
use crate::{
    control::ControlError,
    error::WorkerError,
    session::known_peer::KnownPeer,
    sets::publisher_loss::Pause,
    values::end_signal::unless,
    worker::{Worker, peer::Peer},
};

/// Maximum number of addresses of a name that are used.
const ADDRESSES_MAX: usize = 4_096;

/// Maximum number of addresses that are dialled at a time.
const DIALS_MAX: usize = 16;

/// Maximum number of these that have failed before, so that addresses which do not answer leave room for new ones.
const RETRIES_MAX: usize = 8;

/// How long the first dial of an address may take, in which it holds a place that others need. Further dials have the worker's limits.
const FIRST_DIAL_LIMIT: Duration = Duration::from_secs(2);

/// An incarnation of a worker.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Life {
    name: String,
    incarnation: u64,
}

#[derive(Debug)]
struct Place {
    stage: Stage,
    /// The pause before the address is dialled again.
    pause: Pause,
    /// The text of the last error that was returned.
    failure: Option<String>,
}

#[derive(Debug, PartialEq, Eq)]
enum Stage {
    Fresh,
    /// It is dialled again at this time.
    Later(Duration),
    Dialling,
    /// The worker of this name is connected.
    Up(String),
    ThisWorker,
}

#[derive(Debug)]
struct Member {
    peer: Peer,
    incarnation: u64,
}

type Dialled = (String, Result<KnownPeer, WorkerError>);

/// A discovery under way.
#[derive(Debug)]
pub(super) struct Search {
    worker: Worker,
    lookup: Lookup,
    /// The addresses of the name.
    places: BTreeMap<String, Place>,
    /// The workers that are found. Each is up at one address at least.
    members: BTreeMap<String, Member>,
    dials: FuturesUnordered<BoxFuture<'static, Dialled>>,
    /// Those that end when a worker is lost, one for each of `watched`.
    losses: FuturesUnordered<BoxFuture<'static, Life>>,
    watched: BTreeSet<Life>,
    /// Changes that were not returned yet: those of one event.
    ready: VecDeque<Discovered>,
    has_too_many: bool,
}

impl Search {
    pub(super) fn new(worker: &Worker, name: &str, every: Duration) -> Self {
        Self {
            worker: worker.clone(),
            lookup: Lookup::new(&worker.node, name, every),
            places: BTreeMap::new(),
            members: BTreeMap::new(),
            dials: FuturesUnordered::new(),
            losses: FuturesUnordered::new(),
            watched: BTreeSet::new(),
            ready: VecDeque::new(),
            has_too_many: false,
        }
    }

    pub(super) fn set_interval(&mut self, every: Duration) {
        self.lookup.every = every;
    }

    /// The next change.
    pub(super) async fn next(mut self) -> (Self, Result<Discovered, WorkerError>) {
        if let Err(error) = self.worker.check_runs() {
            return (self, Err(error));
        }
        let closing = self.worker.node.closing();
        let changed = unless(closing, self.changed()).await;
        // A shutdown also ends the sessions: no worker is gone because of it.
        let changed = changed.filter(|_| !self.worker.node.is_closing());
        (self, changed.unwrap_or(Err(WorkerError::ShutDown)))
    }

    async fn changed(&mut self) -> Result<Discovered, WorkerError> {
        loop {
            if let Some(change) = self.ready.pop_front() {
                return Ok(change);
            }
            let due = self.begin_dials();
            let runtime = self.worker.node.runtime().clone();
            let due = async move {
                match due {
                    Some(pause) => runtime.sleep(pause).await,
                    None => pending().await,
                }
            };
            tokio::select! {
                biased;
                Some(life) = self.losses.next() => self.lost(&life),
                Some((address, dialled)) = self.dials.next() => self.dialled(address, dialled)?,
                addresses = self.lookup.answer() => addresses.into_iter().for_each(|it| self.resolved(it)),
                () = due => {}
            }
        }
    }

    /// Dials the addresses that are due, new ones first. Returns the time until the next one is due.
    fn begin_dials(&mut self) -> Option<Duration> {
        let room = DIALS_MAX.saturating_sub(self.dials.len());
        if room == 0 {
            return None;
        }
        let now = self.now();
        let (mut due, mut later, mut retried) = (Vec::new(), Vec::new(), 0);
        for (address, place) in &self.places {
            match place.stage {
                Stage::Fresh => due.push(address.clone()),
                Stage::Later(at) => later.push((at, address.clone())),
                Stage::Dialling if !place.pause.is_none() => retried += 1,
                Stage::Dialling | Stage::Up(_) | Stage::ThisWorker => {}
            }
        }
        later.sort_unstable();
        let not_due = later.iter().position(|(at, _)| *at > now).unwrap_or(later.len());
        let next = later.get(not_due).map(|(at, _)| *at - now);
        let again = later.into_iter().take(not_due.min(RETRIES_MAX.saturating_sub(retried)));
        due.extend(again.map(|(_, address)| address));
        due.into_iter().take(room).for_each(|address| self.dial(address));
        next
    }

    fn dial(&mut self, address: String) {
        let Some(place) = self.places.get_mut(&address) else { return };
        place.stage = Stage::Dialling;
        let is_first = place.pause.is_none();
        let (node, name) = (self.worker.node.clone(), self.lookup.name().clone());
        let dialling = async move {
            let dialling = node.dial_discovered(&address, &name);
            let dialled = if is_first {
                let dialled = timeout(&**node.runtime(), FIRST_DIAL_LIMIT, dialling).await;
                dialled.unwrap_or_else(|_| Err(silent(&address)))
            } else {
                dialling.await
            };
            (address, dialled.map_err(WorkerError::or_limit))
        };
        self.dials.push(dialling.boxed());
    }

    /// Takes the new addresses of the name.
    fn resolved(&mut self, addresses: Vec<String>) {
        let mut listed: BTreeSet<String> = addresses.into_iter().collect();
        self.bound(&mut listed);
        self.places.retain(|address, _| listed.contains(address));
        for place in self.places.values_mut().filter(|place| matches!(place.stage, Stage::Up(_))) {
            // Its worker has lived for a while.
            place.pause = Pause::default();
        }
        for address in listed {
            let is_own = self.worker.node.is_own_address(&address);
            let stage = if is_own { Stage::ThisWorker } else { Stage::Fresh };
            let place = || Place { stage, pause: Pause::default(), failure: None };
            self.places.entry(address).or_insert_with(place);
        }
        let up: BTreeSet<&str> = self.places.values().filter_map(Place::worker).collect();
        let ready = &mut self.ready;
        self.members.retain(|name, member| {
            let is_up = up.contains(&**name);
            if !is_up {
                ready.push_back(Discovered::Gone(member.peer.clone()));
            }
            is_up
        });
    }

    /// Removes the addresses above the limit.
    fn bound(&mut self, listed: &mut BTreeSet<String>) {
        let count = listed.len();
        let had_too_many = std::mem::replace(&mut self.has_too_many, count > ADDRESSES_MAX);
        if self.has_too_many && !had_too_many {
            let name = &**self.lookup.name();
            log!(WARN, name, count, limit = ADDRESSES_MAX, "the name has more addresses than are used");
        }
        while listed.len() > ADDRESSES_MAX {
            listed.pop_last();
        }
    }

    fn dialled(
        &mut self,
        address: String,
        dialled: Result<KnownPeer, WorkerError>,
    ) -> Result<(), WorkerError> {
        let now = self.now();
        // The name may have lost the address, and got it back.
        let place = self.places.get_mut(&address).filter(|place| place.stage == Stage::Dialling);
        let Some(place) = place else { return Ok(()) };
        match dialled {
            Ok(peer) => match peer.life() {
                Some(incarnation) => self.found(&address, peer, incarnation),
                // Lost since.
                None => place.retry(now),
            },
            Err(WorkerError::ShutDown) => return Err(WorkerError::ShutDown),
            Err(error) if error.is_this_worker() => place.stage = Stage::ThisWorker,
            Err(error) => {
                place.retry(now);
                let text = error.to_string();
                if place.failure.as_ref() != Some(&text) {
                    place.failure = Some(text);
                    self.ready.push_back(Discovered::Failed { address, error });
                }
            }
        }
        Ok(())
    }

    /// The worker at `address` is connected.
    fn found(&mut self, address: &str, known: KnownPeer, incarnation: u64) {
        let name = known.name().to_owned();
        let is_found = match self.members.get(&name) {
            Some(member) if member.incarnation == incarnation => true,
            Some(_) => {
                self.leave(&name);
                false
            }
            None => false,
        };
        if let Some(place) = self.places.get_mut(address) {
            place.stage = Stage::Up(name.clone());
            place.failure = None;
        }
        if is_found {
            return;
        }
        let peer = Peer::new(&self.worker, known.clone());
        self.ready.push_back(Discovered::Found(peer.clone()));
        self.members.insert(name.clone(), Member { peer, incarnation });
        let life = Life { name, incarnation };
        // A worker that was gone from the name and is back is watched already.
        if self.watched.insert(life.clone()) {
            self.losses.push(until_lost(known, life).boxed());
        }
    }

    fn lost(&mut self, life: &Life) {
        self.watched.remove(life);
        if self.members.get(&life.name).is_some_and(|member| member.incarnation == life.incarnation) {
            self.leave(&life.name);
            self.lookup.hurry();
        }
    }

    /// The worker `name` is lost. Its addresses are dialled again.
    fn leave(&mut self, name: &str) {
        let now = self.now();
        self.places
            .values_mut()
            .filter(|place| place.worker() == Some(name))
            .for_each(|place| place.retry(now));
        let left = self.members.remove(name);
        self.ready.extend(left.map(|member| Discovered::Gone(member.peer)));
    }

    fn now(&self) -> Duration {
        self.worker.node.runtime().now()
    }
}

impl Place {
    /// The worker that is connected at this address.
    fn worker(&self) -> Option<&str> {
        match &self.stage {
            Stage::Up(name) => Some(name),
            _ => None,
        }
    }

    fn retry(&mut self, now: Duration) {
        self.pause.lengthen();
        self.stage = Stage::Later(now + self.pause.length());
    }
}

fn silent(address: &str) -> WorkerError {
    let detail = format!("no session within {FIRST_DIAL_LIMIT:?}; it is dialled again, with a longer limit");
    ControlError::Unreachable { address: address.to_owned(), detail }.into()
}

/// Ends when the peer has no session of this incarnation.
async fn until_lost(peer: KnownPeer, life: Life) -> Life {
    while let Some(session) = peer.live_session().filter(|it| it.peer.incarnation == life.incarnation) {
        let ended = session.ended();
        // A session that has ended is dropped without delay.
        drop(session);
        unless(ended, pending::<()>()).await;
    }
    life
}
