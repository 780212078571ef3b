//! The fabric contract over the `async-rdma` crate, for comparison with the native verbs fabric.
//!
//! async-rdma registers only memory that its own allocator made, so peers cannot write a pool's blocks. What a write
//! carries is copied into a *landing area* at the target, which async-rdma did allocate, by `write_with_imm`; the
//! target copies it on, after the checks that a NIC would make. These are two copies more than a NIC needs. A frame
//! says what the crate does not: how many bytes came, and in which order, since its immediates can overtake each other
//! on a runtime of several threads.
//!
//! What the contract asks for and this fabric does not do is named in `contract.txt` beside this package.
#![forbid(unsafe_code)]

mod connect;
mod fabric;
mod frame;
mod link;
mod pump;

pub use fabric::{AsyncRdmaFabric, PathMtu, Settings};
