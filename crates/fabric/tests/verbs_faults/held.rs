//! The RDMA objects of this process: those that the kernel counts (`rdma resource` of iproute2), and open descriptors
//! and mappings.

use std::{fs, process::Command};

/// Compared as a whole: every count must return to its earlier value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) contexts: usize,
    pub(crate) domains: usize,
    pub(crate) regions: usize,
    pub(crate) queue_pairs: usize,
    pub(crate) completion_queues: usize,
    /// Open file descriptors, of whatever kind.
    pub(crate) descriptors: usize,
    /// Mappings of the devices' queues.
    pub(crate) queues: usize,
    /// Mappings of pools' blocks.
    pub(crate) blocks: usize,
}

impl Held {
    pub(crate) fn now() -> Self {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let mapped = |what: &str| maps.lines().filter(|line| line.contains(what)).count();
        Self {
            contexts: tracked("ctx"),
            domains: tracked("pd"),
            regions: tracked("mr"),
            queue_pairs: tracked("qp"),
            completion_queues: tracked("cq"),
            descriptors: fs::read_dir("/proc/self/fd").unwrap().count(),
            queues: mapped("/dev/infiniband/"),
            blocks: mapped("/memfd:"),
        }
    }
}

/// The kernel's objects of this kind for threads of this process, on all devices.
fn tracked(kind: &str) -> usize {
    let output = Command::new("rdma").args(["resource", "show", kind]).output();
    let output = output.unwrap_or_else(|error| panic!("rdma, of iproute2, is needed: {error}"));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success(),
        "rdma resource show {kind}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let threads = fs::read_dir("/proc/self/task").unwrap();
    let threads: Vec<String> =
        threads.map(|thread| thread.unwrap().file_name().into_string().unwrap()).collect();
    let is_ours = |line: &&str| {
        let owner = line.split(' ').skip_while(|word| *word != "pid").nth(1);
        owner.is_some_and(|owner| threads.iter().any(|thread| thread == owner))
    };
    text.lines().filter(is_ours).count()
}
