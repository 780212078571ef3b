//! The results of trainings with different numbers of processes.

use serde_json::Value;

use crate::program::trained;

/// Bytes of the network's parameters.
const PARAMETER_BYTES: f64 = 1_204_264.0;

/// The summary of a training for programs.
fn summary(flags: &str) -> Value {
    let text = trained(&format!("{flags} --json"));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn number(summary: &Value, name: &str) -> f64 {
    summary[name].as_f64().unwrap_or_else(|| panic!("no number `{name}`: {summary}"))
}

fn trains_and_counts_what_it_moves(fabric: &str) {
    const STEPS: f64 = 50.0;
    const WORKERS: f64 = 2.0;
    let summary = summary(&format!("--steps {STEPS} --workers {WORKERS} --fabric {fabric}"));
    assert_eq!(summary["transport"], fabric);
    let moved = number(&summary, "bytes_moved");
    // Besides the steps each worker fetches the last parameters.
    let least = STEPS * WORKERS * 2.0 * PARAMETER_BYTES;
    assert!(
        (least..least * 1.1).contains(&moved),
        "{moved} bytes moved, at least {least} expected: {summary}"
    );
    assert!(number(&summary, "accuracy") > 85.0 && number(&summary, "steps_per_s") > 0.0, "{summary}");
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
fn training_with_one_worker_equals_one_process_bit_for_bit() {
    for flags in ["--steps 60 --workers 1", "--steps 60 --workers 1 --servers 3 --fabric tcp --seed 2"] {
        assert_eq!(number(&summary(flags), "difference"), 0.0, "{flags}");
    }
}

#[test]
fn training_with_four_workers_equals_one_process_within_rounding() {
    let one = summary("--steps 60 --workers 4 --servers 2");
    assert!(number(&one, "difference") < 1e-5, "{one}");
    let behind = number(&one, "one_process") - number(&one, "accuracy");
    assert!(behind <= 2.0, "{one}");
    assert_eq!(
        one["fingerprint"],
        summary("--steps 60 --workers 4 --servers 3")["fingerprint"],
        "neither the number of servers nor the order in which gradients come matters"
    );
}
