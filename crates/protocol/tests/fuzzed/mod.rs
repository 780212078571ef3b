//! What fuzzers do to parsers and flow control, and the inputs they have found so far. `tests/pair/fuzzed.rs` fuzzes whole
//! connections.
//!
//! Each body is called by a target of `fuzz/fuzz_targets` with inputs of libFuzzer, and here with every file of the target's
//! committed corpus.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod corpora;
mod credit;
mod keys;
mod wire;

use crate::replay::replay;

#[test]
fn d_fuzz_message() {
    replay("message", wire::message);
}

#[test]
fn d_fuzz_control_frame() {
    replay("control_frame", wire::control_frame);
}

#[test]
fn d_fuzz_record() {
    replay("record", wire::record);
}

#[test]
fn d_fuzz_keys() {
    replay("keys", keys::keys);
}

#[test]
fn d_fuzz_credit() {
    replay("credit", credit::credit);
}
