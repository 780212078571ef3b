#![no_main]
#![allow(dead_code)] // a target calls one of the bodies

#[path = "../../crates/cli/src/header.rs"]
mod header;

libfuzzer_sys::fuzz_target!(|data: &[u8]| header::fuzzing::header(data));
