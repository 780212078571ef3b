#![no_main]
#![allow(dead_code)] // a target calls one of the bodies

#[path = "../../crates/protocol/tests/pair/fuzzed.rs"]
mod fuzzed;
#[path = "../input.rs"]
mod input;
#[path = "../../crates/protocol/tests/pair/support/mod.rs"]
mod support;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzzed::connection(data));
