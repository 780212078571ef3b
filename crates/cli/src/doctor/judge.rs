//! Derives findings from facts.

use indicatif::BinaryBytes;

use super::{
    Examination,
    cause::{
        CHOICE_MADE, CHOICE_NONE, CONTAINER_CLOSED, CONTAINER_NONE, CONTAINER_PASSED, CONTAINER_UNLOCKED,
        DEVICE_FOUND, DEVICE_NONE, DEVICE_UNKNOWN, HUGE_PAGES, KERNEL_MISSING, KERNEL_READY, LIBRARY_FOUND,
        LIBRARY_MISSING, LOOPBACK_FAILED, LOOPBACK_WORKS, MEMLOCK_ENOUGH, MEMLOCK_SMALL, MEMLOCK_UNKNOWN,
        MODULES_LOADED, PEER_MEMORY, PIDFD_MISSING, PIDFD_WORKS, SHM_FAILED, SHM_WORKS, Status, TCP_FAILED,
        TCP_WORKS, YAMA,
    },
    devices::device_findings,
    finding::Finding,
};
use crate::machine::{Choice, Library, Machine, MemoryLock};

/// All findings, in the order in which a user should read them.
pub(super) fn findings(seen: &Examination) -> Vec<Finding> {
    let machine = &seen.machine;
    let mut found = of_devices(machine, seen.wanted.as_deref());
    found.push(choice(machine));
    found.push(memory_lock(seen));
    found.extend(loopback(seen));
    found.extend([huge_pages(machine), peer_memory(machine), container(seen)]);
    found.extend([shm(seen), pidfd(seen), yama(machine), tcp(seen)]);
    found
}

/// Findings that concern all devices.
fn of_devices(machine: &Machine, wanted: Option<&str>) -> Vec<Finding> {
    let mut found = vec![library(machine), kernel(machine), modules(machine), device(machine, wanted)];
    found.extend(machine.devices.iter().flat_map(|device| device_findings(machine, wanted, device)));
    found
}

/// The reason why no device can be opened, with the remedy.
pub(super) fn obstacle(machine: &Machine) -> Option<Finding> {
    of_devices(machine, None).into_iter().find(|finding| finding.status == Status::Problem)
}

fn library(machine: &Machine) -> Finding {
    match &machine.library {
        Library::Missing { reason } => {
            Finding::new(&LIBRARY_MISSING, format!("libibverbs.so.1 cannot be used: {reason}"))
        }
        Library::Found { path, .. } => {
            let version = machine.library.version().unwrap_or("of unknown version");
            let path = path.as_deref().unwrap_or("an unknown file");
            Finding::new(&LIBRARY_FOUND, format!("libibverbs {version} ({path})"))
        }
    }
}

fn kernel(machine: &Machine) -> Finding {
    let release = machine.surroundings.kernel.as_deref().unwrap_or("of unknown release");
    if machine.surroundings.has_verbs {
        Finding::new(&KERNEL_READY, format!("Linux {release} offers verbs"))
    } else {
        Finding::new(
            &KERNEL_MISSING,
            format!("the kernel (Linux {release}) offers no verbs: ib_uverbs is not loaded"),
        )
    }
}

fn modules(machine: &Machine) -> Finding {
    let modules = &machine.surroundings.modules;
    let message = if modules.is_empty() {
        "none of the known modules is loaded".to_owned()
    } else {
        format!("loaded: {}", modules.join(", "))
    };
    let manager =
        if machine.surroundings.has_module("rdma_ucm") { "" } else { "; rdma_ucm is not, nor needed" };
    Finding::new(&MODULES_LOADED, message + manager)
}

fn device(machine: &Machine, wanted: Option<&str>) -> Finding {
    let present: Vec<_> = machine.devices.iter().map(|device| device.name.as_str()).collect();
    let present = present.join(", ");
    match wanted {
        _ if present.is_empty() => Finding::new(&DEVICE_NONE, "there is no RDMA device"),
        Some(wanted) if machine.devices.iter().all(|device| device.name != wanted) => {
            let message = format!("there is no RDMA device {wanted}; present are: {present}");
            Finding::new(&DEVICE_UNKNOWN, message).with("present", &present)
        }
        _ => Finding::new(&DEVICE_FOUND, format!("present: {present}")),
    }
}

fn choice(machine: &Machine) -> Finding {
    match &machine.choice {
        Ok(choice) => Finding::new(&CHOICE_MADE, format!("Tensorwire would use {}", place(choice))),
        Err(reason) => Finding::new(&CHOICE_NONE, format!("Tensorwire would use no device: {reason}")),
    }
}

/// Device, port and address, for people.
pub(super) fn place(choice: &Choice) -> String {
    let Choice { device, port, gid_index, gid } = choice;
    format!("{device} port {port}, address {gid} (GID {gid_index})")
}

fn memory_lock(seen: &Examination) -> Finding {
    let process = &seen.machine.process;
    let pool = BinaryBytes(seen.pool_bytes);
    match process.lockable() {
        Some(MemoryLock::Unlimited) => {
            let why = if process.may_lock { " (CAP_IPC_LOCK, or no limit)" } else { "" };
            Finding::new(&MEMLOCK_ENOUGH, format!("any amount of memory may be locked{why}"))
        }
        Some(MemoryLock::Bytes(limit)) if limit >= seen.pool_bytes => {
            let message = format!("{} may be locked, pools take {pool}", BinaryBytes(limit));
            Finding::new(&MEMLOCK_ENOUGH, message)
        }
        Some(MemoryLock::Bytes(limit)) => {
            let message = format!(
                "the limit on locked memory is {} ({limit} bytes), too small for pools of {pool}",
                BinaryBytes(limit)
            );
            Finding::new(&MEMLOCK_SMALL, message).with("pool", &pool.to_string())
        }
        None => Finding::new(&MEMLOCK_UNKNOWN, "the limit on locked memory cannot be read"),
    }
}

fn loopback(seen: &Examination) -> Option<Finding> {
    let device = seen.machine.choice.as_ref().ok()?.device.as_str();
    let finding = match &seen.verbs {
        Ok(proof) => Finding::new(&LOOPBACK_WORKS, format!("a write between two queue pairs: {proof}")),
        Err(reason) => {
            Finding::new(&LOOPBACK_FAILED, format!("a write between two queue pairs failed: {reason}"))
        }
    };
    Some(finding.of(device))
}

fn huge_pages(machine: &Machine) -> Finding {
    let memory = &machine.memory;
    let page = BinaryBytes(memory.huge_page_bytes);
    let transparent = memory.transparent.as_deref().unwrap_or("not there");
    let message = format!(
        "{} of {page} reserved, {} of them free; transparent ones in shared memory: {transparent}",
        memory.huge_pages, memory.huge_pages_free
    );
    Finding::new(&HUGE_PAGES, message)
}

fn peer_memory(machine: &Machine) -> Finding {
    let loaded = &machine.memory.peer_memory;
    let modules = if loaded.is_empty() { "no module of a GPU".to_owned() } else { loaded.join(", ") };
    let has_dma_buf = machine.surroundings.kernel_version().is_some_and(|version| version >= (5, 12));
    let dma_buf = if has_dma_buf { "the kernel has dma-buf" } else { "the kernel has no dma-buf" };
    Finding::new(&PEER_MEMORY, format!("{modules}; {dma_buf}"))
}

fn container(seen: &Examination) -> Finding {
    let around = &seen.machine.surroundings;
    if around.container.is_empty() {
        return Finding::new(&CONTAINER_NONE, "nothing looks like a container");
    }
    let hints = around.container.join(", ");
    if !around.has_nodes {
        return Finding::new(&CONTAINER_CLOSED, format!("a container ({hints}) without /dev/infiniband"));
    }
    match seen.machine.process.lockable() {
        Some(MemoryLock::Bytes(limit)) if limit < seen.pool_bytes => Finding::new(
            &CONTAINER_UNLOCKED,
            format!("a container ({hints}) with a small limit on locked memory, and without CAP_IPC_LOCK"),
        ),
        _ => Finding::new(&CONTAINER_PASSED, format!("a container ({hints}) with /dev/infiniband")),
    }
}

fn shm(seen: &Examination) -> Finding {
    match &seen.shm {
        Ok(proof) => Finding::new(&SHM_WORKS, format!("a write over shared memory: {proof}")),
        Err(reason) => Finding::new(&SHM_FAILED, format!("shared memory cannot be used: {reason}")),
    }
}

fn pidfd(seen: &Examination) -> Finding {
    match &seen.pidfd {
        Ok(()) => Finding::new(&PIDFD_WORKS, "pidfd_open works"),
        Err(reason) => Finding::new(&PIDFD_MISSING, format!("pidfd_open is refused: {reason}")),
    }
}

fn yama(machine: &Machine) -> Finding {
    Finding::new(
        &YAMA,
        match machine.surroundings.yama {
            Some(scope) => format!("ptrace_scope is {scope}, which is of no consequence"),
            None => "the kernel has no Yama, which is of no consequence".to_owned(),
        },
    )
}

fn tcp(seen: &Examination) -> Finding {
    match &seen.tcp {
        Ok(proof) => Finding::new(&TCP_WORKS, format!("a write over TCP on loopback: {proof}")),
        Err(reason) => Finding::new(&TCP_FAILED, format!("TCP on loopback cannot be used: {reason}")),
    }
}
