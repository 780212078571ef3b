//! Page-aligned memory files: sized, mapped, sealed, every page present.

use std::{
    ffi::c_void,
    io::{self, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::{self, NonNull},
    sync::Arc,
};

use rustix::{
    fs::{FallocateFlags, MemfdFlags, SealFlags},
    io::Errno,
    mm::{MapFlags, MprotectFlags, MremapFlags, ProtFlags},
};

pub(crate) use rustix::param::page_size;

use crate::{
    HugePages, MemoryError,
    huge::{self, collapse},
    limits,
};

/// A mapped memfd, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Memfd {
    fd: OwnedFd,
    mapping: Mapped,
    huge_bytes: usize,
}

/// One mapping of this process.
#[derive(Debug)]
pub(crate) struct Mapped {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is plain memory owned by this value; who may read or write which part of it is decided
// by `BufMut`, `Buf` and `Granted`, each of which owns a disjoint range.
unsafe impl Send for Mapped {}
// SAFETY: as above; this value itself forms no reference to the memory.
unsafe impl Sync for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: `base` and `length` are the mapping this value made, and no handle on it is left.
        let _cannot_fail = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

impl Mapped {
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
) -> io::Result<Mapped> {
    // SAFETY: a fresh mapping at the kernel's choice, or one over address space that the caller reserved.
    let base = unsafe { rustix::mm::mmap(place, length, protection, flags, fd, 0) }?;
    mapped(base, length)
}

/// Address space without memory.
fn reserve(length: usize) -> io::Result<Mapped> {
    anonymous(length, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE)
}

fn anonymous(length: usize, protection: ProtFlags, flags: MapFlags) -> io::Result<Mapped> {
    // SAFETY: a fresh mapping at the kernel's choice.
    let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), length, protection, flags) }?;
    mapped(base, length)
}

fn mapped(base: *mut c_void, length: usize) -> io::Result<Mapped> {
    let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned address 0"))?;
    Ok(Mapped { base, length })
}

impl Memfd {
    /// Makes, sizes, maps, pre-faults and seals a memfd of `length` bytes, rounded up to whole pages: to huge
    /// pages, where those are required.
    pub(crate) fn new(pool: &'static str, length: usize, huge: HugePages) -> Result<Self, MemoryError> {
        let huge_page = huge::page_size();
        let page = if huge == HugePages::Require { huge_page } else { page_size() };
        let length = length.max(1).next_multiple_of(page);
        let maker = Maker { pool, length };
        maker.check()?;
        if huge != HugePages::Never
            && length.is_multiple_of(huge_page)
            && let Ok(made) = maker.reserved()
        {
            return Ok(made);
        }
        let made = if huge == HugePages::Never { maker.plain() } else { maker.collapsed(huge_page) }?;
        if huge == HugePages::Require && made.huge_bytes < length {
            return Err(MemoryError::HugePages { pool, bytes: length, got: made.huge_bytes });
        }
        Ok(made)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.mapping.base()
    }

    pub(crate) fn length(&self) -> usize {
        self.mapping.length()
    }

    pub(crate) fn huge_bytes(&self) -> usize {
        self.huge_bytes
    }
}

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Makes one block.
#[derive(Debug, Clone, Copy)]
struct Maker {
    pool: &'static str,
    length: usize,
}

impl Maker {
    /// Limits that the kernel would answer with a signal.
    fn check(self) -> Result<(), MemoryError> {
        let Self { pool, length: bytes } = self;
        match limits::refuses(bytes as u64) {
            Some((limit, value)) => Err(MemoryError::Limit { pool, bytes, limit, value }),
            None => Ok(()),
        }
    }

    fn failed(self, step: &'static str) -> impl FnOnce(io::Error) -> MemoryError {
        let Self { pool, length: bytes } = self;
        move |source| match limits::behind(step, &source, bytes as u64) {
            Some((limit, value)) => MemoryError::Limit { pool, bytes, limit, value },
            None => MemoryError::Block { pool, bytes, step, source: Arc::new(source) },
        }
    }

    fn plain(self) -> Result<Memfd, MemoryError> {
        let fd = memfd(MemfdFlags::empty()).map_err(self.failed("memfd_create"))?;
        allocate(&fd, self.length).map_err(self.failed("fallocate"))?;
        self.finish(fd, 0)
    }

    /// In huge pages that the system has reserved.
    fn reserved(self) -> Result<Memfd, MemoryError> {
        let fd = memfd(MemfdFlags::HUGETLB).map_err(self.failed("memfd_create"))?;
        allocate(&fd, self.length).map_err(self.failed("fallocate"))?;
        let made = self.finish(fd, 0)?;
        Ok(Memfd { huge_bytes: self.length, ..made })
    }

    /// In pages of any size, made huge as far as the kernel can.
    fn collapsed(self, huge_page: usize) -> Result<Memfd, MemoryError> {
        let fd = memfd(MemfdFlags::empty()).map_err(self.failed("memfd_create"))?;
        allocate(&fd, self.length).map_err(self.failed("fallocate"))?;
        let made = self.finish(fd, huge_page)?;
        let huge_bytes = collapse(&made.mapping, huge_page);
        Ok(Memfd { huge_bytes, ..made })
    }

    fn finish(self, fd: OwnedFd, alignment: usize) -> Result<Memfd, MemoryError> {
        // Every page is touched when it is mapped: a neighbour could not distinguish untouched pages from holes.
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        let mapping = Mapped::new(fd.as_fd(), self.length, READ_WRITE, flags, alignment)
            .map_err(self.failed("mmap"))?;
        seal(&fd).map_err(self.failed("sealing"))?;
        Ok(Memfd { fd, mapping, huge_bytes: 0 })
    }
}

fn memfd(flags: MemfdFlags) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | flags;
    Ok(rustix::fs::memfd_create(c"tensorwire-block", flags)?)
}

/// Allocates memory for every page, so that no later access can fail for lack of memory.
fn allocate(fd: &OwnedFd, length: usize) -> io::Result<()> {
    // A signal with a handler interrupts the call.
    let take = || rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, length as u64);
    Ok(rustix::io::retry_on_intr(take)?)
}

/// No one can resize the memory under a neighbour's mapping, nor map it writable.
fn seal(fd: &OwnedFd) -> io::Result<()> {
    let seals = SealFlags::FUTURE_WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    Ok(rustix::fs::fcntl_add_seals(fd, seals)?)
}
