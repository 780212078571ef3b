//! Trainings that fail: they print the reason, and leave no process behind.

use rustix::process::{Pid, Signal, kill_process};

use crate::program::{Running, failed, parameter_server, pid_of};

/// A training that would take hours, with all its processes known.
struct Training {
    launcher: Running,
    /// The process ids of the server, worker 0 and worker 1.
    children: Vec<Pid>,
}

impl Training {
    fn start(flags: &str) -> Self {
        let launcher = Running::start(parameter_server(&format!("--steps 100000000 {flags}")));
        let mut children = Vec::new();
        loop {
            let line = launcher.line(|line| line.starts_with("training") || line.contains(" pid "));
            if line.starts_with("training") {
                assert_eq!(children.len(), 3, "a server and two workers");
                return Self { launcher, children };
            }
            let words: Vec<&str> = line.split_whitespace().collect();
            let at = words.iter().position(|&word| word == "pid").unwrap();
            children.push(pid_of(words[at + 1].parse().unwrap()));
        }
    }

    fn until_all_are_gone(mut self) -> String {
        self.launcher.errors_until_all_are_gone()
    }
}

#[test]
fn a_process_killed_more_often_than_it_may_be_started_ends_the_training_with_an_error() {
    for (child, name) in [(0, "ps 0"), (2, "worker 1")] {
        let training = Training::start("--restarts 0");
        kill_process(training.children[child], Signal::KILL).unwrap();
        let text = training.until_all_are_gone();
        let expected = format!("parameter_server: the {name} ended before the training did: signal: 9");
        assert!(text.contains(&expected), "{text}");
    }
}

#[test]
fn killed_launcher_leaves_no_process() {
    let training = Training::start("");
    kill_process(training.launcher.pid(), Signal::KILL).unwrap();
    training.until_all_are_gone();
}

#[test]
fn interrupted_launcher_leaves_no_process() {
    let training = Training::start("--servers 1");
    kill_process(training.launcher.pid(), Signal::INT).unwrap();
    training.until_all_are_gone();
}

#[test]
fn bad_flags_name_the_flag_the_value_and_a_remedy() {
    for (flags, expected) in [
        ("--task_index=1", ["--task-index", "--job-name"]),
        ("--steps=many", ["'many' for '--steps", "invalid digit"]),
        ("--issync=2", ["'2' for '--issync", "0..=1"]),
        ("--model=linear --servers=3", ["--ps-hosts has 3 hosts", "name 2 at most"]),
        (
            "--job-name worker --task-index 3 --ps-hosts 127.0.0.1:1 --worker-hosts 127.0.0.1:2",
            ["--task-index = `3`", "give 0 to 0"],
        ),
    ] {
        let text = failed(flags);
        assert!(expected.iter().all(|part| text.contains(part)), "{flags}: {text}");
    }
}

#[test]
fn the_help_explains_every_flag() {
    let text = crate::program::trained("--help");
    for flag in [
        "--job-name",
        "--task-index",
        "--ps-hosts",
        "--worker-hosts",
        "--secret-file",
        "--patience",
        "--workers",
        "--servers",
        "--restarts",
        "--steps",
        "--issync",
        "--staleness",
        "--model",
        "--data",
        "--data-dir",
        "--steps-to-validate",
        "--checkpoint",
        "--checkpoint-secs",
        "--restore",
        "--learning-rate",
        "--seed",
        "--fabric",
        "--json",
    ] {
        assert!(text.contains(flag), "{flag}: {text}");
    }
}
