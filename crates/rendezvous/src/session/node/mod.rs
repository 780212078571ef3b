//! [`Node`]: the state that all sessions and connections of a worker share, and what it does: serves, dials, connects, watches.

pub(crate) mod connection_setup;
mod liveness;
mod replacement;
mod report;
mod serve;
pub(crate) mod session_setup;

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    sync::{Arc, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use tensorwire_fabric::{FabricKind, Runtime};
use tensorwire_protocol::wire::control::Parameters;
use tensorwire_testpoints::sync::Mutex;
use tokio::sync::{Notify, futures::Notified, watch};

use crate::{
    connection::{meter::Labels, tally::Tally},
    control::{
        ControlPlane, Secret,
        cluster::{ClusterSpec, normalise},
        for_peers,
        handshake::Introduction,
        host_and_port,
    },
    error::WorkerError,
    log::quota::LogQuota,
    peer_memory::{enclosure::LocalFabric, pools::Pools, trust::Trust},
    session::{
        Session,
        counts::{Full, SessionCaps, SessionCounter},
        known_peer::KnownPeer,
        peers::Peers,
        store::StoreService,
    },
    values::SharedValues,
};

/// The settings with which a worker is started. They do not change.
#[derive(Debug)]
pub(crate) struct NodeSettings {
    pub(crate) name: String,
    pub(crate) incarnation: u64,
    pub(crate) address: String,
    /// The runtime of data connections.
    pub(crate) runtime: Arc<dyn Runtime>,
    /// The runtime of sessions, so that pings are answered while user code blocks `runtime`.
    pub(crate) control_runtime: Arc<dyn Runtime>,
    /// The liveness bound.
    pub(crate) liveness: Duration,
    pub(crate) control: Arc<dyn ControlPlane>,
    /// The user's secret. If there is none, the control plane is asked for the secret of each address.
    pub(crate) secret: Option<Secret>,
    /// The secret that peers must prove when they dial this worker.
    pub(crate) accept_secret: Option<Secret>,
    /// In order of preference.
    pub(crate) fabrics: Vec<LocalFabric>,
    /// Fabrics that cannot be used on this host, with the reasons.
    pub(crate) unavailable: Vec<(FabricKind, String)>,
    pub(crate) pools: Pools,
    pub(crate) trust: Trust,
    pub(crate) values: SharedValues,
    pub(crate) parameters: Parameters,
    pub(crate) connect_limit: Duration,
    pub(crate) cluster: ClusterSpec,
    /// The address at which rank 0 serves its job's store, as the launcher gives it, if this worker listens there.
    pub(crate) store_address: Option<String>,
}

/// A worker's settings, peers, and the limits of what peers may cause.
#[derive(Debug)]
pub(crate) struct Node {
    settings: NodeSettings,
    peers: Mutex<Peers>,
    /// Notified when a session with a peer begins.
    met: Notify,
    closing: watch::Sender<bool>,
    labels: Labels,
    /// What the connections of peers moved that this worker has forgotten.
    forgotten: Arc<Tally>,
    /// Limits the log lines that peers cause.
    log: Arc<LogQuota>,
    /// The sessions in use.
    sessions: Arc<SessionCounter>,
    /// The store that this worker serves.
    store: Mutex<Option<Weak<dyn StoreService>>>,
}

impl Node {
    /// A node that knows at most `peers_max` peers, and has no session yet.
    pub(crate) fn new(settings: NodeSettings, peers_max: usize, sessions: SessionCaps) -> Arc<Self> {
        let log = Arc::new(LogQuota::new(settings.runtime.clone()));
        Arc::new(Self {
            settings,
            peers: Mutex::new(Peers::new(peers_max)),
            met: Notify::new(),
            closing: watch::Sender::new(false),
            labels: Labels::default(),
            forgotten: Arc::default(),
            log,
            sessions: SessionCounter::new(sessions),
            store: Mutex::default(),
        })
    }

    /// The liveness bound.
    pub(crate) fn liveness(&self) -> Duration {
        self.settings.liveness
    }

    pub(crate) fn name(&self) -> &str {
        &self.settings.name
    }

    pub(crate) fn incarnation(&self) -> u64 {
        self.settings.incarnation
    }

    pub(crate) fn address(&self) -> &str {
        &self.settings.address
    }

    /// The runtime of data connections.
    pub(crate) fn runtime(&self) -> &Arc<dyn Runtime> {
        &self.settings.runtime
    }

    /// The runtime of sessions.
    pub(crate) fn control_runtime(&self) -> &Arc<dyn Runtime> {
        &self.settings.control_runtime
    }

    /// In order of preference.
    pub(crate) fn fabrics(&self) -> &[LocalFabric] {
        &self.settings.fabrics
    }

    pub(crate) fn pools(&self) -> &Pools {
        &self.settings.pools
    }

    pub(crate) fn values(&self) -> &SharedValues {
        &self.settings.values
    }

    pub(crate) fn sessions(&self) -> &SessionCounter {
        &self.sessions
    }

    /// The maximum number of unanswered requests of a peer.
    pub(crate) fn requests_max(&self) -> u32 {
        self.settings.parameters.requests_max
    }

    /// Whether peers on this host get this worker's secret from it.
    pub(crate) fn hands_secret_over(&self) -> bool {
        self.settings.accept_secret.as_ref().is_some_and(Secret::is_handed_over)
    }

    /// Ready when the next session with a peer begins.
    pub(crate) fn session_begins(&self) -> Notified<'_> {
        self.met.notified()
    }

    /// Stops accepting and making connections.
    pub(crate) fn begin_closing(&self) {
        self.closing.send_replace(true);
    }

    /// A receiver that becomes true when this worker closes.
    pub(crate) fn closing(&self) -> watch::Receiver<bool> {
        self.closing.subscribe()
    }

    /// Ends all sessions, and the control plane.
    pub(crate) async fn close_control(&self) {
        self.settings.control.close().await;
    }

    pub(crate) fn introduction(&self) -> Introduction {
        Introduction {
            worker: self.settings.name.clone(),
            incarnation: self.settings.incarnation,
            listen_address: Some(for_peers(&self.settings.address)),
            fabrics: self
                .settings
                .fabrics
                .iter()
                .map(|fabric| (fabric_number(fabric.kind), fabric.reach.clone()))
                .collect(),
        }
    }

    /// The peer `name`, which is added on first use. `address` is the address at which it was dialled.
    ///
    /// # Errors
    /// The maximum number of peers is known, and each is in use.
    pub(crate) fn note_peer(&self, name: &str, address: Option<&str>) -> Result<KnownPeer, Full> {
        self.lock_peers().note(name, address, self.settings.cluster.address(name).is_some())
    }

    /// The peer of `session`, which is added on first use, with the session unless another worker has its name. Both happen under
    /// one lock, so that no caller finds a peer that dialled this worker before its address is known.
    ///
    /// # Errors
    /// As [`note_peer`](Self::note_peer).
    pub(crate) fn meet_peer(&self, session: &Arc<Session>) -> Result<KnownPeer, Full> {
        let name = &session.peer.worker;
        let mut peers = self.lock_peers();
        let peer = peers.note(name, None, self.settings.cluster.address(name).is_some())?;
        // The caller claims the name, which adds the session once the name is free.
        let _ = peer.note_session(session);
        Ok(peer)
    }

    /// The peer `name`, whose address the user has set.
    pub(crate) fn name_peer(&self, name: &str, address: &str) -> Result<KnownPeer, WorkerError> {
        self.lock_peers().note(name, Some(address), true).map_err(too_many)
    }

    /// The peer `name`, which may listen at `address`.
    pub(crate) fn add_hint(&self, name: &str, address: &str) -> Result<KnownPeer, WorkerError> {
        self.lock_peers().add_hint(name, address).map_err(too_many)
    }

    /// Removes a peer that was never met, and that only the caller uses.
    pub(crate) fn forget_unmet(&self, peer: &KnownPeer) {
        self.lock_peers().forget_unmet(peer);
    }

    /// Removes a hint.
    pub(crate) fn remove_hint(&self, peer: &KnownPeer, address: &str) {
        self.lock_peers().remove_hint(peer, address);
    }

    /// The peer that was dialled at `address` before, or this worker itself.
    pub(crate) fn peer_by_address(&self, address: &str) -> Option<KnownPeer> {
        if self.is_own_address(address) {
            return Some(self.own_peer());
        }
        self.lock_peers().at(address).cloned()
    }

    /// This worker as a peer of itself. Its own publications are fetched without a connection.
    fn own_peer(&self) -> KnownPeer {
        KnownPeer::known(&self.settings.name, &self.settings.address, self.settings.incarnation)
    }

    /// Whether `peer` is this worker.
    pub(crate) fn is_own(&self, peer: &KnownPeer) -> bool {
        peer.name() == self.settings.name
    }

    /// Whether this worker itself listens on `address`.
    pub(crate) fn is_own_address(&self, address: &str) -> bool {
        let address = normalise(address);
        if address == self.settings.address
            || self.settings.store_address.as_ref() == Some(&address)
            || self.settings.cluster.address(&self.settings.name) == Some(&address)
        {
            return true;
        }
        let (Ok(own), Ok((host, port))) =
            (self.settings.address.parse::<SocketAddr>(), host_and_port(&address))
        else {
            return false;
        };
        let is_everywhere = own.ip().is_unspecified();
        let is_own_host = match host.parse::<IpAddr>() {
            Ok(ip) => ip == own.ip() || is_everywhere && ip.is_loopback(),
            Err(_) => host == "localhost" && (is_everywhere || own.ip().is_loopback()),
        };
        is_own_host && port == own.port()
    }

    /// The peer with this name, if it is known or in the cluster.
    pub(crate) fn peer_by_name(&self, name: &str) -> Result<KnownPeer, WorkerError> {
        if name == self.settings.name {
            return Ok(self.own_peer());
        }
        if let Some(peer) = self.lock_peers().get(name) {
            return Ok(peer.clone());
        }
        if let Some(address) = self.settings.cluster.address(name) {
            return self.name_peer(name, address);
        }
        let mut known: Vec<String> = self.settings.cluster.names().map(str::to_owned).collect();
        known.extend(self.lock_peers().all().map(|peer| peer.name().to_owned()));
        known.sort();
        known.dedup();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        Err(WorkerError::UnknownWorker { name: name.to_owned(), known })
    }

    /// The addresses of `peer` to try: the last known one, then the one in the cluster, then the unproven ones.
    pub(crate) fn addresses(&self, peer: &KnownPeer) -> Vec<String> {
        let of_cluster = self.settings.cluster.address(peer.name()).map(str::to_owned);
        let all = peer.address().into_iter().chain(of_cluster).chain(peer.hints());
        let mut known = BTreeSet::new();
        all.filter(|address| known.insert(address.clone())).collect()
    }

    /// The peer `name`, if it is connected now, in an incarnation in which this has not returned it before.
    pub(crate) fn met_peer(&self, name: &str) -> Option<KnownPeer> {
        if name == self.settings.name {
            return Some(self.own_peer());
        }
        self.known_peer(name).filter(KnownPeer::take_life)
    }

    /// The peer `name`, if it is known.
    pub(crate) fn known_peer(&self, name: &str) -> Option<KnownPeer> {
        self.lock_peers().get(name).cloned()
    }

    /// All peers, sorted by name.
    pub(crate) fn all_peers(&self) -> Vec<KnownPeer> {
        self.lock_peers().all().cloned().collect()
    }

    /// All peers but those that dialled this worker and left, sorted by name.
    pub(crate) fn present_peers(&self) -> Vec<KnownPeer> {
        self.lock_peers().present().cloned().collect()
    }

    /// Serves `service`, until it is dropped. False if this worker serves a store already.
    pub(crate) fn serve_store(&self, service: &Arc<dyn StoreService>) -> bool {
        let mut store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        let is_free = store.as_ref().is_none_or(|served| served.strong_count() == 0);
        if is_free {
            *store = Some(Arc::downgrade(service));
        }
        is_free
    }

    /// The store that this worker serves, if there is one.
    pub(crate) fn store(&self) -> Option<Arc<dyn StoreService>> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner).as_ref().and_then(Weak::upgrade)
    }

    pub(crate) fn is_closing(&self) -> bool {
        *self.closing.borrow()
    }

    fn lock_peers(&self) -> MutexGuard<'_, Peers> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn too_many(full: Full) -> WorkerError {
    let remedy = "allow more peers".to_owned();
    WorkerError::Config { field: full.field, value: full.most.to_string(), remedy }
}

/// The numbers of fabric kinds on the wire. Earlier versions use 5 for another kind.
const NUMBERS: [(FabricKind, u8); 4] =
    [(FabricKind::VERBS, 1), (FabricKind::SHM, 2), (FabricKind::TCP, 3), (FabricKind::SIM, 4)];

/// The number of a kind on the wire. For a kind that is not in the list it is computed from the name, with the highest
/// bit set. If two such kinds have the same number, their reaches differ.
pub(crate) fn fabric_number(kind: FabricKind) -> u8 {
    let known = NUMBERS.iter().find(|(known, _)| *known == kind).map(|(_, number)| *number);
    let of_name = || kind.name().bytes().fold(0_u8, |number, byte| number.wrapping_mul(31) ^ byte) | 0x80;
    known.unwrap_or_else(of_name)
}
