//! A rogue's own memory: its sources, and the memory that it grants.

/// Regions as workers announce them.
#[path = "../../../rendezvous/src/peer_memory/region_record.rs"]
#[allow(dead_code)] // a rogue makes its other frames itself
mod announcements;

use std::sync::Arc;

use tensorwire_fabric::{
    Access, Domain, RegionGeneration, RegionId, RegisteredPool, RemoteRange, RemoteRegion,
};
use tensorwire_memory::{BufMut, Granted, PoolConfig};
use tensorwire_protocol::Destination;
use tensorwire_sim::Node;

pub(super) use announcements::{record as record_of, region as region_of};

/// A pool whose blocks are registered.
#[derive(Debug)]
pub(super) struct Registered(RegisteredPool);

impl Registered {
    pub(super) fn new(node: &Node, domain: &Arc<dyn Domain>, name: &'static str, access: Access) -> Self {
        let config = PoolConfig { block_bytes: 256 << 10, cap_bytes: 8 << 20, ..PoolConfig::new(name) };
        let pool = node.pool(config).unwrap();
        Self(RegisteredPool::new(pool, domain, access).unwrap())
    }

    pub(super) fn buffer(&self, bytes: usize) -> Option<BufMut> {
        self.0.pool.try_alloc(bytes).ok()
    }

    /// Grants memory until the process ends.
    pub(super) fn lend(&self, bytes: u32) -> Option<(Granted, RemoteRegion, Destination)> {
        let granted = self.0.pool.try_alloc(bytes as usize).ok()?.grant();
        let region = self.0.region(granted.block()?.id())?;
        let destination = Destination {
            region: region.region.0,
            generation: region.generation.0,
            offset: granted.offset() as u64,
            capacity: bytes.into(),
            result: None,
        };
        Some((granted, region, destination))
    }
}

/// `length` bytes from `offset` on of the granted memory.
pub(super) fn range_of(at: &Destination, offset: u64, length: u64) -> RemoteRange {
    RemoteRange {
        region: RegionId(at.region),
        generation: RegionGeneration(at.generation),
        offset: at.offset.wrapping_add(offset),
        length,
    }
}
