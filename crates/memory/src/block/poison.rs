//! Marks free bytes for the address sanitizer (`scripts/check-asan`), which reports every access to them.

#[cfg(not(asan))]
use super::Block;

/// The sanitizer reports accesses to the range from now on.
#[cfg(not(asan))]
pub(crate) fn forbid(_: &Block, _offset: usize, _length: usize) {}

/// The range may be accessed again.
#[cfg(not(asan))]
pub(crate) fn permit(_: &Block, _offset: usize, _length: usize) {}

#[cfg(asan)]
pub(crate) use sanitizer::{forbid, permit};

#[cfg(asan)]
mod sanitizer {
    use std::ffi::c_void;

    use crate::Block;

    // SAFETY: these are the signatures in `sanitizer/asan_interface.h`; the runtime that the compiler links for `cfg(asan)` keeps them.
    unsafe extern "C" {
        fn __asan_poison_memory_region(address: *const c_void, length: usize);
        fn __asan_unpoison_memory_region(address: *const c_void, length: usize);
    }

    fn place(block: &Block, offset: usize) -> *const c_void {
        block.base().as_ptr().wrapping_add(offset).cast_const().cast()
    }

    pub(crate) fn forbid(block: &Block, offset: usize, length: usize) {
        // SAFETY: marks shadow memory only; the range is mapped, because `block` is.
        unsafe { __asan_poison_memory_region(place(block, offset), length) };
    }

    pub(crate) fn permit(block: &Block, offset: usize, length: usize) {
        // SAFETY: as in the function above.
        unsafe { __asan_unpoison_memory_region(place(block, offset), length) };
    }
}
