//! `--json` and `--quiet` of every subcommand.
#![allow(clippy::unwrap_used, clippy::panic)] // a helper of tests fails by panicking, as a test does

use std::{fs, path::Path, process::Stdio};

use serde_json::Value;

use crate::common::{
    Lines, Process, Server, fail_with, file_of, finish, replace, run, small_checkpoint, tensorwire, text,
};

/// A command that goes on, and its lines.
fn start(arguments: &[&str]) -> (Process, Lines) {
    let mut command = tensorwire(arguments);
    command.stderr(Stdio::inherit());
    let mut process = Process(command.spawn().unwrap());
    let lines = process.lines();
    (process, lines)
}

/// The next line, which is JSON of this event.
fn event(lines: &Lines, name: &str) -> Value {
    let line: Value = serde_json::from_str(&lines.after("")).unwrap();
    assert_eq!(line["event"], name, "{line}");
    assert_documented(&line);
    line
}

/// Checks that the book names every field of `value`.
pub(crate) fn assert_documented(value: &Value) {
    match value {
        Value::Object(object) => {
            for (name, value) in object {
                let page = include_str!("../../../docs/src/command.md");
                assert!(page.contains(&format!("`{name}`")), "docs/src/command.md does not name `{name}`");
                assert_documented(value);
            }
        }
        Value::Array(values) => values.iter().for_each(assert_documented),
        _ => {}
    }
}

/// The one document that a command prints, and its messages.
fn document(arguments: &[&str]) -> (Value, String) {
    let output = run(arguments);
    assert!(output.status.success(), "{}", text(&output));
    let value = serde_json::from_slice(&output.stdout).unwrap();
    assert_documented(&value);
    (value, String::from_utf8(output.stderr).unwrap())
}

fn text_of(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_pull_is_one_document_and_its_messages_are_on_standard_error() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&small_checkpoint(directory.path()), &[]);
    let copy = directory.path().join("copy");
    let pull = ["pull", &server.address, "-o", text_of(&copy), "--repeat", "2", "--json", "--fabric", "tcp"];
    let (value, messages) = document(&[&pull[..], &["--stats"]].concat());
    assert_eq!((&value["version"], &value["server"]), (&1.into(), &server.address.clone().into()));
    assert_eq!(value["output"], text_of(&copy), "{value}");
    let rounds = value["rounds"].as_array().unwrap();
    assert_eq!(rounds.len(), 2, "{value}");
    assert_eq!((&rounds[1]["tensors"], &rounds[1]["bytes"]), (&1.into(), &4.into()), "{value}");
    assert_eq!(rounds[1]["transport"], "tcp", "{value}");
    assert_eq!(rounds[1]["stats"]["sent"]["tensor_request"], 1, "{value}");
    assert!(messages.contains("round 2: 1 tensors") && messages.contains("wrote "), "{messages}");

    let (value, messages) = document(&[&pull[..2], &["--json", "-q"]].concat());
    assert_eq!((&value["output"], &value["rounds"][0]["stats"]), (&Value::Null, &Value::Null));
    assert_eq!(messages, "");
}

#[test]
fn a_failure_prints_no_document() {
    let output = run(&["pull", "127.0.0.1:1", "--json"]);
    assert_eq!((output.status.code(), output.stdout.is_empty()), (Some(4), true), "{}", text(&output));
    assert!(String::from_utf8(output.stderr).unwrap().contains("127.0.0.1:1"));
}

#[test]
fn bytes_and_json_are_not_mixed_on_standard_output() {
    let message = fail_with(2, &["pull", "127.0.0.1:1", "-o", "-", "--json"]);
    assert!(message.contains("--output = `-`") && message.contains("leave --json out"), "{message}");
}

#[test]
fn a_server_and_a_follower_print_a_line_for_each_event() {
    let directory = tempfile::tempdir().unwrap();
    let [file, copy] = ["file", "copy"].map(|name| directory.path().join(name));
    let first = file_of([("a", &b"one"[..]), ("b", b"two")]);
    fs::write(&file, &first).unwrap();
    let (_server, served) = start(&["serve", text_of(&file), "--watch", "--json"]);
    let serving = event(&served, "serving");
    assert_eq!(
        (&serving["tensors"], &serving["bytes"], &serving["files"]),
        (&2.into(), &6.into(), &1.into())
    );
    assert_eq!(serving["path"], text_of(&file));
    let address = serving["address"].as_str().unwrap();
    let version = event(&served, "version")["files_version"].clone();

    let (_follower, followed) = start(&["pull", address, "-o", text_of(&copy), "--follow", "--json"]);
    assert_eq!(event(&followed, "following")["address"], address);
    assert_eq!(event(&followed, "version")["files_version"], version);

    replace(&file, &first[..first.len() - 1]);
    let refused = event(&served, "refused");
    assert_eq!(refused["files_version"], version, "{refused}");
    assert!(refused["reason"].as_str().unwrap().contains("truncated"), "{refused}");

    replace(&file, &file_of([("a", &b"one"[..]), ("b", b"new")]));
    let served = event(&served, "version");
    assert_eq!((&served["changed"], &served["bytes"]), (&1.into(), &3.into()), "{served}");
    let followed = event(&followed, "version");
    assert_eq!((&followed["files_version"], &followed["changed"]), (&served["files_version"], &1.into()));
    assert_eq!((&followed["files_written"], &followed["files_removed"]), (&1.into(), &0.into()));
}

#[test]
fn a_follower_that_has_newer_files_than_its_server_prints_both_versions() {
    let directory = tempfile::tempdir().unwrap();
    let [file, copy] = ["file", "copy"].map(|name| directory.path().join(name));
    fs::write(&file, file_of([("a", &b"one"[..])])).unwrap();
    let serve = ["serve", text_of(&file), "--watch", "--json"];
    let (mut server, served) = start(&serve);
    let address = event(&served, "serving")["address"].as_str().unwrap().to_owned();
    let held = event(&served, "version")["files_version"].clone();
    let (_follower, followed) = start(&["pull", &address, "-o", text_of(&copy), "--follow", "--json"]);
    event(&followed, "following");
    event(&followed, "version");
    server.0.kill().unwrap();
    server.0.wait().unwrap();
    let old = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
    fs::File::options().write(true).open(&file).unwrap().set_modified(old).unwrap();
    let (_server, _lines) = start(&[&serve[..], &["--bind", &address]].concat());
    let restarted = event(&followed, "restarted");
    assert_eq!((&restarted["held"], &restarted["accepted"]), (&held, &false.into()), "{restarted}");
    assert_eq!(restarted["offered"], 1_000_000_000_000_u64, "{restarted}");
}

#[test]
fn a_benchmark_server_prints_its_address_as_json() {
    let (_server, lines) = start(&["bench", "--serve", "127.0.0.1:0", "--json"]);
    let serving = event(&lines, "serving");
    assert!(serving["address"].as_str().unwrap().starts_with("127.0.0.1:"), "{serving}");
    assert!(serving["fabrics"].as_array().unwrap().contains(&"tcp".into()), "{serving}");
}

#[test]
fn a_list_is_one_document() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&small_checkpoint(directory.path()), &[]);
    let (value, messages) = document(&["list", &server.address, "--json"]);
    assert_eq!((&value["version"], &value["tensors"][0]["name"]), (&1.into(), &"tensorwire:header".into()));
    assert_eq!(
        (&value["tensors"][1]["dtype"], &value["tensors"][1]["shape"]),
        (&"u8".into(), &vec![4].into())
    );
    assert_eq!(messages, "");
}

#[test]
fn quiet_leaves_out_what_is_no_result_and_no_error() {
    let directory = tempfile::tempdir().unwrap();
    let file = small_checkpoint(directory.path());
    let (_server, lines) = start(&["serve", text_of(&file), "--json", "-q"]);
    let address = event(&lines, "serving")["address"].as_str().unwrap().to_owned();
    let copy = directory.path().join("copy");
    for more in [&["-o", text_of(&copy)][..], &[]] {
        let output = run(&[&["pull", &address, "--stats", "-q"][..], more].concat());
        assert_eq!((output.status.code(), text(&output)), (Some(0), String::new()));
    }
    assert_eq!(fs::read(&copy).unwrap(), fs::read(&file).unwrap());
    // A list is the result.
    assert!(text(&run(&["list", &address, "--quiet"])).contains("[4]"));
    assert!(fail_with(4, &["pull", "127.0.0.1:1", "-q"]).contains("127.0.0.1:1"));
    let wordy = finish(tensorwire(&["pull", &address]), std::time::Duration::from_secs(60));
    assert!(text(&wordy).contains("pulled 1 tensors"), "{}", text(&wordy));
}

#[test]
fn a_quiet_examination_shows_only_what_is_wrong() {
    let quiet = run(&["doctor", "-q"]);
    let lines: Vec<String> = text(&quiet).lines().map(str::to_owned).collect();
    assert!(!lines.iter().any(|line| line.starts_with("ok ")), "{lines:?}");
    let wordy = run(&["doctor"]);
    let wrong = text(&wordy).lines().filter(|line| line.starts_with("problem ")).count();
    assert_eq!(lines.iter().filter(|line| line.starts_with("problem ")).count(), wrong, "{lines:?}");
    let devices = run(&["devices", "-q"]);
    let is_explained = text(&devices).starts_with("No device can be used: ");
    assert_eq!(
        (is_explained, text(&devices).is_empty()),
        (!devices.status.success(), devices.status.success())
    );
}
