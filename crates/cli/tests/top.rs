//! `tensorwire top` as a process.
#![allow(clippy::unwrap_used, clippy::panic)] // a helper of tests fails by panicking, as a test does

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    path::Path,
    process::Stdio,
    time::Duration,
};

use rustix::{
    fs::{Mode, OFlags},
    process::{Pid, Signal, kill_process},
    termios::{Winsize, tcsetwinsize},
};
use serde_json::Value;

use crate::{
    common::{Lines, Process, Server, fail_with, file_of, finish, run, succeed, tensorwire, text},
    json::assert_documented,
    pull::{in_time, terminal},
};

/// Bytes of the tensor `w`: too many for a catalogue, and the server counts what it sends.
const BYTES: usize = 100_000;

fn served(directory: &Path) -> Server {
    let file = directory.join("file.safetensors");
    fs::write(&file, file_of([("w", &vec![7; BYTES][..])])).unwrap();
    Server::start(&file, &[])
}

/// A running `top`, and its lines.
fn start(address: &str, more: &[&str]) -> (Process, Lines) {
    let mut command = tensorwire(&[&["top", address, "--interval", "0.1"], more].concat());
    command.stderr(Stdio::inherit());
    let mut process = Process(command.spawn().unwrap());
    let lines = process.lines();
    (process, lines)
}

fn view(lines: &Lines) -> Value {
    let view: Value = serde_json::from_str(&lines.after("")).unwrap();
    assert_eq!((&view["event"], &view["version"]), (&"report".into(), &1.into()), "{view}");
    assert_documented(&view);
    view
}

fn pull(address: &str, often: &str) {
    succeed(&["pull", address, "--tensor", "w", "--fabric", "tcp", "--repeat", often]);
}

#[test]
fn one_view_is_one_line_of_json_with_the_worker_its_sets_and_what_it_has_sent() {
    let directory = tempfile::tempdir().unwrap();
    let server = served(directory.path());
    pull(&server.address, "37");
    let output = run(&["top", &server.address, "--once", "--json", "--interval", "0.1"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    assert!(output.stderr.is_empty(), "{}", text(&output));
    let line = String::from_utf8(output.stdout).unwrap();
    assert_eq!(line.matches('\n').count(), 1, "{line}");
    let view: Value = serde_json::from_str(&line).unwrap();
    assert_documented(&view);
    let worker = &view["worker"];
    assert_eq!(worker["name"], "/job:serve/replica:0/task:0", "{view}");
    assert_eq!(
        (&worker["address"], &worker["version"]),
        (&(*server.address).into(), &env!("CARGO_PKG_VERSION").into())
    );
    assert_eq!(worker["incarnation"].as_str().unwrap().len(), 16, "{view}");
    // The header of the file is pulled once, with the checksums and tensors that a pull needs.
    let total = &view["total"];
    let (values, bytes) = (total["values_sent"].as_u64().unwrap(), total["bytes_sent"].as_u64().unwrap());
    let header = fs::metadata(directory.path().join("file.safetensors")).unwrap().len() - BYTES as u64;
    assert!((37..=39).contains(&values), "{view}");
    assert!(bytes >= 37 * BYTES as u64 && bytes <= 37 * BYTES as u64 + 2 * header, "{view}");
    assert_eq!((&total["values_received"], &total["losses"]), (&0.into(), &0.into()), "{view}");
    let rates = &total["rates"];
    assert_eq!(
        (&rates["values_sent_per_second"], &rates["bytes_sent_per_second"]),
        (&0.0.into(), &0.0.into())
    );
    assert!(view["interval_seconds"].as_f64().unwrap() >= 0.1, "{view}");
    assert_eq!(view["sets"][0]["name"], "files", "{view}");
    assert!(view["pools"].as_array().unwrap().iter().any(|pool| pool["name"] == "source"), "{view}");
    assert_eq!((&view["slowest"], &view["peers_left_out"]), (&Value::Null, &0.into()), "{view}");
}

#[test]
fn the_sum_of_the_rates_of_all_views_is_what_was_pulled() {
    let directory = tempfile::tempdir().unwrap();
    let server = served(directory.path());
    let (_top, lines) = start(&server.address, &["--json"]);
    let first = view(&lines);
    assert_eq!((&first["interval_seconds"], &first["total"]["rates"]), (&Value::Null, &Value::Null));
    pull(&server.address, "37");
    let (mut sent, mut moved) = (0.0, 0.0);
    let end = succeed(&["top", &server.address, "--once", "--json", "--interval", "0.1"]);
    let end: Value = serde_json::from_str(&end).unwrap();
    let values = end["total"]["values_sent"].as_u64().unwrap();
    loop {
        let view = view(&lines);
        let (seconds, rates) = (view["interval_seconds"].as_f64().unwrap(), &view["total"]["rates"]);
        sent += seconds * rates["values_sent_per_second"].as_f64().unwrap();
        moved += seconds * rates["bytes_sent_per_second"].as_f64().unwrap();
        if view["total"]["values_sent"].as_u64() == Some(values) {
            break;
        }
    }
    assert!((sent - values as f64).abs() < 0.01 && values >= 37, "{sent} {end}");
    assert!((moved - end["total"]["bytes_sent"].as_f64().unwrap()).abs() < 1.0, "{moved} {end}");
}

#[test]
fn a_worker_that_is_gone_ends_top_with_4() {
    let directory = tempfile::tempdir().unwrap();
    let mut server = served(directory.path());
    let (mut top, lines) = start(&server.address, &["--json", "-q"]);
    view(&lines);
    server.process.0.kill().unwrap();
    assert_eq!(top.0.wait().unwrap().code(), Some(4));
    let message = fail_with(4, &["top", &server.address, "--once"]);
    assert!(message.contains(&server.address), "{message}");
}

#[test]
fn a_signal_ends_top_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let server = served(directory.path());
    for signal in [Signal::INT, Signal::TERM] {
        let (mut top, lines) = start(&server.address, &[]);
        lines.after("slowest: ");
        kill_process(Pid::from_child(&top.0), signal).unwrap();
        assert_eq!(top.0.wait().unwrap().code(), Some(0), "{signal:?}");
    }
}

#[test]
fn a_reader_that_closes_its_pipe_ends_top_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let server = served(directory.path());
    let mut command = tensorwire(&["top", &server.address, "--interval", "0.1"]);
    let mut top = Process(command.spawn().unwrap());
    let mut line = String::new();
    // Dropped after the first line, as by `head -1`.
    BufReader::new(top.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("/job:serve/replica:0/task:0 at "), "{line}");
    assert_eq!(top.0.wait().unwrap().code(), Some(0));
    let mut errors = String::new();
    top.0.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert_eq!(errors, "");
}

#[test]
fn what_is_no_terminal_gets_plain_lines() {
    let directory = tempfile::tempdir().unwrap();
    let server = served(directory.path());
    let output = run(&["top", &server.address, "--once", "--interval", "0.1"]);
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(!shown.contains('\x1b'), "{shown:?}");
    let lines: Vec<&str> = shown.lines().collect();
    assert!(lines[1].starts_with("peers 1, 0 connected; sessions 1; errors 0"), "{shown}");
    for word in ["slowest: nothing has waited", "fabric", "all ", "files ", "source "] {
        assert!(shown.contains(word), "`{word}`: {shown}");
    }
}

/// The first view on a terminal, as it is written.
fn on_terminal(address: &str, variables: &[(&str, &str)]) -> String {
    let (mut master, device) = terminal();
    tcsetwinsize(&master, Winsize { ws_row: 5, ws_col: 40, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let slave = rustix::fs::open(&device, flags, Mode::empty()).unwrap();
    let mut command = tensorwire(&["top", address, "--interval", "0.1", "-q"]);
    command
        .env("TERM", "xterm")
        .env_remove("NO_COLOR")
        .envs(variables.iter().copied())
        .stdout(Stdio::from(slave));
    let _top = Process(command.spawn().unwrap());
    in_time(move || {
        let mut shown = Vec::new();
        while String::from_utf8_lossy(&shown).matches("more lines").count() < 2 {
            let mut bytes = [0; 4096];
            let count = master.read(&mut bytes).unwrap();
            shown.extend_from_slice(&bytes[..count]);
        }
        String::from_utf8_lossy(&shown).into_owned()
    })
}

#[test]
fn a_terminal_shows_one_view_in_place_of_the_one_before() {
    let directory = tempfile::tempdir().unwrap();
    let server = served(directory.path());
    let shown = on_terminal(&server.address, &[]);
    assert!(shown.starts_with("\x1b[H\x1b[2J\x1b[3J\x1b[1m/job:serve/replica:0/task:0 at "), "{shown:?}");
    assert!(shown.matches("\x1b[2J").count() >= 2, "{shown:?}");
    for line in shown.split("\r\n") {
        let plain = line.replace("\x1b[H\x1b[2J\x1b[3J", "").replace("\x1b[1m", "").replace("\x1b[0m", "");
        assert!(plain.chars().count() <= 40 || plain.contains("more lines"), "{plain:?}");
    }
    // Without colours the screen is cleared all the same.
    let shown = on_terminal(&server.address, &[("NO_COLOR", "1")]);
    assert!(shown.contains("\x1b[2J") && !shown.contains("\x1b[1m"), "{shown:?}");
    let mut dumb = tensorwire(&["top", &server.address, "--once", "--interval", "0.1"]);
    dumb.env("TERM", "dumb");
    assert!(!text(&finish(dumb, Duration::from_secs(60))).contains('\x1b'));
}

#[test]
fn an_interval_that_is_none_is_refused_with_the_range() {
    for interval in ["0", "-1", "x", "NaN", "1e9"] {
        let message = fail_with(2, &["top", "127.0.0.1:1", &format!("--interval={interval}")]);
        assert!(message.contains("0.1 to 86400"), "{message}");
    }
}
