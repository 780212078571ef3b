//! Regions as control frames encode them.

use tensorwire_fabric::{RegionGeneration, RegionId, RemoteRegion};
use tensorwire_protocol::wire::control::RegionRecord;

/// A region as it is sent.
pub(crate) fn record(region: &RemoteRegion) -> RegionRecord {
    RegionRecord {
        region: region.region.0,
        generation: region.generation.0,
        base: region.base,
        length: region.length,
        key: region.key,
    }
}

/// The region that a peer has announced.
pub(crate) fn region(record: &RegionRecord) -> RemoteRegion {
    RemoteRegion {
        region: RegionId(record.region),
        generation: RegionGeneration(record.generation),
        base: record.base,
        length: record.length,
        key: record.key,
    }
}
