//! The store that a worker serves to its peers.
//!
//! A [`MemoryStore`](super::MemoryStore) is served at its worker's port, over the sessions of peers: [`service`] answers their
//! requests, [`wire`] encodes them, and [`WorkerStore`] asks.

mod client;
mod service;
mod wire;

pub use self::client::WorkerStore;
pub(super) use self::service::Served;
