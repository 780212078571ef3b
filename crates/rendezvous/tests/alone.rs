//! Tests that look at the whole process: its counts of copies, its metrics, its descriptors, its log. One runs at a time.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bounded;
mod fabrics;
mod rdma;
mod shown;
mod tap;
mod two;

mod catalogue;
mod copies;
mod costs;
mod observed;
mod programs;
mod receive_into;
mod secrets_in_logs;

use std::{
    env,
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// The process is the caller's until the guard is dropped.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
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
