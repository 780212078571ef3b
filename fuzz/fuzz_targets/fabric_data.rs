#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| verbs_reactor::fuzzing::fabric_data(data));
