//! What fuzzers do to the fabrics: the bodies of targets in `fuzz/fuzz_targets`, and the replay of their corpora.
//!
//! There is nothing of it in a normal build.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a finding

#[path = "../../../fuzz/input.rs"]
pub(crate) mod input;

use self::input::Input;
use crate::{ConnectionData, verbs};

pub use crate::{shm::fuzzing::shm_ring, tcp::fuzzing::tcp_stream};

/// Connection data of every fabric, and what ends say before and beside their rings.
pub fn fabric_data(data: &[u8]) {
    let mut input = Input::new(data);
    match input.below(5) {
        0 => crate::shm::fuzzing::address(input.rest()),
        1 => crate::shm::fuzzing::frame(input.rest()),
        2 => crate::tcp::fuzzing::address(input.rest()),
        3 => crate::tcp::fuzzing::greeting(input.rest()),
        _ => verbs_endpoint(input.rest()),
    }
}

fn verbs_endpoint(data: &[u8]) {
    let decoded = verbs::endpoint::Endpoint::decode(&ConnectionData(data.to_vec()));
    match decoded {
        Ok(end) => assert_eq!(verbs::endpoint::Endpoint::decode(&end.encode()), Ok(end)),
        Err(detail) => assert!(!detail.is_empty()),
    }
}

#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    use super::replay::replay;

    #[test]
    fn d_fuzz_fabric_data() {
        replay("fabric_data", super::fabric_data);
    }

    #[test]
    fn d_fuzz_shm_ring() {
        replay("shm_ring", super::shm_ring);
    }

    #[test]
    fn d_fuzz_tcp_stream() {
        replay("tcp_stream", super::tcp_stream);
    }
}
