#![no_main]
#![allow(dead_code)] // a target calls one of the bodies

#[path = "../../crates/protocol/tests/fuzzed/credit.rs"]
mod credit;
#[path = "../input.rs"]
mod input;

libfuzzer_sys::fuzz_target!(|data: &[u8]| credit::credit(data));
