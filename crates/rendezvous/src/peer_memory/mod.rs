//! The memory of a worker that its peers may write or read: pools, the regions that are announced to a peer, and the memory that is
//! granted for one value.

pub(crate) mod announcer;
pub(crate) mod arena;
pub(crate) mod destinations;
pub(crate) mod enclosure;
pub(crate) mod import;
pub(crate) mod lent;
pub(crate) mod pools;
pub(crate) mod region_record;
pub(crate) mod ring;
pub(crate) mod target;
pub(crate) mod trust;
