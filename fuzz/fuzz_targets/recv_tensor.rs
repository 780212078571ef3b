#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| rendezvous::fuzzing::recv_tensor(data));
