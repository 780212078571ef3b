//! Every maximum and chunk size of this fabric.

/// Bytes copied or made resident in one go before the thread is given back: about 60 µs of a cold memcpy, 55 µs
/// of page table entries.
pub(super) const CHUNK_BYTES: usize = 256 << 10;

/// The shortest payload that a second core helps to copy: below, waking it costs more than it saves (1 MiB takes 47 µs
/// with its help, and 33 µs without).
pub(super) const HELP_BYTES: usize = 2 << 20;

/// Copies that may wait for the helper.
pub(super) const HELP_QUEUE: usize = 4;

/// Turns of waiting for the helper's last chunk after which the next [`HELP_PAUSE`] copies are not shared: a chunk
/// takes 20 to 60 µs, a turn about one.
pub(super) const HELP_WAITS: u32 = 200;

/// Copies done alone after the helper made one wait.
pub(super) const HELP_PAUSE: u32 = 32;

/// Descriptors executed in one go.
pub(super) const BATCH_DESCRIPTORS: usize = 64;

/// Control frames read in one go; each may map a block, which takes some 10 µs.
pub(super) const BATCH_FRAMES: usize = 16;

/// The longest payload that rides in the descriptor ring itself: most messages of the protocol.
pub(super) const INLINE_BYTES: usize = 192;

/// The deepest send queue.
pub(super) const DEPTH_MAX: u32 = 1 << 16;

/// One-sided reads that a peer may have unanswered. Its ring has room for their answers beside its own operations.
pub(super) const READS_MAX: u32 = 16;

/// Writes that are complete once they are posted and may lie in a ring beside its operations and answers, at least.
pub(super) const QUIET_MIN: u32 = 16;

/// The most slots of a ring.
pub(super) const SLOTS_MAX: u32 = (DEPTH_MAX + READS_MAX + QUIET_MIN).next_power_of_two();

/// Blocks of a peer mapped per connection. Each costs one mapping; a process has 65,530 by default.
pub(super) const BLOCKS_MAX: usize = 4096;

/// Leases of one connection: each has a word on the page of the process that views.
pub(super) const LEASES_MAX: u32 = 4096;

/// Leases that one process may hold by default, through all its connections.
pub(super) const LEASES_PER_PROCESS: u32 = 4096;

/// The longest control frame in bytes.
pub(super) const FRAME_BYTES: usize = 64;

/// Descriptors that one control frame may carry.
pub(super) const FRAME_FDS: usize = 2;

/// A stranger at the acceptor's socket may take this fraction of the time that connecting may take.
pub(super) const CANDIDATE_SHARE: u32 = 4;
