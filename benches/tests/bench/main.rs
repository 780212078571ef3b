//! `tensorwire-bench` as a user starts it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../crates/cli/tests/common/process.rs"]
mod process;
#[path = "../../../crates/fabric/tests/rdma_devices/mod.rs"]
mod rdma_devices;
mod suites;

use std::process::{Command, Output, Stdio};

use process::{command_max, finish, text};

/// The program with `arguments`.
fn tensorwire_bench(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tensorwire-bench"));
    command.args(arguments).env_remove("RUST_LOG");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs the program until it exits. If that takes too long, kills it and fails.
fn run(arguments: &[&str]) -> Output {
    finish(tensorwire_bench(arguments), command_max())
}

/// Runs the program, which must succeed, and returns its output.
fn succeed(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output));
    text(&output)
}

/// Runs the program, which must fail with code 1, and returns its output.
fn fail(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {}", text(&output));
    text(&output)
}
