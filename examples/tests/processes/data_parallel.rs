//! Ranks that train together.

use std::process::Command;

use rustix::process::{Signal, kill_process};
use serde_json::Value;

use crate::program::{Running, example, pid_of, run, summary_value, text};

/// Maximum difference of parameters, after these few steps, if gradients are summed in another order.
const ROUNDING: f64 = 1e-4;

fn data_parallel(flags: &str) -> Command {
    let mut command = example("data_parallel");
    command.args(flags.split_whitespace());
    command
}

/// The summary of a training for programs.
fn summary(flags: &str) -> Value {
    let output = run(data_parallel(&format!("{flags} --json")));
    let text = text(&output);
    assert!(output.status.success(), "{flags}: {text}");
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn number(summary: &Value, name: &str) -> f64 {
    summary[name].as_f64().unwrap_or_else(|| panic!("no number `{name}`: {summary}"))
}

#[test]
fn one_rank_equals_one_process_bit_for_bit() {
    assert_eq!(number(&summary("--ranks 1 --steps 40"), "difference"), 0.0);
}

#[test]
fn any_number_of_ranks_reaches_the_loss_of_one_process() {
    // Ranks have different numbers of samples if these cannot be divided evenly.
    for flags in ["--ranks 2 --fabric tcp", "--ranks 4 --fabric shm", "--ranks 3 --batch 50 --seed 2"] {
        let summary = summary(&format!("{flags} --steps 40"));
        assert!(number(&summary, "difference") < ROUNDING, "{flags}: {summary}");
        let [loss, alone] = ["loss", "one_process_loss"].map(|name| number(&summary, name));
        assert!((loss - alone).abs() < ROUNDING && loss < 1.5, "{flags}: {summary}");
    }
}

#[test]
fn the_fabric_is_the_one_that_was_asked_for() {
    for fabric in ["shm", "tcp"] {
        assert_eq!(summary(&format!("--steps 5 --fabric {fabric}"))["transport"], fabric);
    }
}

/// A training whose rank `lost` of three is killed after some steps. Returns the output after that.
fn trained_without(lost: usize, fabric: &str) -> String {
    let training = Running::start(data_parallel(&format!("--ranks 3 --steps 300 --fabric {fabric}")));
    let mut pids = Vec::new();
    for rank in 0..3 {
        let line = training.line(|line| line.starts_with(&format!("rank {rank} ")));
        pids.push(line.split_whitespace().last().unwrap().parse().unwrap());
    }
    training.line(|line| line.starts_with("training     30/300"));
    kill_process(pid_of(pids[lost]), Signal::KILL).unwrap();
    training.line(|line| line.starts_with("going on     with 2 ranks after "));
    let (status, text) = training.end();
    assert!(status.success(), "{text}");
    text
}

#[test]
fn d_peer_sigkill_the_ranks_that_are_left_reach_the_loss_of_one_process() {
    // Rank 0 prints the result until it is lost.
    for (lost, fabric) in [(0, "tcp"), (2, "shm")] {
        let text = trained_without(lost, fabric);
        assert!(text.contains(&format!("rank {lost} was killed: signal: 9")), "{text}");
        assert!(text.contains(&format!("rank {lost} is lost")), "the others say whom they miss: {text}");
        let [one, alone] = ["accuracy", "one process"].map(|name| {
            let loss = summary_value(&text, name).rsplit(' ').next().unwrap();
            loss.parse::<f64>().unwrap()
        });
        assert!((one - alone).abs() < 1e-3 && one < 0.5, "{text}");
    }
}

#[test]
fn killed_launcher_leaves_no_rank() {
    let mut training = Running::start(data_parallel("--steps 100000000"));
    training.line(|line| line.starts_with("training"));
    kill_process(training.pid(), Signal::KILL).unwrap();
    training.errors_until_all_are_gone();
}

#[test]
fn bad_flags_and_variables_name_the_value_and_a_remedy() {
    for (flags, variables, expected) in [
        ("--ranks 0", vec![], ["'0' for '--ranks", "1..=64"]),
        ("--fabric pigeon", vec![], ["'pigeon' for '--fabric", "shm, tcp"]),
        ("", vec![("TENSORWIRE_RANK", "1")], ["`TENSORWIRE_SIZE` is not set", "set `TENSORWIRE_SIZE`"]),
        ("", vec![("TENSORWIRE_RANK", "1"), ("TENSORWIRE_SIZE", "2")], ["store", "TENSORWIRE_STORE"]),
    ] {
        let mut command = data_parallel(flags);
        command.envs(variables);
        let output = run(command);
        let text = text(&output);
        assert!(!output.status.success(), "{flags}: {text}");
        assert!(expected.iter().all(|part| text.contains(part)), "{flags}: {text}");
    }
}

#[test]
fn a_store_that_nobody_serves_is_named() {
    let mut command = data_parallel("--patience 1");
    let [rank, size, store] = ["TENSORWIRE_RANK", "TENSORWIRE_SIZE", "TENSORWIRE_STORE"];
    // Rank 0 serves the store itself if it can.
    command.envs([(rank, "1"), (size, "2"), (store, "127.0.0.1:9")]);
    let output = run(command);
    assert!(!output.status.success() && text(&output).contains("127.0.0.1:9"), "{}", text(&output));
}

#[test]
fn the_help_explains_every_flag() {
    let text = text(&run(data_parallel("--help")));
    for flag in
        ["--ranks", "--steps", "--batch", "--learning-rate", "--seed", "--fabric", "--patience", "--json"]
    {
        assert!(text.contains(flag), "{flag}: {text}");
    }
}
