//! The example of the book: a fabric for two sides in one process. `submit` copies into the memory of the peer.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::{collections::BTreeMap, future::poll_fn};

use tensorwire_fabric::{FabricError::*, *};
use tensorwire_memory::{Block, copy::CopyReason::Local};

const KIND: FabricKind = FabricKind::new("loopback");

/// The sides that are not connected yet, by their tokens. A token is used once: connecting removes its side.
static PREPARED: Mutex<BTreeMap<Vec<u8>, Arc<Side>>> = Mutex::new(BTreeMap::new());

/// The fabric, and each of its domains.
#[derive(Debug)]
struct Loopback(Arc<dyn Runtime>, Arc<RegionTable>);

impl Fabric for Loopback {
    fn kind(&self) -> FabricKind {
        KIND
    }

    fn capabilities(&self) -> Capabilities {
        let mut able = Capabilities::WRITES;
        (able.vectored, able.piece_bytes_max) = (true, 4 << 20);
        able
    }

    fn reach(&self) -> Vec<u8> {
        static PROCESS: OnceLock<u64> = OnceLock::new();
        PROCESS.get_or_init(|| self.0.random()).to_le_bytes().to_vec()
    }

    fn open_domain(&self) -> Result<Arc<dyn Domain>, FabricError> {
        Ok(Arc::new(Self(self.0.clone(), Arc::new(RegionTable::new(&*self.0)))))
    }
}

impl Domain for Loopback {
    fn kind(&self) -> FabricKind {
        KIND
    }

    fn register(&self, block: &Block, access: Access) -> Result<RemoteRegion, FabricError> {
        Ok(self.1.register(&*self.0, block, access))
    }

    fn prepare(&self, config: QueuePairConfig) -> Result<Box<dyn Prepared>, FabricError> {
        let core = Arc::new(QueuePairCore::new(KIND, config, self.capabilities()));
        let (table, gate, peer) = (self.1.clone(), Mutex::new(()), OnceLock::new());
        let owner = Owner(Arc::new(Side { core, table, gate, peer }), self.0.random().to_le_bytes().to_vec());
        lock(&PREPARED).insert(owner.1.clone(), owner.0.clone());
        Ok(Box::new(owner))
    }
}

/// Owns a side: first a prepared one, which can be dialled by its token, then a connected one as part of the driver.
/// Dropping it ends the side.
#[derive(Debug)]
struct Owner(Arc<Side>, Vec<u8>);

impl Prepared for Owner {
    fn connection_data(&self) -> ConnectionData {
        ConnectionData(self.1.clone())
    }

    fn connect(self: Box<Self>, params: ConnectParams) -> BoxFuture<'static, Result<Connected, FabricError>> {
        Box::pin(async move {
            let peer = lock(&PREPARED).remove(&params.peer.0);
            let peer = peer.ok_or(PeerMisbehaved { kind: KIND, violation: PeerViolation::BadToken })?;
            let _ = self.0.peer.set(Arc::downgrade(&peer));
            let queue_pair = QueuePair::new(self.0.core.clone(), self.0.clone());
            let driver = async move {
                poll_fn(|context| peer.core.poll_drained(context)).await;
                self.0.end(&match peer.core.failure() {
                    Some(PeerMisbehaved { kind, violation }) => RemoteRefused { kind, reason: violation },
                    Some(error @ ReceiverNotReady { .. }) => error,
                    _ => PeerLost { kind: KIND, cause: LossCause::ClosedByPeer, detail: "it ended".into() },
                });
            };
            Ok(Connected { queue_pair, driver: Box::pin(driver) })
        })
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        lock(&PREPARED).remove(&self.1);
        self.0.end(&Closed);
    }
}

#[derive(Debug)]
struct Side {
    core: Arc<QueuePairCore>,
    table: Arc<RegionTable>,
    /// The peer locks this while it writes.
    gate: Mutex<()>,
    peer: OnceLock<Weak<Self>>,
}

impl Link for Side {
    fn submit(&self, key: SlotKey, request: &WorkRequest) {
        let Some(peer) = self.peer.get().and_then(Weak::upgrade) else { return }; // The driver has ended this.
        let aim = |piece: Piece| {
            self.table.check_local(KIND, piece.local.block().map(Block::id))?;
            let region = self.core.remote_regions().aim(piece.local.len() as u64, piece.remote.as_ref())?;
            Ok((region.map_or(0, |region| region.key), piece))
        };
        let pieces: Result<Vec<_>, _> = request.pieces(u64::MAX).map(aim).collect();
        match pieces.map(|pieces| peer.receive(pieces, request)) {
            Ok(Err(error)) => peer.end(&error), // The driver of this side sees it.
            landed => self.core.complete(key, request.length(), landed.map(drop)),
        }
    }

    fn start_close(&self) {
        self.end(&Closed);
    }
}

impl Side {
    /// Lands a write of the peer. An error ends the connection.
    fn receive(&self, pieces: Vec<(u32, Piece)>, request: &WorkRequest) -> Result<(), FabricError> {
        let refused = |violation| PeerMisbehaved { kind: KIND, violation };
        let _gate = lock(&self.gate);
        self.core.failure().map_or(Ok(()), Err)?;
        for (key, piece) in pieces {
            if let Some(range) = piece.remote.filter(|range| range.length > 0) {
                let (target, _) = self.table.write_target(&range, key).map_err(refused)?;
                target.write_at(0, &piece.local, Local).map_err(|_| refused(PeerViolation::NotGranted))?;
                self.core.count_received(range.length);
            }
        }
        let Some(immediate) = request.immediate() else { return Ok(()) };
        self.core.queue_arrival(Arrival::Immediate { immediate, length: request.length() })
    }

    /// Ends this side. The driver of the peer sees that it is drained.
    fn end(&self, error: &FabricError) {
        self.core.fail(error);
        drop(lock(&self.gate)); // A write that began before has ended, and no other begins.
        self.core.mark_drained();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The fabric ends here; its tests follow.
fn fabric(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
    let table = Arc::new(RegionTable::new(&*runtime));
    Arc::new(Loopback(runtime, table))
}

const SETUP: crate::contract::Setup = crate::contract::Setup { fabric, peer_address: None };

contract_suite!(crate::loopback::SETUP);
