//! `tensorwire devices` and `tensorwire doctor` as a user starts them: on any machine, and, if it has an RDMA device,
//! after a change that makes RDMA fail for one cause.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    fs::{self, File, Permissions},
    os::unix::fs::PermissionsExt,
    process::{Command, Output, Stdio},
    time::Duration,
};

use rustix::fs::{FlockOperation, flock};
use serde_json::Value;

use crate::common::{finish, run, tensorwire, text};
use crate::own_network::need_own_network;

/// How long one command may take, on a machine that is not emulated.
const COMMAND_MAX: Duration = Duration::from_secs(60);
/// The user id of `nobody`.
const USER: &str = "65534";

/// What a command printed with `--json`, and its status.
struct Answer {
    code: Option<i32>,
    value: Value,
}

impl Answer {
    fn of(output: &Output) -> Self {
        let value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("not JSON ({error}): {}", text(output)));
        Self { code: output.status.code(), value }
    }

    fn finding(&self, cause: &str) -> &Value {
        let findings = self.value["findings"].as_array().unwrap();
        let found = findings.iter().find(|finding| finding["cause"] == cause);
        found.unwrap_or_else(|| panic!("no {cause} in {:#}", self.value))
    }

    fn causes(&self, status: &str) -> Vec<&str> {
        let findings = self.value["findings"].as_array().unwrap().iter();
        findings.filter(|one| one["status"] == status).map(|one| one["cause"].as_str().unwrap()).collect()
    }

    fn verdict(&self) -> &str {
        self.value["verdict"].as_str().unwrap()
    }

    /// Checks that RDMA can't be used for exactly these causes, each with a remedy.
    #[track_caller]
    fn refuses(&self, causes: &[&str]) {
        assert_eq!((self.code, self.value["usable"].as_bool()), (Some(1), Some(false)), "{:#}", self.value);
        assert_eq!(self.causes("problem"), causes, "{:#}", self.value);
        for cause in causes {
            assert!(self.finding(cause)["remedy"].is_string(), "{cause}");
        }
        assert!(self.verdict().starts_with("RDMA cannot be used: "), "{}", self.verdict());
        assert!(self.verdict().ends_with("; Tensorwire will use shm and tcp"), "{}", self.verdict());
    }
}

/// By how much limits grow on an emulated machine.
fn patience() -> u32 {
    std::env::var("TENSORWIRE_TEST_PATIENCE").ok().and_then(|value| value.parse().ok()).unwrap_or(1)
}

fn ask(arguments: &[&str]) -> Answer {
    Answer::of(&finish(tensorwire(arguments), COMMAND_MAX * patience()))
}

/// Runs tensorwire through `prefix`, a command that starts another.
fn ask_through(prefix: &[&str], arguments: &[&str]) -> Answer {
    let mut command = Command::new(prefix[0]);
    command.args(&prefix[1..]).arg(env!("CARGO_BIN_EXE_tensorwire")).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Answer::of(&finish(command, COMMAND_MAX * patience()))
}

#[test]
fn devices_tell_why_there_is_none_or_what_would_be_used() {
    let answer = ask(&["devices", "--json"]);
    let plain = run(&["devices"]);
    assert_eq!(answer.code, plain.status.code());
    let opened = answer.value["devices"].as_array().unwrap().iter().any(|one| one["limits"].is_object());
    assert_eq!(answer.code, Some(i32::from(!opened)), "{:#}", answer.value);
    match answer.value["why_no_device"].as_str() {
        Some(reason) => {
            assert!(!opened && answer.value["choice"].is_null());
            assert!(text(&plain).contains(reason), "{}", text(&plain));
        }
        None => assert!(opened && text(&plain).contains("Tensorwire would use "), "{}", text(&plain)),
    }
}

#[test]
fn doctor_on_this_machine_is_of_one_mind_with_its_status_and_with_devices() {
    let (devices, doctor) =
        (ask(&["devices", "--json"]), ask(&["doctor", "--require", "verbs", "--json", "--pool", "1"]));
    assert_eq!(doctor.value["choice"], devices.value["choice"]);
    let usable = doctor.value["usable"].as_bool().unwrap();
    assert_eq!(doctor.code, Some(i32::from(!usable)));
    assert_eq!(doctor.causes("problem").is_empty(), usable, "{:#}", doctor.value);
    // Every machine that runs these tests runs the tests of both fabrics, too.
    for works in ["shm.works", "tcp.works"] {
        assert_eq!(doctor.finding(works)["status"], "ok");
    }
    let plain = run(&["doctor", "--pool", "1"]);
    // The command did not require RDMA.
    assert_eq!(plain.status.code(), Some(0));
    let several = run(&["doctor", "--pool", "1", "--require", "shm,tcp", "--require", "verbs"]);
    assert_eq!(several.status.code(), doctor.code);
    assert_eq!(text(&plain).lines().last(), Some(doctor.verdict()));
}

#[test]
fn doctor_without_a_library_that_can_be_loaded() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("libibverbs.so.1"), b"not a library").unwrap();
    let shadowed = |arguments: &[&str]| {
        let mut command = tensorwire(arguments);
        command.env("LD_LIBRARY_PATH", directory.path());
        finish(command, COMMAND_MAX)
    };
    let doctor = Answer::of(&shadowed(&["doctor", "--require", "verbs", "--json"]));
    assert_eq!(doctor.code, Some(1));
    assert_eq!(doctor.causes("problem").first(), Some(&"library.missing"), "{:#}", doctor.value);
    let remedy = doctor.finding("library.missing")["remedy"].as_str().unwrap();
    assert!(remedy.contains("libibverbs1"), "{remedy}");
    assert!(doctor.verdict().contains("libibverbs.so.1 cannot be used"), "{}", doctor.verdict());
    let devices = shadowed(&["devices"]);
    assert_eq!(devices.status.code(), Some(1));
    assert!(
        text(&devices).contains("No device can be used: libibverbs.so.1 cannot be used"),
        "{}",
        text(&devices)
    );
}

#[test]
fn doctor_names_the_devices_there_are_when_it_is_asked_for_another() {
    let doctor = ask(&["doctor", "--require", "verbs", "--json", "--device", "no_such_device"]);
    assert_eq!(doctor.code, Some(1));
    let has_none = ask(&["devices", "--json"]).value["devices"].as_array().unwrap().is_empty();
    let cause = if has_none { "device.none" } else { "device.unknown" };
    assert!(doctor.causes("problem").contains(&cause), "{:#}", doctor.value);
}

#[test]
fn doctor_heeds_the_environment_that_workers_heed() {
    let with = |name: &str, value: &str| {
        let mut command = tensorwire(&["doctor", "--require", "verbs", "--json", "--pool", "1"]);
        command.env(name, value);
        Answer::of(&finish(command, COMMAND_MAX))
    };
    let doctor = with("TENSORWIRE_RDMA_MTU", "1025");
    assert_eq!(doctor.code, Some(1));
    let message = doctor.finding("choice.none")["message"].as_str().unwrap();
    assert!(message.contains("TENSORWIRE_RDMA_MTU") && message.contains("1025"), "{message}");
    let doctor = with("TENSORWIRE_RDMA_DEVICE", "no_such_device");
    assert_eq!((doctor.code, &doctor.value["choice"]), (Some(1), &Value::Null));
}

#[test]
fn wrong_arguments_end_with_code_2() {
    for arguments in [
        &["devices", "now"][..],
        &["devices", "--pool", "1"],
        &["doctor", "--pool", "0"],
        &["doctor", "--pool", "much"],
        &["doctor", "--device"],
        &["doctor", "--require", "smoke"],
        &["doctor", "rxe0"],
    ] {
        assert_eq!(run(arguments).status.code(), Some(2), "{arguments:?}");
    }
}

/// Keeps other tests, in this process and in others, from using the machine until it is dropped.
fn machine() -> File {
    let lock = File::create(std::env::temp_dir().join("tensorwire-test-doctor.lock")).unwrap();
    flock(&lock, FlockOperation::LockExclusive).unwrap();
    lock
}

/// Keeps other tests from using the machine, so that this one can change it.
fn own_machine() -> File {
    need_own_network();
    machine()
}

/// Runs a tool, which must succeed.
fn tool(line: &[&str]) {
    let output = Command::new(line[0]).args(&line[1..]).output();
    let output = output.unwrap_or_else(|error| panic!("{line:?}: {error}"));
    assert!(output.status.success(), "{line:?}: {}", text(&output));
}

/// A tool that undoes a change of the test when it is dropped, even if the test fails.
struct Undo(Vec<String>);

impl Undo {
    fn by(line: &[&str]) -> Self {
        Self(line.iter().map(|&word| word.to_owned()).collect())
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        // A failure here would hide that of the test.
        let _ = Command::new(&self.0[0]).args(&self.0[1..]).status();
    }
}

/// What Tensorwire would use, as `tensorwire devices` prints it.
struct Chosen {
    name: String,
    interface: String,
    node: String,
}

fn chosen() -> Chosen {
    let devices = ask(&["devices", "--json"]).value;
    let name =
        devices["choice"]["device"].as_str().unwrap_or_else(|| panic!("no device to test with: {devices:#}"));
    let all = devices["devices"].as_array().unwrap();
    let device = all.iter().find(|device| device["name"] == name).unwrap();
    Chosen {
        name: name.to_owned(),
        interface: device["ports"][0]["interface"]["name"].as_str().unwrap().to_owned(),
        node: device["node"]["path"].as_str().unwrap().to_owned(),
    }
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some that may be broken"]
fn rdma_doctor_healthy() {
    let _machine = machine();
    let doctor = ask(&["doctor", "--require", "verbs", "--json", "--pool", "4M"]);
    assert_eq!((doctor.code, doctor.causes("problem")), (Some(0), vec![]), "{:#}", doctor.value);
    for cause in
        ["library.found", "node.usable", "port.active", "address.found", "choice.made", "loopback.works"]
    {
        assert_eq!(doctor.finding(cause)["status"], "ok");
    }
    let name = doctor.value["choice"]["device"].as_str().unwrap();
    assert!(doctor.verdict().starts_with(&format!("RDMA works here: {name} port ")), "{}", doctor.verdict());
    let devices = ask(&["devices", "--json"]);
    assert_eq!(devices.value["choice"], doctor.value["choice"]);
    let device = &devices.value["devices"][0];
    for field in ["queue_pairs", "work_requests", "segments", "completions", "region_bytes"] {
        assert!(device["limits"][field].as_u64().unwrap() > 0, "{field}: {device:#}");
    }
    assert!(device["ports"][0]["mtu"].as_u64().unwrap() >= 256, "{device:#}");
    assert!(!device["ports"][0]["addresses"].as_array().unwrap().is_empty(), "{device:#}");
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some that may be broken"]
fn rdma_doctor_no_libibverbs() {
    let _machine = own_machine();
    let devices = ask(&["devices", "--json"]);
    let library = devices.value["library"]["path"].as_str().unwrap();
    // Only for the command: the mount is made in a separate namespace.
    let hide = format!("mount --bind /dev/null {library} && exec \"$@\"");
    let prefix = ["unshare", "--mount", "sh", "-c", &hide, "sh"];
    let doctor = ask_through(&prefix, &["doctor", "--require", "verbs", "--json", "--pool", "4M"]);
    doctor.refuses(&["library.missing", "choice.none"]);
    assert_eq!(doctor.finding("node.usable")["status"], "ok");
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some that may be broken"]
fn rdma_doctor_no_device() {
    let _machine = own_machine();
    let devices = ask(&["devices", "--json"]).value;
    let mut undo = Vec::new();
    for device in devices["devices"].as_array().unwrap() {
        assert_eq!(device["driver"], "rdma_rxe", "only software devices can be taken away");
        let name = device["name"].as_str().unwrap();
        let interface = device["ports"][0]["interface"]["name"].as_str().unwrap();
        tool(&["rdma", "link", "del", name]);
        undo.push(Undo::by(&["rdma", "link", "add", name, "type", "rxe", "netdev", interface]));
    }
    ask(&["doctor", "--require", "verbs", "--json", "--pool", "4M"]).refuses(&["device.none", "choice.none"]);
    let devices = ask(&["devices", "--json"]);
    assert_eq!((devices.code, devices.value["devices"].as_array().map(Vec::len)), (Some(1), Some(0)));
    assert!(
        devices.value["why_no_device"].as_str().unwrap().contains("rdma link add"),
        "{:#}",
        devices.value
    );
}

/// Every device's file gets this mode.
fn set_modes(mode: u32) {
    for entry in fs::read_dir("/dev/infiniband").unwrap() {
        let path = entry.unwrap().path();
        if path.file_name().unwrap().to_string_lossy().starts_with("uverbs") {
            fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        }
    }
}

/// Runs a command as `nobody`. That user has only the rights of all users.
const AS_NOBODY: [&str; 6] = ["setpriv", "--reuid", USER, "--regid", USER, "--clear-groups"];

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some that may be broken"]
fn rdma_doctor_device_without_permission() {
    let _machine = own_machine();
    let node = chosen().node;
    set_modes(0o600);
    let _undo = Undo::by(&["sh", "-c", "chmod 666 /dev/infiniband/uverbs*"]);
    let doctor = ask_through(&AS_NOBODY, &["doctor", "--require", "verbs", "--json", "--pool", "4M"]);
    assert_eq!(doctor.code, Some(1));
    let problems = doctor.causes("problem");
    assert!(problems.iter().all(|cause| ["node.denied", "choice.none"].contains(cause)), "{problems:?}");
    let finding = doctor.finding("node.denied");
    assert!(finding["message"].as_str().unwrap().contains("mode 600"), "{finding:#}");
    assert!(finding["remedy"].as_str().unwrap().contains(&format!("chmod 666 {node}")), "{finding:#}");
    let devices = ask_through(&AS_NOBODY, &["devices", "--json"]);
    assert_eq!(devices.code, Some(1));
    assert!(
        devices.value["why_no_device"].as_str().unwrap().contains("this user may not use"),
        "{:#}",
        devices.value
    );
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some that may be broken"]
fn rdma_doctor_port_down() {
    let _machine = own_machine();
    let Chosen { name, interface, .. } = chosen();
    tool(&["ip", "link", "set", &interface, "down"]);
    let _undo = Undo::by(&["ip", "link", "set", &interface, "up"]);
    let doctor = ask(&["doctor", "--require", "verbs", "--json", "--pool", "4M", "--device", &name]);
    doctor.refuses(&["port.interface-down", "choice.none"]);
    let finding = doctor.finding("port.interface-down");
    assert_eq!(finding["subject"], format!("{name} port 1"));
    assert_eq!(finding["remedy"], format!("switch it on: ip link set {interface} up"));
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some that may be broken"]
fn rdma_doctor_memlock_too_small() {
    let _machine = own_machine();
    set_modes(0o666);
    let limited = |bytes: &str, pool: &str| {
        let limit = format!("--memlock={bytes}");
        let prefix = [&["prlimit", limit.as_str()][..], &AS_NOBODY].concat();
        ask_through(&prefix, &["doctor", "--require", "verbs", "--json", "--pool", pool])
    };
    // Enough for the proof, not for the pools.
    let doctor = limited("8388608", "64M");
    doctor.refuses(&["memlock.small"]);
    let finding = doctor.finding("memlock.small");
    assert!(finding["message"].as_str().unwrap().contains("8388608 bytes"), "{finding:#}");
    assert!(finding["remedy"].as_str().unwrap().contains("64.00 MiB"), "{finding:#}");
    assert_eq!(doctor.finding("loopback.works")["status"], "ok");
    // Not even for the proof.
    let doctor = limited("65536", "64M");
    doctor.refuses(&["memlock.small", "loopback.failed"]);
    let finding = doctor.finding("loopback.failed");
    assert!(finding["message"].as_str().unwrap().contains("locked memory is 64 KiB"), "{finding:#}");
    // The same limit, for pools that need no more.
    assert_eq!(limited("8388608", "8M").code, Some(0));
}
