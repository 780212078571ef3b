#![no_main]
#![allow(dead_code)] // a target calls one of the bodies

#[path = "../input.rs"]
mod input;
#[path = "../../crates/protocol/tests/fuzzed/wire.rs"]
mod wire;

libfuzzer_sys::fuzz_target!(|data: &[u8]| wire::record(data));
