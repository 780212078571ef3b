//! Everything that doctor can find, with its remedy. The book's table is generated from this.

use serde::Serialize;

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Status {
    /// Correct, or without consequence.
    Ok,
    /// RDMA works, but not everywhere or not as well.
    Warning,
    /// This makes RDMA unusable.
    Problem,
}

impl Status {
    /// The printed name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }
}

/// Something that doctor can find.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Cause {
    /// Stable; the part before the dot names the check.
    pub(crate) id: &'static str,
    /// How bad it is for the device in question.
    pub(crate) status: Status,
    /// The condition of the finding.
    pub(crate) when: &'static str,
    /// The remedy, with `{words}` for parts that depend on the machine. Empty if none is needed.
    pub(crate) remedy: &'static str,
}

impl Cause {
    /// The name of the check.
    pub(crate) fn check(&self) -> &'static str {
        self.id.split_once('.').map_or(self.id, |(check, _)| check)
    }
}

/// The causes, as constants and as one table.
macro_rules! causes {
    ($($name:ident $id:literal $status:ident $when:literal, $remedy:expr;)*) => {
        $(pub(super) const $name: Cause =
            Cause { id: $id, status: Status::$status, when: $when, remedy: $remedy };)*
        /// All causes, for the book.
        #[cfg(test)]
        pub(super) const CAUSES: &[Cause] = &[$($name),*];
    };
}

causes! {
    LIBRARY_FOUND "library.found" Ok "libibverbs is there", "";
    LIBRARY_MISSING "library.missing" Problem "libibverbs.so.1 cannot be opened, or lacks a function",
        "install rdma-core's libraries (Debian, Ubuntu: apt-get install libibverbs1 ibverbs-providers; Fedora: \
         dnf install libibverbs)";
    KERNEL_READY "kernel.ready" Ok "the kernel offers verbs to programs", "";
    KERNEL_MISSING "kernel.missing" Problem "the kernel offers no verbs: ib_uverbs is not loaded",
        "load ib_uverbs and the device's driver, for Soft-RoCE rdma_rxe (modprobe ib_uverbs; modprobe rdma_rxe); in a \
         container, on its host";
    MODULES_LOADED "modules.loaded" Ok "which of the kernel's modules for RDMA are loaded; rdma_ucm is not needed", "";
    DEVICE_FOUND "device.found" Ok "there is a device", "";
    DEVICE_NONE "device.none" Problem "the kernel knows no device",
        "load the driver of the network card, or make a software device: modprobe rdma_rxe; rdma link add rxe0 type \
         rxe netdev INTERFACE";
    DEVICE_UNKNOWN "device.unknown" Problem "there is no device of the name that --device gives",
        "name one of these: {present}";
    NODE_USABLE "node.usable" Ok "this user may use the device's file", "";
    NODE_MISSING "node.missing" Problem "the device has no file in /dev/infiniband",
        "load ib_uverbs and let udev make {node}; start a container with --device {node}";
    NODE_DENIED "node.denied" Problem "the mode of the device's file does not admit this user",
        "let this user in: chmod 666 {node}, for good by a udev rule (KERNEL==\"uverbs*\", MODE=\"0666\") or by joining \
         its group";
    NODE_FORBIDDEN "node.forbidden" Problem "something other than its mode forbids the use of the device's file",
        "allow the device where the container or service is started: --device {node} (docker, podman), DeviceAllow= \
         (systemd)";
    NODE_FAILED "node.failed" Problem "the device's file cannot be opened for another reason",
        "look into the kernel's log (dmesg) for {device}, and load its driver again";
    PROVIDER_FOUND "provider.found" Ok "the library has a driver for the device", "";
    PROVIDER_MISSING "provider.missing" Problem "the library has no driver for the device, or cannot list devices",
        "install the library's drivers of the same release (Debian, Ubuntu: apt-get install ibverbs-providers)";
    OPEN_FAILED "open.failed" Problem "the library cannot open the device although its file can be",
        "bring kernel and library to releases that fit each other; see dmesg for messages about {device}";
    PAGING_ON_DEMAND "paging.on-demand" Ok "the device pages on demand: users' own memory, such as a mapped file, is \
        registered without being locked", "";
    PAGING_NONE "paging.none" Ok "the device does not page on demand, or not all that is needed: users' own memory is \
        locked as long as it is registered", "";
    PORT_ACTIVE "port.active" Ok "a port carries traffic", "";
    PORT_INTERFACE_DOWN "port.interface-down" Problem "a port is down because its network interface is switched off",
        "switch it on: ip link set {interface} up";
    PORT_NO_SUBNET "port.no-subnet" Problem "the link of an InfiniBand port is up, but no subnet manager has set it up",
        "start a subnet manager in this subnet (opensm), or repair the one there is";
    PORT_DOWN "port.down" Problem "a port is down",
        "check cable, switch and transceiver of {port}; rdma link shows its state";
    PORT_NONE "port.none" Problem "a device has no port", "load the driver of {device} again; see dmesg for messages about it";
    ADDRESS_FOUND "address.found" Ok "a port has an address that connections can use", "";
    ADDRESS_LINK_LOCAL "address.link-local" Warning "the only RoCE v2 addresses are link-local, which no router passes on",
        "give the network interface an IP address: ip address add ADDRESS/24 dev {interface}";
    ADDRESS_MISSING "address.missing" Problem "an Ethernet port has no RoCE v2 address",
        "give the network interface an IP address: ip address add ADDRESS/24 dev {interface}";
    CHOICE_MADE "choice.made" Ok "Tensorwire would use this device, port and address", "";
    CHOICE_NONE "choice.none" Problem "Tensorwire would use none of the devices",
        "see the problems above, or correct the setting that the message names";
    MEMLOCK_ENOUGH "memlock.enough" Ok "memory for the pools may be locked", "";
    MEMLOCK_SMALL "memlock.small" Problem "less memory may be locked than the pools take (--pool)",
        "raise the limit to {pool} or more: ulimit -l, memlock in /etc/security/limits.conf, LimitMEMLOCK= (systemd), \
         --ulimit memlock=-1 (docker, podman); or let pools be smaller";
    MEMLOCK_UNKNOWN "memlock.unknown" Warning "the limit on locked memory cannot be read",
        "mount /proc, and look with ulimit -l";
    LOOPBACK_WORKS "loopback.works" Ok "a write between two queue pairs of the device arrived and is right", "";
    LOOPBACK_FAILED "loopback.failed" Problem "a write between two queue pairs of the device failed",
        "see what the message names; the problems above, or a firewall that drops UDP port 4791, may be the cause";
    HUGE_PAGES "huge-pages.counted" Ok "how many huge pages there are; pools that want them take these first \
        (sysctl vm.nr_hugepages)", "";
    PEER_MEMORY "peer-memory.counted" Ok "by which ways devices could reach memory of GPUs, which Tensorwire does \
        not use yet", "";
    CONTAINER_NONE "container.none" Ok "nothing looks like a container", "";
    CONTAINER_PASSED "container.passed" Ok "this is a container, and /dev/infiniband is passed on", "";
    CONTAINER_CLOSED "container.closed" Warning "this is a container without /dev/infiniband",
        "start it with --device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1 and, for RoCE, --network host";
    CONTAINER_UNLOCKED "container.unlocked" Warning "this is a container whose limit on locked memory is smaller than the pools",
        "start it with --cap-add IPC_LOCK or --ulimit memlock=-1";
    SHM_WORKS "shm.works" Ok "a write over shared memory arrived and is right", "";
    SHM_FAILED "shm.failed" Warning "shared memory cannot be used: sealed memfds and pre-faulted mappings are needed",
        "use Linux 5.14 or newer, and allow memfd_create in the container's seccomp profile";
    PIDFD_WORKS "pidfd.works" Ok "the death of a neighbour's process can be noticed", "";
    PIDFD_MISSING "pidfd.missing" Warning "pidfd_open is refused: shared memory that a dead neighbour held stays taken",
        "use Linux 5.3 or newer, and allow pidfd_open in the container's seccomp profile";
    YAMA "yama.read" Ok "Yama's ptrace_scope, whatever it is: neighbours do not read each other's memory", "";
    TCP_WORKS "tcp.works" Ok "a write over TCP on loopback arrived and is right", "";
    TCP_FAILED "tcp.failed" Warning "TCP on loopback cannot be used", "switch the loopback interface on: ip link set lo up";
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{CAUSES, Status};

    #[test]
    fn every_cause_has_an_id_of_its_own_and_a_remedy_where_something_is_wrong() {
        let ids: BTreeSet<_> = CAUSES.iter().map(|cause| cause.id).collect();
        assert_eq!(ids.len(), CAUSES.len());
        for cause in CAUSES {
            assert_eq!(cause.remedy.is_empty(), cause.status == Status::Ok, "{}", cause.id);
            assert!(cause.id.contains('.') && !cause.when.is_empty(), "{}", cause.id);
        }
    }
}
