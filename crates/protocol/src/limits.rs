//! Every limit of the protocol.
//!
//! A peer that exceeds one is refused. A user who exceeds one gets an error that names it.

/// Version of the wire format. Both peers must have the same one. It grows when a release adds messages.
pub const WIRE_VERSION: u16 = 10;

/// Longest key or published name, in bytes of UTF-8.
pub const NAME_BYTES_MAX: usize = 1024;

/// Most dimensions of a shape.
pub const RANK_MAX: usize = 254;

/// Longest message of an error status, in bytes; longer ones are cut at a character.
pub const STATUS_MESSAGE_BYTES_MAX: usize = 2048;

/// Longest details of an error status, in bytes; longer ones are dropped.
pub const STATUS_DETAILS_BYTES_MAX: usize = 1024;

/// Largest tensor, in bytes.
pub const TENSOR_BYTES_MAX: u64 = 1 << 46;

/// Most metadata that a request lists: two bits of an immediate name one of them.
pub const KNOWN_METADATA_MAX: usize = 4;

/// Longest list of metadata in a request, in bytes; the oldest are left out.
pub const KNOWN_BYTES_MAX: usize = 6 << 10;

/// Longest content that travels inside META_DATA_RESPONSE, in bytes.
pub const EAGER_BYTES_MAX: u32 = 4 << 10;

/// Longest note, in bytes.
pub const NOTE_BYTES_MAX: usize = 4 << 10;

/// Most lanes of one channel of notes.
pub const NOTE_LANES_MAX: u16 = 64;

/// The lane of a note that comes in every lane of its channel.
pub const NOTE_EVERY_LANE: u16 = u16::MAX;

/// Most notes of one lane that were not taken. A peer that sends more breaks a rule.
pub const NOTES_UNTAKEN_MAX: usize = 64;

/// Largest encoded ring message, in bytes: the longest name with a list of metadata, or the longest eager content with
/// the highest rank, and all fixed fields.
pub const MESSAGE_BYTES_MAX: usize = 7680;

/// Smallest and largest message ring, in bytes. A ring holds at least one largest message.
pub const RING_BYTES_MIN: u32 = 8 << 10;
/// See [`RING_BYTES_MIN`].
pub const RING_BYTES_MAX: u32 = 16 << 20;

/// Size of a message ring when its connection begins, in bytes, or the agreed maximum if that is less.
pub const RING_BYTES_FIRST: u32 = 16 << 10;

/// Size of the slot of ASK and of that of ANSWER, in bytes.
pub const SLOT_BYTES: u32 = 64;

/// Size of the slot of a content's result, in bytes.
pub const RESULT_SLOT_BYTES: u32 = 64;

/// Bytes of that slot that are written.
pub const RESULT_BYTES: usize = 24;

/// Fewest and most receives that each side posts for the other: two of them are reserved for ASK and ANSWER.
pub const DEPTH_MIN: u32 = 4;
/// See [`DEPTH_MIN`].
pub const DEPTH_MAX: u32 = 4096;

/// Most content writes that one side may have under way.
pub const CONTENTS_MAX: u32 = 4096;

/// Shortest and longest pieces in which a longer content is written, in bytes.
pub const PIECE_BYTES_MIN: u32 = 4 << 10;
/// See [`PIECE_BYTES_MIN`].
pub const PIECE_BYTES_MAX: u32 = 1 << 30;

/// Most pieces of long contents that one side has under way, whichever contents they belong to.
pub const PIECES_MAX: usize = 2;

/// Most keys that have a number, per connection and direction: a step may have ten thousand.
pub const NAMES_MAX: u32 = 16 << 10;

/// Numbers that keys of any length may have. The other numbers are for keys of at most [`NAMED_BYTES_MAX`], so that the keys of a
/// peer take less than 5 MiB.
pub const LONG_NAMES_MAX: u16 = 1024;

/// See [`LONG_NAMES_MAX`].
pub const NAMED_BYTES_MAX: usize = 256;

/// Most requests that one side may have outstanding at the other.
pub const REQUESTS_MAX: u32 = 16 << 10;

/// Most contents that one connection holds for the next receives of their keys, because the receives that they came for were given
/// up. Above it, further receives of steps are refused.
pub const STASH_MAX: usize = 4096;

/// Most values that a subscription has under way.
pub const SUBSCRIPTION_VALUES_MAX: u8 = 64;

/// Most pages that one request moves.
pub const PAGES_PER_REQUEST_MAX: usize = 64;

/// Most tensors of one [list](crate::TensorList).
pub const TENSORS_PER_LIST_MAX: usize = 1024;

/// Most arguments of calls that one side requests on a connection at a time. The others wait.
pub const ARGUMENT_PULLS_MAX: usize = 16;

/// Most writes of pages that one side has under way on a connection. The others wait.
pub const PAGE_WRITES_MAX: usize = 16;

/// How many requests for pages of the peer's writes and for arguments of its calls may be made beyond the agreed number of requests: they must
/// not wait for those, which may be writes and calls that wait for the peer. Some may be of writes and calls that were given up.
pub const PULLS_MAX: u32 = 64;

/// Most requests that one message may carry.
pub const REQUESTS_PER_MESSAGE_MAX: u32 = 512;

/// Most entries of the metadata cache of one connection; the oldest is dropped for a new one.
pub const METADATA_CACHE_MAX: usize = 64 << 10;

/// Largest frame on the control plane, in bytes.
pub const CONTROL_FRAME_BYTES_MAX: usize = 1 << 20;

/// Most fabrics that one worker offers.
pub const FABRICS_MAX: usize = 16;

/// Longest reach of a fabric, in bytes.
pub const REACH_BYTES_MAX: usize = 256;

/// Longest connection data of a fabric, in bytes.
pub const CONNECTION_DATA_BYTES_MAX: usize = 4096;

/// Longest listen address, in bytes.
pub const ADDRESS_BYTES_MAX: usize = 256;

/// Most entries of one page of a tensor list.
pub const LIST_ENTRIES_MAX: usize = 4096;

/// Most peers in a report. One with the most peers and sets, all with the longest names, fits into a frame.
pub const REPORT_PEERS_MAX: usize = 1024;

/// Most sets in a report.
pub const REPORT_SETS_MAX: usize = 256;

/// Most pools in a report.
pub const REPORT_POOLS_MAX: usize = 16;

/// Longest name of a fabric, a pool or a version in a report, in bytes.
pub const REPORT_TEXT_BYTES_MAX: usize = 64;

/// Longest worker name, in bytes.
pub const WORKER_NAME_BYTES_MAX: usize = 256;

/// Most regions announced by one peer.
pub const REGIONS_MAX: usize = 64 << 10;
