//! Settings: options, their environment variables, and which of them counts.

use std::{
    path::Path,
    process::{Command, Output},
};

use crate::common::{Server, command_max, finish, small_checkpoint, succeed, tensorwire, text};

/// The command with these environment variables.
fn with(variables: &[(&str, &str)], arguments: &[&str]) -> Command {
    let mut command = tensorwire(arguments);
    command.envs(variables.iter().copied());
    command
}

fn run_with(variables: &[(&str, &str)], arguments: &[&str]) -> Output {
    finish(with(variables, arguments), command_max())
}

/// Runs it, which must fail because of a setting, and returns its output.
fn refused(variables: &[(&str, &str)], arguments: &[&str]) -> String {
    let output = run_with(variables, arguments);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", text(&output));
    text(&output)
}

fn succeeded(variables: &[(&str, &str)], arguments: &[&str]) -> String {
    let output = run_with(variables, arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output));
    text(&output)
}

fn served(directory: &Path) -> Server {
    Server::start(&small_checkpoint(directory), &[])
}

#[test]
fn the_help_shows_the_variable_of_each_option() {
    for (subcommand, names) in [
        (
            "serve",
            &["SERVE_BIND", "SERVE_DATA_BIND", "SERVE_WATCH", "SERVE_MMAP", "VALIDATE", "LIVENESS"][..],
        ),
        ("pull", &["PULL_OUTPUT", "PULL_MEMORY", "PULL_RETRY", "PULL_FABRIC", "TRUST", "SECRET_FILE"]),
        ("list", &["JSON", "QUIET", "TLS_CERT"]),
        ("top", &["TOP_INTERVAL", "TOP_ONCE", "JSON", "QUIET", "LIVENESS", "SECRET_FILE"]),
        ("bench", &["BENCH_OP", "BENCH_SIZE", "BENCH_WAIT", "BENCH_TIME", "BENCH_ITERATIONS", "JSON"]),
        ("doctor", &["DOCTOR_DEVICE", "DOCTOR_POOL", "DOCTOR_REQUIRE", "JSON"]),
        ("devices", &["JSON", "QUIET"]),
    ] {
        let help = succeed(&[subcommand, "--help"]);
        for name in names {
            assert!(help.contains(&format!("[env: TENSORWIRE_{name}=]")), "{name}: {help}");
        }
    }
}

#[test]
fn a_variable_sets_an_option_and_the_option_comes_first() {
    let directory = tempfile::tempdir().unwrap();
    let server = served(directory.path());
    let pull = ["pull", &server.address];
    let fabric = [("TENSORWIRE_PULL_FABRIC", "tcp"), ("TENSORWIRE_PULL_STATS", "yes")];
    let text = succeeded(&fabric, &pull);
    assert!(text.contains("over tcp") && text.contains("TENSOR_REQUEST"), "{text}");
    let text = succeeded(&fabric, &[&pull[..], &["--fabric", "shm"]].concat());
    assert!(text.contains("over shm"), "{text}");
    // A list replaces that of the variable.
    let absent = [("TENSORWIRE_PULL_TENSOR", "absent")];
    assert_eq!(run_with(&absent, &pull).status.code(), Some(3));
    succeeded(&absent, &[&pull[..], &["--tensor", "w"]].concat());
}

#[test]
fn a_flag_is_turned_off_by_its_variable() {
    let directory = tempfile::tempdir().unwrap();
    let server = served(directory.path());
    for off in ["false", "0", "no"] {
        let text = succeeded(&[("TENSORWIRE_PULL_STATS", off)], &["pull", &server.address]);
        assert!(!text.contains("TENSOR_REQUEST"), "{text}");
    }
}

#[test]
fn a_variable_that_excludes_an_option_of_the_command_line_is_left_out() {
    let variables = [
        ("TENSORWIRE_PULL_VERIFY", "true"),
        ("TENSORWIRE_PULL_RETRY", "1"),
        ("TENSORWIRE_BENCH_SIZE", "8"),
        ("TENSORWIRE_BENCH_TIME", "0.001"),
        ("TENSORWIRE_BENCH_OP", "pull"),
        ("TENSORWIRE_JSON", "true"),
    ];
    // Beyond what clap checks: the output is refused.
    let text = refused(&variables, &["pull", "127.0.0.1:1", "-o", "/dev/null", "--follow"]);
    assert!(text.contains("--follow needs"), "{text}");
    // The second process has no settings but those on its command line.
    let text = succeeded(&variables, &["bench", "--iterations", "3", "--fabric", "tcp"]);
    let row: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&row["size"], &row["iterations"]), (&8.into(), &3.into()), "{row}");
}

#[test]
fn an_error_names_the_variable_that_has_the_value() {
    let text = refused(&[("TENSORWIRE_PULL_MEMORY", "lots")], &["pull", "127.0.0.1:1"]);
    assert!(text.contains("'lots'") && text.contains("sets TENSORWIRE_PULL_MEMORY"), "{text}");
    let text = refused(&[("TENSORWIRE_SERVE_WATCH", "maybe")], &["serve", "file"]);
    assert!(text.contains("'maybe'") && text.contains("sets TENSORWIRE_SERVE_WATCH"), "{text}");
    let both = [("TENSORWIRE_BENCH_TIME", "1"), ("TENSORWIRE_BENCH_ITERATIONS", "1")];
    let text = refused(&both, &["bench"]);
    assert!(text.contains("TENSORWIRE_BENCH_TIME and TENSORWIRE_BENCH_ITERATIONS"), "{text}");
    // The value on the command line is wrong, not the variable's.
    let text = refused(&[("TENSORWIRE_PULL_MEMORY", "4K")], &["pull", "127.0.0.1:1", "--memory", "few"]);
    assert!(text.contains("'few'") && !text.contains("TENSORWIRE_PULL_MEMORY"), "{text}");
}
