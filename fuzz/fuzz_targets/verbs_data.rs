#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tensorwire_verbs_reactor::fuzzing::verbs_data(data));
