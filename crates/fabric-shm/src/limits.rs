//! Every maximum and chunk size of this fabric.

/// Bytes copied or made resident in one poll, before other tasks have their turn. A cold copy of as many takes about
/// 60 µs, and filling their page table entries 55 µs.
pub(super) const CHUNK_BYTES: usize = 256 << 10;

/// The shortest payload that a second core helps to copy. For shorter ones, waking it costs more than it saves: 1 MiB
/// takes 47 µs with its help, and 33 µs without.
pub(super) const HELP_BYTES: usize = 2 << 20;

/// The shortest piece of a write that counts as part of a longer payload, for which a second core helps: so long that the most
/// pieces that are gathered are [`HELP_BYTES`] together.
pub(super) const GATHER_BYTES: usize = HELP_BYTES / BATCH_DESCRIPTORS;

/// The most bytes of pieces that are gathered. The peer learns of their end when all are copied, and may need the room in its ring.
pub(super) const GATHERED_BYTES: u64 = 8 << 20;

/// Copies that may wait for the helper.
pub(super) const HELP_QUEUE: usize = 4;

/// After this many polls that wait for the helper's last chunk, the next [`HELP_PAUSE`] copies are not shared. A chunk
/// takes 20 to 60 µs, and a poll about 1 µs.
pub(super) const HELP_WAITS: u32 = 200;

/// How many copies are not shared after one had to wait for the helper.
pub(super) const HELP_PAUSE: u32 = 32;

/// Descriptors executed in one poll.
pub(super) const BATCH_DESCRIPTORS: usize = 64;

/// Control frames read in one poll. Each may map a block, which takes some 10 µs.
pub(super) const BATCH_FRAMES: usize = 16;

/// The longest payload that is written into the descriptor ring itself. Most messages of the protocol are shorter.
pub(super) const INLINE_BYTES: usize = 192;

/// The longest payload that is written into the descriptor, so that the peer fetches one cache line.
pub(super) const SHORT_BYTES: usize = 16;

/// The deepest send queue.
pub(super) const DEPTH_MAX: u32 = 1 << 16;

/// One-sided reads that a peer may have unanswered. Each side's ring has room for as many answers beside its own
/// operations.
pub(super) const READS_MAX: u32 = 16;

/// The least number of quiet writes for which a ring has room beside its operations and answers. A quiet write is
/// complete once it is posted.
pub(super) const QUIET_MIN: u32 = 16;

/// Number of executed quiet descriptors from which on the target reports them to the peer. A ring must have more room
/// than that for quiet writes.
pub(super) const UNREPORTED_MAX: u64 = QUIET_MIN as u64 / 2;

/// The most slots of a ring.
pub(super) const SLOTS_MAX: u32 = (DEPTH_MAX + READS_MAX + QUIET_MIN).next_power_of_two();

/// Blocks of a peer mapped per connection. Each costs one mapping; a process has 65,530 by default.
pub(super) const BLOCKS_MAX: usize = 4096;

/// Leases of one connection. Each has a word on the page of the process that views the memory.
pub(super) const LEASES_MAX: u32 = 4096;

/// Views out of a peer's catalogue that one connection may hold. Each has a word on the page of the process that views
/// the memory, and replacing a tensor reads all of them.
pub(super) const CLAIMS_MAX: u32 = 256;

/// Leases that one process may hold by default, through all its connections.
pub(super) const LEASES_PER_PROCESS: u32 = 4096;

/// The longest control frame in bytes.
pub(super) const FRAME_BYTES: usize = 64;

/// Descriptors that one control frame may carry.
pub(super) const FRAME_FDS: usize = 3;

/// Part of the time limit of a connection attempt, as a divisor: a process that connects to the acceptor's socket must
/// show the token within this part.
pub(super) const CANDIDATE_SHARE: u32 = 4;
