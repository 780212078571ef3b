//! Memory that two processes share without seals and without checks of the peer. It is only for limits.
#![allow(unsafe_code)] // a mapping that both processes write is no reference in safe code

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::{self, NonNull},
    sync::atomic::AtomicU64,
};

use rustix::{
    fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create},
    mm::{MapFlags, ProtFlags, mmap, munmap},
};
use tensorwire_memory::copy::{CopyReason, copy_raw};

/// Bytes from one word of [`SharedMemory::word`] to the next: two cache lines, since the prefetcher takes pairs.
const WORD_STRIDE: usize = 128;

/// A memfd that both processes map for reading and writing.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    fd: OwnedFd,
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is plain memory, accessed through atomics and raw copies only; no reference to its bytes
// is ever formed.
unsafe impl Send for SharedMemory {}
// SAFETY: as above: shared access is atomic, or a raw copy whose bytes may be torn.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// `length` bytes, rounded up to whole pages by the kernel, zero and resident.
    ///
    /// # Errors
    /// The kernel refuses the memory.
    pub(crate) fn create(length: usize) -> io::Result<Self> {
        let fd = memfd_create(c"limit", MemfdFlags::CLOEXEC)?;
        fallocate(&fd, FallocateFlags::empty(), 0, length as u64)?;
        Self::map(fd, length)
    }

    /// All of the memory that another process created.
    ///
    /// # Errors
    /// `fd` is empty, or can't be mapped.
    pub(crate) fn open(fd: OwnedFd) -> io::Result<Self> {
        let file = std::fs::File::from(fd);
        let length = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        Self::map(file.into(), length)
    }

    fn map(fd: OwnedFd, length: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping chosen by the kernel; no existing memory is replaced.
        let base = unsafe {
            mmap(ptr::null_mut(), length, protection, MapFlags::SHARED | MapFlags::POPULATE, &fd, 0)?
        };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned address 0"))?;
        Ok(Self { fd, base, length })
    }

    /// The descriptor to hand to the other process.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// A word of its own cache line; `None` beyond the end.
    pub(crate) fn word(&self, index: usize) -> Option<&AtomicU64> {
        let offset = index.checked_mul(WORD_STRIDE)?;
        if offset.checked_add(size_of::<AtomicU64>())? > self.length {
            return None;
        }
        // SAFETY: the word lies inside the mapping, which lives as long as `self`, and is aligned: a mapping
        // starts at a page, and the stride is a multiple of 8. Other accesses to it are atomic or raw copies.
        Some(unsafe { &*self.base.as_ptr().add(offset).cast::<AtomicU64>() })
    }

    /// Writes `bytes` at `offset`; bytes that do not fit are left out.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        let length = bytes.len().min(self.length.saturating_sub(offset));
        // SAFETY: the range lies inside the mapping, and a caller's slice never does, since no reference to the
        // mapping's bytes is ever formed.
        unsafe { copy_raw(self.at(offset), bytes.as_ptr(), length, CopyReason::Local) };
    }

    /// Reads the bytes at `offset`, up to the end of the memory.
    pub(crate) fn read(&self, offset: usize, into: &mut [u8]) {
        let length = into.len().min(self.length.saturating_sub(offset));
        // SAFETY: as in `write`. What the other process writes meanwhile may be torn, which plain bytes allow.
        unsafe { copy_raw(into.as_mut_ptr(), self.at(offset), length, CopyReason::Local) };
    }

    fn at(&self, offset: usize) -> *mut u8 {
        // SAFETY: clamped to the mapping's end.
        unsafe { self.base.as_ptr().add(offset.min(self.length)) }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: `base` and `length` are the mapping this value made; borrows of it have ended.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::SharedMemory;

    #[test]
    fn both_mappings_show_the_same_bytes_and_words() {
        let first = SharedMemory::create(4096).unwrap();
        let second = SharedMemory::open(first.fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(second.length, 4096);
        first.word(1).unwrap().store(7, Ordering::Release);
        assert_eq!(second.word(1).unwrap().load(Ordering::Acquire), 7);
        second.write(4000, &[5; 200]);
        let mut read = [1; 100];
        first.read(4090, &mut read);
        assert_eq!(read[..6], [5; 6]);
        assert_eq!(read[6..], [1; 94]);
        assert!(first.word(32).is_none());
    }
}
