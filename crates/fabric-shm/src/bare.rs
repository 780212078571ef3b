//! Memory that two processes share with nothing around it: what the machine allows, for benchmarks to measure
//! the shared-memory fabric against. No seals, no checks of the peer: not for anything else.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr::{self, NonNull},
    sync::atomic::AtomicU64,
};

use tensorwire_memory::copy::{CopyReason, copy_raw};

/// Bytes from one word of [`BareMemory::word`] to the next: two cache lines, since the prefetcher takes pairs.
const WORD_STRIDE: usize = 128;

/// A memfd that both processes map for reading and writing.
#[derive(Debug)]
pub struct BareMemory {
    fd: OwnedFd,
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is plain memory, accessed through atomics and raw copies only; no reference to its bytes
// is ever formed.
unsafe impl Send for BareMemory {}
// SAFETY: as above: shared access is atomic, or a raw copy whose bytes may be torn.
unsafe impl Sync for BareMemory {}

impl BareMemory {
    /// `length` bytes, rounded up to whole pages by the kernel, zero and resident.
    ///
    /// # Errors
    /// The kernel refuses the memory.
    pub fn create(length: usize) -> io::Result<Self> {
        // SAFETY: the name is a C string constant.
        let fd = unsafe { libc::memfd_create(c"bare".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just made this descriptor for us; nobody else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let bytes = libc::off_t::try_from(length).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
        // SAFETY: no pointers are involved; the descriptor is ours.
        if unsafe { libc::fallocate(fd.as_raw_fd(), 0, 0, bytes) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Self::map(fd, length)
    }

    /// All of the memory that another process created.
    ///
    /// # Errors
    /// `fd` is empty, or can't be mapped.
    pub fn open(fd: OwnedFd) -> io::Result<Self> {
        let file = std::fs::File::from(fd);
        let length = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        Self::map(file.into(), length)
    }

    /// Bytes of it.
    pub fn length(&self) -> usize {
        self.length
    }

    fn map(fd: OwnedFd, length: usize) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: a fresh mapping chosen by the kernel; no existing memory is replaced.
        let base = unsafe { libc::mmap(ptr::null_mut(), length, protection, flags, fd.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned address 0"))?;
        Ok(Self { fd, base, length })
    }

    /// The descriptor to hand to the other process.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// A word of its own cache line; `None` beyond the end.
    pub fn word(&self, index: usize) -> Option<&AtomicU64> {
        let offset = index.checked_mul(WORD_STRIDE)?;
        if offset.checked_add(size_of::<AtomicU64>())? > self.length {
            return None;
        }
        // SAFETY: the word lies inside the mapping, which lives as long as `self`, and is aligned: a mapping
        // starts at a page, and the stride is a multiple of 8. Other accesses to it are atomic or raw copies.
        Some(unsafe { &*self.base.as_ptr().add(offset).cast::<AtomicU64>() })
    }

    /// Writes `bytes` at `offset`; what does not fit is left out.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let length = bytes.len().min(self.length.saturating_sub(offset));
        // SAFETY: the range lies inside the mapping, and a caller's slice never does, since no reference to the
        // mapping's bytes is ever formed.
        unsafe { copy_raw(self.at(offset), bytes.as_ptr(), length, CopyReason::Local) };
    }

    /// Reads the bytes at `offset`, as many as there are.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        let length = into.len().min(self.length.saturating_sub(offset));
        // SAFETY: as in `write`. What the other process writes meanwhile may be torn, which plain bytes allow.
        unsafe { copy_raw(into.as_mut_ptr(), self.at(offset), length, CopyReason::Local) };
    }

    fn at(&self, offset: usize) -> *mut u8 {
        // SAFETY: clamped to the mapping's end.
        unsafe { self.base.as_ptr().add(offset.min(self.length)) }
    }
}

impl Drop for BareMemory {
    fn drop(&mut self) {
        // SAFETY: `base` and `length` are the mapping this value made; borrows of it have ended.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::BareMemory;

    #[test]
    fn both_mappings_show_the_same_bytes_and_words() {
        let first = BareMemory::create(4096).unwrap();
        let second = BareMemory::open(first.fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(second.length(), 4096);
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
