//! What the tasks of one worker share.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use protocol::{Sharing, wire::control::Parameters};
use tokio::sync::{Notify, watch};
use verbs_reactor::{FabricKind, Runtime};

use crate::{
    ClusterSpec, Peer, WorkerError,
    control::{ControlPlane, Secret, handshake::Introduction},
    enclosure::LocalFabric,
    grpc_set_up::GrpcOffer,
    log_quota::LogQuota,
    meter::Labels,
    peers::Peers,
    pools::Pools,
    sessions::{Full, SessionCaps, SessionCounts},
    values::SharedValues,
};

/// A worker's settings, memory, fabrics, values and peers.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) incarnation: u64,
    pub(crate) address: String,
    /// Where tensors move.
    pub(crate) runtime: Arc<dyn Runtime>,
    /// Where sessions are served, so that pings are answered while user code blocks `runtime`.
    pub(crate) control_runtime: Arc<dyn Runtime>,
    /// How long a peer may give no sign of life.
    pub(crate) liveness: Duration,
    pub(crate) control: Arc<dyn ControlPlane>,
    /// What the user gave; else each address's own is asked for.
    pub(crate) secret: Option<Secret>,
    /// What peers that dial here must know.
    pub(crate) accept_secret: Option<Secret>,
    /// In order of preference.
    pub(crate) fabrics: Vec<LocalFabric>,
    /// As one of the fabrics: calls on the control plane's port.
    pub(crate) grpc: Option<GrpcOffer>,
    /// Fabrics that were wanted but cannot be used here, and why.
    pub(crate) unavailable: Vec<(FabricKind, String)>,
    pub(crate) pools: Pools,
    pub(crate) values: SharedValues,
    pub(crate) parameters: Parameters,
    /// Of receives that don't name it.
    pub(crate) sharing: Sharing,
    pub(crate) limit: Duration,
    pub(crate) connect_limit: Duration,
    pub(crate) cluster: ClusterSpec,
    pub(crate) peers: Mutex<Peers>,
    /// A session with a peer has begun.
    pub(crate) met: Notify,
    /// A shutdown has begun: nothing new is accepted here.
    pub(crate) refusing: AtomicBool,
    pub(crate) closing: watch::Sender<bool>,
    /// The shutdown is done.
    pub(crate) closed: watch::Sender<bool>,
    pub(crate) labels: Labels,
    /// Lines that peers may cause.
    pub(crate) log: Arc<LogQuota>,
    /// How long a shutdown waits for transfers under way.
    pub(crate) grace: Duration,
    /// Sessions that are served.
    pub(crate) sessions: watch::Sender<SessionCounts>,
    pub(crate) session_caps: SessionCaps,
}

/// What tensors may move over.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Candidate<'node> {
    /// Queue pairs of a fabric.
    Fabric(&'node LocalFabric),
    /// Calls on the control plane's port.
    Grpc,
}

impl Candidate<'_> {
    pub(crate) fn kind(&self) -> FabricKind {
        match self {
            Self::Fabric(fabric) => fabric.kind,
            Self::Grpc => FabricKind::Grpc,
        }
    }

    /// What both ends must have in common.
    pub(crate) fn reach(&self) -> &[u8] {
        match self {
            Self::Fabric(fabric) => &fabric.reach,
            Self::Grpc => &[],
        }
    }
}

impl Node {
    pub(crate) fn introduction(&self) -> Introduction {
        Introduction {
            worker: self.name.clone(),
            incarnation: self.incarnation,
            listen_address: Some(self.address.clone()),
            fabrics: self
                .candidates()
                .map(|candidate| (fabric_number(candidate.kind()), candidate.reach().to_vec()))
                .collect(),
        }
    }

    /// What tensors may move over, in order of preference.
    pub(crate) fn candidates(&self) -> impl Iterator<Item = Candidate<'_>> {
        let grpc_at = self.grpc.as_ref().map(|offer| offer.place.min(self.fabrics.len()));
        (0..=self.fabrics.len()).flat_map(move |place| {
            let grpc = (grpc_at == Some(place)).then_some(Candidate::Grpc);
            grpc.into_iter().chain(self.fabrics.get(place).map(Candidate::Fabric))
        })
    }

    /// The peer `name`, noted on first sight; `address` is where it was dialled.
    ///
    /// # Errors
    /// There are as many as may be, and each is in use.
    pub(crate) fn note_peer(&self, name: &str, address: Option<&str>) -> Result<Peer, Full> {
        self.lock_peers().note(name, address, self.cluster.address(name).is_some())
    }

    /// The peer `name`, which the user says is at `address`.
    pub(crate) fn name_peer(&self, name: &str, address: &str) -> Result<Peer, WorkerError> {
        let named = self.lock_peers().note(name, Some(address), true);
        named.map_err(|Full { field, most }| WorkerError::Config {
            field,
            value: most.to_string(),
            remedy: "allow more".to_owned(),
        })
    }

    /// The peer that was dialled at `address` before.
    pub(crate) fn peer_by_address(&self, address: &str) -> Option<Peer> {
        self.lock_peers().at(address).cloned()
    }

    /// The peer with this name, if it is in the cluster or known already.
    pub(crate) fn peer_by_name(&self, name: &str) -> Result<Peer, WorkerError> {
        if let Some(peer) = self.lock_peers().get(name) {
            return Ok(peer.clone());
        }
        if let Some(address) = self.cluster.address(name) {
            return self.name_peer(name, address);
        }
        let mut known: Vec<String> = self.cluster.names().map(str::to_owned).collect();
        known.extend(self.lock_peers().all().map(|peer| peer.name().to_owned()));
        known.sort();
        known.dedup();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        Err(WorkerError::UnknownWorker { name: name.to_owned(), known })
    }

    /// Where `peer` may be: what was learnt last, then what the cluster says.
    pub(crate) fn addresses(&self, peer: &Peer) -> Vec<String> {
        let learnt = peer.address();
        let of_cluster = self.cluster.address(peer.name()).map(str::to_owned);
        let of_cluster = of_cluster.filter(|address| learnt.as_ref() != Some(address));
        learnt.into_iter().chain(of_cluster).collect()
    }

    /// The peer `name`, if it was met or named.
    pub(crate) fn known_peer(&self, name: &str) -> Option<Peer> {
        self.lock_peers().get(name).cloned()
    }

    /// All peers, sorted by name.
    pub(crate) fn all_peers(&self) -> Vec<Peer> {
        self.lock_peers().all().cloned().collect()
    }

    /// Whether operations of this worker's user are refused.
    pub(crate) fn is_refusing(&self) -> bool {
        self.refusing.load(Ordering::Acquire) || self.is_closing()
    }

    pub(crate) fn is_closing(&self) -> bool {
        *self.closing.borrow()
    }

    fn lock_peers(&self) -> MutexGuard<'_, Peers> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Fabric kinds as they travel.
const NUMBERS: [(FabricKind, u8); 5] = [
    (FabricKind::Verbs, 1),
    (FabricKind::Shm, 2),
    (FabricKind::Tcp, 3),
    (FabricKind::Sim, 4),
    (FabricKind::Grpc, 5),
];

/// 0 for a kind that this version cannot name.
pub(crate) fn fabric_number(kind: FabricKind) -> u8 {
    NUMBERS.iter().find(|(known, _)| *known == kind).map_or(0, |(_, number)| *number)
}
