//! Huge pages, and the kernel's ways to register memory of other devices.

use super::Tree;

/// Facts about huge pages and about memory of other devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MemoryFacts {
    /// Bytes of a huge page.
    pub(crate) huge_page_bytes: u64,
    /// Huge pages that are reserved.
    pub(crate) huge_pages: u64,
    /// Reserved huge pages that are free.
    pub(crate) huge_pages_free: u64,
    /// The setting for transparent huge pages in shared memory, if the kernel has them.
    pub(crate) transparent: Option<String>,
    /// Modules through which devices reach memory of GPUs.
    pub(crate) peer_memory: Vec<String>,
}

impl MemoryFacts {
    pub(super) fn read(tree: &Tree) -> Self {
        let text = tree.text("/proc/meminfo").unwrap_or_default();
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
        };
        let modules = ["nvidia_peermem", "nv_peer_mem", "amdgpu"];
        let loaded = |name: &&str| tree.has(&format!("/sys/module/{name}"));
        Self {
            huge_page_bytes: field("Hugepagesize") << 10,
            huge_pages: field("HugePages_Total"),
            huge_pages_free: field("HugePages_Free"),
            transparent: tree
                .text("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
                .map(|text| selected(&text)),
            peer_memory: modules.iter().filter(|name| loaded(name)).map(|&name| name.to_owned()).collect(),
        }
    }
}

/// `never` of `always advise [never]`.
fn selected(text: &str) -> String {
    let inside = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    inside.map_or(text, |(word, _)| word).to_owned()
}
