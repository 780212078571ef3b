//! All tests of the wire format and the protocol, in one binary: a suite is a module.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "the lints spare test functions, not their helpers"
)]

#[path = "../../../fuzz/input.rs"]
mod input;
#[path = "../../../fuzz/replay.rs"]
mod replay;
#[path = "pair/support/mod.rs"]
mod support;

mod credit;
mod credit_model;
mod fuzzed;
mod pair;
mod record;
mod validation;
mod wire;
