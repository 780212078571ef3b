//! The output for made-up devices.

use serde_json::Value;

use super::{report, why_none};
use crate::machine::{Library, NodeAccess, tests::made_up::MadeUp};

#[test]
fn devices_are_told_with_what_would_be_used() {
    let tree = MadeUp::healthy("rxe0");
    tree.card("mlx5_0", 1, "InfiniBand");
    tree.gid("mlx5_0", 0, "fe80::506b:4b03:1:2", "IB/RoCE v1", "");
    let mut machine = tree.seen();
    machine.choice =
        machine.choice.map(|choice| crate::machine::Choice { device: "rxe0".to_owned(), ..choice });
    let text = report::text(&machine, why_none(&machine).as_deref());
    for line in [
        "rxe0",
        "  driver    rdma_rxe, software",
        "  place     PCI 0000:3b:00.0, NUMA node 1",
        "  driver    mlx5_core, vendor 0x15b3, MT4125, firmware 22.31.1014",
        "  limits    65,536 queue pairs, 16,384 work requests in each, 32 ranges a request, 30 of a read",
        "  paging    on demand: none",
        "  port 1    ACTIVE, LinkUp, Ethernet, 100 Gb/sec (4X EDR), interface net0 (up, MTU 4300)",
        "  port 1    ACTIVE, LinkUp, InfiniBand, 100 Gb/sec (4X EDR), LID 17",
        "    GID 0   InfiniBand fe80::506b:4b03:1:2",
        "    GID 1   RoCE v2    192.0.2.1, chosen",
    ] {
        assert!(text.lines().any(|shown| shown == line), "no line `{line}` in\n{text}");
    }
    assert!(text.contains("\nTensorwire would use rxe0 port 1, address 192.0.2.1 (GID 1): "), "{text}");
}

#[test]
fn reason_against_every_device_is_told_with_its_remedy() {
    let mut machine = MadeUp::healthy("rxe0").seen();
    assert_eq!(why_none(&machine), None);
    machine.devices[0].limits = None;
    machine.devices[0].node.as_mut().unwrap().access = NodeAccess::Denied;
    machine.choice = Err("Permission denied".to_owned());
    let reason = why_none(&machine).unwrap();
    assert!(reason.starts_with("rxe0: this user may not use /dev/infiniband/uverbs0"), "{reason}");
    assert!(reason.contains("chmod 666 /dev/infiniband/uverbs0"), "{reason}");
    machine.devices[0].refused = Some("No such file or directory".to_owned());
    let text = report::text(&machine, Some(&reason));
    assert!(text.contains("\n  closed    this user may not use its file\n"), "{text}");
    assert!(text.ends_with(&format!("\nNo device can be used: {reason}\n")), "{text}");
    machine.library = Library::Missing { reason: "no such file".to_owned() };
    let reason = why_none(&machine).unwrap();
    assert!(reason.contains("no such file; install rdma-core's libraries"), "{reason}");
    let bare = MadeUp::bare();
    assert!(why_none(&bare.seen()).unwrap().contains("modprobe ib_uverbs"));
    bare.verbs();
    assert!(why_none(&bare.seen()).unwrap().starts_with("there is no RDMA device; "));
}

/// The paths of all fields. Of an array, the first element's.
fn fields(value: &Value, path: &str, into: &mut Vec<String>) {
    match value {
        Value::Object(object) => object.iter().for_each(|(name, value)| {
            let path = format!("{path}.{name}");
            into.push(path.trim_start_matches('.').to_owned());
            fields(value, &path, into);
        }),
        Value::Array(array) => {
            if let Some(value) = array.first() {
                fields(value, &format!("{path}[]"), into);
            }
        }
        _ => {}
    }
}

#[test]
fn the_book_names_every_field_of_the_json() {
    let machine = MadeUp::healthy("rxe0").seen();
    let value: Value = serde_json::from_str(&report::json(&machine, None).unwrap()).unwrap();
    let mut found = Vec::new();
    fields(&value, "", &mut found);
    assert!(found.len() > 40, "{found:?}");
    let page = include_str!("../../../../docs/src/doctor.md");
    for field in found {
        assert!(page.contains(&format!("`{field}`")), "docs/src/doctor.md does not name `{field}`");
    }
}
