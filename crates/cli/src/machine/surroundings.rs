//! The kernel, its modules, and whether this is a container.

use super::Tree;

/// Modules for RDMA: the interface to programs, the connection manager, and drivers of devices.
const MODULES: [&str; 17] = [
    "ib_core",
    "ib_uverbs",
    "rdma_ucm",
    "rdma_rxe",
    "siw",
    "mlx5_ib",
    "mlx4_ib",
    "irdma",
    "bnxt_re",
    "efa",
    "hns_roce_hw_v2",
    "qedr",
    "erdma",
    "mana_ib",
    "iw_cxgb4",
    "hfi1",
    "ocrdma",
];
const GROUPS: [&str; 6] = ["docker", "kubepods", "containerd", "libpod", "lxc", "podman"];

/// The surroundings of this process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Surroundings {
    /// The kernel's release, as in `6.1.0-56-amd64`.
    pub(crate) kernel: Option<String>,
    /// Whether the kernel offers verbs to programs.
    pub(crate) has_verbs: bool,
    /// The modules for RDMA that are loaded.
    pub(crate) modules: Vec<String>,
    /// Why this counts as a container, if it does.
    pub(crate) container: Vec<String>,
    /// Whether the directory for devices' files exists.
    pub(crate) has_nodes: bool,
    /// Yama's rule for access to other processes, if the kernel has it.
    pub(crate) yama: Option<u32>,
}

impl Surroundings {
    pub(super) fn read(tree: &Tree) -> Self {
        let loaded = |name: &&str| tree.has(&format!("/sys/module/{name}"));
        Self {
            kernel: tree.text("/proc/sys/kernel/osrelease"),
            // The class exists while ib_uverbs is loaded or built in.
            has_verbs: tree.has("/sys/class/infiniband_verbs"),
            modules: MODULES.iter().filter(|name| loaded(name)).map(|&name| name.to_owned()).collect(),
            container: container(tree),
            has_nodes: tree.has("/dev/infiniband"),
            yama: tree.number("/proc/sys/kernel/yama/ptrace_scope"),
        }
    }

    /// Whether a module is loaded.
    pub(crate) fn has_module(&self, name: &str) -> bool {
        self.modules.iter().any(|module| module == name)
    }

    /// The kernel's first two numbers.
    pub(crate) fn kernel_version(&self) -> Option<(u32, u32)> {
        let mut numbers = self.kernel.as_deref()?.split(['.', '-', '+']).map(str::parse);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    }
}

fn container(tree: &Tree) -> Vec<String> {
    let files = ["/.dockerenv", "/run/.containerenv"];
    let mut hints: Vec<String> =
        files.iter().filter(|file| tree.has(file)).map(|&file| file.to_owned()).collect();
    let groups = tree.text("/proc/1/cgroup").unwrap_or_default();
    let named = GROUPS.iter().filter(|name| groups.contains(*name));
    hints.extend(named.map(|name| format!("control group of {name}")));
    hints
}
