//! Groups of settings: memory, limits, flow and tcp.

use std::time::Duration;

use tensorwire_memory::HugePages;
use tensorwire_protocol::{Mode, Validation, wire::control::Parameters};

use crate::{
    session::counts::SessionCaps,
    values::{duplicates::DuplicatePolicy, steps::StepSettings},
};

const GIB: u64 = 1 << 30;

/// How much memory a worker uses ([`WorkerBuilder::memory`](crate::WorkerBuilder::memory)).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Memory {
    /// Maximum memory for published and sent values, in bytes. Memory is allocated as it is needed. Default 64 GiB.
    pub source_bytes: u64,
    /// Maximum memory for received values, in bytes. At the maximum, receives wait. Default 64 GiB.
    pub receive_bytes: u64,
    /// Size of the blocks in which memory is allocated, in bytes. A block stays resident. A larger tensor gets a
    /// separate block. Default 16 MiB.
    pub block_bytes: usize,
    /// Whether published, sent and received values are in huge pages. A neighbour maps such memory in a hundredth of
    /// the time, and copies of large values miss fewer address translations. If the system has reserved no huge pages
    /// (`sysctl vm.nr_hugepages`), a new block takes several times as long to allocate. With [`HugePages::Require`], an
    /// allocation that gets none fails with [`MemoryError::HugePages`](tensorwire_memory::MemoryError::HugePages),
    /// which names the remedy. The gauge `tensorwire_pool_huge_bytes` shows the obtained amount. Default:
    /// [`HugePages::Never`].
    pub huge_pages: HugePages,
    /// Under [`Trust::Hostile`](crate::Trust::Hostile), maximum memory that the peer of one connection may write values
    /// into, in bytes. At the maximum, receives wait; a longer value cannot be received. Memory is allocated as it is
    /// needed, and freed with the connection. Default 1 GiB.
    pub bounce_bytes: u64,
    /// Memory of this worker that one other process may view at once over shared memory, in bytes. Above it, the
    /// process gets copies, so that a process which never drops its views pins no more memory. Default: `None`, a
    /// quarter of [`source_bytes`](Self::source_bytes).
    pub viewed_bytes_per_peer_max: Option<u64>,
    /// Memory that a peer on the same host may map into this process over one connection, in bytes. The connection ends
    /// if the peer offers more. Reading mapped memory costs this process page tables of 1/512 of its size, so lower
    /// this value if the process may use little memory. Default: `None`, the size of the host's memory and swap.
    pub imported_bytes_per_connection_max: Option<u64>,
}

impl Default for Memory {
    fn default() -> Self {
        Self {
            source_bytes: 64 * GIB,
            receive_bytes: 64 * GIB,
            block_bytes: 16 << 20,
            huge_pages: HugePages::Never,
            bounce_bytes: GIB,
            viewed_bytes_per_peer_max: None,
            imported_bytes_per_connection_max: None,
        }
    }
}

/// Limits for peers and steps ([`WorkerBuilder::limits`](crate::WorkerBuilder::limits)).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Limits {
    /// Maximum number of sent values that wait for their receivers. Default 1,048,576.
    pub values_max: usize,
    /// How long a peer's request for a value of a step waits until this worker begins the step with
    /// [`Worker::step`](crate::Worker::step). Then the receive fails with DEADLINE_EXCEEDED. Default 60 s.
    pub step_init_timeout: Duration,
    /// Maximum number of steps that this worker has not begun and that requests of one peer wait for. A request for a
    /// further step fails with RESOURCE_EXHAUSTED. The limit exists because a peer may request any step number. Default
    /// 1024.
    pub deferred_steps_max: usize,
    /// Maximum number of open control sessions, dialled and accepted. A further one is refused. Two workers have one
    /// session, or two if each dialled the other. Default 1024.
    pub sessions_max: usize,
    /// Maximum number of open control sessions with one peer. A further one is refused. More than two exist if the peer
    /// has lost its side of some. Default 8.
    pub sessions_per_peer_max: usize,
    /// Maximum number of data connections that one peer has set up, over all of its sessions. A further one is refused.
    /// Two workers need one; others are connections whose loss is not noticed yet. One session may have 16. Default 16.
    pub connections_per_peer_max: usize,
    /// Maximum number of known peers that are not in the cluster and whose address the user did not set. A further peer
    /// replaces the oldest one that is not in use; if all are in use, its session is refused. Default 4096.
    pub peers_max: usize,
    /// Maximum bytes that the arguments of one peer's calls may hold in the receive pool ([`Worker::handle`](crate::Worker::handle)). A
    /// call with more arguments waits; one whose own arguments are more is refused. Default 256 MiB.
    pub call_bytes: u64,
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
            call_bytes: 256 << 20,
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

/// The flow of messages and values between two workers ([`WorkerBuilder::flow`](crate::WorkerBuilder::flow)).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Flow {
    /// How messages are acknowledged. Default [`Mode::Counted`]. [`Mode::Original`] follows the flow of TensorFlow's
    /// verbs plugin, with one message in flight per direction, but with other message bytes.
    pub mode: Mode,
    /// Maximum number of messages and values in flight from one peer, including two of the protocol's own. Each
    /// connection posts as many receives. 4 to 4096, default 256. Of the settings of two workers, the smaller applies.
    pub depth: u32,
    /// Maximum size of the message ring that each peer writes on this worker, in bytes. It starts with 16 KiB and
    /// grows. Default 256 KiB.
    pub ring_bytes: u32,
    /// Maximum number of receives that are outstanding at one peer; further ones wait. Default 256. In mode original,
    /// each needs one queue-pair receive.
    pub requests_max: u32,
    /// Maximum number of values in flight to one peer. Default 64.
    pub contents_max: u32,
    /// Maximum length, in bytes, of a tensor that travels inside a message if its receiver does not know its shape.
    /// This saves a round trip and costs a copy on each side. Of the settings of two workers, the smaller applies.
    /// Default and maximum 4096; 0 turns it off.
    pub eager_bytes_max: u32,
    /// Maximum number of requests in one message if several tensors are requested at once
    /// ([`Step::recv_many`](crate::Step::recv_many), [`Peer::fetch_many`](crate::Peer::fetch_many)), 1 to 512. Of the
    /// settings of two workers, the smaller applies. Default 128.
    pub requests_per_message: u32,
    /// Length, in bytes, of the pieces in which a longer tensor is written over TCP and RDMA: 4 KiB to 1 GiB. Long tensors take turns,
    /// two pieces of a connection at a time, and other messages and tensors come between them. Of the settings of two workers, the
    /// smaller applies. Default 512 KiB. In mode original, and over shared memory, a tensor is written as a whole.
    pub piece_bytes: u32,
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
            piece_bytes: Parameters::default().piece_bytes,
        }
    }
}

/// The streams of tcp ([`WorkerBuilder::tcp`](crate::WorkerBuilder::tcp)).
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Tcp {
    /// The congestion control of data connections over tcp, for instance `reno`. It decides how fast this worker sends;
    /// a peer decides for itself. A name that the system refuses is logged once at level INFO, and the system's default
    /// is used: an ordinary user may choose the names in `net.ipv4.tcp_allowed_congestion_control`. Default: `None`,
    /// the system's.
    pub congestion: Option<String>,
}

impl Flow {
    pub(super) fn parameters(&self, validation: Validation) -> Parameters {
        Parameters {
            mode: self.mode,
            depth: self.depth,
            ring_bytes: self.ring_bytes,
            requests_max: self.requests_max,
            contents_max: self.contents_max,
            names_max: tensorwire_protocol::limits::NAMES_MAX,
            eager_bytes_max: self.eager_bytes_max,
            requests_per_message: self.requests_per_message,
            piece_bytes: self.piece_bytes,
            validation,
        }
    }
}
