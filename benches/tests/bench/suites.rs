//! Tests that the program measures, refuses wrong input and ends. They assert no times.

use std::{
    fs,
    process::Stdio,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{
    fail,
    process::{Process, text},
    rdma_devices, run, succeed, tensorwire_bench,
};

const OPS: [&str; 10] = [
    "write",
    "pingpong",
    "pull",
    "pull-by-handle",
    "pull-by-message",
    "pages",
    "outstanding",
    "list",
    "receives",
    "set-up",
];
const SIZED_OPS: [&str; 6] = ["write", "pingpong", "pull", "pull-by-handle", "pull-by-message", "pages"];
const WAITS: [&str; 3] = ["sleep", "adaptive", "busy"];
const FIELDS_OF_TEXT: [&str; 9] =
    ["fabric", "op", "mode", "wait", "validate", "source", "limit", "cpus", "ratio_of"];
const FIELDS_OF_NUMBERS: [&str; 13] = [
    "size",
    "median_ns",
    "mean_ns",
    "cpu_ns",
    "limit_mean_ns",
    "p99_ns",
    "bytes_per_s",
    "ops_per_s",
    "limit_median_ns",
    "limit_bytes_per_s",
    "ratio",
    "steal",
    "rounds",
];

/// The lines of JSON that a run prints.
fn lines_of(arguments: &[&str]) -> Vec<serde_json::Value> {
    let output = run(&[&["--json"], arguments].concat());
    assert!(output.status.success(), "{}", text(&output));
    let lines = String::from_utf8(output.stdout).unwrap();
    let parse = |line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
    lines.lines().map(parse).collect()
}

/// Runs one operation over one fabric for a moment, and checks each line.
fn measures(fabric: &str, op: &str, sizes: &str) {
    let lines =
        lines_of(&["--fabric", fabric, "--op", op, "--size", sizes, "--rounds", "2", "--round-ms", "2"]);
    assert_eq!(lines.len(), if SIZED_OPS.contains(&op) { sizes.split(',').count() } else { 1 });
    for line in &lines {
        assert_eq!((&line["fabric"], &line["op"]), (&fabric.into(), &op.into()), "{line}");
        for field in FIELDS_OF_TEXT {
            assert!(line[field].as_str().is_some_and(|text| !text.is_empty()), "{field}: {line}");
        }
        for field in FIELDS_OF_NUMBERS {
            assert!(line[field].as_f64().is_some_and(f64::is_finite), "{field}: {line}");
        }
        for field in ["median_ns", "limit_median_ns", "ratio", "bytes_per_s", "limit_bytes_per_s"] {
            assert!(line[field].as_f64() > Some(0.0), "{field}: {line}");
        }
        assert_eq!(line["row"], serde_json::Value::Null, "only rows of a suite have a name: {line}");
    }
}

macro_rules! every_op {
    ($($name:ident: $fabric:literal $op:literal $sizes:literal;)*) => {
        $(
            #[test]
            fn $name() {
                assert!(OPS.contains(&$op));
                measures($fabric, $op, $sizes);
            }
        )*
    };
}

every_op! {
    shm_write_is_measured: "shm" "write" "8,64K";
    shm_pingpong_is_measured: "shm" "pingpong" "8,4K";
    shm_pull_is_measured: "shm" "pull" "8,64K,2M";
    shm_pulls_by_handle_are_measured: "shm" "pull-by-handle" "8,64K";
    shm_pulls_by_message_are_measured: "shm" "pull-by-message" "8,64K";
    shm_pages_are_measured: "shm" "pages" "4K,8M";
    shm_outstanding_is_measured: "shm" "outstanding" "8";
    shm_lists_are_measured: "shm" "list" "8";
    shm_receives_are_measured: "shm" "receives" "8";
    shm_set_up_is_measured: "shm" "set-up" "8";
    tcp_write_is_measured: "tcp" "write" "8,64K";
    tcp_pingpong_is_measured: "tcp" "pingpong" "8,64K";
    tcp_pull_is_measured: "tcp" "pull" "8,64K";
    tcp_pages_are_measured: "tcp" "pages" "64K";
    tcp_outstanding_is_measured: "tcp" "outstanding" "8";
    tcp_lists_are_measured: "tcp" "list" "8";
    tcp_receives_are_measured: "tcp" "receives" "8";
    tcp_set_up_is_measured: "tcp" "set-up" "8";
}

/// Measures a collective of a group for a moment, and checks each line.
fn measures_collective(fabric: &str, op: &str, ranks: &str, more: &[&str]) -> Vec<serde_json::Value> {
    // 12 bytes are 3 numbers: of more ranks, some have no part.
    let arguments = ["--fabric", fabric, "--op", op, "--ranks", ranks, "--size", "12,256K", "--rounds", "1"];
    let lines = lines_of(&[&arguments[..], &["--round-ms", "2"], more].concat());
    for line in &lines {
        assert_eq!((&line["fabric"], &line["op"]), (&fabric.into(), &op.replace('_', "-").into()), "{line}");
        assert!(line["ranks"].as_u64().is_some_and(|count| ranks.contains(&count.to_string())), "{line}");
        for field in ["median_ns", "p99_ns", "ops_per_s", "cpu_ns"] {
            assert!(line[field].as_f64() > Some(0.0), "{field}: {line}");
        }
        assert_eq!(line["bytes_per_s"].as_f64() > Some(0.0), op != "barrier", "{line}");
        assert_eq!(line["limit"], "none", "{line}");
    }
    lines
}

macro_rules! every_collective {
    ($($name:ident: $fabric:literal $op:literal $ranks:literal $lines:literal;)*) => {
        $(
            #[test]
            fn $name() {
                assert_eq!(measures_collective($fabric, $op, $ranks, &[]).len(), $lines);
            }
        )*
    };
}

every_collective! {
    all_reduce_over_shm_is_measured: "shm" "all_reduce" "2,5" 4;
    all_reduce_over_tcp_is_measured: "tcp" "all-reduce" "2,4" 4;
    reduce_is_measured: "shm" "reduce" "3" 2;
    reduce_scatter_is_measured: "shm" "reduce-scatter" "2,4" 4;
    all_gather_is_measured: "tcp" "all-gather" "3" 2;
    broadcast_is_measured: "shm" "broadcast" "2,4" 4;
    all_to_all_is_measured: "shm" "all-to-all" "3" 2;
    barrier_is_measured: "tcp" "barrier" "2,4" 2;
}

#[test]
fn an_all_reduce_is_measured_with_each_algorithm() {
    let algorithms = "exchange,views,ring,halving-doubling,doubling,hierarchical";
    let lines = measures_collective("shm", "all-reduce", "4", &["--algorithm", algorithms]);
    let measured: Vec<_> = lines.iter().map(|line| line["algorithm"].as_str().unwrap()).step_by(2).collect();
    assert_eq!(measured.join(","), algorithms);
}

#[test]
fn ranks_wait_in_each_way() {
    let lines = measures_collective("shm", "all-reduce", "2", &["--wait", "sleep,adaptive,busy"]);
    assert_eq!(lines.len(), 2 * WAITS.len());
}

/// Measures one operation between the devices that tests use, in each way of waiting.
fn measures_rdma(op: &str, sizes: &str) {
    let ends = rdma_devices::ends();
    for wait in WAITS {
        let mut arguments = vec!["--fabric", "verbs", "--op", op, "--size", sizes, "--wait", wait, "--json"];
        arguments.extend(["--rounds", "1", "--ops", "64"]);
        if let (Some(left), Some(right)) = (&ends.left, &ends.right) {
            arguments.extend(["--device", left, "--peer-device", right]);
        }
        let lines = succeed(&arguments);
        assert_eq!(lines.lines().count(), sizes.split(',').count(), "{lines}");
        for line in lines.lines() {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_eq!(
                (&line["fabric"], &line["op"], &line["wait"]),
                (&"verbs".into(), &op.into(), &wait.into())
            );
            for field in ["median_ns", "limit_median_ns", "ratio", "ratio_low", "ratio_high"] {
                assert!(line[field].as_f64() > Some(0.0), "{field}: {line}");
            }
        }
    }
}

macro_rules! needs_a_device {
    ($($name:ident: $op:literal $sizes:literal;)*) => {
        $(
            #[test]
            #[ignore = "needs an RDMA device: run it with scripts/rxe-vm/suite, or with --ignored where there is one"]
            fn $name() {
                measures_rdma($op, $sizes);
            }
        )*
    };
}

needs_a_device! {
    verbs_write_is_measured: "write" "64K";
    verbs_pingpong_is_measured: "pingpong" "8";
    verbs_pull_is_measured: "pull" "8";
    verbs_pages_are_measured: "pages" "64K";
    verbs_all_reduce_is_measured: "all-reduce" "512K";
}

#[test]
fn device_that_is_not_there_is_refused() {
    let output =
        fail(&["--fabric", "verbs", "--op", "pingpong", "--size", "8", "--device", "no_such_device"]);
    assert!(output.contains("tensorwire-bench: ") && output.contains("RDMA"), "{output}");
}

#[test]
fn peers_device_alone_is_refused() {
    let output = run(&["--fabric", "verbs", "--peer-device", "rxe2"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output).contains("--device"), "{}", text(&output));
}

#[test]
fn operations_of_a_round_can_be_given() {
    let arguments = ["--fabric", "tcp", "--op", "pingpong", "--size", "8", "--rounds", "1", "--ops", "100"];
    let line: serde_json::Value =
        serde_json::from_str(&succeed(&[&arguments[..], &["--json"]].concat())).unwrap();
    assert!(line["ratio_low"].as_f64() > Some(0.0) && line["ratio_high"] == line["ratio_low"], "{line}");
}

#[test]
fn each_fabric_waits_in_each_way() {
    for (fabric, wait) in ["shm", "tcp"].into_iter().flat_map(|fabric| WAITS.map(|wait| (fabric, wait))) {
        let arguments = ["--fabric", fabric, "--op", "pingpong,pull", "--size", "8", "--wait", wait];
        let output = succeed(&[&arguments[..], &["--rounds", "1", "--round-ms", "1", "--json"]].concat());
        let wanted = format!(r#""wait":"{wait}""#);
        assert_eq!(output.matches(&wanted).count(), 2, "{fabric}: {output}");
    }
}

#[test]
fn idle_connections_are_watched() {
    for fabric in ["shm", "tcp"] {
        let output = run(&["--fabric", fabric, "--op", "idle", "--rounds", "1", "--json"]);
        assert!(output.status.success(), "{}", text(&output));
        let line: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&line["op"], &line["limit"]), (&"idle".into(), &"none".into()), "{line}");
        assert!(line["ops_per_s"].as_f64().is_some(), "{line}");
    }
}

#[test]
fn table_has_a_head_and_a_row_a_case() {
    let arguments = ["--fabric", "tcp", "--op", "pingpong", "--size", "8,16", "--rounds", "1"];
    let output = run(&[&arguments[..], &["--round-ms", "1"]].concat());
    assert!(output.status.success(), "{}", text(&output));
    let table = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 3, "{table}");
    assert!(lines[0].contains("ratio") && lines[1].contains("tcp pingpong 8 B"), "{table}");
    assert!(lines.iter().all(|line| line.chars().count() <= 100), "{table}");
}

#[test]
fn one_cpu_is_enough_for_both_processes() {
    let output = succeed(&[
        "--fabric",
        "shm",
        "--op",
        "pingpong",
        "--size",
        "8",
        "--cpus",
        "one",
        "--rounds",
        "1",
        "--round-ms",
        "1",
        "--json",
    ]);
    assert!(output.contains(r#""cpus":"one""#), "{output}");
}

/// Wrong values end with code 2 before anything starts; each message names field, value and remedy.
#[test]
fn bad_input_is_refused_by_name() {
    let cases: [(&[&str], [&str; 3]); 11] = [
        (&["--size", "0"], ["--size", "'0'", "from 1 to 1G"]),
        (&["--size", "8,many"], ["--size", "'many'", "64K"]),
        (&["--size", "2G"], ["--size", "'2G'", "from 1 to 1G"]),
        (&["--fabric", "smoke"], ["--fabric", "'smoke'", "shm, tcp"]),
        (&["--op", "dance"], ["--op", "'dance'", "pingpong"]),
        (&["--wait", "never"], ["--wait", "'never'", "sleep"]),
        (&["--rounds", "0"], ["--rounds", "'0'", "number"]),
        (&["--suite", "tiny"], ["--suite", "'tiny'", "small, large"]),
        (&["--ranks", "1"], ["--ranks", "1", "2..=8"]),
        (&["--ranks", "2,9"], ["--ranks", "9", "2..=8"]),
        (&["--algorithm", "magic"], ["--algorithm", "'magic'", "halving-doubling"]),
    ];
    for (arguments, wanted) in cases {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let text = text(&output);
        for word in wanted {
            assert!(text.contains(word), "{arguments:?} without {word}: {text}");
        }
    }
}

/// The limit of each way of waiting, by the fabric and the operation that it is compared with.
fn limits(fabric: &str, op: &str, cpus: &str) -> Vec<String> {
    let arguments = ["--fabric", fabric, "--op", op, "--size", "8", "--rounds", "1", "--round-ms", "2"];
    let lines = lines_of(&[&arguments[..], &["--wait", "sleep,adaptive,busy", "--cpus", cpus]].concat());
    lines.iter().map(|line| line["limit"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_limit_waits_as_its_row_waits() {
    let [asleep, looking] = ["eventfd + epoll", "words in shared memory"];
    for cpus in ["free", "one"] {
        assert_eq!(limits("shm", "pingpong", cpus), [asleep, looking, looking]);
    }
    assert_eq!(limits("shm", "outstanding", "free")[1], format!("{looking}, 64 at once"));
}

#[test]
fn no_limit_has_tensorwire_in_it() {
    assert_eq!(limits("shm", "pull", "free"), ["two messages, copy"; 3]);
    assert_eq!(limits("tcp", "pull", "free"), ["raw stream"; 3]);
}

#[test]
fn a_large_pull_is_compared_with_the_bare_copy_too_and_by_at_most_as_many_cores() {
    for (cpus, copies) in [("one", &["copy"][..]), ("free", &["copy", "copy on two cores"])] {
        let arguments = ["--fabric", "shm", "--op", "pull", "--size", "1M", "--cpus", cpus, "--rounds", "1"];
        for wait in ["sleep", "adaptive"] {
            let line = &lines_of(&[&arguments[..], &["--round-ms", "2", "--wait", wait]].concat())[0];
            let of_limit = line["limit"].as_str().unwrap().strip_prefix("two messages, ").unwrap();
            assert!(copies.contains(&of_limit), "{line}");
            assert!(copies.contains(&line["bare"].as_str().unwrap()), "{line}");
            for field in ["bare_mean_ns", "bare_bytes_per_s", "bare_ratio"] {
                assert!(line[field].as_f64() > Some(0.0), "{field}: {line}");
            }
        }
    }
}

#[test]
fn a_source_as_it_was_and_one_just_rewritten_are_rows_of_their_own() {
    let arguments = ["--fabric", "shm", "--op", "pull", "--size", "64K", "--rounds", "1", "--round-ms", "2"];
    let lines = lines_of(&[&arguments[..], &["--source", "as-it-was,rewritten"]].concat());
    let sources: Vec<_> = lines.iter().map(|line| line["source"].as_str().unwrap()).collect();
    assert_eq!(sources, ["as-it-was", "rewritten"]);
}

#[test]
fn a_suite_measures_its_rows_and_draws_them() {
    let folder = tempfile::tempdir().unwrap();
    let chart = folder.path().join("chart.svg");
    let lines =
        lines_of(&["--suite", "large", "--rounds", "1", "--ops", "1", "--plot", chart.to_str().unwrap()]);
    let chart = fs::read_to_string(chart).unwrap();
    assert!(lines.len() > 10, "{lines:?}");
    for line in &lines {
        let name = line["row"].as_str().expect("a name");
        assert!(chart.contains(name), "the chart lacks {name}");
        assert_eq!(line.get("goal").is_some(), line["met"].is_boolean(), "{line}");
        assert!(line["size"].as_u64() >= Some(1 << 20), "{line}");
    }
}

#[test]
fn a_suite_has_no_options_of_rows() {
    let output = run(&["--suite", "small", "--size", "8"]);
    let text = text(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("--suite") && text.contains("--size"), "{text}");
}

#[test]
fn what_this_build_cannot_do_is_refused_by_name() {
    let refused = [
        ("tcp", "--mode", "view"),
        ("tcp", "--mode", "view-read"),
        ("verbs", "--mode", "view"),
        ("tcp", "--source", "rewritten"),
    ];
    for (fabric, field, value) in refused {
        let output = fail(&["--fabric", fabric, "--size", "8", field, value]);
        for word in [field, value, "this build", "use"] {
            assert!(output.contains(word), "without {word}: {output}");
        }
    }
}

#[test]
fn a_collective_that_is_not_possible_is_refused_by_name() {
    let refused = [("tcp", "--algorithm", "views"), ("shm", "--size", "6")];
    for (fabric, field, value) in refused {
        let output = fail(&["--fabric", fabric, "--op", "all-reduce", field, value]);
        for word in [field, value, "use"] {
            assert!(output.contains(word), "without {word}: {output}");
        }
    }
}

#[test]
fn help_has_examples() {
    let output = succeed(&["--help"]);
    assert!(output.contains("Examples:") && output.contains("tensorwire-bench --fabric shm --op pingpong"));
    assert!(!output.contains("COMMAND") && !output.contains("peer  "), "{output}");
}

/// The processes that `parent` has started.
fn children_of(parent: u32) -> Vec<u32> {
    let path = format!("/proc/{parent}/task/{parent}/children");
    let text = fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().map(|word| word.parse().unwrap()).collect()
}

/// The state letter of a process; `None` when there is none.
fn state_of(process: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// How often a process went to sleep.
fn sleeps_of(process: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.map_or(0, |count| count.trim().parse().unwrap())
}

/// Waits until `done` holds.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    #[allow(clippy::disallowed_methods)] // bounds the wait
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < Duration::from_secs(30), "{what}: it did not happen");
        thread::yield_now();
    }
}

/// A benchmark that would run for hours, and its second process, once it measures.
fn endless(fabric: &str, op: &str) -> (Process, u32) {
    let (bench, children) = endless_ranks(fabric, op, 2);
    (bench, children[0])
}

/// A benchmark that would run for hours, and its other processes.
fn endless_ranks(fabric: &str, op: &str, ranks: usize) -> (Process, Vec<u32>) {
    let arguments = ["--fabric", fabric, "--op", op, "--size", "8", "--rounds", "100000"];
    let count = ranks.to_string();
    let arguments = [&arguments[..], &["--round-ms", "200", "--ranks", &count]].concat();
    let bench = Process(tensorwire_bench(&arguments).stderr(Stdio::piped()).spawn().unwrap());
    let mut children = Vec::new();
    until("the other processes", || {
        children = children_of(bench.0.id());
        children.len() == ranks - 1
    });
    (bench, children)
}

fn kill(process: u32) {
    kill_process(Pid::from_raw(i32::try_from(process).unwrap()).unwrap(), Signal::KILL).unwrap();
}

/// Kills the second process once it has slept `sleeps` times: while it is set up, or while it measures.
fn killed_peer_ends_the_run(fabric: &str, op: &str, sleeps: u64) {
    let (bench, peer) = endless(fabric, op);
    until("sleeps of the second process", || sleeps_of(peer) >= sleeps);
    kill(peer);
    // Less than the limit of connecting.
    fails_within(bench, Duration::from_secs(9));
    assert_eq!(state_of(peer), None, "the second process is not reaped");
}

/// Awaits the end of a run that cannot continue; returns its output.
fn fails_within(mut bench: Process, limit: Duration) -> String {
    let mut stderr = bench.0.stderr.take().unwrap();
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut text = String::new();
        std::io::Read::read_to_string(&mut stderr, &mut text).unwrap();
        sender.send(text).unwrap();
    });
    let text = receiver.recv_timeout(limit).expect("the run goes on without its peer");
    assert_eq!(bench.0.wait().unwrap().code(), Some(1), "{text}");
    assert!(text.contains("tensorwire-bench: "), "{text}");
    text
}

/// Kills one of four ranks once it has slept `sleeps` times: while they join, or while they call.
fn a_killed_rank_ends_the_run(fabric: &str, killed: usize, sleeps: u64) {
    let (bench, ranks) = endless_ranks(fabric, "all-reduce", 4);
    until("sleeps of a rank", || sleeps_of(ranks[killed]) >= sleeps);
    kill(ranks[killed]);
    // The others may wait for it until the limit of joining.
    let text = fails_within(bench, Duration::from_secs(20));
    assert!(text.contains("rank"), "{text}");
    for rank in ranks {
        assert_eq!(state_of(rank), None, "a rank is not reaped");
    }
}

#[test]
fn a_rank_that_is_killed_ends_a_run_over_shm() {
    a_killed_rank_ends_the_run("shm", 0, 30);
    a_killed_rank_ends_the_run("shm", 2, 2_000);
}

#[test]
fn a_rank_that_is_killed_ends_a_run_over_tcp() {
    a_killed_rank_ends_the_run("tcp", 1, 2_000);
}

#[test]
fn a_rank_that_stops_ends_the_run_within_the_limit_of_a_call() {
    let (bench, ranks) = endless_ranks("shm", "all-reduce", 3);
    until("sleeps of a rank", || sleeps_of(ranks[1]) >= 2_000);
    kill_process(Pid::from_raw(i32::try_from(ranks[1]).unwrap()).unwrap(), Signal::STOP).unwrap();
    let text = fails_within(bench, Duration::from_secs(30));
    // The list of missing ranks ends with rank 2: a rank that waits for several may be the first to report.
    let is_late_call = text.contains("was not complete after 8s") && text.contains("2]");
    // It has made its last call, and stopped before it reported that.
    let is_late_report = text.contains("rank 2: the other process did not answer within 9s");
    assert!(is_late_call || is_late_report, "{text}");
}

#[test]
fn d_peer_sigkill_ends_a_run_over_shm() {
    for sleeps in [0, 2, 3, 4, 5, 6, 7, 3_000, 10_000] {
        killed_peer_ends_the_run("shm", "pingpong", sleeps);
    }
}

#[test]
fn d_peer_sigkill_ends_a_run_over_tcp() {
    for sleeps in [2_000, 10_000] {
        killed_peer_ends_the_run("tcp", "pingpong", sleeps);
    }
}

#[test]
fn d_peer_sigkill_ends_a_run_of_pulls() {
    killed_peer_ends_the_run("shm", "pull", 500);
}

#[test]
fn killed_run_leaves_no_process() {
    let (mut bench, peer) = endless("shm", "pingpong");
    bench.0.kill().unwrap();
    bench.0.wait().unwrap();
    until("the end of the second process", || state_of(peer).is_none_or(|state| state == 'Z'));
}

#[test]
fn a_pull_is_measured_with_each_checksum_and_a_write_once() {
    let arguments = ["--fabric", "shm", "--op", "pull,write", "--size", "4K", "--rounds", "1"];
    let more = ["--round-ms", "1", "--validate", "off,crc32c,xxh3"];
    let measured: Vec<_> = lines_of(&[&arguments[..], &more].concat())
        .iter()
        .map(|line| (line["op"].as_str().unwrap().to_owned(), line["validate"].as_str().unwrap().to_owned()))
        .collect();
    let expected = [("pull", "off"), ("pull", "crc32c"), ("pull", "xxh3"), ("write", "off")];
    assert_eq!(measured, expected.map(|(op, validate)| (op.to_owned(), validate.to_owned())));
}
