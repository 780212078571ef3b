//! The fuzz target of this crate: called by `fuzz/fuzz_targets`, and by the replay of its corpus.
//!
//! A normal build does not contain this module.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a finding

use tensorwire_fabric::ConnectionData;

use crate::endpoint;

/// Connection data either do not decode, or equal the encoding of their decoded endpoint.
pub fn verbs_data(data: &[u8]) {
    let decoded = endpoint::Endpoint::decode(&ConnectionData(data.to_vec()));
    match decoded {
        Ok(end) => assert_eq!(endpoint::Endpoint::decode(&end.encode()), Ok(end)),
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
    fn d_fuzz_verbs_data() {
        replay("verbs_data", super::verbs_data);
    }
}
