//! `tensorwire serve` and `tensorwire pull` as processes, over real shared memory, TCP and RDMA.
#![allow(clippy::unwrap_used, clippy::panic)] // a helper of tests fails by panicking, as a test does

mod active;
mod flood;

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    net::TcpListener,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use rustix::process::{Pid, Resource, Rlimit, Signal, geteuid, kill_process, prlimit};
use tensorwire::{DataType, Tensor, Worker};
use tokio::sync::oneshot;

use crate::common::{
    Process, RDMA_DEVICE, Server, checkpoint, command_max, fail, finish, names_in, run, small_checkpoint,
    succeed, succeed_as, tensorwire, text,
};
use crate::rdma_devices;

const NOBODY_TRUSTED: [&str; 2] = ["--trust", "hostile"];

fn pull_bit_for_bit(fabric: &str, serve_arguments: &[&str], pull_arguments: &[&str]) {
    let directory = tempfile::tempdir().unwrap();
    let file = checkpoint(directory.path());
    let server = Server::start(&file, serve_arguments);
    let pulled = directory.path().join("pulled");
    let pull = ["pull", &server.address, "-o", pulled.to_str().unwrap(), "--verify", "--fabric", fabric];
    let output = succeed(&[&pull[..], pull_arguments].concat());
    assert!(output.contains(&format!("over {fabric}")), "{output}");
    assert!(fs::read(&file).unwrap() == fs::read(&pulled).unwrap(), "the files differ");
    assert_eq!(names_in(directory.path()), ["checkpoint.safetensors", "pulled"]);
}

#[test]
fn checkpoint_arrives_bit_for_bit_over_shm() {
    pull_bit_for_bit("shm", &[], &[]);
}

#[test]
fn checkpoint_arrives_bit_for_bit_over_tcp() {
    pull_bit_for_bit("tcp", &[], &[]);
}

#[test]
fn mapped_checkpoint_arrives_bit_for_bit_over_shm() {
    pull_bit_for_bit("shm", &["--mmap"], &[]);
}

#[test]
fn mapped_checkpoint_arrives_bit_for_bit_over_tcp() {
    pull_bit_for_bit("tcp", &["--mmap"], &[]);
}

#[test]
fn checkpoint_arrives_bit_for_bit_over_tcp_where_nobody_is_trusted() {
    pull_bit_for_bit("tcp", &NOBODY_TRUSTED, &NOBODY_TRUSTED);
    pull_bit_for_bit("tcp", &["--mmap"], &NOBODY_TRUSTED);
}

#[test]
fn shared_memory_is_not_required_of_peers_that_are_not_trusted() {
    let output = fail(&["pull", "127.0.0.1:1", "--fabric", "shm", "--trust", "hostile"]);
    assert!(output.contains("--trust hostile") && output.contains("use tcp or verbs"), "{output}");
    assert!(!output.contains("::"), "a name of the library: {output}");
}

#[test]
#[cfg(not(feature = "tls"))]
fn e_tls_is_not_left_out_where_it_is_not_built_in() {
    let output =
        fail(&["pull", "127.0.0.1:1", "--tls-cert", "a.pem", "--tls-key", "a.key", "--tls-ca", "ca.pem"]);
    assert!(output.contains("--tls-cert = `a.pem`") && output.contains("--features tls"), "{output}");
    assert!(output.contains("TENSORWIRE_TLS_CERT"), "{output}");
}

/// The server on one device, the client on the other. Without `--fabric` they would use shared memory, because they are
/// on one host.
fn pull_bit_for_bit_over_verbs(serve_arguments: &[&str], pull_arguments: &[&str]) {
    let ends = rdma_devices::ends();
    let directory = tempfile::tempdir().unwrap();
    let file = checkpoint(directory.path());
    let server = Server::start_on(ends.left.as_deref(), &file, serve_arguments);
    let pulled = directory.path().join("pulled");
    let (address, to) = (server.address.as_str(), pulled.to_str().unwrap());
    let pull = ["pull", address, "-o", to, "--verify", "--stats", "--fabric", "verbs"];
    let mut pull = tensorwire(&[&pull[..], pull_arguments].concat());
    pull.envs(ends.right.map(|name| (RDMA_DEVICE, name)));
    let output = succeed_as(pull);
    assert!(output.contains("over verbs"), "{output}");
    assert!(fs::read(&file).unwrap() == fs::read(&pulled).unwrap(), "the files differ");
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn checkpoint_arrives_bit_for_bit_over_verbs() {
    pull_bit_for_bit_over_verbs(&[], &[]);
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn mapped_checkpoint_arrives_bit_for_bit_over_verbs() {
    pull_bit_for_bit_over_verbs(&["--mmap"], &[]);
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn checkpoint_arrives_bit_for_bit_over_verbs_where_nobody_is_trusted() {
    pull_bit_for_bit_over_verbs(&NOBODY_TRUSTED, &NOBODY_TRUSTED);
}

#[test]
fn file_that_strangers_may_write_is_not_mapped() {
    let directory = tempfile::tempdir().unwrap();
    let file = small_checkpoint(directory.path());
    fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    let output = fail(&["serve", file.to_str().unwrap(), "--mmap"]);
    assert!(output.contains("chmod go-w") && output.contains("without --mmap"), "{output}");
}

#[test]
fn s5_a_mapped_file_of_another_user_is_refused_and_one_of_root_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let file = small_checkpoint(directory.path());
    if geteuid().is_root() {
        std::os::unix::fs::chown(&file, Some(65_534), None).unwrap();
        let output = fail(&["serve", file.to_str().unwrap(), "--mmap"]);
        assert!(output.contains(file.to_str().unwrap()) && output.contains("user 65534"), "{output}");
        assert!(output.contains("without --mmap"), "{output}");
    } else {
        // For a file of root only the format is checked.
        let output = fail(&["serve", "/etc/passwd", "--mmap"]);
        assert!(output.contains("no safetensors file") && !output.contains("--mmap"), "{output}");
    }
}

/// Pulls repeatedly while the file's owner rewrites it.
fn truncate_while_pulled(fabric: &str) {
    let directory = tempfile::tempdir().unwrap();
    let file = checkpoint(directory.path());
    let content = fs::read(&file).unwrap();
    let mut server = Server::start(&file, &["--mmap"]);
    let pulled = directory.path().join("pulled");
    let pull = ["pull", &server.address, "-o", pulled.to_str().unwrap(), "--fabric", fabric];
    let mut endless = endless_pull(&server.address, &directory.path().join("endless"));
    fs::write(&file, b"short").unwrap();
    for _ in 0..3 {
        succeed(&pull);
        assert!(fs::read(&pulled).unwrap() == content, "the bytes changed with the file");
    }
    assert_eq!(fs::read(&file).unwrap(), b"short");
    assert!(endless.0.try_wait().unwrap().is_none(), "the pull that was under way ended");
    assert!(server.process.0.try_wait().unwrap().is_none(), "the server ended");
}

#[test]
fn s5_a_mapped_file_that_its_owner_truncates_is_served_as_it_was_over_shm() {
    truncate_while_pulled("shm");
}

#[test]
fn s5_a_mapped_file_that_its_owner_truncates_is_served_as_it_was_over_tcp() {
    truncate_while_pulled("tcp");
}

#[test]
fn s5_a_mapped_file_that_changes_is_served_as_it_was_also_where_nobody_reads_what_the_server_says() {
    let directory = tempfile::tempdir().unwrap();
    let file = checkpoint(directory.path());
    let content = fs::read(&file).unwrap();
    let mut command = tensorwire(&["serve", file.to_str().unwrap(), "--mmap"]);
    command.stderr(Stdio::inherit());
    let mut server = Process(command.spawn().unwrap());
    let mut lines = BufReader::new(server.0.stdout.take().unwrap()).lines().map_while(Result::ok);
    let address = lines.find_map(|line| line.strip_prefix("address ").map(str::to_owned)).unwrap();
    drop(lines);
    fs::write(&file, b"short").unwrap();
    let pulled = directory.path().join("pulled");
    succeed(&["pull", &address, "-o", pulled.to_str().unwrap()]);
    assert!(fs::read(&pulled).unwrap() == content, "the bytes changed with the file");
    assert!(server.0.try_wait().unwrap().is_none(), "the server ended");
}

#[test]
fn s5_a_mapped_file_that_cannot_be_copied_before_it_changes_ends_the_server_with_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let file = checkpoint(directory.path());
    let mut server = Server::start(&file, &["--mmap"]);
    succeed(&["pull", &server.address]);
    // Room for little more than the present memory.
    let status = fs::read_to_string(format!("/proc/{}/statm", server.process.0.id())).unwrap();
    let pages: u64 = status.split_whitespace().next().unwrap().parse().unwrap();
    let limit = Some((pages << 12) + (32 << 20));
    prlimit(Some(pid(&server.process)), Resource::As, Rlimit { current: limit, maximum: limit }).unwrap();
    fs::write(&file, b"short").unwrap();
    assert_eq!(server.process.0.wait().unwrap().code(), Some(1));
}

#[test]
fn a_file_that_is_open_for_writing_is_read_instead_of_mapped() {
    let directory = tempfile::tempdir().unwrap();
    let file = checkpoint(directory.path());
    let content = fs::read(&file).unwrap();
    let writer = fs::File::options().append(true).open(&file).unwrap();
    let server = Server::start(&file, &["--mmap"]);
    writer.set_len(0).unwrap();
    let pulled = directory.path().join("pulled");
    succeed(&["pull", &server.address, "-o", pulled.to_str().unwrap()]);
    assert!(fs::read(&pulled).unwrap() == content, "the file was mapped");
}

#[test]
fn s4_a_header_that_is_longer_than_the_format_has_is_not_pulled() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let output = runtime.block_on(async {
        let server = Worker::builder("/job:serve/replica:0/task:0").start().await.unwrap();
        let header = vec![b' '; 100_000_001];
        let header = Tensor::from_bytes(server.pool(), DataType::U8, &[100_000_001], &header).unwrap();
        server.publish("tensorwire:header", header).unwrap();
        let (address, (done, ended)) = (server.address().to_owned(), oneshot::channel());
        std::thread::spawn(move || done.send(fail(&["pull", &address])));
        let output = ended.await.unwrap();
        assert!(output.contains(server.address()), "{output}");
        output
    });
    assert!(output.contains("100000001 bytes") && output.contains("at most 100000000"), "{output}");
}

#[test]
fn s4_a_header_with_millions_of_dimensions_takes_no_more_memory_than_its_text() {
    let dimensions = 47_000_000;
    let shape = vec!["0"; dimensions].join(",");
    let header = format!(r#"{{"a":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,0]}}}}"#);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let output = runtime.block_on(async {
        let server = Worker::builder("/job:serve/replica:0/task:0").start().await.unwrap();
        let bytes = header.len() as u64;
        let header = Tensor::from_bytes(server.pool(), DataType::U8, &[bytes], header.as_bytes()).unwrap();
        server.publish("tensorwire:header", header).unwrap();
        let (address, (done, ended)) = (server.address().to_owned(), oneshot::channel());
        std::thread::spawn(move || {
            // Parsing it would take about two GiB.
            let mut command = Command::new("sh");
            let limited = r#"ulimit -v 1500000; exec "$@""#;
            command.args(["-c", limited, "sh", env!("CARGO_BIN_EXE_tensorwire"), "pull", &address]);
            command.args(["--fabric", "tcp", "--memory", "256M"]);
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            done.send(finish(command, command_max()))
        });
        ended.await.unwrap()
    });
    let (code, output) = (output.status.code(), text(&output));
    assert_eq!(code, Some(7), "{output}");
    assert!(output.contains("more than 1048576 values") && output.contains("divide the file"), "{output}");
}

#[test]
fn the_address_that_a_server_at_all_addresses_prints_can_be_dialled() {
    let directory = tempfile::tempdir().unwrap();
    let secret = directory.path().join("secret");
    fs::write(&secret, "a secret that is long enough").unwrap();
    fs::set_permissions(&secret, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let secret = ["--secret-file", secret.to_str().unwrap()];
    let file = small_checkpoint(directory.path());
    let server = Server::start(&file, &[&["--bind", "0.0.0.0:0"][..], &secret].concat());
    assert!(!server.address.starts_with("0.0.0.0"), "{}", server.address);
    succeed(&[&["pull", &server.address, "--verify"][..], &secret].concat());
}

#[test]
fn one_end_that_validates_is_enough() {
    let directory = tempfile::tempdir().unwrap();
    let file = small_checkpoint(directory.path());
    for (serve, pull, validated) in
        [("off", "off", false), ("xxh3", "off", true), ("off", "crc32c", true), ("crc32c", "xxh3", true)]
    {
        let server = Server::start(&file, &["--validate", serve]);
        let output = succeed(&["pull", &server.address, "--stats", "--validate", pull]);
        assert_eq!(output.contains("validated 1"), validated, "{serve}, {pull}: {output}");
    }
}

#[test]
fn second_round_needs_no_metadata() {
    let directory = tempfile::tempdir().unwrap();
    let file = checkpoint(directory.path());
    let server = Server::start(&file, &[]);
    let bytes = fs::read(&file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let is_short = |tensor: &safetensors::tensor::TensorView<'_>| (1..=96).contains(&tensor.data().len());
    let short = tensors.iter().filter(|(_, tensor)| is_short(tensor)).count() as u64;
    let output = succeed(&["pull", &server.address, "--repeat", "2", "--stats"]);
    let messages = |round: &str| -> u64 {
        let from = output.find(round).unwrap_or_else(|| panic!("no {round}: {output}"));
        let after = &output[from..];
        let at = after.find("META_DATA_RESPONSE ").unwrap_or_else(|| panic!("{output}"));
        after[at..].split_whitespace().nth(1).unwrap().trim_end_matches(',').parse().unwrap()
    };
    assert!(messages("round 1:") >= 200, "{output}");
    // This message carries short tensors, except those that the catalogue has.
    assert!(messages("round 2:") <= short && short < 50, "{short} are short: {output}");
}

#[test]
fn chosen_tensors_make_a_file_of_their_own() {
    let directory = tempfile::tempdir().unwrap();
    let file = checkpoint(directory.path());
    let server = Server::start(&file, &[]);
    let pulled = directory.path().join("pulled");
    let names = ["size.3", "größe.权重.🚀", "layer.1/weight"];
    let mut arguments = vec!["pull", &server.address, "-o", pulled.to_str().unwrap(), "--verify"];
    arguments.extend(names.iter().flat_map(|name| ["--tensor", name]));
    succeed(&arguments);
    let (whole, part) = (fs::read(&file).unwrap(), fs::read(&pulled).unwrap());
    let whole = safetensors::SafeTensors::deserialize(&whole).unwrap();
    let part = safetensors::SafeTensors::deserialize(&part).unwrap();
    assert_eq!(part.len(), names.len());
    for name in names {
        let (a, b) = (whole.tensor(name).unwrap(), part.tensor(name).unwrap());
        assert_eq!((a.dtype(), a.shape(), a.data()), (b.dtype(), b.shape(), b.data()), "{name}");
    }
}

#[test]
fn e_a_file_with_a_name_that_acts_on_terminals_is_refused_with_the_name_and_the_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("active.safetensors");
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::U8, vec![4], &[1, 2, 3, 4]).unwrap();
    safetensors::serialize_to_file([("a\u{1b}[2J\nb".to_owned(), view)], None, &file).unwrap();
    let output = fail(&["serve", file.to_str().unwrap()]);
    assert!(
        output.contains(r"published name = `a\u{1b}[2J\nb`") && output.contains("leave out control"),
        "{output}"
    );
}

/// A file with this header, and data of one byte where it has a tensor.
fn file_with(directory: &Path, header: &str) -> PathBuf {
    let path = directory.join("made.safetensors");
    let data: &[u8] = if header.contains("dtype") { &[7] } else { &[] };
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat();
    fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn a_file_without_tensors_arrives_bit_for_bit() {
    for header in ["{}", r#"{"__metadata__":{"format":"pt"}}   "#] {
        let directory = tempfile::tempdir().unwrap();
        let file = file_with(directory.path(), header);
        let server = Server::start(&file, &[]);
        let pulled = directory.path().join("pulled");
        for fabric in ["shm", "tcp"] {
            let to = pulled.to_str().unwrap();
            succeed(&["pull", &server.address, "-o", to, "--verify", "--fabric", fabric]);
            assert_eq!(fs::read(&file).unwrap(), fs::read(&pulled).unwrap(), "{header}");
        }
        let output = fail(&["pull", &server.address, "--tensor", "w"]);
        assert!(output.contains("has no tensor `w`; it has none"), "{output}");
    }
}

#[test]
fn a_name_that_cannot_be_published_is_refused_before_anything_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let long = "x".repeat(1025);
    for (name, shown, remedy) in [
        (r"a\tb", r"a\tb", "leave out control characters"),
        (r"a\nb", r"a\nb", "leave out control characters"),
        ("", "", "a name has 1 to 1024 bytes"),
        (&long, &long, "a name has 1 to 1024 bytes"),
        ("tensorwire:header", "tensorwire:header", "the server itself publishes one"),
    ] {
        // Too large to be read.
        let header = format!(
            r#"{{"w":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}},"{name}":{{"dtype":"U8","shape":[{0}],"data_offsets":[1,{1}]}}}}"#,
            1u64 << 40,
            (1u64 << 40) + 1
        );
        let file = file_with(directory.path(), &header);
        let whole = 8 + header.len() as u64 + (1 << 40) + 1;
        fs::File::options().write(true).open(&file).unwrap().set_len(whole).unwrap();
        let output = fail(&["serve", file.to_str().unwrap()]);
        assert!(output.contains(&format!("published name = `{shown}`")), "{output}");
        assert!(output.contains(remedy) && output.contains("rename it in the file"), "{output}");
    }
}

#[test]
fn missing_tensor_is_named_with_what_there_is() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&small_checkpoint(directory.path()), &[]);
    let output = fail(&["pull", &server.address, "--tensor", "w", "--tensor", "absent"]);
    assert!(output.contains("no tensor `absent`; it has `w`"), "{output}");
}

#[test]
fn equal_secrets_meet_and_others_do_not() {
    let directory = tempfile::tempdir().unwrap();
    let secret = |name: &str, text: &str| {
        let path = directory.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let right = secret("right", "the first secret, long enough");
    let wrong = secret("wrong", "another secret, also long enough");
    let file = small_checkpoint(directory.path());
    let server = Server::start(&file, &["--secret-file", &right]);
    succeed(&["pull", &server.address, "--verify", "--secret-file", &right]);
    let output = fail(&["pull", &server.address, "--verify", "--secret-file", &wrong]);
    assert!(output.contains("secret"), "{output}");
    assert!(!output.contains("long enough"), "a secret was shown: {output}");
}

#[test]
fn bind_beyond_loopback_without_a_secret_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let file = small_checkpoint(directory.path());
    let output = fail(&["serve", file.to_str().unwrap(), "--bind", "0.0.0.0:0"]);
    assert!(output.contains("0.0.0.0") && output.contains("secret"), "{output}");
}

#[test]
fn address_without_a_server_is_named() {
    // A port that was free a moment ago.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let output = fail(&["pull", &address]);
    assert!(output.contains(&address), "{output}");
}

#[test]
fn truncated_file_is_refused_with_both_lengths() {
    let directory = tempfile::tempdir().unwrap();
    let file = small_checkpoint(directory.path());
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    let output = fail(&["serve", file.to_str().unwrap()]);
    assert!(output.contains("truncated") && output.contains(&bytes.len().to_string()), "{output}");
}

#[test]
fn wrong_command_line_ends_with_code_2() {
    for arguments in
        [&["pull"][..], &["pull", "nowhere"], &["pull", "127.0.0.1:1", "--fabric", "smoke"], &["fly"]]
    {
        assert_eq!(run(arguments).status.code(), Some(2), "{arguments:?}");
    }
}

#[test]
fn output_that_cannot_be_written_is_an_error_that_names_it() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&small_checkpoint(directory.path()), &[]);
    let output = fail(&["pull", &server.address, "-o", "/nonexistent/file"]);
    assert!(output.contains("/nonexistent/file"), "{output}");
    assert!(!output.contains(".pull."), "a name that the user did not give: {output}");
}

/// A pull whose rounds do not end before it is killed; returns after the first round.
fn endless_pull(address: &str, output: &Path) -> Process {
    let arguments = ["pull", address, "-o", output.to_str().unwrap(), "--repeat", "4000000000"];
    let mut command = tensorwire(&arguments);
    command.stderr(Stdio::inherit());
    let mut pull = Process(command.spawn().unwrap());
    pull.line_after("round 1:");
    pull
}

fn pid(process: &Process) -> Pid {
    Pid::from_raw(i32::try_from(process.0.id()).unwrap()).unwrap()
}

fn send_signal(process: &Process, signal: Signal) {
    kill_process(pid(process), signal).unwrap();
}

#[test]
fn killed_pull_leaves_no_file() {
    for signal in [Signal::KILL, Signal::INT] {
        let directory = tempfile::tempdir().unwrap();
        let server = Server::start(&small_checkpoint(directory.path()), &[]);
        let mut pull = endless_pull(&server.address, &directory.path().join("pulled"));
        send_signal(&pull, signal);
        assert!(pull.0.wait().unwrap().signal().is_some());
        assert_eq!(names_in(directory.path()), ["small.safetensors"], "{signal:?}");
    }
}

#[test]
fn killed_server_ends_the_pull_with_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let mut server = Server::start(&small_checkpoint(directory.path()), &[]);
    let mut pull = endless_pull(&server.address, &directory.path().join("pulled"));
    server.process.0.kill().unwrap();
    assert_eq!(pull.0.wait().unwrap().code(), Some(4));
    assert_eq!(names_in(directory.path()), ["small.safetensors"]);
}

#[test]
fn a_server_that_is_stopped_is_told_with_the_option_that_allows_more() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&small_checkpoint(directory.path()), &[]);
    // Over shared memory a pull reads tensors without the server, so it would not notice the loss.
    let arguments = ["pull", &server.address, "--fabric", "tcp", "--liveness", "1", "--repeat", "4000000000"];
    let mut pull = Process(tensorwire(&arguments).spawn().unwrap());
    pull.line_after("round 1:");
    send_signal(&server.process, Signal::STOP);
    let mut text = String::new();
    pull.0.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(pull.0.wait().unwrap().code(), Some(4));
    assert!(text.contains("allow more with --liveness"), "{text}");
    assert!(!text.contains("WorkerBuilder") && !text.contains("setting"), "{text}");
}

#[test]
fn server_ends_in_order_when_told_to() {
    for signal in [Signal::INT, Signal::TERM] {
        let directory = tempfile::tempdir().unwrap();
        let mut server = Server::start(&small_checkpoint(directory.path()), &[]);
        succeed(&["pull", &server.address]);
        send_signal(&server.process, signal);
        assert_eq!(server.process.0.wait().unwrap().code(), Some(0), "{signal:?}");
    }
}
