//! Processes whose time is bounded. Other packages' tests include this with `#[path]`.

use std::{
    io::Read,
    process::{Child, Command, Output},
    sync::mpsc,
    thread,
    time::Duration,
};

/// How long any one command of a test may take.
const COMMAND_MAX: Duration = Duration::from_secs(60);

/// Runs a command, whose outputs are piped, until it exits; kills it, and fails, when it takes longer than `limit`.
pub(crate) fn finish(mut command: Command, limit: Duration) -> Output {
    let mut child = command.spawn().unwrap();
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let (done, ended) = mpsc::channel();
    let reader = thread::spawn(move || {
        let mut text = Vec::new();
        stderr.read_to_end(&mut text).unwrap();
        text
    });
    let writer = thread::spawn(move || {
        let mut text = Vec::new();
        stdout.read_to_end(&mut text).unwrap();
        let _ = done.send(());
        text
    });
    let in_time = ended.recv_timeout(limit).is_ok();
    if !in_time {
        child.kill().unwrap();
    }
    let status = child.wait().unwrap();
    let output = Output { status, stdout: writer.join().unwrap(), stderr: reader.join().unwrap() };
    assert!(in_time, "{command:?} took longer than {limit:?}: {}", text(&output));
    output
}

/// [`COMMAND_MAX`] times `TENSORWIRE_TEST_PATIENCE`: emulated machines are slow.
pub(crate) fn command_max() -> Duration {
    let patience = std::env::var("TENSORWIRE_TEST_PATIENCE").ok();
    COMMAND_MAX * patience.map_or(1, |value| value.parse().unwrap())
}

/// Both streams, for messages and searches.
pub(crate) fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// A child process, killed when the test ends.
#[derive(Debug)]
pub(crate) struct Process(pub(crate) Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
