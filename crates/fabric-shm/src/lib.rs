//! Shared memory between processes of one host and one trust domain.
//!
//! Each process writes only memory it made itself and maps the other's read-only, so a hostile peer can spoil only what
//! it sends. A write is a descriptor in a ring; the *target* executes it: it checks the access as a NIC would, copies
//! the bytes out of a read-only mapping of the source block, and delivers the immediate. The requester spends no CPU on
//! copies.
//!
//! | module | responsibility |
//! | --- | --- |
//! | `fabric` | the fabric's objects |
//! | `handshake`, `frame` | from two prepared sides to a connection, over a Unix socket |
//! | `ring` | descriptors, and their shared pages |
//! | `import` | checking and mapping the peer's memory |
//! | `doorbell` | waking the peer |
//! | `board` | words that the peer reads without a message |
//! | `catalogue` | published contents that the peer reads without a message |
//! | `lease`, `loan` | views without a copy: the producer's records, the consumer's half |
//! | `producer` | the requester's half of a connection |
//! | `reads` | one-sided reads, both ways |
//! | `target` | the target's half |
//! | `copying`, `helper`, `chunks` | copies out of the peer's memory, and a second core for long ones |
//! | `link`, `driver` | who makes progress, and when |
//! | `ending` | why a connection ends, and how each side learns of it |
//! | `words`, `sequence` | the steps on single shared words, for models |
//! | `sys` | system calls as safe functions |

#[macro_use]
mod log;

mod board;
mod catalogue;
mod chunks;
mod connection;
mod copying;
mod doorbell;
mod driver;
mod ending;
mod fabric;
mod frame;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod handshake;
mod helper;
mod import;
mod lease;
mod limits;
mod link;
mod loan;
mod producer;
mod reads;
#[cfg(any(test, fuzzing))]
mod rig;
mod ring;
mod sequence;
mod sync;
mod sys;
mod tail;
mod target;
#[cfg(test)]
mod tests;
mod words;

pub use fabric::ShmFabric;
