#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tensorwire_rendezvous::fuzzing::sets(data));
