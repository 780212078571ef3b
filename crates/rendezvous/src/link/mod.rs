//! Links to peers: control sessions, data connections, and the memory that a peer may write.

pub(crate) mod announcer;
pub(crate) mod connection;
pub(crate) mod connection_setup;
pub(crate) mod destinations;
pub(crate) mod enclosure;
pub(crate) mod fast_boxes;
pub(crate) mod frames;
pub(crate) mod import;
pub(crate) mod known_peer;
mod liveness;
pub(crate) mod loan;
pub(crate) mod meter;
pub(crate) mod node;
pub(crate) mod peer_values;
pub(crate) mod peers;
pub(crate) mod pools;
pub(crate) mod refusals;
pub(crate) mod ring;
mod serve;
pub(crate) mod session;
pub(crate) mod session_counts;
pub(crate) mod session_setup;
pub(crate) mod target;
pub(crate) mod trust;
