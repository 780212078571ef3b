//! Facts that are read from a tree of files.

pub(crate) mod made_up;

use self::made_up::MadeUp;
use super::{AddressKind, MemoryLock, NodeAccess};

#[test]
fn software_device_is_read_with_its_interface_and_addresses() {
    let machine = MadeUp::healthy("rxe0").seen();
    let [device] = machine.devices.as_slice() else { panic!("{:?}", machine.devices) };
    assert_eq!(
        (device.name.as_str(), device.driver.as_deref(), device.software),
        ("rxe0", Some("rdma_rxe"), true)
    );
    let node = device.node.as_ref().unwrap();
    assert_eq!((node.path.as_str(), &node.access), ("/dev/infiniband/uverbs0", &NodeAccess::Granted));
    let [port] = device.ports.as_slice() else { panic!("{:?}", device.ports) };
    assert_eq!((port.number, port.state.as_str(), port.is_active(), port.lid), (1, "ACTIVE", true, None));
    let interface = port.interface.as_ref().unwrap();
    assert_eq!((interface.name.as_str(), interface.up, interface.mtu), ("net0", Some(true), Some(4300)));
    let addresses: Vec<_> =
        port.addresses.iter().map(|one| (one.index, one.gid.as_str(), one.kind)).collect();
    assert_eq!(addresses, [(0, "fe80::1", AddressKind::RoceV2), (1, "192.0.2.1", AddressKind::RoceV2)]);
}

#[test]
fn card_is_read_with_its_place_and_firmware() {
    let tree = MadeUp::bare();
    tree.verbs();
    tree.card("mlx5_0", 0, "InfiniBand");
    tree.gid("mlx5_0", 0, "fe80:0:0:0:506b:4b03:1:2", "IB/RoCE v1", "");
    let machine = tree.seen();
    let [device] = machine.devices.as_slice() else { panic!("{:?}", machine.devices) };
    assert!(!device.software);
    assert_eq!(device.driver.as_deref(), Some("mlx5_core"));
    assert_eq!(device.pci.as_deref(), Some("0000:3b:00.0"));
    assert_eq!((device.numa_node, device.vendor.as_deref()), (Some(1), Some("0x15b3")));
    assert_eq!((device.firmware.as_deref(), device.model.as_deref()), (Some("22.31.1014"), Some("MT4125")));
    let [port] = device.ports.as_slice() else { panic!("{:?}", device.ports) };
    assert_eq!((port.lid, port.link_layer.as_str()), (Some(0x11), "InfiniBand"));
    assert_eq!(port.addresses[0].kind, AddressKind::InfiniBand);
}

#[test]
fn empty_entries_of_an_address_table_are_left_out() {
    let tree = MadeUp::healthy("rxe0");
    tree.gid("rxe0", 2, "0000:0000:0000:0000:0000:0000:0000:0000", "", "");
    tree.gid("rxe0", 10, "::ffff:192.0.2.9", "IB/RoCE v1", "net0");
    let addresses = tree.seen().devices.remove(0).ports.remove(0).addresses;
    let read: Vec<_> = addresses.iter().map(|one| (one.index, one.kind)).collect();
    assert_eq!(read, [(0, AddressKind::RoceV2), (1, AddressKind::RoceV2), (10, AddressKind::RoceV1)]);
}

#[test]
fn right_to_lock_memory_counts_outside_of_user_namespaces_only() {
    let tree = MadeUp::bare();
    tree.lock("8388608");
    assert_eq!(tree.seen().process.lockable(), Some(MemoryLock::Bytes(8 << 20)));
    tree.write("/proc/self/status", "Uid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\n");
    assert_eq!(tree.seen().process.lockable(), Some(MemoryLock::Unlimited));
    tree.write("/proc/self/uid_map", "         0       1000          1\n");
    assert_eq!(tree.seen().process.lockable(), Some(MemoryLock::Bytes(8 << 20)));
}

#[test]
fn machine_of_which_nothing_can_be_read_has_no_facts() {
    let tree = MadeUp::bare();
    for directory in ["/proc", "/sys", "/etc"] {
        tree.remove(directory);
    }
    let machine = tree.seen();
    assert!(machine.devices.is_empty() && machine.surroundings.kernel.is_none());
    assert_eq!(machine.process.lockable(), None);
    assert_eq!(machine.memory, super::MemoryFacts::default());
}

#[test]
fn containers_are_told_by_files_and_control_groups() {
    let tree = MadeUp::bare();
    assert!(tree.seen().surroundings.container.is_empty());
    tree.write("/run/.containerenv", "");
    tree.write("/proc/1/cgroup", "0::/kubepods/besteffort/pod1\n");
    assert_eq!(tree.seen().surroundings.container, ["/run/.containerenv", "control group of kubepods"]);
}

#[test]
fn versions_of_kernel_and_library_are_read() {
    let machine = MadeUp::bare().seen();
    assert_eq!(machine.surroundings.kernel_version(), Some((6, 1)));
    assert_eq!(machine.library.version(), Some("1.14.44.0"));
}
