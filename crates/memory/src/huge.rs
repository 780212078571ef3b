//! Huge pages under blocks.

use std::{fs, sync::OnceLock};

use crate::pages::Pages;

/// Whether the blocks of a pool are backed by huge pages. A neighbour maps such a block in a hundredth of the time,
/// and copies miss fewer address translations.
///
/// Where the system has reserved huge pages (`sysctl vm.nr_hugepages`), these are used at no extra cost.
/// Otherwise the kernel is asked to collapse a block's pages after they were allocated, which makes a new block several times
/// as expensive. [`PoolStats::huge_bytes`](crate::PoolStats::huge_bytes) is how much was obtained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum HugePages {
    /// Small pages, unless the system makes them huge by itself.
    #[default]
    Never,
    /// Huge pages as far as the system has any.
    Try,
    /// Huge pages for every block, or [`MemoryError::HugePages`](crate::MemoryError::HugePages). Blocks are rounded
    /// up to whole huge pages.
    Require,
}

/// Bytes of a huge page.
pub(crate) fn page_size() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    const USUAL: usize = 2 << 20;
    *BYTES.get_or_init(|| {
        let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").ok();
        let bytes = text.and_then(|text| text.trim().parse().ok());
        bytes.filter(|bytes: &usize| bytes.is_power_of_two()).unwrap_or(USUAL)
    })
}

/// Collapses pages into huge ones (Linux 6.1). The definitions for musl lack it.
const MADV_COLLAPSE: libc::c_int = 25;

/// Asks the kernel to make the pages of `pages` huge. Returns how many bytes are.
pub(crate) fn collapse(pages: &Pages, huge_page: usize) -> usize {
    let base = pages.base().as_ptr();
    let whole = pages.length() / huge_page;
    let advise = |place: *mut u8, length, advice| {
        // SAFETY: the range is a part of our own mapping; these kinds of advice don't change its bytes.
        unsafe { libc::madvise(place.cast(), length, advice) == 0 }
    };
    advise(base, pages.length(), libc::MADV_HUGEPAGE);
    let is_huge = |page: &usize| advise(base.wrapping_add(page * huge_page), huge_page, MADV_COLLAPSE);
    (0..whole).filter(is_huge).count() * huge_page
}
