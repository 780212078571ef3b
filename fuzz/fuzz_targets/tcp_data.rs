#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tensorwire_fabric_tcp::fuzzing::tcp_data(data));
