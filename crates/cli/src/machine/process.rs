//! The rights of this process.

use super::Tree;

/// The bit of CAP_IPC_LOCK.
const IPC_LOCK: u32 = 14;

/// This process's rights.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ProcessFacts {
    /// Its effective user id.
    pub(crate) user: Option<u32>,
    /// Whether it has CAP_IPC_LOCK.
    pub(crate) may_lock: bool,
    /// Whether its rights are valid only in a user namespace.
    pub(crate) in_user_namespace: bool,
    /// How much memory it may lock.
    pub(crate) memory_lock: Option<MemoryLock>,
}

/// A limit on locked memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryLock {
    /// This many bytes.
    Bytes(u64),
    /// Unlimited.
    Unlimited,
}

impl ProcessFacts {
    pub(super) fn read(tree: &Tree) -> Self {
        let status = tree.text("/proc/self/status").unwrap_or_default();
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let capabilities = field("CapEff").and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
        let map = tree.text("/proc/self/uid_map");
        Self {
            // Real, effective, saved, file system.
            user: field("Uid").and_then(|text| text.split_whitespace().nth(1)?.parse().ok()),
            may_lock: capabilities.is_some_and(|bits| bits >> IPC_LOCK & 1 == 1),
            in_user_namespace: map.is_some_and(|map| !is_whole(&map)),
            memory_lock: tree.text("/proc/self/limits").and_then(|limits| memory_lock(&limits)),
        }
    }

    /// How much memory it may lock, considering its rights: CAP_IPC_LOCK counts only outside user namespaces.
    pub(crate) fn lockable(&self) -> Option<MemoryLock> {
        if self.may_lock && !self.in_user_namespace { Some(MemoryLock::Unlimited) } else { self.memory_lock }
    }
}

/// Whether a map of user numbers maps all of them to themselves.
fn is_whole(map: &str) -> bool {
    map.split_whitespace().collect::<Vec<_>>() == ["0", "0", "4294967295"]
}

fn memory_lock(limits: &str) -> Option<MemoryLock> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(MemoryLock::Unlimited),
        bytes => bytes.parse().ok().map(MemoryLock::Bytes),
    }
}
