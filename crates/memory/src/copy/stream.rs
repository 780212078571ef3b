//! Copies past the caches, by streaming stores. Chapter 9 of Intel's optimization reference manual describes these.

use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

/// Bytes of a line of the caches. All its loads come before its stores, so that the processor can write it as a whole.
pub(super) const LINE: usize = 64;

const PAGE: usize = 4096;

/// Pages that are copied side by side, a line of each in turn. Memory serves several pages at once: 11 GB/s where one page after the
/// other gives 9, and plain copies 7.
const PAGES: usize = 4;

/// Copies `lines` lines.
///
/// # Safety
/// `source` is readable and `destination` writable for so many lines, they do not overlap, and `destination` is aligned to a line unless
/// there are none.
pub(super) unsafe fn stream_lines(destination: *mut u8, source: *const u8, lines: usize) {
    for line in (0..lines).map(interleaved(lines)) {
        let at = line * LINE;
        // SAFETY: `line` is less than `lines`, so these bytes are those of the caller's contract.
        unsafe { stream_line(destination.add(at).cast(), source.add(at).cast()) };
    }
    // SAFETY: every x86-64 processor has SSE. The intrinsic requires a fence before any other access to these bytes,
    // also by threads that learn of them.
    unsafe { _mm_sfence() };
}

/// Orders the lines so that those of [`PAGES`] pages alternate; the last ones, which fill fewer pages, follow in their order.
fn interleaved(lines: usize) -> impl Fn(usize) -> usize {
    const PAGE_LINES: usize = PAGE / LINE;
    const GROUP: usize = PAGES * PAGE_LINES;
    let grouped = lines / GROUP * GROUP;
    move |at| {
        if at >= grouped {
            return at;
        }
        let (group, rest) = (at / GROUP * GROUP, at % GROUP);
        group + rest % PAGES * PAGE_LINES + rest / PAGES
    }
}

/// # Safety
/// Both are valid for 64 bytes, and `to` is aligned to 16.
#[inline(always)]
unsafe fn stream_line(to: *mut __m128i, from: *const __m128i) {
    // SAFETY: the caller's contract; every x86-64 processor has SSE2.
    unsafe {
        // Written out: closures over the parts are not always inlined, and would then cost ten times the copy.
        let (first, second) = (_mm_loadu_si128(from), _mm_loadu_si128(from.add(1)));
        let (third, fourth) = (_mm_loadu_si128(from.add(2)), _mm_loadu_si128(from.add(3)));
        _mm_stream_si128(to, first);
        _mm_stream_si128(to.add(1), second);
        _mm_stream_si128(to.add(2), third);
        _mm_stream_si128(to.add(3), fourth);
    }
}

#[cfg(test)]
mod tests {
    use super::interleaved;

    #[test]
    fn every_line_is_copied_once() {
        for lines in [0, 1, 63, 64, 255, 256, 257, 511, 512, 700, 4096] {
            let mut order: Vec<_> = (0..lines).map(interleaved(lines)).collect();
            order.sort_unstable();
            assert!(order.into_iter().eq(0..lines), "{lines} lines");
        }
    }
}
