//! The results of trainings with different numbers of processes.

use serde_json::Value;

use crate::program::{summary_value, trained};

/// Bytes of the network's parameters.
const PARAMETER_BYTES: f64 = 1_204_264.0;

/// The summary of a training for programs.
pub(crate) fn summary(flags: &str) -> Value {
    let text = trained(&format!("{flags} --json"));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

pub(crate) fn number(summary: &Value, name: &str) -> f64 {
    summary[name].as_f64().unwrap_or_else(|| panic!("no number `{name}`: {summary}"))
}

/// Each worker moves the parameters so often in a step.
fn trains_and_counts_what_it_moves(fabric: &str, times: f64) {
    const STEPS: f64 = 50.0;
    const WORKERS: f64 = 2.0;
    let summary = summary(&format!("--steps {STEPS} --workers {WORKERS} --fabric {fabric}"));
    assert_eq!(summary["transport"], fabric);
    let moved = number(&summary, "bytes_moved");
    // Besides the steps each worker fetches the last parameters.
    let least = STEPS * WORKERS * times * PARAMETER_BYTES;
    assert!(
        (least..least * 1.1).contains(&moved),
        "{moved} bytes moved, at least {least} expected: {summary}"
    );
    assert!(number(&summary, "accuracy") > 85.0 && number(&summary, "steps_per_s") > 0.0, "{summary}");
}

#[test]
fn training_over_shm_moves_gradients_and_views_parameters() {
    trains_and_counts_what_it_moves("shm", 1.0);
}

#[test]
fn training_over_tcp_moves_parameters_and_gradients() {
    trains_and_counts_what_it_moves("tcp", 2.0);
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

/// Measured: 95.6 to 95.9 %, and 96.1 % synchronously.
#[test]
fn asynchronous_training_learns_as_well() {
    for flags in ["--servers 2", "--workers 3 --staleness 0", "--fabric tcp"] {
        let summary = summary(&format!("--steps 60 --issync 0 {flags}"));
        assert!(number(&summary, "accuracy") > 91.0, "{flags}: {summary}");
    }
}

#[test]
fn asynchronous_training_with_one_worker_equals_one_process_bit_for_bit() {
    assert_eq!(number(&summary("--steps 60 --workers 1 --issync 0"), "difference"), 0.0);
}

/// Measured: 89.8 to 90.2 %.
#[test]
fn the_linear_model_learns_from_the_rows_that_are_pulled() {
    for flags in ["--servers 2", "--issync 0", "--fabric tcp"] {
        let summary = summary(&format!("--model linear --steps 200 {flags}"));
        assert!(number(&summary, "accuracy") > 86.0, "{flags}: {summary}");
        let is_sync = !flags.contains("issync");
        assert!(!is_sync || number(&summary, "difference") < 1e-5, "{flags}: {summary}");
    }
}

#[test]
fn the_linear_model_with_one_worker_equals_one_process_bit_for_bit() {
    assert_eq!(number(&summary("--model linear --steps 60 --workers 1"), "difference"), 0.0);
}

#[test]
fn accuracy_is_printed_during_the_training() {
    let text = trained("--steps 40 --steps_to_validate 10");
    for step in [10, 20, 30, 40] {
        assert!(text.contains(&format!("validation   {step} steps: ")), "{text}");
    }
    let last = text.lines().find(|line| line.starts_with("validation   40 steps: ")).unwrap();
    assert!(last.ends_with(summary_value(&text, "accuracy")), "{text}");
}
