//! The fabric contract over the `async-rdma` crate, for comparison with the native verbs fabric.
//!
//! async-rdma registers only memory that its own allocator made, so peers cannot write a pool's blocks. So
//! `write_with_imm` writes a frame into a *landing area* at the target, which async-rdma did allocate; the target
//! copies the payload to its destination, after the checks that a NIC would make. These are two copies more than a NIC
//! needs. A frame contains what the crate does not report: the number of bytes, and their order, because the crate's
//! immediates can overtake each other on a runtime of several threads.
//!
//! `contract.txt` in this package lists the rules of the contract that this fabric does not fulfil.
#![forbid(unsafe_code)]

mod connect;
mod fabric;
mod frame;
mod link;
mod pump;

pub use fabric::{AsyncRdmaFabric, PathMtu, Settings};
