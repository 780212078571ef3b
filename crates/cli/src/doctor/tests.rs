//! The findings of doctor on machines that exist only as a directory.

use std::time::Duration;

use super::{
    Examination, Proof,
    cause::{CAUSES, Status},
    finding::Finding,
    judge, report,
};
use crate::machine::{Library, Machine, NodeAccess, Paging, tests::made_up::MadeUp};

const PROOF: Proof = Proof { took: Duration::from_millis(20) };

/// The examination of `machine`, in which every possible write works.
fn examined(machine: Machine) -> Examination {
    Examination {
        verbs: machine.choice.as_ref().map(|_| PROOF).map_err(Clone::clone),
        machine,
        wanted: None,
        pool_bytes: 1 << 30,
        shm: Ok(PROOF),
        tcp: Ok(PROOF),
        pidfd: Ok(()),
    }
}

/// Findings by cause, and the verdict.
struct Opinion {
    findings: Vec<Finding>,
    usable: bool,
    verdict: String,
}

impl Opinion {
    fn on(seen: &Examination) -> Self {
        let findings = judge::findings(seen);
        let report::Verdict { usable, text } = report::verdict(seen, &findings);
        for finding in &findings {
            let remedy = finding.remedy.as_deref().unwrap_or("");
            assert!(!remedy.contains('{'), "a word is not filled in: {remedy}");
            assert_eq!(finding.status == Status::Ok, remedy.is_empty(), "{finding:?}");
            assert!(CAUSES.iter().any(|cause| cause.id == finding.cause), "{finding:?}");
        }
        Self { findings, usable, verdict: text }
    }

    fn finding(&self, cause: &str) -> &Finding {
        let mut found = self.findings.iter().filter(|finding| finding.cause == cause);
        found.next().unwrap_or_else(|| panic!("no {cause} in {:?}", self.findings))
    }

    fn causes(&self, status: Status) -> Vec<&str> {
        self.findings.iter().filter(|one| one.status == status).map(|one| one.cause).collect()
    }

    /// Checks that RDMA is unusable for these causes, and that the verdict names the first.
    fn refuses(&self, causes: &[&str]) {
        assert!(!self.usable, "{}", self.verdict);
        assert_eq!(self.causes(Status::Problem), causes);
        let first = &self.finding(causes[0]).message;
        assert!(
            self.verdict.starts_with("RDMA cannot be used: ") && self.verdict.contains(first),
            "{}",
            self.verdict
        );
        assert!(self.verdict.ends_with("; Tensorwire will use shm and tcp"), "{}", self.verdict);
    }
}

#[test]
fn doctor_healthy() {
    let opinion = Opinion::on(&examined(MadeUp::healthy("rxe0").seen()));
    assert_eq!(opinion.causes(Status::Problem), [""; 0]);
    assert_eq!(opinion.causes(Status::Warning), [""; 0]);
    assert!(opinion.usable);
    assert_eq!(opinion.verdict, "RDMA works here: rxe0 port 1, address 192.0.2.1 (GID 1)");
    assert!(opinion.finding("loopback.works").message.contains("1.00 MiB"));
}

#[test]
fn doctor_tells_whether_memory_is_paged_on_demand() {
    let mut machine = MadeUp::healthy("rxe0").seen();
    let opinion = Opinion::on(&examined(machine.clone()));
    assert!(opinion.finding("paging.none").message.starts_with("on-demand paging: none; "));
    let lacking = Paging { send: true, write: true, read: false, used: false };
    machine.devices[0].on_demand_paging = Some(lacking);
    let opinion = Opinion::on(&examined(machine.clone()));
    assert!(opinion.finding("paging.none").message.contains("sends, writes; "));
    machine.devices[0].on_demand_paging = Some(Paging { read: true, used: true, ..lacking });
    let opinion = Opinion::on(&examined(machine.clone()));
    assert_eq!(opinion.finding("paging.on-demand").subject.as_deref(), Some("rxe0"));
    machine.devices[0].on_demand_paging = None;
    let opinion = Opinion::on(&examined(machine));
    assert!(!opinion.findings.iter().any(|finding| finding.check == "paging"));
}

#[test]
fn doctor_no_libibverbs() {
    let mut machine = MadeUp::healthy("rxe0").seen();
    machine.library = Library::Missing { reason: "no such file".to_owned() };
    machine.choice = Err("cannot open libibverbs.so.1".to_owned());
    let opinion = Opinion::on(&examined(machine));
    opinion.refuses(&["library.missing", "choice.none"]);
    assert!(opinion.finding("library.missing").message.contains("no such file"));
    assert!(opinion.finding("library.missing").remedy.as_ref().unwrap().contains("libibverbs1"));
}

#[test]
fn doctor_no_kernel_support() {
    let opinion = Opinion::on(&examined(MadeUp::bare().seen()));
    opinion.refuses(&["kernel.missing", "device.none", "choice.none"]);
    assert!(opinion.finding("kernel.missing").remedy.as_ref().unwrap().contains("modprobe ib_uverbs"));
}

#[test]
fn doctor_no_device() {
    let tree = MadeUp::bare();
    tree.verbs();
    let opinion = Opinion::on(&examined(tree.seen()));
    opinion.refuses(&["device.none", "choice.none"]);
    assert!(opinion.finding("device.none").remedy.as_ref().unwrap().contains("rdma link add"));
}

#[test]
fn doctor_device_of_another_name() {
    let mut seen = examined(MadeUp::healthy("rxe0").seen());
    seen.wanted = Some("mlx5_0".to_owned());
    seen.machine.choice = Err("there is no RDMA device mlx5_0".to_owned());
    let opinion = Opinion::on(&seen);
    opinion.refuses(&["device.unknown", "choice.none"]);
    assert_eq!(opinion.finding("device.unknown").remedy.as_deref(), Some("name one of these: rxe0"));
}

/// A machine whose only device can't be opened for this reason.
fn closed(access: NodeAccess) -> Opinion {
    let mut machine = MadeUp::healthy("rxe0").seen();
    machine.devices[0].node.as_mut().unwrap().access = access;
    machine.devices[0].refused = Some("Permission denied".to_owned());
    machine.devices[0].limits = None;
    machine.choice = Err("Permission denied".to_owned());
    Opinion::on(&examined(machine))
}

#[test]
fn doctor_device_without_permission() {
    let opinion = closed(NodeAccess::Denied);
    opinion.refuses(&["node.denied", "choice.none"]);
    let finding = opinion.finding("node.denied");
    assert_eq!(finding.subject.as_deref(), Some("rxe0"));
    assert!(finding.message.contains("/dev/infiniband/uverbs0 (owner "), "{}", finding.message);
    assert!(finding.remedy.as_ref().unwrap().contains("chmod 666 /dev/infiniband/uverbs0"));
}

#[test]
fn doctor_device_that_the_container_forbids() {
    let opinion = closed(NodeAccess::Forbidden);
    opinion.refuses(&["node.forbidden", "choice.none"]);
    assert!(
        opinion
            .finding("node.forbidden")
            .remedy
            .as_ref()
            .unwrap()
            .contains("--device /dev/infiniband/uverbs0")
    );
}

#[test]
fn doctor_device_without_a_file() {
    closed(NodeAccess::Missing).refuses(&["node.missing", "choice.none"]);
    closed(NodeAccess::Failed("No such device".to_owned())).refuses(&["node.failed", "choice.none"]);
    // The library's own error is shown only if the file does not explain it.
    closed(NodeAccess::Granted).refuses(&["open.failed", "choice.none"]);
}

#[test]
fn doctor_port_down() {
    let tree = MadeUp::healthy("rxe0");
    tree.port("rxe0", 1, "1: DOWN", "3: Disabled", "Ethernet");
    tree.interface("net0", "0x1002");
    let opinion = Opinion::on(&examined(tree.seen()));
    opinion.refuses(&["port.interface-down", "choice.none"]);
    let finding = opinion.finding("port.interface-down");
    assert_eq!(finding.subject.as_deref(), Some("rxe0 port 1"));
    assert_eq!(finding.remedy.as_deref(), Some("switch it on: ip link set net0 up"));
    tree.interface("net0", "0x1003");
    Opinion::on(&examined(tree.seen())).refuses(&["port.down", "choice.none"]);
}

#[test]
fn doctor_port_without_a_subnet_manager() {
    let tree = MadeUp::bare();
    tree.verbs();
    tree.card("mlx5_0", 0, "InfiniBand");
    tree.port("mlx5_0", 1, "2: INIT", "5: LinkUp", "InfiniBand");
    Opinion::on(&examined(tree.seen())).refuses(&["port.no-subnet", "choice.none"]);
}

#[test]
fn doctor_port_without_an_address() {
    let tree = MadeUp::healthy("rxe0");
    tree.gid("rxe0", 0, "fe80::1", "IB/RoCE v1", "net0");
    tree.gid("rxe0", 1, "::ffff:192.0.2.1", "IB/RoCE v1", "net0");
    let mut machine = tree.seen();
    machine.choice = Err("no RoCE v2 address".to_owned());
    let opinion = Opinion::on(&examined(machine));
    opinion.refuses(&["address.missing", "choice.none"]);
    assert!(opinion.finding("address.missing").remedy.as_ref().unwrap().ends_with("dev net0"));
}

#[test]
fn doctor_port_with_link_local_addresses_only() {
    let tree = MadeUp::healthy("rxe0");
    tree.gid("rxe0", 1, "fe80::2", "RoCE v2", "net0");
    let opinion = Opinion::on(&examined(tree.seen()));
    assert!(opinion.usable);
    assert_eq!(opinion.causes(Status::Warning), ["address.link-local"]);
}

#[test]
fn doctor_memlock_too_small() {
    let tree = MadeUp::healthy("rxe0");
    tree.lock("8388608");
    let mut seen = examined(tree.seen());
    let opinion = Opinion::on(&seen);
    opinion.refuses(&["memlock.small"]);
    let finding = opinion.finding("memlock.small");
    assert!(finding.message.contains("8.00 MiB (8388608 bytes)"), "{}", finding.message);
    assert!(finding.remedy.as_ref().unwrap().contains("raise the limit to 1.00 GiB"));
    seen.pool_bytes = 8 << 20;
    assert!(Opinion::on(&seen).usable);
}

#[test]
fn doctor_write_that_fails() {
    let mut seen = examined(MadeUp::healthy("rxe0").seen());
    seen.verbs = Err("nothing has arrived within 10s".to_owned());
    let opinion = Opinion::on(&seen);
    opinion.refuses(&["loopback.failed"]);
    assert!(opinion.finding("loopback.failed").message.ends_with("within 10s"));
}

#[test]
fn doctor_library_without_a_driver() {
    let mut machine = MadeUp::healthy("rxe0").seen();
    machine.library = Library::Found { path: None, devices: Ok(vec![]) };
    machine.devices[0].refused = Some("there is no RDMA device rxe0".to_owned());
    machine.choice = Err("there is no RDMA device rxe0".to_owned());
    Opinion::on(&examined(machine.clone())).refuses(&["provider.missing", "choice.none"]);
    // Without its file the library does not know the device, even if it has the driver.
    machine.devices[0].node.as_mut().unwrap().access = NodeAccess::Missing;
    Opinion::on(&examined(machine)).refuses(&["node.missing", "choice.none"]);
}

#[test]
fn doctor_device_that_nobody_needs_does_no_harm() {
    let tree = MadeUp::healthy("rxe0");
    tree.software("rxe1", 1, "192.0.2.2");
    tree.port("rxe1", 1, "1: DOWN", "2: Polling", "Ethernet");
    let mut seen = examined(tree.seen());
    let opinion = Opinion::on(&seen);
    assert!(opinion.usable);
    assert_eq!(opinion.causes(Status::Warning), ["port.down"]);
    seen.wanted = Some("rxe1".to_owned());
    seen.machine.choice = Err("port 1 of RDMA device rxe1 is not active".to_owned());
    Opinion::on(&seen).refuses(&["port.down", "choice.none"]);
}

#[test]
fn doctor_container() {
    let tree = MadeUp::bare();
    tree.write("/.dockerenv", "");
    let opinion = Opinion::on(&examined(tree.seen()));
    assert_eq!(opinion.causes(Status::Warning), ["container.closed"]);
    let tree = MadeUp::healthy("rxe0");
    tree.write("/.dockerenv", "");
    assert!(Opinion::on(&examined(tree.seen())).causes(Status::Ok).contains(&"container.passed"));
    tree.lock("8388608");
    let opinion = Opinion::on(&examined(tree.seen()));
    opinion.refuses(&["memlock.small"]);
    assert_eq!(opinion.causes(Status::Warning), ["container.unlocked"]);
}

#[test]
fn doctor_tells_what_is_left_without_rdma() {
    let mut seen = examined(MadeUp::bare().seen());
    seen.shm = Err("memfd_create: Operation not permitted".to_owned());
    seen.pidfd = Err("Operation not permitted".to_owned());
    let opinion = Opinion::on(&seen);
    assert!(opinion.verdict.ends_with("; Tensorwire will use tcp"), "{}", opinion.verdict);
    assert_eq!(opinion.causes(Status::Warning), ["shm.failed", "pidfd.missing"]);
    seen.tcp = Err("refused".to_owned());
    assert!(Opinion::on(&seen).verdict.ends_with("; no fabric is left, since shm and tcp fail too"));
}

#[test]
fn doctor_answers_what_it_was_asked() {
    use super::FabricName::{self, Shm, Tcp, Verbs};

    let mut seen = examined(MadeUp::bare().seen());
    let meets = |seen: &Examination, required: &[FabricName]| super::meets(seen, false, required);
    assert!(meets(&seen, &[]) && meets(&seen, &[Shm, Tcp]) && !meets(&seen, &[Tcp, Verbs]));
    assert!(super::meets(&seen, true, &[Verbs]));
    seen.shm = Err("refused".to_owned());
    assert!(meets(&seen, &[]) && meets(&seen, &[Tcp]) && !meets(&seen, &[Shm]));
    seen.tcp = Err("refused".to_owned());
    assert!(!meets(&seen, &[]) && super::meets(&seen, true, &[]));
}

#[test]
fn json_has_the_fields_that_the_book_names() {
    let seen = examined(MadeUp::healthy("rxe0").seen());
    let findings = judge::findings(&seen);
    let text = report::json(&seen, &findings, &report::verdict(&seen, &findings)).unwrap();
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let names = |value: &serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(
        names(&value),
        ["choice", "findings", "pool_bytes", "tensorwire", "usable", "verdict", "version"]
    );
    assert_eq!(names(&value["choice"]), ["device", "gid", "gid_index", "port"]);
    let finding = &value["findings"][0];
    assert_eq!(names(finding), ["cause", "check", "message", "remedy", "status", "subject"]);
    assert_eq!((&finding["cause"], &finding["status"]), (&"library.found".into(), &"ok".into()));
    assert_eq!(value["version"], 1);
}

#[test]
fn text_has_a_line_a_finding_with_its_remedy_below_and_the_verdict_last() {
    let seen = examined(MadeUp::bare().seen());
    let findings = judge::findings(&seen);
    let text = report::text(&findings, &report::verdict(&seen, &findings));
    let lines: Vec<_> = text.lines().collect();
    let at = lines.iter().position(|line| line.starts_with("problem  kernel ")).unwrap();
    assert!(lines[at + 1].trim_start().starts_with("-> load ib_uverbs"), "{text}");
    assert!(lines.last().unwrap().starts_with("RDMA cannot be used: "), "{text}");
}

/// Set to write the book's table instead of comparing it.
const WRITE: &str = "TENSORWIRE_WRITE_DOCTOR";
const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/doctor.md");
const BEGIN: &str = "<!-- findings: written by scripts/gen-doctor -->\n";
const END: &str = "<!-- end of findings -->";

fn table() -> String {
    let rows = CAUSES.iter().map(|cause| {
        let remedy = cause.remedy.replace('|', "\\|");
        format!("| `{}` | {} | {} | {remedy} |\n", cause.id, cause.status.name(), cause.when)
    });
    format!("| finding | status | when | remedy |\n| --- | --- | --- | --- |\n{}", rows.collect::<String>())
}

#[test]
fn the_book_lists_every_finding() {
    let page = std::fs::read_to_string(PAGE).unwrap();
    let (before, rest) = page.split_once(BEGIN).expect("the table's begin");
    let (shown, after) = rest.split_once(END).expect("the table's end");
    if std::env::var_os(WRITE).is_some() {
        return std::fs::write(PAGE, format!("{before}{BEGIN}{}{END}{after}", table())).unwrap();
    }
    assert_eq!(shown, table(), "run scripts/gen-doctor");
}
