//! Runs the examples within a time limit, and reads their output.

use std::{
    io::{BufRead, BufReader, Read},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::{
        LazyLock,
        mpsc::{self, Receiver},
    },
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

/// The limit of each operation: a minute, times `TENSORWIRE_TEST_PATIENCE` where that is set, for emulated machines.
pub(crate) static LIMIT: LazyLock<Duration> = LazyLock::new(|| {
    let patience = std::env::var("TENSORWIRE_TEST_PATIENCE").ok();
    Duration::from_secs(60) * patience.map_or(1, |value| value.parse().unwrap())
});

pub(crate) fn example(name: &str) -> Command {
    // target/debug/deps/processes-… → target/debug/examples/NAME
    let this_test = std::env::current_exe().unwrap();
    let program: PathBuf = this_test.parent().unwrap().parent().unwrap().join("examples").join(name);
    assert!(program.exists(), "{} is missing: `cargo build --examples` makes it", program.display());
    let mut command = Command::new(program);
    command.env_remove("TENSORWIRE_SECRET_FILE").env_remove("RUST_LOG");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The parameter server with these flags. It learns digits, also where Fashion-MNIST is installed.
pub(crate) fn parameter_server(flags: &str) -> Command {
    let mut command = example("parameter_server");
    command.args(["--data", "digits"]).args(flags.split_whitespace());
    command
}

/// Runs until the process and all its children, which hold its streams, have exited.
pub(crate) fn run(mut command: Command) -> Output {
    let child = command.spawn().unwrap();
    let pid = pid_of(child.id());
    let (done, ended) = mpsc::channel();
    thread::spawn(move || done.send(child.wait_with_output().unwrap()));
    ended.recv_timeout(*LIMIT).unwrap_or_else(|error| {
        // The child may have ended just now.
        let _ = kill_process(pid, Signal::KILL);
        panic!("{command:?} took longer than {:?}: {error}", *LIMIT)
    })
}

pub(crate) fn pid_of(id: u32) -> Pid {
    Pid::from_raw(i32::try_from(id).unwrap()).unwrap()
}

pub(crate) fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Runs a whole training that must succeed; returns its output.
pub(crate) fn trained(flags: &str) -> String {
    let output = run(parameter_server(flags));
    let text = text(&output);
    assert!(output.status.success(), "{flags}: {text}");
    text
}

/// Runs a training that must fail; returns its output.
pub(crate) fn failed(flags: &str) -> String {
    let output = run(parameter_server(flags));
    let text = text(&output);
    assert!(!output.status.success(), "{flags}: {text}");
    text
}

/// The text after `name` in the summary.
pub(crate) fn summary_value<'a>(text: &'a str, name: &str) -> &'a str {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("no `{name}`: {text}")).trim()
}

/// A process that is killed at the end of the test, if it still runs.
pub(crate) struct Running {
    child: Child,
    stdout: Receiver<String>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (found, stdout) = mpsc::channel();
        thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| found.send(line)));
        Self { child, stdout }
    }

    pub(crate) fn pid(&self) -> Pid {
        pid_of(self.child.id())
    }

    /// Reads to the first line that `is_meant`.
    pub(crate) fn line(&self, is_meant: impl Fn(&str) -> bool) -> String {
        loop {
            let line = self.stdout.recv_timeout(*LIMIT);
            let line = line.unwrap_or_else(|error| panic!("{error}: the line did not come"));
            if is_meant(&line) {
                return line;
            }
        }
    }

    /// Reads standard error until the last process that has inherited it is gone.
    pub(crate) fn errors_until_all_are_gone(&mut self) -> String {
        let mut stderr = self.child.stderr.take().unwrap();
        let (done, ended) = mpsc::channel();
        thread::spawn(move || {
            let mut text = String::new();
            let _ = stderr.read_to_string(&mut text);
            done.send(text)
        });
        ended.recv_timeout(*LIMIT).unwrap_or_else(|error| panic!("a process is still there: {error}"))
    }

    /// Waits until it exits; returns its status, and its unread output.
    pub(crate) fn end(mut self) -> (ExitStatus, String) {
        let errors = self.errors_until_all_are_gone();
        let mut text: Vec<String> = Vec::new();
        while let Ok(line) = self.stdout.recv_timeout(*LIMIT) {
            text.push(line);
        }
        (self.child.wait().unwrap(), text.join("\n") + &errors)
    }
}
