//! One TCP stream per queue pair.
//!
//! A write is a header and its payload in one system call, straight from the registered buffer; the target
//! checks the header and has the kernel put the payload straight into the granted memory. Only small payloads, and up to
//! 4 KiB at the beginning of a larger one, are copied in user space: so one system call sends or receives many of them.
//!
//! | module | responsibility |
//! | --- | --- |
//! | `fabric` | the fabric, its domains, and the connecting of a prepared queue pair |
//! | `port` | streams of dialing peers, distinguished by one-use tickets |
//! | `listener` | the listener of a fabric that has a port of its own |
//! | `handshake` | connection data, hello and welcome, in bytes |
//! | `frame` | the stream's frames, in bytes |
//! | `outgoing` | queued writes, requests and answers, and their frames |
//! | `sender` | posted writes, gathered into as few system calls as possible |
//! | `gathering` | whether a write waits for others |
//! | `reads` | one-sided reads of this side, requested in parts |
//! | `ahead` | bytes that were read before it is known what they are |
//! | `receiver` | received frames: their checks, and the copy into granted memory |
//! | `link` | one connection: both halves, and how it ends |
//! | `closing` | a request to end a connection |
//! | `door`, `strangers`, `pace` | limits on connections whose peers have not proven themselves |
//! | `tls` | certificates and TLS handshakes (feature `tls`) |
//! | `driver` | the background task of one connection |
//! | `protection` | whether streams are encrypted, and the handshake of those that are |
//! | `sealed` | the records of an encrypted stream (feature `tls`) |
//! | `congestion` | the congestion control of streams |
//! | `dial` | connecting, for every dialler of the project |
//! | `socket` | the system calls |
//!
//! # The stream
//! After the handshake each direction is a sequence of frames with a fixed little-endian header of 40 bytes:
//!
//! | bytes | field | in a write | in a refusal |
//! | --- | --- | --- | --- |
//! | 0 | kind | 1 write, 2 write with immediate, 5 write that goes on | 4 (3 is a goodbye, all else zero) |
//! | 1 | reason | 0 | the rule that was broken |
//! | 2..4 | reserved | 0 | 0 |
//! | 4..8 | region | the target's region | 0 |
//! | 8..12 | generation | of the region | 0 |
//! | 12..16 | key | of the region | 0 |
//! | 16..20 | immediate | for kind 2, else 0 | the receive depth, if receives ran out |
//! | 20..24 | length | payload bytes in this frame, at most 1 MiB | 0 |
//! | 24..32 | offset | where they go in the region | 0 |
//! | 32..40 | rest | bytes of the range from here on | 0 |
//!
//! A range of more than 1 MiB is several frames that continue each other; only the last one (`length` equals
//! `rest`) can be of kind 2 or 5. The first one announces the whole range in `rest`, and the target checks all of
//! it before it reads a byte of the payload, as a NIC does. An empty write touches no memory and names no region.
//! A logical write with immediate and many ranges (segments, or the pieces of a very long one) is those ranges one
//! after the other, all but the last ending in kind 5 and the last in kind 2, whose arrival has the bytes of all; without
//! an immediate its ranges are writes of their own. Between two frames of one logical write nothing can come but a
//! goodbye or a refusal.
//!
//! A read is a header of kind 6 without payload: region, generation, key, offset and `rest`, the requested bytes (at
//! most 4 MiB; a longer read is requested in parts), and a number in the field of the immediate. Its answer, of kind
//! 7, carries that number, `length` and `rest`, and payload as a write does. Reads are answered in their order,
//! between logical writes. At most 16 may be unanswered, which bounds the memory that a target queues for its peer.

#[macro_use]
mod log;

mod ahead;
#[cfg(test)]
mod clock;
mod closing;
mod congestion;
mod dial;
mod door;
mod driver;
mod fabric;
mod frame;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod gathering;
mod handshake;
mod link;
mod listener;
mod outgoing;
mod pace;
mod port;
mod protection;
mod reads;
mod receiver;
#[cfg(feature = "tls")]
mod sealed;
mod sender;
mod socket;
mod strangers;
#[cfg(test)]
mod tests;
#[cfg(feature = "tls")]
pub mod tls;

pub use congestion::Congestion;
pub use dial::Dial;
pub use door::{Door, DoorStats, Guest, Newcomer, Presence, Stranger, Visit, listen};
pub use fabric::{ListenerStats, TcpConfig, TcpFabric};
pub use pace::Pace;
pub use port::DataPort;
pub use protection::Stream;
