//! Groups whose ranks are processes that are killed, stopped, late, or started twice by mistake.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::disallowed_methods)] // the parent has no runtime that it could ask for the time

mod child;
mod descriptors;
mod growth;
mod harness;
mod isolated;
mod killed;
mod late;
#[path = "../../../rendezvous/tests/namespaces/mod.rs"]
mod namespaces;
mod networks;
mod pairs;
#[path = "../../../rendezvous/tests/rdma/mod.rs"]
mod rdma;
mod rejoined;
mod restarted;
mod served;
mod stopped;
mod two_jobs;
