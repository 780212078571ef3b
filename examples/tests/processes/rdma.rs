//! Training over RDMA.

use crate::{
    by_hand::{cluster, ends_well, one_process},
    program::{Running, summary_value, trained},
    rdma_devices::ends,
};

/// Names the RDMA device of a process.
const DEVICE: &str = "TENSORWIRE_RDMA_DEVICE";

const TRAINING: &str = "--steps=20 --fabric=verbs";

const EQUAL: &str = "none: equal bit for bit";

fn start(job: &str, cluster: &str, device: Option<String>) -> Running {
    let mut command = one_process(cluster, job, 0);
    command.envs(device.map(|name| (DEVICE, name)));
    Running::start(command)
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn training_between_two_devices_equals_one_process_bit_for_bit() {
    let cluster = cluster(1, 1, TRAINING);
    let server = start("ps", &cluster, ends().left);
    let text = ends_well(start("worker", &cluster, ends().right));
    assert_eq!(summary_value(&text, "difference"), EQUAL);
    assert_eq!(summary_value(&text, "transport"), "verbs");
    ends_well(server);
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn training_over_verbs_with_one_worker_equals_one_process_bit_for_bit() {
    let text = trained(&format!("{TRAINING} --workers=1"));
    assert_eq!(summary_value(&text, "difference"), EQUAL);
    assert_eq!(summary_value(&text, "transport"), "verbs");
}
