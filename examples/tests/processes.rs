//! The examples as their users run them: processes, real shared memory, real TCP.
#![allow(clippy::unwrap_used, clippy::panic)] // a helper of tests fails by panicking, as a test does

use std::{
    io::{BufRead, BufReader, Read},
    path::PathBuf,
    process::{Child, ChildStderr, Command, Output, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

/// How long anything may take.
const LIMIT: Duration = Duration::from_secs(60);
/// Bytes of the network's parameters.
const PARAMETER_BYTES: u64 = 1_204_264;

fn example(name: &str) -> Command {
    // target/debug/deps/processes-… → target/debug/examples/NAME
    let this_test = std::env::current_exe().unwrap();
    let program: PathBuf = this_test.parent().unwrap().parent().unwrap().join("examples").join(name);
    assert!(program.exists(), "{} is missing: `cargo build --examples` makes it", program.display());
    let mut command = Command::new(program);
    command.env_remove("TENSORWIRE_SECRET_FILE").env_remove("RUST_LOG");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs to the end of the process and of all its children, which hold its streams.
fn run(mut command: Command) -> Output {
    let child = command.spawn().unwrap();
    let pid = pid_of(child.id());
    let (done, ended) = mpsc::channel();
    thread::spawn(move || done.send(child.wait_with_output().unwrap()));
    ended.recv_timeout(LIMIT).unwrap_or_else(|error| {
        // The child may have ended just now.
        let _ = kill_process(pid, Signal::KILL);
        panic!("{command:?} took longer than {LIMIT:?}: {error}")
    })
}

fn pid_of(id: u32) -> Pid {
    Pid::from_raw(i32::try_from(id).unwrap()).unwrap()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// What stands after `name` in the summary.
fn summary_value<'a>(text: &'a str, name: &str) -> &'a str {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("no `{name}`: {text}")).trim()
}

fn trains_and_counts_what_it_moves(fabric: &str) {
    const STEPS: u64 = 25;
    let mut command = example("parameter_server");
    command.args(["--steps", &STEPS.to_string(), "--fabric", fabric]);
    let output = run(command);
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    assert_eq!(summary_value(&text, "transport"), fabric);
    let moved = summary_value(&text, "bytes moved").split_whitespace().next().unwrap().replace(',', "");
    let moved: u64 = moved.parse().unwrap();
    let least = STEPS * 2 * PARAMETER_BYTES;
    assert!(
        (least..least + least / 10).contains(&moved),
        "{moved} bytes moved, at least {least} expected: {text}"
    );
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
fn server_and_workers_learn_as_well_as_one_process() {
    let mut command = example("parameter_server");
    command.args(["--steps", "600"]);
    let output = run(command);
    let text = text(&output);
    let percent = |name: &str| -> f64 {
        summary_value(&text, name).split_whitespace().next().unwrap().parse().unwrap()
    };
    // The median over seeds is within 2 points; one run may be a little further off.
    assert!(percent("accuracy") >= 90.0 && percent("accuracy") >= percent("one process") - 5.0, "{text}");
}

/// A process that is killed, if it is still there, when the test ends.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A training that would take hours, with all its processes known.
struct Training {
    launcher: Killed,
    /// Of the server, worker 0 and worker 1.
    children: Vec<Pid>,
}

impl Training {
    fn start() -> Self {
        let mut command = example("parameter_server");
        let mut launcher = Killed(command.args(["--steps", "100000000"]).spawn().unwrap());
        let stdout = BufReader::new(launcher.0.stdout.take().unwrap());
        let (found, lines) = mpsc::channel();
        thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| found.send(line)));
        let mut children = Vec::new();
        loop {
            let line =
                lines.recv_timeout(LIMIT).unwrap_or_else(|error| panic!("{error}: no training begins"));
            if line.starts_with("training") {
                assert_eq!(children.len(), 3, "a server and two workers");
                return Self { launcher, children };
            }
            let words: Vec<&str> = line.split_whitespace().collect();
            if let Some(at) = words.iter().position(|&word| word == "pid") {
                children.push(pid_of(words[at + 1].parse().unwrap()));
            }
        }
    }

    /// Reads standard error to its end: that is, until the last process that has inherited it is gone.
    fn until_all_are_gone(mut self) -> String {
        let mut stderr: ChildStderr = self.launcher.0.stderr.take().unwrap();
        let (done, ended) = mpsc::channel();
        thread::spawn(move || {
            let mut text = String::new();
            let _ = stderr.read_to_string(&mut text);
            done.send(text)
        });
        let text = ended.recv_timeout(LIMIT);
        if text.is_err() {
            for &pid in &self.children {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        text.unwrap_or_else(|error| panic!("a process is still there: {error}"))
    }
}

#[test]
fn killed_server_stops_the_workers_with_an_error() {
    let training = Training::start();
    kill_process(training.children[0], Signal::KILL).unwrap();
    let text = training.until_all_are_gone();
    assert!(text.contains("signal: 9"), "{text}");
    for worker in ["worker 0", "worker 1"] {
        // Which of the ends the launcher sees first is a race.
        let ended =
            |line: &&str| line.contains(&format!("{worker} ended")) && line.ends_with("exit status: 1");
        assert!(text.lines().any(|line| ended(&line)), "{text}");
    }
}

#[test]
fn killed_worker_ends_the_training_with_an_error() {
    let training = Training::start();
    kill_process(training.children[1], Signal::KILL).unwrap();
    let text = training.until_all_are_gone();
    assert!(text.lines().any(|line| line.contains("worker 0 ended") && line.contains("signal: 9")), "{text}");
}

#[test]
fn killed_launcher_leaves_no_process() {
    let training = Training::start();
    kill_process(pid_of(training.launcher.0.id()), Signal::KILL).unwrap();
    training.until_all_are_gone();
}

#[test]
fn interrupted_launcher_leaves_no_process() {
    let training = Training::start();
    kill_process(pid_of(training.launcher.0.id()), Signal::INT).unwrap();
    training.until_all_are_gone();
}

#[test]
fn quickstart_moves_a_tensor_between_two_processes() {
    let output = run(example("quickstart"));
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]") && text.contains("over shm"), "{text}");
}
