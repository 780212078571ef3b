//! Whole workers in processes of their own, which are killed, stopped, blocked and starved.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod calls;
mod crash;
mod crowd;
mod harness;
mod hostile;
mod limits;
mod liveness;
mod load;
#[path = "../namespaces/mod.rs"]
mod namespaces;
mod networks;
mod one_port;
#[path = "../../../fabric/tests/own_network/mod.rs"]
mod own_network;
mod pages;
mod proxied;
mod proxy;
#[path = "../rdma/mod.rs"]
mod rdma;
mod replaced;
mod restart;
mod rogue;
mod sets;
mod shards;
mod soak;
mod stop;
mod storm;
mod subscriptions;
mod unaffected;
#[path = "../verbs_network/mod.rs"]
mod verbs_network;
#[path = "../watched/mod.rs"]
mod watched;
