//! What both halves of a connection use.

use std::{os::fd::OwnedFd, sync::Arc};

use tensorwire_fabric::{LatestRegions, QueuePairCore, RegionTable};
use tokio::io::unix::AsyncFd;

use crate::{
    board::ShmBoard,
    catalogue::{NeighbourCatalogue, OwnCatalogue},
    doorbell::Ringer,
    import::ImportedBlocks,
    lease::PeerProcess,
    ring::{OwnPage, PeerPage},
};

/// The parts of a connection that need no lock.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) core: Arc<QueuePairCore>,
    /// This side's regions.
    pub(super) regions: Arc<RegionTable>,
    pub(super) own: Arc<OwnPage>,
    pub(super) peer: Arc<PeerPage>,
    /// Wakes the peer's driver.
    pub(super) ringer: Arc<Ringer>,
    /// Carries descriptors of blocks; its end of file is the peer's death.
    pub(super) socket: AsyncFd<OwnedFd>,
    /// The peer's process; `None` where it is not visible.
    pub(super) process: Option<Arc<PeerProcess>>,
    /// The peer's receive depth, for errors.
    pub(super) peer_receive_depth: u32,
    /// Bytes of the peer's blocks that are mapped.
    pub(super) imported_bytes_max: u64,
    /// The peer's blocks that are mapped.
    pub(super) blocks: Arc<ImportedBlocks>,
    /// The catalogue of this side's domain.
    pub(super) catalogue: Arc<OwnCatalogue>,
    pub(super) peer_catalogue: Arc<NeighbourCatalogue>,
    /// Regions of the peer that short writes used last.
    pub(super) latest: LatestRegions,
}

impl Connection {
    pub(super) fn board(&self) -> ShmBoard {
        ShmBoard::new(self.own.clone(), self.peer.clone())
    }
}
