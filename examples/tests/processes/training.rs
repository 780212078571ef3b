//! What is learnt, by how many processes ever.

use crate::program::{summary_number, summary_value, trained};

/// Bytes of the network's parameters.
const PARAMETER_BYTES: f64 = 1_204_264.0;

fn trains_and_counts_what_it_moves(fabric: &str) {
    const STEPS: f64 = 50.0;
    let text = trained(&format!("--steps {STEPS} --fabric {fabric}"));
    assert_eq!(summary_value(&text, "transport"), fabric);
    let moved = summary_number(&text, "bytes moved");
    // Besides the steps the chief gives the server its first parameters, and fetches a checkpoint at the end.
    let least = STEPS * 2.0 * PARAMETER_BYTES;
    assert!((least..least * 1.1).contains(&moved), "{moved} bytes moved, at least {least} expected: {text}");
    assert!(summary_value(&text, "accuracy").contains("540 held-out"), "{text}");
}

#[test]
fn training_over_shm_moves_parameters_and_gradients() {
    trains_and_counts_what_it_moves("shm");
}

#[test]
fn training_over_tcp_moves_parameters_and_gradients() {
    trains_and_counts_what_it_moves("tcp");
}

#[test]
fn training_over_grpc_moves_parameters_and_gradients() {
    trains_and_counts_what_it_moves("grpc");
}

#[test]
fn synchronous_training_with_one_worker_equals_one_process_bit_for_bit() {
    for flags in [
        "--steps 60 --issync --workers 1",
        "--steps 60 --issync --workers 1 --servers 3 --fabric tcp --seed 2",
        "--steps 300 --issync --workers 1 --servers 2 --model linear",
    ] {
        let text = trained(flags);
        assert_eq!(summary_value(&text, "difference"), "none: equal bit for bit", "{flags}");
    }
}

#[test]
fn synchronous_training_with_four_workers_equals_one_process_within_rounding() {
    let text = trained("--steps 60 --issync --workers 4 --servers 2");
    assert!(summary_number(&text, "difference") < 1e-5, "{text}");
    let again = trained("--steps 60 --issync --workers 4 --servers 3");
    assert_eq!(
        summary_value(&text, "fingerprint"),
        summary_value(&again, "fingerprint"),
        "neither the number of servers nor the order in which gradients come matters"
    );
}

#[test]
fn asynchronous_training_learns_as_well_as_one_process() {
    let mut behind: Vec<f64> = (1..=5)
        .map(|seed| {
            let text = trained(&format!("--steps 200 --seed {seed}"));
            summary_number(&text, "one process") - summary_number(&text, "accuracy")
        })
        .collect();
    behind.sort_by(f64::total_cmp);
    assert!(behind[2] <= 2.0, "the median over seeds is more than 2 points behind: {behind:?}");
}

#[test]
fn a_worker_is_never_further_ahead_than_the_staleness_allows() {
    for staleness in [0, 2] {
        let flags = format!("--steps 60 --workers 3 --staleness {staleness} --slow worker:2@20ms");
        // The server ends with an error when the bound is broken.
        let text = trained(&flags);
        let ahead = format!("a worker was {staleness} steps ahead at most");
        assert!(summary_value(&text, "gradients").ends_with(&ahead), "the bound was not reached: {text}");
    }
}

#[test]
fn backup_workers_replace_the_slow_one_whose_gradients_are_dropped() {
    let text = trained("--steps 60 --issync --workers 3 --backup-workers 1 --slow worker:2@50ms");
    assert!(summary_number(&text, "gradients") > 0.0, "{text}");
    assert!(summary_number(&text, "accuracy") > 85.0, "{text}");
}

#[test]
fn the_line_prints_its_loss_and_is_found() {
    let text = trained(
        "--model linear --issync --workers 2 --steps 3000 --learning-rate 0.003 --steps-to-validate 1000",
    );
    for step in [1000, 2000] {
        assert!(text.contains(&format!("step {step}     loss ")), "{text}");
    }
    assert!(summary_number(&text, "result       loss").is_finite(), "{text}");
    assert!(summary_value(&text, "result").contains("bias 9.") || text.contains("bias 10."), "{text}");
}
