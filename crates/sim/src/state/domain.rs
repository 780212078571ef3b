//! The registered memory of a domain.

use std::{ops::Range, sync::Mutex};

use tensorwire_fabric::{FabricKind, Purpose, RegionId, RegionTable, RemoteRange};
use tensorwire_memory::BlockId;

use crate::lock::lock;

/// The registered memory of a domain.
#[derive(Debug)]
pub(crate) struct DomainShared {
    /// The kind that its fabric simulates. Each kind is a device of its own.
    pub(crate) kind: FabricKind,
    pub(crate) table: RegionTable,
    /// By region number.
    regions: Mutex<Vec<(BlockId, Purpose)>>,
}

impl DomainShared {
    pub(crate) fn new(kind: FabricKind, table: RegionTable) -> Self {
        Self { kind, table, regions: Mutex::default() }
    }

    /// Notes the purpose of a region that was registered.
    pub(crate) fn note(&self, region: RegionId, block: BlockId, purpose: Purpose) {
        let mut regions = lock(&self.regions);
        if regions.len() == region.0 as usize {
            regions.push((block, purpose));
        }
    }

    /// The purpose of the region. Nothing lands in an unknown region.
    pub(crate) fn purpose(&self, region: RegionId) -> Purpose {
        let registered = lock(&self.regions).get(region.0 as usize).map(|(_, purpose)| *purpose);
        registered.unwrap_or(Purpose::Payload)
    }

    /// The block and range in it of `part` of `range`.
    pub(crate) fn place(&self, range: &RemoteRange, part: &Range<usize>) -> Option<(BlockId, Range<usize>)> {
        let block = lock(&self.regions).get(range.region.0 as usize).map(|(block, _)| *block)?;
        let first = usize::try_from(range.offset).ok()?;
        Some((block, first.checked_add(part.start)?..first.checked_add(part.end)?))
    }
}
