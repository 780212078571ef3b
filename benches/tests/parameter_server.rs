//! The benchmark of a parameter server's workload as a user starts it, with a model of a few bytes. No times are
//! asserted.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    io::Read,
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

/// Far more than a few steps take.
const LIMIT: Duration = Duration::from_secs(60);

/// The output of the benchmark.
fn printed(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_parameter_server"));
    command.args(["--model", "tiny", "--rounds", "2", "--round-ms", "1"]).args(arguments);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let (done, ended) = mpsc::channel();
    thread::spawn(move || {
        let mut text = String::new();
        stdout.read_to_string(&mut text).unwrap();
        done.send(text).unwrap();
    });
    let text = ended.recv_timeout(LIMIT).unwrap_or_else(|_| {
        child.kill().unwrap();
        panic!("not done after {LIMIT:?}")
    });
    assert!(child.wait().unwrap().success(), "{text}");
    text
}

#[test]
fn each_way_is_measured_and_compared_with_tonic() {
    let lines: Vec<serde_json::Value> =
        printed(&["--json"]).lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let ways: Vec<&str> = lines.iter().map(|line| line["way"].as_str().unwrap()).collect();
    assert_eq!(ways, ["shm", "shm, views", "tcp", "tonic"]);
    for line in &lines {
        assert_eq!(
            (&line["model"], &line["bytes"], &line["rounds"]),
            (&"tiny".into(), &52.into(), &2.into())
        );
        for field in ["pull_ns", "push_ns", "step_ns", "ratio", "ratio_least", "ratio_most"] {
            assert!(line[field].as_f64().is_some_and(|number| number > 0.0), "{field}: {line}");
        }
    }
    assert_eq!(lines.last().unwrap()["ratio"], 1.0);
}

#[test]
fn without_json_it_prints_a_table() {
    let table = printed(&[]);
    assert!(table.starts_with("tiny: 6 tensors, 52 bytes; update alone "), "{table}");
    assert_eq!(table.lines().filter(|line| line.starts_with("| ")).count(), 6, "{table}");
}
