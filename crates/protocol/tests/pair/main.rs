//! Pairs of connections, moved by hand.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "the lints spare test functions, not their helpers"
)]

mod cancel;
mod eager;
mod failure;
mod flow;
mod fuzzed;
#[path = "../../../../fuzz/input.rs"]
mod input;
mod known;
mod load;
mod misbehaviour;
#[path = "../../../../fuzz/replay.rs"]
mod replay;
mod sequences;
mod several;
mod stash;
mod support;
mod validation;
mod version;
mod view;
