//! Fuzzing of the parsers of workers: the bodies of targets in `fuzz/fuzz_targets`, and the replay of their corpora.
//!
//! Not part of a normal build.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a finding

#[path = "../../../fuzz/input.rs"]
pub(crate) mod input;
#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;

use crate::control::cluster::{ClusterSpec, TfConfig, check_address, normalise};

pub use crate::{control::handshake::fuzzing::handshake, values::sets::fuzzing::sets};

/// Parses `TF_CONFIG`, host lists and addresses. What is accepted must be consistent.
pub fn cluster(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match text.parse::<TfConfig>() {
        Ok(TfConfig { cluster, task }) => {
            holds_together(&cluster);
            if let Some((job, task)) = task {
                cluster.task_address(&job, task).unwrap();
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    let spec = ClusterSpec::new().hosts("ps", text);
    match spec.check() {
        Ok(()) => holds_together(&spec),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    let address = normalise(text);
    if check_address(&address).is_ok() {
        assert_eq!(normalise(&address), address);
    }
}

/// Checks that every task of every job has a name, and an address that can be dialled.
fn holds_together(cluster: &ClusterSpec) {
    cluster.check().unwrap();
    let mut tasks = 0;
    for job in cluster.jobs() {
        for (task, address) in cluster.job(&job).unwrap() {
            assert_eq!(cluster.address(&ClusterSpec::worker_name(&job, task)), Some(address));
            assert_eq!(check_address(address), Ok(()));
            tasks += 1;
        }
    }
    assert_eq!(tasks, cluster.names().count());
}

#[cfg(test)]
mod tests {
    use super::replay::replay;

    #[test]
    fn d_fuzz_cluster() {
        replay("cluster", super::cluster);
    }

    #[test]
    fn d_fuzz_sets() {
        replay("sets", super::sets);
    }

    #[test]
    fn d_fuzz_handshake() {
        replay("handshake", super::handshake);
    }
}
