//! The exit codes of the command: one for each kind of failure.

use std::{fs, net::TcpListener, os::unix::fs::PermissionsExt, path::Path};

use crate::common::{Server, fail_with, small_checkpoint, succeed};

fn text_of(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn wrong_usage_ends_with_2() {
    let directory = tempfile::tempdir().unwrap();
    let file = small_checkpoint(directory.path());
    fail_with(2, &["serve"]);
    fail_with(2, &["serve", text_of(&file), "--watch", "--mmap"]);
    fail_with(2, &["pull", "nowhere"]);
    fail_with(2, &["pull", "127.0.0.1:1", "-o", "-", "--follow"]);
    fail_with(2, &["serve", "/dev/null"]);
}

#[test]
fn what_is_not_there_ends_with_3() {
    let directory = tempfile::tempdir().unwrap();
    fail_with(3, &["serve", text_of(&directory.path().join("missing"))]);
    fail_with(3, &["serve", text_of(directory.path())]);
    let server = Server::start(&small_checkpoint(directory.path()), &[]);
    fail_with(3, &["pull", &server.address, "--tensor", "absent"]);
    fail_with(3, &["pull", &server.address, "-o", text_of(&directory.path().join("missing/file"))]);
}

#[test]
fn a_server_that_does_not_answer_ends_every_client_with_4() {
    for command in ["pull", "list", "top", "bench"] {
        fail_with(4, &[command, "127.0.0.1:1"]);
    }
}

#[test]
fn what_is_refused_ends_with_5() {
    let directory = tempfile::tempdir().unwrap();
    let file = small_checkpoint(directory.path());
    let secret = directory.path().join("secret");
    fs::write(&secret, "a secret of this test alone").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    let server = Server::start(&file, &["--secret-file", text_of(&secret)]);
    let other = directory.path().join("other");
    fs::write(&other, "another secret of this test").unwrap();
    fs::set_permissions(&other, fs::Permissions::from_mode(0o600)).unwrap();
    fail_with(5, &["list", &server.address, "--secret-file", text_of(&other)]);
    fail_with(5, &["list", &server.address, "--secret-file", text_of(&directory.path().join("missing"))]);
    fail_with(5, &["serve", text_of(&file), "--bind", "0.0.0.0:0"]);
    fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
    fail_with(5, &["serve", text_of(&file), "--mmap"]);
}

#[test]
fn what_has_no_room_ends_with_6() {
    let directory = tempfile::tempdir().unwrap();
    let file = small_checkpoint(directory.path());
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    fail_with(6, &["serve", text_of(&file), "--bind", &taken.local_addr().unwrap().to_string()]);
    let server = Server::start(&file, &[]);
    fail_with(6, &["pull", &server.address, "-o", "/dev/full"]);
}

#[test]
fn what_is_damaged_ends_with_7() {
    let directory = tempfile::tempdir().unwrap();
    let file = small_checkpoint(directory.path());
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    fail_with(7, &["serve", text_of(&file)]);
    fs::write(&file, "no file of tensors").unwrap();
    fail_with(7, &["serve", text_of(&file)]);
}

#[test]
fn every_help_has_the_exit_codes_or_names_the_help_that_has_them() {
    for command in ["serve", "pull", "list", "top", "bench", "devices", "doctor"] {
        let help = succeed(&[command, "--help"]);
        assert!(help.contains("Exit status:"), "{help}");
        assert!(help.contains("\n  7      damaged") || help.contains("`tensorwire --help`"), "{help}");
    }
    assert!(succeed(&["--help"]).contains("\n  4      unreachable"));
}
