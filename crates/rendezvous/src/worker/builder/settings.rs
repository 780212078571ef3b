//! Settings in groups.

use std::time::Duration;

use tensorwire_protocol::{Mode, Validation, wire::control::Parameters};

use crate::{
    link::session_counts::SessionCaps,
    values::{duplicates::DuplicatePolicy, steps::StepSettings},
};

const GIB: u64 = 1 << 30;

/// Memory that a worker takes ([`WorkerBuilder::memory`](crate::WorkerBuilder::memory)).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Memory {
    /// Cap of the memory for values that are published and sent, in bytes. Memory is taken as it is needed.
    /// Default 64 GiB.
    pub source_bytes: u64,
    /// Cap of the memory that received values take, in bytes; at the cap receives wait. Default 64 GiB.
    pub receive_bytes: u64,
    /// Memory is taken in blocks of this many bytes, which are resident from then on; a larger tensor gets a
    /// block of its own. Default 16 MiB.
    pub block_bytes: usize,
    /// Under [`Trust::Hostile`](crate::Trust::Hostile), cap of the memory that one connection's peer may be lent for
    /// values at once, in bytes; at the cap receives wait, and a value that is longer cannot be received. Memory is taken
    /// as it is needed, and let go of with the connection. Default 1 GiB.
    pub bounce_bytes: u64,
    /// Memory of this worker that one other process may view at once over shared memory, in bytes; above it, it gets
    /// copies. A process that never lets go of its views pins no more. Default: `None`, a quarter of
    /// [`source_bytes`](Self::source_bytes).
    pub viewed_bytes_per_peer_max: Option<u64>,
    /// Bytes of its memory that a peer on the same host may share with this worker over one connection; with more the
    /// connection ends. What is read of it costs this process page tables, of a 512th with small pages: lower it where
    /// this process may have little memory. Default: `None`, what the host has, with swap.
    pub imported_bytes_per_connection_max: Option<u64>,
}

impl Default for Memory {
    fn default() -> Self {
        Self {
            source_bytes: 64 * GIB,
            receive_bytes: 64 * GIB,
            block_bytes: 16 << 20,
            bounce_bytes: GIB,
            viewed_bytes_per_peer_max: None,
            imported_bytes_per_connection_max: None,
        }
    }
}

/// How much peers and steps may take of a worker ([`WorkerBuilder::limits`](crate::WorkerBuilder::limits)).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Limits {
    /// Sent values that may wait for their receivers. Default 1 Mi.
    pub values_max: usize,
    /// How long a peer's request for a value of a step waits for this worker to begin the step with
    /// [`Worker::step`](crate::Worker::step); then its receive ends with DEADLINE_EXCEEDED, and the text says what to
    /// do. Default 60 s.
    pub step_init_timeout: Duration,
    /// Steps that this worker has not begun, and that requests of one peer may wait for at once: a peer may name any
    /// step. A request for one more ends with RESOURCE_EXHAUSTED. Default 1024.
    pub deferred_steps_max: usize,
    /// Control sessions, dialled and accepted, that may be open at once; one more is refused. Two workers have one,
    /// or two when each dialled the other. Default 1024.
    pub sessions_max: usize,
    /// Control sessions that may be open at once with the worker of one name; one more is refused. Two workers have one,
    /// or two when each dialled the other; more are of a peer that lost its side of one. Default 8.
    pub sessions_per_peer_max: usize,
    /// Data connections that workers of one name may have set up at once, over all of their sessions; one more is
    /// refused. Two workers have one; more are left over from connections whose end has not been noticed. One session
    /// may have 16. Default 16.
    pub connections_per_peer_max: usize,
    /// Peers that may be known at once beside those of the cluster and those whose address was given; the one noted
    /// longest ago that nobody uses makes room for another, and without one its session is refused. Default 4096.
    pub peers_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            values_max: 1 << 20,
            step_init_timeout: Duration::from_secs(60),
            deferred_steps_max: 1024,
            sessions_max: 1024,
            sessions_per_peer_max: 8,
            connections_per_peer_max: 16,
            peers_max: 4096,
        }
    }
}

impl Limits {
    pub(super) fn of_steps(&self, duplicates: DuplicatePolicy) -> StepSettings {
        StepSettings {
            values_max: self.values_max,
            duplicates,
            deferred_steps_max: self.deferred_steps_max,
            init_timeout: self.step_init_timeout,
        }
    }

    pub(super) fn of_sessions(&self) -> SessionCaps {
        SessionCaps {
            in_all: self.sessions_max,
            of_a_peer: self.sessions_per_peer_max,
            connections_of_a_peer: self.connections_per_peer_max,
        }
    }
}

/// How messages and values flow between two workers ([`WorkerBuilder::flow`](crate::WorkerBuilder::flow)).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Flow {
    /// How messages flow. Default [`Mode::Counted`]; [`Mode::Original`] is the protocol of TensorFlow's verbs
    /// plugin, one message in flight per direction.
    pub mode: Mode,
    /// Messages and values that may be on their way from one peer at once, counted with two of the protocol's own:
    /// the receives that each connection posts. 4 to 4096, default 256; the smaller of both workers' holds.
    pub depth: u32,
    /// Bytes up to which each peer's message ring here may grow; it begins with 16 KiB. Default 256 KiB.
    pub ring_bytes: u32,
    /// Receives that may be outstanding at one peer; further ones wait. Default 256. In
    /// mode original each costs one queue-pair receive.
    pub requests_max: u32,
    /// Values that may be on their way to one peer at once. Default 64.
    pub contents_max: u32,
    /// Longest tensor that travels inside a message when its receiver does not know its shape, in bytes; what both
    /// workers allow holds. It saves a round trip and costs a copy at each side. Default and most 4096; 0 for none.
    pub eager_bytes_max: u32,
    /// Requests that one message may carry when several tensors are asked for at once
    /// ([`Step::recv_many`](crate::Step::recv_many), [`Peer::fetch_many`](crate::Peer::fetch_many)), 1 to 512; the
    /// smaller of both workers' holds. Default 128.
    pub requests_per_message: u32,
}

impl Default for Flow {
    fn default() -> Self {
        Self {
            mode: Mode::Counted,
            depth: 256,
            ring_bytes: 256 << 10,
            requests_max: 256,
            contents_max: 64,
            eager_bytes_max: tensorwire_protocol::limits::EAGER_BYTES_MAX,
            requests_per_message: 128,
        }
    }
}

impl Flow {
    pub(super) fn parameters(&self, validation: Validation) -> Parameters {
        Parameters {
            mode: self.mode,
            depth: self.depth,
            ring_bytes: self.ring_bytes,
            requests_max: self.requests_max,
            contents_max: self.contents_max,
            names_max: 1024,
            eager_bytes_max: self.eager_bytes_max,
            requests_per_message: self.requests_per_message,
            validation,
        }
    }
}
