//! Whether a service can answer requests, and what it lacks if not.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use serde::Serialize;
use tensorwire::{Peer, Worker};

/// What a service needs before it can answer requests. It is ready when all is there; clones share it.
#[derive(Debug, Clone)]
pub struct Readiness {
    worker: Worker,
    needs: Arc<Mutex<Needs>>,
}

#[derive(Debug, Default)]
struct Needs {
    peers: Vec<Peer>,
    /// Of each requirement the detail that was given with it, once it is met.
    requirements: BTreeMap<String, Option<String>>,
    ends: bool,
}

/// The answer of `GET /ready`, as JSON.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// Whether the service should get requests.
    pub(crate) ready: bool,
    /// Whether it is about to end.
    ends: bool,
    /// The worker's name.
    worker: String,
    /// Of each required peer the fabric that it is connected by, or null.
    peers: BTreeMap<String, Option<String>>,
    /// Of each further requirement what was said when it was met, or null.
    requirements: BTreeMap<String, Option<String>>,
}

impl Readiness {
    /// Of a service that uses `worker`. It needs nothing yet.
    pub fn new(worker: &Worker) -> Self {
        Self { worker: worker.clone(), needs: Arc::default() }
    }

    /// Requires a connection with this peer. This does not connect: [`Peer::connect`] does, and the first fetch.
    pub fn require_peer(&self, peer: &Peer) {
        let mut needs = self.lock();
        if !needs.peers.iter().any(|required| required.name() == peer.name()) {
            needs.peers.push(peer.clone());
        }
    }

    /// Requires something that the program reports, such as weights: it is missing until [`Requirement::met`]. The same
    /// name is the same requirement.
    pub fn require(&self, name: &str) -> Requirement {
        self.lock().requirements.entry(name.to_owned()).or_default();
        Requirement { name: name.to_owned(), readiness: self.clone() }
    }

    /// Whether the service can answer requests now.
    pub fn is_ready(&self) -> bool {
        self.report().ready
    }

    pub(crate) fn begin_end(&self) {
        self.lock().ends = true;
    }

    pub(crate) fn report(&self) -> Report {
        let connected = self.worker.peers();
        let needs = self.lock();
        let transport = |name: &str| {
            let peer = connected.iter().find(|peer| peer.name == name)?;
            peer.transport.map(|transport| transport.to_string())
        };
        let peers: BTreeMap<_, _> =
            needs.peers.iter().map(|peer| (peer.name().to_owned(), transport(peer.name()))).collect();
        let complete = peers.values().chain(needs.requirements.values()).all(Option::is_some);
        Report {
            ready: complete && !needs.ends,
            ends: needs.ends,
            worker: self.worker.name().to_owned(),
            peers,
            requirements: needs.requirements.clone(),
        }
    }

    // A panic of another holder leaves the lists whole.
    fn lock(&self) -> MutexGuard<'_, Needs> {
        self.needs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A requirement of [`Readiness::require`].
#[derive(Debug, Clone)]
pub struct Requirement {
    name: String,
    readiness: Readiness,
}

impl Requirement {
    /// It is there. `/ready` shows `detail`, such as the version of the weights that the service uses.
    pub fn met(&self, detail: impl Into<String>) {
        self.set(Some(detail.into()));
    }

    /// It is missing again: the service is not ready until it is met.
    pub fn missing(&self) {
        self.set(None);
    }

    fn set(&self, state: Option<String>) {
        self.readiness.lock().requirements.insert(self.name.clone(), state);
    }
}
