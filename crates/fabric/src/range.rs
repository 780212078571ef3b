//! Names for ranges of a peer's memory.

/// Names a region within its domain; never reused within it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId(pub u32);

/// Distinguishes a region from one that had its number before the peer restarted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionGeneration(pub u32);

/// A range of a peer's region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RemoteRange {
    /// The region.
    pub region: RegionId,
    /// The region's generation at its announcement.
    pub generation: RegionGeneration,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}
