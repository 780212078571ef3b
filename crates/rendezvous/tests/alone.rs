//! Tests that look at the whole process: its counts of copies, its metrics, its descriptors, its log. One runs at a time.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bounded;
mod fabrics;
mod rdma;
mod shown;
mod spans;
mod tap;
mod two;

#[cfg(all(feature = "ndarray", feature = "safetensors", feature = "dlpack"))]
mod array_copies;
mod catalogue;
mod copies;
mod costs;
mod observed;
mod programs;
mod receive_into;
mod report_figures;
mod secrets_in_logs;

use std::{
    cell::Cell,
    env,
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError},
};

thread_local! {
    static HAS_TURN: Cell<bool> = const { Cell::new(false) };
}

/// The process is the caller's until this is dropped.
struct Turn(#[expect(dead_code, reason = "held until the drop")] MutexGuard<'static, ()>);

impl Drop for Turn {
    fn drop(&mut self) {
        HAS_TURN.set(false);
    }
}

/// Waits until the process is the caller's. A test that calls another one must leave the turn to it.
fn turn() -> Turn {
    static TURN: Mutex<()> = Mutex::new(());
    assert!(!HAS_TURN.get(), "this test has the turn, and would wait for itself");
    let guard = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    HAS_TURN.set(true);
    Turn(guard)
}

#[test]
fn a_test_that_takes_the_turn_twice_fails_instead_of_waiting_for_itself() {
    let first = turn();
    let second = std::panic::catch_unwind(|| drop(turn()));
    assert!(second.is_err());
    drop(first);
    drop(turn());
}

/// Whether this process is for `test` alone, because what the test sets can be set once in a process. If not, such a process has
/// run and succeeded.
fn is_child(test: &str) -> bool {
    const CHILD: &str = "TENSORWIRE_ALONE_CHILD";
    if env::var_os(CHILD).is_some() {
        return true;
    }
    let mut command = Command::new(env::current_exe().unwrap());
    let output = command.args([test, "--exact", "--nocapture"]).env(CHILD, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{:?}\n{text}", output.status);
    false
}
