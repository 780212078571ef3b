#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tensorwire_fabric_shm::fuzzing::shm_ring(data));
