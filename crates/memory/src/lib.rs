//! Who owns tensor bytes, and who may still touch them.
//!
//! Memory comes in [`Block`]s: page-aligned, pre-faulted memfds that a [`Pool`] cuts into buffers and registers
//! once with every open device. A buffer lives through three types, and the type says who may touch it:
//!
//! | type | who may touch the bytes |
//! | --- | --- |
//! | [`BufMut`] | its owner alone, read and write |
//! | [`Buf`] | all code of this process, read only; a fabric may send from it |
//! | [`Granted`] | a peer, which writes it through a fabric; no slice of it can be formed here |
//!
//! `BufMut` → [`BufMut::freeze`] → `Buf`, and `BufMut` → [`BufMut::grant`] → `Granted` →
//! [`Granted::end`] → `BufMut`. A grant ends only with evidence ([`GrantEnd`]) that no write of the peer can
//! still land; without it the memory is leaked and counted, never reused. [`BufMut::divide`] gives parts of a buffer to several peers.
//!
//! Payload bytes are copied by the functions of [`copy`] only, so that tests can assert how often a tensor was
//! copied.
//!
//! ```
//! use tensorwire_memory::{Pool, PoolConfig};
//!
//! let pool = Pool::new(PoolConfig::new("source"))?;
//! let mut buffer = pool.try_alloc(16)?;
//! buffer.fill(7);
//! let shared = buffer.freeze();
//! assert_eq!(&shared[..], &[7; 16]);
//! # Ok::<(), tensorwire_memory::MemoryError>(())
//! ```

mod block;
mod buffer;
pub mod copy;
#[cfg(feature = "dlpack")]
mod dlpack;
mod error;
mod foreign;
mod huge;
mod lease;
mod limits;
mod mapping;
mod memfd;
mod owner;
mod pages;
mod poison;
mod pool;
mod sync;
mod user;

pub use block::{
    Block, BlockId, BlockVisitor, GrantEnd, GrantId, MemoryObserver, PoolConfig, PoolStats, RemoteAccess,
    RemoteTarget, Span,
};
pub use buffer::{Buf, BufMut, Divided, Exposure, Granted, Loan, Retired};
#[cfg(feature = "dlpack")]
pub use dlpack::DlpackMemory;
pub use error::{MemoryError, VisitError};
pub use foreign::{ForeignMemory, GivenMemory, Place};
pub use huge::HugePages;
pub use lease::Lease;
pub use limits::Limit;
pub use mapping::Mapping;
pub use owner::{NotOwnUser, check_own_user, check_own_user_is_certain};
pub use pool::{Alloc, Pool};
pub use user::{Joined, UserMemory};

/// Every buffer starts at a multiple of this many bytes, so that rows of any element type are aligned and no
/// two buffers share a cache line.
pub const ALIGNMENT: usize = 64;
