#![no_main]
#![allow(dead_code)] // a target calls one of the bodies

#[path = "../../crates/protocol/tests/fuzzed/keys.rs"]
mod keys;

libfuzzer_sys::fuzz_target!(|data: &[u8]| keys::keys(data));
