//! The configuration file: what it sets, what is preferred to it, and what is wrong with it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::common::{
    Server, command_max, fail_with, finish, run, small_checkpoint, succeed, tensorwire, text,
};

/// A configuration file of this text.
fn config(directory: &Path, toml: &str) -> PathBuf {
    let path = directory.join("config.toml");
    fs::write(&path, toml).unwrap();
    path
}

/// A server, and the options of a pull from it with a configuration file.
fn pull_with(directory: &Path, toml: &str) -> (Server, Vec<String>) {
    let server = Server::start(&small_checkpoint(directory), &[]);
    let path = config(directory, toml);
    let pull = ["pull", &server.address, "--config", path.to_str().unwrap()].map(str::to_owned);
    (server, pull.to_vec())
}

fn and<'a>(pull: &'a [String], more: &[&'a str]) -> Vec<&'a str> {
    pull.iter().map(String::as_str).chain(more.iter().copied()).collect()
}

#[test]
fn the_file_sets_options_after_the_environment_and_the_command_line() {
    let directory = tempfile::tempdir().unwrap();
    let toml =
        "[pull]\nfabric = 'tcp'\nstats = true\nmemory = 1048576\nverify = false\n[list]\njson = true\n";
    let (server, pull) = pull_with(directory.path(), toml);
    let shown = succeed(&and(&pull, &[]));
    assert!(shown.contains("over tcp") && shown.contains("TENSOR_REQUEST"), "{shown}");
    let of_environment = |fabric: &str| {
        let mut command = tensorwire(&and(&pull, &[]));
        command.env("TENSORWIRE_PULL_FABRIC", fabric).env("TENSORWIRE_PULL_STATS", "off");
        text(&finish(command, command_max()))
    };
    let shown = of_environment("shm");
    assert!(shown.contains("over shm") && !shown.contains("TENSOR_REQUEST"), "{shown}");
    let shown = succeed(&and(&pull, &["--fabric", "shm"]));
    assert!(shown.contains("over shm"), "{shown}");
    // Another section is of another subcommand.
    let list = succeed(&["list", &server.address, &pull[2], &pull[3]]);
    assert!(list.starts_with('{'), "{list}");
}

#[test]
fn a_list_of_the_file_is_replaced_by_that_of_the_command_line() {
    let directory = tempfile::tempdir().unwrap();
    let (_server, pull) = pull_with(directory.path(), "[pull]\ntensor = ['absent', 'missing']\n");
    assert!(fail_with(3, &and(&pull, &[])).contains("no tensor `absent`"));
    succeed(&and(&pull, &["--tensor", "w"]));
}

#[test]
fn what_excludes_an_option_of_the_command_line_is_left_out() {
    let directory = tempfile::tempdir().unwrap();
    let path = config(directory.path(), "[pull]\nverify = true\nretry = 9\noutput = '/dev/null'\n");
    let shown = fail_with(2, &["pull", "127.0.0.1:1", "--follow", "--config", path.to_str().unwrap()]);
    // The file's output is used, and refused.
    assert!(shown.contains("--output = `/dev/null`") && shown.contains("--follow needs"), "{shown}");
}

#[test]
fn the_file_of_the_user_and_that_of_the_variable_are_found() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&small_checkpoint(directory.path()), &[]);
    let folder = directory.path().join("tensorwire");
    fs::create_dir(&folder).unwrap();
    config(&folder, "[list]\njson = true\n");
    let list = |name: &str, value: &Path, more: &[&str]| {
        let mut command = tensorwire(&[&["list", &server.address][..], more].concat());
        command.env_remove("XDG_CONFIG_HOME").env("HOME", "/nonexistent").env(name, value);
        text(&finish(command, command_max())).starts_with('{')
    };
    assert!(list("XDG_CONFIG_HOME", directory.path(), &[]));
    assert!(list("TENSORWIRE_CONFIG", &folder.join("config.toml"), &[]));
    assert!(!list("XDG_CONFIG_HOME", directory.path(), &["--config", "/dev/null"]));
    // A relative path is not valid there.
    assert!(!list("XDG_CONFIG_HOME", Path::new("relative"), &[]));
    fs::rename(directory.path().join("tensorwire"), directory.path().join("moved")).unwrap();
    fs::create_dir(directory.path().join(".config")).unwrap();
    fs::rename(directory.path().join("moved"), directory.path().join(".config/tensorwire")).unwrap();
    assert!(list("HOME", directory.path(), &[]));
}

#[test]
fn every_mistake_is_an_error_with_file_key_value_and_remedy() {
    let directory = tempfile::tempdir().unwrap();
    for (toml, expected) in [
        (
            "[pull]\nmemmory = '1G'\n",
            "[pull] memmory = `1G`: there is no such key: use one of output, follow",
        ),
        ("[pul]\nmemory = 1\n", "[pul]: there is no such section: use one of [serve], [pull]"),
        ("memory = '1G'\n", "memory = `1G`: it is in no section: put it below one of [serve]"),
        ("[pull]\nmemory = 'lots'\n", "[pull] memory = `lots`: not a size: give a number of bytes"),
        ("[pull]\nfabric = 'smoke'\n", "[pull] fabric = `smoke`: give one of auto, shm, verbs, tcp"),
        ("[pull]\nverify = 'yes'\n", "[pull] verify = `yes`: it is a TOML string: give true or false"),
        ("[pull]\nretry = true\n", "[pull] retry = `true`: it is a TOML boolean: give a text or a number"),
        ("[pull]\nretry = -1\n", "[pull] retry = `-1`: "),
        (
            "[pull]\noutput = ['a', 'b']\n",
            "[pull] output = `a, b`: it is a TOML array: give a text or a number",
        ),
        (
            "[pull.tensor]\n",
            "[pull] tensor = `{…}`: it is a TOML table: give a text, a number, or a list of them",
        ),
        ("[pull]\noutput = ''\n", "[pull] output = ``: give a value"),
        // Also in the section of another subcommand.
        (
            "[doctor]\nrequire = ['tcp', 'smoke']\n",
            "[doctor] require = `tcp, smoke`: give one of shm, tcp, verbs",
        ),
        ("[bench]\nserve = '0.0.0.0'\n", "[bench] serve = `0.0.0.0`: there is no such key"),
        ("[pull]\n\nmemory =\n", "line 3: "),
    ] {
        let path = config(directory.path(), toml);
        let shown = fail_with(2, &["pull", "127.0.0.1:1", "--config", path.to_str().unwrap()]);
        let expected = format!("error: {}: {expected}", path.display());
        assert!(shown.starts_with(&expected), "{toml}: {shown}");
    }
}

#[test]
fn a_file_that_cannot_be_read_is_an_error_only_if_it_was_named() {
    let shown = fail_with(2, &["list", "127.0.0.1:1", "--config", "/nonexistent/config.toml"]);
    assert!(shown.contains("/nonexistent/config.toml: No such file"), "{shown}");
    fail_with(4, &["list", "127.0.0.1:1"]);
}

#[test]
fn values_that_exclude_each_other_are_an_error_that_names_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = config(directory.path(), "[serve]\nwatch = true\nmmap = true\n");
    let path = path.to_str().unwrap();
    let shown = fail_with(2, &["serve", "file", "--config", path]);
    assert!(shown.contains(&format!("{path} sets [serve] watch and mmap: change or remove it")), "{shown}");
    // Each of them can still be chosen.
    let shown = fail_with(3, &["serve", "/nonexistent/file", "--watch", "--config", path]);
    assert!(shown.contains("/nonexistent/file"), "{shown}");
}

#[test]
fn tls_of_the_file_is_as_complete_as_that_of_the_command_line() {
    let directory = tempfile::tempdir().unwrap();
    let path = config(directory.path(), "[list]\ntls-cert = 'cert.pem'\n");
    let shown = fail_with(2, &["list", "127.0.0.1:1", "--config", path.to_str().unwrap()]);
    assert!(shown.contains("--tls-key") && shown.contains("--tls-ca"), "{shown}");
}

#[test]
fn the_second_process_of_a_benchmark_reads_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let toml = "[bench]\nsize = '8'\niterations = 3\nop = ['pull', 'write']\nfabric = 'tcp'\njson = true\n";
    let path = config(directory.path(), toml);
    let output = run(&["bench", "--config", path.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(String::from_utf8(output.stdout).unwrap().lines().count(), 2);
}
