//! Page-aligned memory files: sized, mapped, sealed, every page present.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::Arc,
};

use rustix::{
    fs::{FallocateFlags, MemfdFlags, SealFlags},
    mm::MapFlags,
};

use crate::{
    HugePages, MemoryError,
    huge::{self, collapse},
    limits,
    pages::{Pages, READ_WRITE, page_size},
};

/// A mapped memfd, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Memfd {
    fd: OwnedFd,
    pages: Pages,
    huge_bytes: usize,
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
        self.pages.base()
    }

    pub(crate) fn length(&self) -> usize {
        self.pages.length()
    }

    pub(crate) fn huge_bytes(&self) -> usize {
        self.huge_bytes
    }
}

/// Makes one block.
#[derive(Debug, Clone, Copy)]
struct Maker {
    pool: &'static str,
    length: usize,
}

impl Maker {
    /// Checks limits that the kernel enforces by a signal.
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

    /// Makes the block of huge pages that the system has reserved.
    fn reserved(self) -> Result<Memfd, MemoryError> {
        let fd = memfd(MemfdFlags::HUGETLB).map_err(self.failed("memfd_create"))?;
        allocate(&fd, self.length).map_err(self.failed("fallocate"))?;
        let made = self.finish(fd, 0)?;
        Ok(Memfd { huge_bytes: self.length, ..made })
    }

    /// Makes the block of pages of any size, and collapses as many as the kernel can into huge ones.
    fn collapsed(self, huge_page: usize) -> Result<Memfd, MemoryError> {
        let fd = memfd(MemfdFlags::empty()).map_err(self.failed("memfd_create"))?;
        allocate(&fd, self.length).map_err(self.failed("fallocate"))?;
        let made = self.finish(fd, huge_page)?;
        let huge_bytes = collapse(&made.pages, huge_page);
        Ok(Memfd { huge_bytes, ..made })
    }

    fn finish(self, fd: OwnedFd, alignment: usize) -> Result<Memfd, MemoryError> {
        // Every page is touched when it is mapped: a neighbour could not distinguish untouched pages from holes.
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        let pages =
            Pages::new(fd.as_fd(), self.length, READ_WRITE, flags, alignment).map_err(self.failed("mmap"))?;
        seal(&fd).map_err(self.failed("sealing"))?;
        Ok(Memfd { fd, pages, huge_bytes: 0 })
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

/// Prevents resizing the memory under a neighbour's mapping, and mapping it writable.
fn seal(fd: &OwnedFd) -> io::Result<()> {
    let seals = SealFlags::FUTURE_WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    Ok(rustix::fs::fcntl_add_seals(fd, seals)?)
}
