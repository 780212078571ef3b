//! All tests on the simulator, in one binary: a suite is a module.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod cluster;
mod common;
#[path = "../../fabric/tests/contract/mod.rs"]
#[macro_use]
mod contract;
mod each_event;
mod figures;
mod points;
mod shrunk;

mod across;
mod boards;
mod both_dial;
mod calls;
mod cancel;
mod control;
mod device;
mod discovery;
mod fabric;
mod faults;
mod flips;
mod group_end;
mod groups;
mod half_pool;
mod hostile;
#[path = "../../collective/tests/join_all.rs"]
mod join_all;
mod life;
mod loans;
mod message_tables;
mod misdirected;
mod notes;
mod original;
mod outage;
mod pages;
mod pieces;
#[cfg(feature = "planted-bugs")]
mod planted;
mod published;
mod reconnect;
mod refusals;
mod seeds;
mod select;
mod sets;
mod shards;
#[cfg(feature = "planted-bugs")]
mod shrinking;
mod stops;
mod subscriptions;
mod unanswered;
mod world;
