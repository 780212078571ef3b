//! Marks free bytes for the address sanitizer (`scripts/check-asan`), which reports every access to them.

#[cfg(not(asan))]
use std::ptr::NonNull;

/// The sanitizer reports accesses to the range from now on.
#[cfg(not(asan))]
pub(crate) fn forbid(_base: NonNull<u8>, _offset: usize, _length: usize) {}

/// The range may be accessed again.
#[cfg(not(asan))]
pub(crate) fn permit(_base: NonNull<u8>, _offset: usize, _length: usize) {}

#[cfg(asan)]
pub(crate) use sanitizer::{forbid, permit};

#[cfg(asan)]
mod sanitizer {
    use std::{ffi::c_void, ptr::NonNull};

    // SAFETY: these are the signatures in `sanitizer/asan_interface.h`; the runtime that the compiler links for `cfg(asan)` keeps them.
    unsafe extern "C" {
        fn __asan_poison_memory_region(address: *const c_void, length: usize);
        fn __asan_unpoison_memory_region(address: *const c_void, length: usize);
    }

    fn place(base: NonNull<u8>, offset: usize) -> *const c_void {
        base.as_ptr().wrapping_add(offset).cast_const().cast()
    }

    pub(crate) fn forbid(base: NonNull<u8>, offset: usize, length: usize) {
        // SAFETY: marks shadow memory only, which there is for each mapped range: `Stock` holds the block, and `Pages` has not unmapped it yet.
        unsafe { __asan_poison_memory_region(place(base, offset), length) };
    }

    pub(crate) fn permit(base: NonNull<u8>, offset: usize, length: usize) {
        // SAFETY: as in the function above.
        unsafe { __asan_unpoison_memory_region(place(base, offset), length) };
    }
}
