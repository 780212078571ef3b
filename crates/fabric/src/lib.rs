//! The contract of a fabric, queue pairs as futures, and what all fabrics share.
//!
//! A [`Fabric`] opens [`Domain`]s; a domain registers blocks of memory and prepares queue pairs; two prepared
//! queue pairs exchange opaque [`ConnectionData`] and become connected [`QueuePair`]s. On a queue pair every
//! operation is a future that is only a handle on a [slot](SlotKey): the slot owns the buffers from post to
//! completion, so dropping the future ends interest, not the operation.
//!
//! | fabric | where | a write is |
//! | --- | --- | --- |
//! | verbs | the crate `tensorwire-verbs-reactor` | `ibv_post_send` on a reliable connected queue pair |
//! | shm | the crate `tensorwire-fabric-shm` | a descriptor in a ring; the target copies from a read-only mapping |
//! | tcp | the crate `tensorwire-fabric-tcp` | header + payload, read by the target straight into the destination |
//!
//! The contract that all of them implement:
//! - Immediates show writes on one queue pair in posting order: when the immediate of a write arrives, that write and
//!   all earlier ones are visible. A plain write is not visible before that.
//! - Completion `Ok` means that the local bytes may be reused, not that they were delivered.
//! - Every immediate consumes one of the target's `receive_depth` receives. Taking the arrival
//!   ([`QueuePair::next_arrival`], or a [sink](ArrivalSink)) returns the receive. If no receive is free, the connection
//!   fails on both sides ([`FabricError::ReceiverNotReady`]).
//! - The target checks region, generation, key, range, right and grant. A violation ends that connection only,
//!   and touches no memory.
//! - A write larger than [`Capabilities::piece_bytes_max`] is split; only its last piece carries the immediate,
//!   and each piece counts in the send queue.
//! - Every operation ends exactly once.

#![forbid(unsafe_code)]

#[macro_use]
mod log;

mod alarm;
mod arrival_queue;
mod board;
mod capabilities;
mod catalogue;
mod core;
mod driver;
mod error;
mod fabric;
mod help;
mod kind;
mod link;
mod look;
mod noted;
mod queue_pair;
mod range;
mod read;
mod region;
mod registered_pool;
mod runtime;
mod slot;
#[cfg(test)]
mod slot_model;
mod sync;
mod wait;
mod work;

pub use self::core::{ArrivalSink, QueuePairConfig, QueuePairCore, QueuePairStats, Unacknowledged};
pub use alarm::Alarm;
pub use board::{BOARD_WORDS, Board, LINE_WORDS};
pub use capabilities::Capabilities;
pub use catalogue::{
    CELL_CONTENT_BYTES, CELL_WORDS, Catalogue, CellContent, CellNumber, CellOrigin, CellReading,
    PeerCatalogue,
};
pub use driver::{Driven, Driver};
pub use error::{FabricError, LossCause, PeerViolation};
pub use fabric::{ConnectParams, Connected, ConnectionData, Domain, Fabric, Prepared, Role};
pub use help::Help;
pub use kind::FabricKind;
pub use link::{Link, OfferedCatalogue, SharedMemory, Together};
pub use look::{Effort, Look};
pub use queue_pair::{NextArrival, Operation, QueuePair, ReadOperation, VectoredReadOperation};
pub use range::{RegionGeneration, RegionId, RemoteRange};
pub use read::{ReadDestination, scattered};
pub use region::{Access, LatestRegions, LatestTargets, Purpose, RegionTable, RemoteRegion, RemoteRegions};
pub use registered_pool::RegisteredPool;
pub use runtime::{BoxFuture, Elapsed, Runtime, TokioRuntime, timeout};
pub use slot::{SlotKey, SlotTable};
pub use wait::{Idle, Patience, Spinner, UnknownWait, Wait};
pub use work::{Arrival, Immediate, Piece, Pieces, ReadPart, ReadSegment, Segment, WorkRequest, paged};
