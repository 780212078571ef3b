//! `tensorwire bench` as a user starts it, on one host and between two. No time is asserted.
#![allow(clippy::unwrap_used, clippy::panic)] // a helper of tests fails by panicking, as a test does

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Command, Stdio},
};

use serde_json::Value;
use tensorwire::{Tensor, Worker};

use crate::{
    common::{
        Process, RDMA_DEVICE, Server, command_max, fail, failed, finish, run, small_checkpoint, succeed_as,
        tensorwire, text,
    },
    namespaces::{ROUTED, within},
    rdma_devices,
};

/// The server's address in the namespaces of [`ROUTED`]. By default it listens at all addresses and its own port.
const SERVED: &str = "10.2.0.2:4250";

/// A command that serves measurements, and its address.
fn serve(mut command: Command) -> (Process, String) {
    let mut process = Process(command.stderr(Stdio::inherit()).spawn().unwrap());
    let address = process.line_after("address ");
    (process, address)
}

fn serve_here(more: &[&str]) -> (Process, String) {
    serve(tensorwire(&[&["bench", "--serve", "127.0.0.1:0"], more].concat()))
}

/// The lines that a command prints with `--json`.
fn lines_of(mut command: Command) -> Vec<Value> {
    let output = finish(
        {
            command.arg("--json");
            command
        },
        command_max(),
    );
    assert!(output.status.success(), "{}", text(&output));
    let lines = String::from_utf8(output.stdout).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Checks the lines of `--op all --size 8,64K --iterations 20` over one fabric.
fn check_all(lines: &[Value], fabric: &str) {
    let rows: Vec<_> =
        lines.iter().map(|line| (line["op"].as_str().unwrap(), line["size"].as_u64().unwrap())).collect();
    let ops = ["pingpong", "pull", "write"];
    assert_eq!(rows, ops.map(|op| [(op, 8), (op, 65_536)]).concat());
    for line in lines {
        assert_eq!((&line["fabric"], &line["wait"]), (&fabric.into(), &"adaptive".into()), "{line}");
        assert!(line["iterations"].as_u64() >= Some(20), "{line}");
        let is_latency = line["op"] != "write";
        for field in ["mean_ns", "bytes_per_s", "ops_per_s", "min_ns", "median_ns", "p99_ns"] {
            let is_there = is_latency || !["min_ns", "median_ns", "p99_ns"].contains(&field);
            assert_eq!(line[field].as_f64() > Some(0.0), is_there, "{field}: {line}");
        }
        assert!(!is_latency || line["min_ns"].as_f64() <= line["median_ns"].as_f64(), "{line}");
        assert!(!is_latency || line["median_ns"].as_f64() <= line["p99_ns"].as_f64(), "{line}");
    }
}

const ALL: [&str; 7] = ["bench", "--op", "all", "--size", "8,64K", "--iterations", "20"];

#[test]
fn one_host_is_measured_over_shm_and_tcp_with_a_process_of_its_own() {
    let lines = lines_of(tensorwire(&ALL));
    check_all(&lines[..6], "shm");
    check_all(&lines[6..], "tcp");
}

#[test]
fn a_table_has_the_columns_of_perftest() {
    let line = [
        "bench",
        "--fabric",
        "tcp",
        "--op",
        "pull,write",
        "--size",
        "8,4K",
        "--time",
        "0.01",
        "--wait",
        "sleep",
    ];
    let table = String::from_utf8(run(&line).stdout).unwrap();
    let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines.len(), 8, "{table}");
    assert_eq!(lines[0][..5], ["pull", "over", "tcp,", "sleep,", "with"], "{table}");
    assert_eq!(lines[1], ["#bytes", "#iterations", "t_min[usec]", "t_typical[usec]", "99%[usec]"]);
    assert_eq!(lines[5], ["#bytes", "#iterations", "BW", "average[MB/sec]", "MsgRate[Mpps]"]);
    for (at, size) in [(2, "8"), (3, "4096"), (6, "8"), (7, "4096")] {
        assert_eq!(lines[at][0], size, "{table}");
        assert!(lines[at][1..].iter().all(|figure| figure.parse::<f64>().unwrap() > 0.0), "{table}");
    }
}

#[test]
fn clients_of_one_server_choose_shm_on_one_host_and_get_what_they_require() {
    let (_server, address) = serve_here(&[]);
    let arguments = [&ALL[..], &[&address]].concat();
    check_all(&lines_of(tensorwire(&arguments)), "shm");
    check_all(&lines_of(tensorwire(&[&arguments[..], &["--fabric", "tcp"]].concat())), "tcp");
}

#[test]
fn a_fabric_that_the_server_has_not_is_an_error_that_names_it() {
    let (_server, address) = serve_here(&["--fabric", "tcp"]);
    let message = fail(&["bench", &address, "--fabric", "shm", "--size", "8"]);
    assert!(message.contains("shm") && message.contains(&address), "{message}");
}

#[test]
fn a_second_client_at_the_same_time_is_refused_and_the_first_goes_on() {
    let (_server, address) = serve_here(&[]);
    // Enough rows of a millisecond each to last longer than the refusals.
    let sizes = vec!["8"; 30_000].join(",");
    let mut first =
        Process(tensorwire(&["bench", &address, "--time", "0.001", "--size", &sizes]).spawn().unwrap());
    first.line_after("pull over shm");
    for _ in 0..2 {
        let message = fail(&["bench", &address, "--size", "8"]);
        assert!(message.contains("another benchmark is running") && message.contains(&address), "{message}");
    }
    assert!(first.0.try_wait().unwrap().is_none());
}

#[test]
fn an_address_where_nobody_serves_names_the_remedy() {
    let message = fail(&["bench", "127.0.0.1:1"]);
    assert!(message.contains("127.0.0.1:1") && message.contains("refused"), "{message}");
    assert!(message.contains("tensorwire bench --serve"), "{message}");
}

#[test]
fn a_worker_that_serves_no_benchmark_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(&small_checkpoint(directory.path()), &[]);
    let message = fail(&["bench", &server.address]);
    assert!(message.contains("/job:serve/") && message.contains("tensorwire bench --serve"), "{message}");
}

/// Runs a client with a server that answers the version `answer`, or does not answer. Returns the client's error.
fn with_server_that_answers(answer: Option<&str>) -> String {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let server = Worker::builder("/job:bench/replica:0/task:0").start().await.unwrap();
        let address = server.address().to_owned();
        let client = std::thread::spawn(move || fail(&["bench", &address, "--size", "8"]));
        let peer = server.wait_for_peer("/job:bench/replica:0/task:1").await.unwrap();
        let step = server.step((peer.incarnation().unwrap() >> 1).cast_signed());
        if let Some(answer) = answer {
            let bytes = answer.as_bytes();
            let tensor = Tensor::from_values(server.pool(), &[bytes.len() as u64], bytes).unwrap();
            step.to(&peer).send("answer", tensor).unwrap();
        }
        while !client.is_finished() {
            server.runtime().sleep(std::time::Duration::from_millis(10)).await;
        }
        client.join().unwrap()
    })
}

#[test]
fn a_server_of_another_version_is_refused_with_both_versions() {
    let message = with_server_that_answers(Some("99.0.0"));
    assert!(message.contains("99.0.0") && message.contains(env!("CARGO_PKG_VERSION")), "{message}");
}

#[test]
fn a_server_that_does_not_answer_ends_the_benchmark_in_time() {
    let message = with_server_that_answers(None);
    assert!(message.contains("does not begin") && message.contains("took longer than"), "{message}");
    assert!(message.contains("tensorwire bench --serve"), "{message}");
}

#[test]
fn beyond_loopback_a_secret_is_asked_for() {
    let message = fail(&["bench", "--serve"]);
    assert!(message.contains("0.0.0.0:4250") && message.contains("secret"), "{message}");
}

#[test]
fn what_has_moved_is_named_with_its_new_place() {
    for moved in [&["--suite", "all"][..], &["--ranks", "2,4"], &["--op", "set-up"], &["--op", "all-reduce"]]
    {
        let output = run(&[&["bench"], moved].concat());
        let message = text(&output);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(
            message.contains(moved[0]) && message.contains("run `tensorwire-bench` with the same options"),
            "{message}"
        );
    }
    let message = text(&run(&["bench", "--no-such-option"]));
    assert!(!message.contains("tensorwire-bench"), "{message}");
}

#[test]
fn a_killed_benchmark_leaves_no_process() {
    let mut bench =
        tensorwire(&["bench", "--time", "3600", "--fabric", "shm", "--size", "8"]).spawn().unwrap();
    let children = format!("/proc/{0}/task/{0}/children", bench.id());
    let child = loop {
        if let Some(child) = fs::read_to_string(&children).unwrap().split_whitespace().next() {
            break PathBuf::from(format!("/proc/{child}/stat"));
        }
        std::thread::yield_now();
    };
    bench.kill().unwrap();
    bench.wait().unwrap();
    // It ends by itself. As an orphan it need not be reaped here.
    while fs::read_to_string(&child).is_ok_and(|stat| !stat.contains(") Z")) {
        std::thread::yield_now();
    }
}

/// The command on a host of [`ROUTED`].
fn on(host: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", host, env!("CARGO_BIN_EXE_tensorwire")]).args(arguments);
    command.env_remove("TENSORWIRE_SECRET_FILE").env_remove("RUST_LOG");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn fail_on(host: &str, arguments: &[&str]) -> String {
    failed(arguments, &finish(on(host, arguments), command_max()))
}

#[test]
fn two_hosts_are_measured_and_what_is_wrong_between_them_is_named() {
    within("bench::two_hosts_are_measured_and_what_is_wrong_between_them_is_named", ROUTED, None, || {
        let folder = tempfile::tempdir().unwrap();
        let secret = |name: &str| {
            let path = folder.path().join(name);
            fs::write(&path, format!("{name}: of these tests alone, of no use elsewhere")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            path.into_os_string().into_string().unwrap()
        };
        let (ours, others) = (secret("ours"), secret("others"));
        let nobody = fail_on("client", &["bench", "10.2.0.2", "--secret-file", &ours]);
        assert!(nobody.contains(&format!("tensorwire bench --serve {SERVED}")), "{nobody}");

        let (_server, address) = serve(on("server", &["bench", "--serve", "--secret-file", &ours]));
        assert_eq!(address, SERVED);
        let client = [&ALL[..], &["10.2.0.2", "--secret-file", &ours]].concat();
        let lines = lines_of(on("client", &client));
        check_all(&lines, "tcp");
        for line in lines {
            assert!(line["not_used"].to_string().contains("shm: the peer is on another host"), "{line}");
        }
        let table = succeed_as(on("client", &client));
        let title = table
            .lines()
            .find(|line| line.starts_with("pull over tcp, adaptive, with 10.2.0.2:4250; not used: "));
        assert!(title.is_some_and(|title| title.contains("shm: the peer is on another host")), "{table}");

        let required = fail_on("client", &[&client[..], &["--fabric", "shm"]].concat());
        assert!(required.contains("shm") && required.contains("--fabric"), "{required}");
        for wrong in [&["--secret-file", &*others][..], &[]] {
            let message = fail_on("client", &[&["bench", "10.2.0.2"], wrong].concat());
            assert!(message.contains("secret") && message.contains(SERVED), "{message}");
            assert!(!message.contains("--serve"), "somebody serves there: {message}");
        }
    });
}

#[test]
#[ignore = "needs an RDMA device: run it with scripts/rxe-vm/suite, or with --ignored where there is one"]
fn verbs_is_measured_between_two_devices() {
    let ends = rdma_devices::ends();
    let with = |device: Option<&String>, arguments: &[&str]| {
        let mut command = tensorwire(arguments);
        command.envs(device.map(|name| (RDMA_DEVICE, name)));
        command
    };
    let served = ["bench", "--serve", "127.0.0.1:0", "--fabric", "verbs"];
    let (_server, address) = serve(with(ends.right.as_ref(), &served));
    let client = [&ALL[..], &[&address, "--fabric", "verbs"]].concat();
    check_all(&lines_of(with(ends.left.as_ref(), &client)), "verbs");
}
