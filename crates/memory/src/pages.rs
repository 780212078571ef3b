//! Pages of this process: mapped, aligned, replaced in place, unmapped.

use std::{
    ffi::c_void,
    io::{self, Write},
    os::fd::BorrowedFd,
    ptr::{self, NonNull},
};

use rustix::{
    io::Errno,
    mm::{MapFlags, MprotectFlags, MremapFlags, ProtFlags},
};

pub(crate) use rustix::param::page_size;

use crate::poison;

pub(crate) const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Pages that are mapped into this process, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Pages {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is plain memory owned by this value; who may read or write which part of it is decided
// by `BufMut`, `Buf` and `Granted`, each of which owns a disjoint range.
unsafe impl Send for Pages {}
// SAFETY: as above; this value itself forms no reference to the memory.
unsafe impl Sync for Pages {}

impl Drop for Pages {
    fn drop(&mut self) {
        // What is mapped here next may be read.
        poison::permit(self.base, 0, self.length);
        // SAFETY: `base` and `length` are the mapping this value made, and no handle on it is left.
        let _cannot_fail = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

impl Pages {
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// Memory of this process alone, all zeros.
    pub(crate) fn anonymous(length: usize) -> io::Result<Self> {
        anonymous(length, READ_WRITE, MapFlags::PRIVATE)
    }

    /// Replaces this mapping's pages by those of `other`, which is as long, for reading. The address range is never without
    /// pages: if the kernel fails half-way, this process ends.
    pub(crate) fn replace(&self, other: Self) -> io::Result<()> {
        let (from, length, to) = (other.base.as_ptr(), other.length, self.base.as_ptr());
        if length != self.length {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: `other` is our own mapping, and no reference to it is left.
        unsafe { rustix::mm::mprotect(from.cast(), length, MprotectFlags::READ) }?;
        // A refusal by the kernel, for instance of one mapping too many, happens here already, where nothing is lost.
        let other = other.moved_to(reserve(length)?)?;
        let from = other.base.as_ptr();
        // SAFETY: both ranges are whole mappings of ours. The kernel replaces this one's pages under its own lock, and the
        // caller gives the same bytes, so slices of this mapping stay what they are. A call that fails may have unmapped
        // this mapping's pages already, under those slices; it ends the process, so that nobody reads them.
        let moved =
            unsafe { rustix::mm::mremap_fixed(from.cast(), length, length, MremapFlags::MAYMOVE, to.cast()) };
        if let Err(error) = moved {
            abort_without_pages(length, error);
        }
        std::mem::forget(other);
        Ok(())
    }

    /// Moves these pages to the address space `target`, which is as long and has no memory.
    fn moved_to(self, target: Self) -> io::Result<Self> {
        let (from, length, to) = (self.base.as_ptr(), self.length, target.base.as_ptr());
        // SAFETY: both ranges are whole mappings of ours, and no reference to either is left.
        let moved =
            unsafe { rustix::mm::mremap_fixed(from.cast(), length, length, MremapFlags::MAYMOVE, to.cast()) };
        if let Err(error) = moved {
            // The kernel may have unmapped it, and another thread may have mapped its addresses.
            std::mem::forget(target);
            return Err(error.into());
        }
        std::mem::forget(self);
        Ok(target)
    }

    /// Maps `length` bytes of `fd`, at a multiple of `alignment`.
    pub(crate) fn new(
        fd: BorrowedFd<'_>,
        length: usize,
        protection: ProtFlags,
        flags: MapFlags,
        alignment: usize,
    ) -> io::Result<Self> {
        if alignment <= page_size() {
            return map(ptr::null_mut(), length, protection, flags, fd);
        }
        // Address space that is large enough to contain an aligned range; the mapping replaces that part of it.
        let room = length.checked_add(alignment).ok_or(Errno::NOMEM)?;
        let reserved = reserve(room)?;
        let start = reserved.base.as_ptr();
        let place = start.wrapping_add(start.addr().next_multiple_of(alignment) - start.addr());
        let mapped = map(place.cast(), length, protection, flags | MapFlags::FIXED, fd)?;
        std::mem::forget(reserved);
        let before = place.addr() - start.addr();
        for (part, bytes) in [(start, before), (place.wrapping_add(length), room - length - before)] {
            if bytes > 0 {
                // SAFETY: this part of the address space was reserved above, and nothing was mapped into it.
                let _cannot_fail = unsafe { rustix::mm::munmap(part.cast(), bytes) };
            }
        }
        Ok(mapped)
    }
}

/// Ends the process: memory that is in use may be gone.
fn abort_without_pages(length: usize, error: Errno) -> ! {
    let mut stderr = io::stderr();
    // A message that cannot be written is dropped.
    let _ = writeln!(
        stderr,
        "the pages of a mapped file of {length} bytes could not be replaced by a copy (mremap: {error}), and may be \
         gone: ending this process"
    );
    std::process::abort()
}

/// With `MAP_FIXED`, `place` must be address space that the caller reserved.
fn map(
    place: *mut c_void,
    length: usize,
    protection: ProtFlags,
    flags: MapFlags,
    fd: BorrowedFd<'_>,
) -> io::Result<Pages> {
    // SAFETY: a fresh mapping at the kernel's choice, or one over address space that the caller reserved.
    let base = unsafe { rustix::mm::mmap(place, length, protection, flags, fd, 0) }?;
    mapped(base, length)
}

/// Address space without memory.
fn reserve(length: usize) -> io::Result<Pages> {
    anonymous(length, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE)
}

fn anonymous(length: usize, protection: ProtFlags, flags: MapFlags) -> io::Result<Pages> {
    // SAFETY: a fresh mapping at the kernel's choice.
    let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), length, protection, flags) }?;
    mapped(base, length)
}

fn mapped(base: *mut c_void, length: usize) -> io::Result<Pages> {
    let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned address 0"))?;
    Ok(Pages { base, length })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For the address sanitizer: elsewhere nothing is marked.
    #[test]
    fn pages_are_unmapped_without_the_marks_of_free_memory() {
        let length = page_size();
        let free = Pages::anonymous(length).expect("pages");
        let place = free.base();
        poison::forbid(place, 0, length);
        drop(free);
        // SAFETY: the kernel refuses if another thread has mapped something here.
        let again = unsafe {
            let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
            rustix::mm::mmap_anonymous(place.as_ptr().cast(), length, READ_WRITE, flags)
        };
        // Another thread may have been faster.
        let Ok(again) = again else { return };
        let pages = mapped(again, length).expect("pages");
        // SAFETY: one byte of pages that are mapped and nobody else's.
        assert_eq!(unsafe { pages.base().as_ptr().read_volatile() }, 0);
    }
}
