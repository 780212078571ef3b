//! Machines that exist only as a directory.

use std::{fs, os::unix::fs::symlink, path::Path};

use tempfile::TempDir;

use super::super::{Choice, Library, Limits, Machine, Paging, Tree};

/// A machine as a tree of files. It is healthy except for the changes of a test.
#[derive(Debug)]
pub(crate) struct MadeUp {
    directory: TempDir,
}

impl MadeUp {
    /// Without RDMA.
    pub(crate) fn bare() -> Self {
        let machine = Self { directory: tempfile::tempdir().unwrap() };
        machine.write("/proc/sys/kernel/osrelease", "6.1.0-56-amd64\n");
        machine.write("/proc/sys/kernel/yama/ptrace_scope", "1\n");
        machine.write(
            "/proc/meminfo",
            "MemTotal: 1 kB\nHugePages_Total: 8\nHugePages_Free: 5\nHugepagesize: 2048 kB\n",
        );
        machine.write("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "always advise [never]\n");
        machine.write(
            "/proc/self/status",
            "Name:\tx\nUid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000000000\n",
        );
        machine.write("/proc/self/uid_map", "         0          0 4294967295\n");
        machine.lock("unlimited");
        machine.write("/etc/passwd", "root:x:0:0::/root:/bin/sh\n");
        machine
    }

    /// With RDMA in kernel and library, and one device called `name`, as [`software`](Self::software) makes it.
    pub(crate) fn healthy(name: &str) -> Self {
        let machine = Self::bare();
        machine.verbs();
        machine.software(name, 0, "192.0.2.1");
        machine
    }

    /// The kernel offers verbs.
    pub(crate) fn verbs(&self) {
        self.make("/sys/class/infiniband_verbs");
        for module in ["ib_core", "ib_uverbs", "rdma_rxe"] {
            self.make(&format!("/sys/module/{module}"));
        }
    }

    /// A Soft-RoCE device on an interface `net0`, with an active port.
    pub(crate) fn software(&self, name: &str, number: u32, address: &str) {
        let interface = format!("net{number}");
        self.write(&format!("/sys/class/infiniband/{name}/parent"), &interface);
        self.node(name, number);
        self.port(name, 1, "4: ACTIVE", "5: LinkUp", "Ethernet");
        self.gid(name, 0, "fe80::1", "RoCE v2", &interface);
        self.gid(name, 1, &format!("::ffff:{address}"), "RoCE v2", &interface);
        self.interface(&interface, "0x1003");
    }

    /// A device on the PCI bus, with one port.
    pub(crate) fn card(&self, name: &str, number: u32, link: &str) {
        let device = "/sys/devices/pci0000:00/0000:3b:00.0";
        for (file, text) in [("vendor", "0x15b3\n"), ("numa_node", "1\n")] {
            self.write(&format!("{device}/{file}"), text);
        }
        self.make("/sys/bus/pci/drivers/mlx5_core");
        self.link(&format!("{device}/driver"), "../../../bus/pci/drivers/mlx5_core");
        self.write(&format!("/sys/class/infiniband/{name}/fw_ver"), "22.31.1014\n");
        self.write(&format!("/sys/class/infiniband/{name}/hca_type"), "MT4125\n");
        self.link(
            &format!("/sys/class/infiniband/{name}/device"),
            "../../../devices/pci0000:00/0000:3b:00.0",
        );
        self.node(name, number);
        self.port(name, 1, "4: ACTIVE", "5: LinkUp", link);
    }

    fn node(&self, name: &str, number: u32) {
        self.write(&format!("/sys/class/infiniband_verbs/uverbs{number}/ibdev"), name);
        self.write(&format!("/dev/infiniband/uverbs{number}"), "");
    }

    /// A port's state, or another state for it.
    pub(crate) fn port(&self, name: &str, port: u8, state: &str, physical: &str, link: &str) {
        let files = [
            ("state", state),
            ("phys_state", physical),
            ("link_layer", link),
            ("rate", "100 Gb/sec (4X EDR)"),
            ("lid", "0x11"),
        ];
        for (file, text) in files {
            self.write(&format!("/sys/class/infiniband/{name}/ports/{port}/{file}"), text);
        }
    }

    /// An entry of the first port's address table.
    pub(crate) fn gid(&self, name: &str, index: u32, gid: &str, kind: &str, interface: &str) {
        let port = format!("/sys/class/infiniband/{name}/ports/1");
        self.write(&format!("{port}/gids/{index}"), gid);
        self.write(&format!("{port}/gid_attrs/types/{index}"), kind);
        self.write(&format!("{port}/gid_attrs/ndevs/{index}"), interface);
    }

    /// A network interface with these flags.
    pub(crate) fn interface(&self, name: &str, flags: &str) {
        self.write(&format!("/sys/class/net/{name}/flags"), flags);
        self.write(&format!("/sys/class/net/{name}/mtu"), "4300\n");
    }

    /// The limit on locked memory.
    pub(crate) fn lock(&self, limit: &str) {
        let text =
            format!("Limit  Soft Limit  Hard Limit  Units\nMax locked memory  {limit}  {limit}  bytes\n");
        self.write("/proc/self/limits", &text);
    }

    /// Writes a file.
    pub(crate) fn write(&self, path: &str, text: &str) {
        let path = self.tree().at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Makes a directory.
    pub(crate) fn make(&self, path: &str) {
        fs::create_dir_all(self.tree().at(path)).unwrap();
    }

    /// Removes a file or directory.
    pub(crate) fn remove(&self, path: &str) {
        let path = self.tree().at(path);
        if path.is_dir() { fs::remove_dir_all(path).unwrap() } else { fs::remove_file(path).unwrap() }
    }

    fn link(&self, path: &str, target: &str) {
        let path = self.tree().at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(Path::new(target), path).unwrap();
    }

    fn tree(&self) -> Tree {
        Tree::below(self.directory.path())
    }

    /// The machine as doctor sees it, with a library that knows every device and opens those whose file may be used.
    /// The choice is the first device with an active port.
    pub(crate) fn seen(&self) -> Machine {
        let library =
            Library::Found { path: Some("/usr/lib/libibverbs.so.1.14.44.0".to_owned()), devices: Ok(vec![]) };
        let mut machine = Machine::read(&self.tree(), library);
        let names = machine.devices.iter().map(|device| device.name.clone()).collect();
        machine.library =
            Library::Found { path: Some("/usr/lib/libibverbs.so.1.14.44.0".to_owned()), devices: Ok(names) };
        for device in &mut machine.devices {
            device.limits = Some(LIMITS);
            device.on_demand_paging = Some(Paging::default());
            device.dma_buf = Some(true);
        }
        machine.choice = first_active(&machine).ok_or_else(|| "no port is active".to_owned());
        machine
    }
}

const LIMITS: Limits = Limits {
    queue_pairs: 65_536,
    work_requests: 16_384,
    segments: 32,
    read_segments: 30,
    completion_queues: 1024,
    completions: 32_767,
    regions: 4096,
    region_bytes: u64::MAX,
};

fn first_active(machine: &Machine) -> Option<Choice> {
    let ports = machine.devices.iter().flat_map(|device| device.ports.iter().map(move |port| (device, port)));
    let (device, port) = ports.into_iter().find(|(_, port)| port.is_active())?;
    let address = port.addresses.last()?;
    Some(Choice {
        device: device.name.clone(),
        port: port.number,
        gid_index: address.index,
        gid: address.gid.clone(),
    })
}
