//! Too many peers, and peers that only take: memory and descriptors stay bounded, and honest peers go on.
//!
//! Attackers are processes of their own. Sizes are small unless the environment sets others: `TENSORWIRE_PEERS` for
//! workers, `TENSORWIRE_DIALS` for connections of attackers.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod attacker;
mod cores;
mod descriptors;
mod dials;
#[path = "../processes/harness.rs"]
#[allow(dead_code)] // `processes` uses the rest
mod harness;
mod hoarding;
mod oversized;
#[path = "../rdma/mod.rs"]
#[allow(dead_code)] // `processes` uses the rest
mod rdma;
mod stage;
mod storm;
mod strangers;
mod throughput;
