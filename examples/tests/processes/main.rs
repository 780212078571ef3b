//! The examples as their users run them: processes, real shared memory, real TCP, and RDMA where there is a
//! device.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod by_hand;
mod checkpoints;
mod data_parallel;
mod endings;
mod faults;
mod launchers;
mod program;
mod rdma;
#[path = "../../../crates/fabric/tests/rdma_devices/mod.rs"]
mod rdma_devices;
#[path = "../../../crates/collective/tests/skipped.rs"]
mod skipped;
mod training;
mod two_nodes;

use program::{example, run, text};

#[test]
fn quickstart_moves_a_tensor_between_two_processes() {
    let output = run(example("quickstart"));
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]") && text.contains("over shm"), "{text}");
}

#[test]
fn services_answer_with_each_version_of_the_weights() {
    let output = run(example("weight_sync"));
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    for service in ["service 1", "service 2"] {
        for version in 1..=20 {
            assert!(text.contains(&format!("{service} with version {version:2}: 10 -> ")), "{text}");
        }
    }
}

#[test]
fn an_archive_stores_every_frame_and_a_screen_shows_the_newest() {
    let output = run(example("frames"));
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    assert!(
        text.contains("stored 60 of 60 frames") && text.contains("frame 60: the ball is in row"),
        "{text}"
    );
}

#[test]
fn prefill_writes_a_cache_into_the_pages_of_decode_and_one_request_is_cancelled() {
    let output = run(example("kv_cache"));
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    for request in [1, 3] {
        assert!(text.contains(&format!("request {request}: 256 pages, 16777216 bytes over shm")), "{text}");
    }
    assert!(text.contains("request 2 is cancelled") && !text.contains("request 2: "), "{text}");
}

#[test]
fn a_service_answers_its_clients_and_ends_the_handler_of_one_that_waits_no_longer() {
    let output = run(example("calls"));
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    for line in [
        "client: Tensor(f32 [64]) begins with [0.",
        "token 1234 is not in the vocabulary of 1000; details [210, 4, 0, 0]",
        "client: the training takes too long",
        "service: nobody waits for the training, so it has stopped",
    ] {
        assert_eq!(text.matches(line).count(), 2, "{line}: {text}");
    }
}

#[test]
fn all_reduce_averages_over_four_processes() {
    let output = run(example("all_reduce"));
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    for rank in 0..4 {
        assert!(text.contains(&format!("rank {rank} of 4: mean 1.5 of ")), "{text}");
    }
}
