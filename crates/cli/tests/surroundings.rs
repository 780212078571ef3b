//! The command in unusual surroundings: as process 1, without `/proc`, in a folder that it may not read, with closed
//! streams, on a host whose own name is loopback. The tests make their own namespaces.
#![allow(clippy::unwrap_used, clippy::panic)] // a helper of tests fails by panicking, as a test does

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Output, Stdio},
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{
    common::{Process, Server, command_max, finish, names_in, small_checkpoint, succeed_as, text},
    loopback::{OWNER, Place},
};

/// `tensorwire` run by a shell script as `"$@"`, in new namespaces as their root.
fn through(namespaces: &[&str], script: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("unshare");
    command.arg("--map-root-user").args(namespaces).args(["sh", "-c", script, "sh"]);
    command.arg(env!("CARGO_BIN_EXE_tensorwire")).args(arguments);
    command.env_remove("TENSORWIRE_SECRET_FILE").env_remove("RUST_LOG");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn a_host_whose_own_name_is_loopback_serves_itself_without_a_secret() {
    let directory = tempfile::tempdir().unwrap();
    let file = small_checkpoint(directory.path());
    let hosts = directory.path().join("hosts");
    fs::write(&hosts, "127.0.0.1 localhost\n127.0.1.1 node1 node1.example\n").unwrap();
    let script = format!(r#"mount --bind {} /etc/hosts && exec "$@""#, hosts.display());
    let mut server = through(&["--mount"], &script, &["serve", file.to_str().unwrap(), "--bind", "node1:0"]);
    let mut server = Process(server.stderr(Stdio::inherit()).spawn().unwrap());
    let address = server.line_after("address ");
    let port = address.strip_prefix("127.0.1.1:").unwrap();
    for host in ["node1", "node1.example", "127.0.1.1"] {
        succeed_as(through(&["--mount"], &script, &["pull", &format!("{host}:{port}"), "--verify"]));
    }
}

#[test]
fn a_file_is_written_where_there_is_no_proc() {
    let directory = tempfile::tempdir().unwrap();
    let file = small_checkpoint(directory.path());
    let server = Server::start(&file, &[]);
    let pulled = directory.path().join("pulled");
    let arguments = ["pull", &server.address, "-o", pulled.to_str().unwrap(), "--fabric", "tcp"];
    succeed_as(through(&["--mount"], r#"mount -t tmpfs none /proc && exec "$@""#, &arguments));
    assert_eq!(fs::read(&file).unwrap(), fs::read(&pulled).unwrap());
    assert_eq!(names_in(directory.path()), ["pulled", "small.safetensors"]);
}

#[test]
fn a_file_in_a_folder_that_cannot_be_synced_is_a_success_with_a_warning() {
    let place = Place::new();
    let file = small_checkpoint(&place.path(""));
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    let mut server = place.run(OWNER, "tensorwire", &["serve", file.to_str().unwrap()]);
    let mut server = Process(server.stderr(Stdio::inherit()).spawn().unwrap());
    let address = server.line_after("address ");
    let folder = place.path("drop");
    fs::create_dir(&folder).unwrap();
    // Every user may put files into the folder, and none may list it.
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o1333)).unwrap();
    let pulled = folder.join("pulled");
    let output =
        succeed_as(place.run(OWNER, "tensorwire", &["pull", &address, "-o", pulled.to_str().unwrap()]));
    assert!(output.contains("the file is complete") && output.contains("wrote "), "{output}");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(fs::read(&file).unwrap(), fs::read(&pulled).unwrap());
}

/// A pull whose standard output is set by `redirection`.
fn pull_with(address: &str, output: &str, redirection: &str) -> Output {
    let mut command = Command::new("sh");
    command.args(["-c", &format!(r#"exec "$@" {redirection}"#), "sh", env!("CARGO_BIN_EXE_tensorwire")]);
    command.args(["pull", address, "-o", output]).stdout(Stdio::piped()).stderr(Stdio::piped());
    finish(command, command_max())
}

#[test]
fn standard_output_that_is_closed_is_an_error_where_it_is_the_output_and_none_where_it_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let file = small_checkpoint(directory.path());
    let server = Server::start(&file, &[]);
    let closed = pull_with(&server.address, "-", ">&-");
    assert_eq!(closed.status.code(), Some(1), "{}", text(&closed));
    assert!(text(&closed).contains("standard output is closed") && !text(&closed).contains("wrote"));
    assert_eq!(pull_with(&server.address, "-", ">/dev/null").status.code(), Some(0));
    assert_eq!(pull_with(&server.address, "-", ">/dev/full").status.code(), Some(6));
    // The file is the result, and the messages are not.
    for redirection in [">&-", ">/dev/full"] {
        let pulled = directory.path().join("pulled");
        let output = pull_with(&server.address, pulled.to_str().unwrap(), redirection);
        assert_eq!(output.status.code(), Some(0), "{redirection}: {}", text(&output));
        assert_eq!(fs::read(&file).unwrap(), fs::read(&pulled).unwrap());
        fs::remove_file(&pulled).unwrap();
    }
}

/// A process that is process 1 of its namespace, and its id in this namespace.
fn process_1(arguments: &[&str]) -> (Process, Pid) {
    let mut command = through(&["--pid", "--fork", "--kill-child"], r#"exec "$@""#, arguments);
    let process = Process(command.stderr(Stdio::inherit()).spawn().unwrap());
    let path = format!("/proc/{0}/task/{0}/children", process.0.id());
    let pid = until(|| fs::read_to_string(&path).ok()?.trim().parse().ok());
    (process, Pid::from_raw(pid).unwrap())
}

/// The first result of `look`.
fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let pause = Duration::from_millis(5);
    for _ in 0..command_max().as_millis() / pause.as_millis() {
        if let Some(found) = look() {
            return found;
        }
        thread::sleep(pause);
    }
    panic!("it did not happen");
}

/// Waits until the process handles the signal.
fn until_handled(pid: Pid, signal: Signal) {
    until(|| {
        let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        let caught = u64::from_str_radix(caught.trim(), 16).unwrap();
        (caught >> (signal.as_raw() - 1) & 1 == 1).then_some(())
    });
}

fn code_after(signal: Signal, (mut process, pid): (Process, Pid)) -> Option<i32> {
    until_handled(pid, signal);
    kill_process(pid, signal).unwrap();
    until(|| process.0.try_wait().unwrap()).code()
}

#[test]
fn a_pull_that_is_process_1_ends_when_it_is_told_to_and_leaves_nothing() {
    for signal in [Signal::INT, Signal::TERM] {
        let directory = tempfile::tempdir().unwrap();
        let server = Server::start(&small_checkpoint(directory.path()), &[]);
        let pulled = directory.path().join("pulled");
        let endless = ["--fabric", "tcp", "--repeat", "4000000000"];
        let arguments = [&["pull", &server.address, "-o", pulled.to_str().unwrap()][..], &endless].concat();
        let (mut process, pid) = process_1(&arguments);
        process.line_after("round 1:");
        assert_eq!(code_after(signal, (process, pid)), Some(128 + signal.as_raw()));
        assert_eq!(names_in(directory.path()), ["small.safetensors"]);
    }
}

#[test]
fn a_pull_that_is_process_1_and_waits_for_a_reader_ends_when_it_is_told_to() {
    let directory = tempfile::tempdir().unwrap();
    let fifo = directory.path().join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::from_raw_mode(0o600)).unwrap();
    let pull = process_1(&["pull", "127.0.0.1:1", "-o", fifo.to_str().unwrap()]);
    assert_eq!(code_after(Signal::TERM, pull), Some(143));
}

/// A file of one tensor with this many bytes, none of which are on the disk.
fn sparse_checkpoint(directory: &Path, bytes: u64) -> std::path::PathBuf {
    let header = format!(r#"{{"w":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    let path = directory.join("sparse.safetensors");
    fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(8 + header.len() as u64 + bytes).unwrap();
    path
}

#[test]
fn a_server_that_is_process_1_ends_when_it_is_told_to_while_it_reads_and_while_it_serves() {
    let directory = tempfile::tempdir().unwrap();
    let file = sparse_checkpoint(directory.path(), 1 << 30);
    let server = process_1(&["serve", file.to_str().unwrap()]);
    assert_eq!(code_after(Signal::TERM, server), Some(143), "it had read its file before");
    let file = small_checkpoint(directory.path());
    let (mut process, pid) = process_1(&["serve", file.to_str().unwrap()]);
    process.line_after("address ");
    assert_eq!(code_after(Signal::TERM, (process, pid)), Some(0));
}
