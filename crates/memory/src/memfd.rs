//! Page-aligned memory files: sized, mapped, sealed, every page present.

use std::{
    ffi::CStr,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr::{self, NonNull},
    sync::Arc,
};

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
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

impl Mapped {
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// Maps `length` bytes of `fd`, at a multiple of `alignment`.
    pub(crate) fn new(
        fd: BorrowedFd<'_>,
        length: usize,
        protection: libc::c_int,
        flags: libc::c_int,
        alignment: usize,
    ) -> io::Result<Self> {
        if alignment <= page_size() {
            return map(ptr::null_mut(), length, protection, flags, fd.as_raw_fd());
        }
        // Address space in which an aligned place surely is; the mapping replaces that part of it.
        let room = length.checked_add(alignment).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let reserve = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let reserved = map(ptr::null_mut(), room, libc::PROT_NONE, reserve, -1)?;
        let start = reserved.base.as_ptr();
        let place = start.wrapping_add(start.addr().next_multiple_of(alignment) - start.addr());
        let mapped = map(place.cast(), length, protection, flags | libc::MAP_FIXED, fd.as_raw_fd())?;
        std::mem::forget(reserved);
        let before = place.addr() - start.addr();
        for (part, bytes) in [(start, before), (place.wrapping_add(length), room - length - before)] {
            if bytes > 0 {
                // SAFETY: this part of the address space was reserved above, and nothing was mapped into it.
                unsafe { libc::munmap(part.cast(), bytes) };
            }
        }
        Ok(mapped)
    }
}

/// With `MAP_FIXED`, `place` must be address space that the caller reserved.
fn map(
    place: *mut libc::c_void,
    length: usize,
    protection: libc::c_int,
    flags: libc::c_int,
    fd: libc::c_int,
) -> io::Result<Mapped> {
    // SAFETY: a fresh mapping at the kernel's choice, or one over address space that the caller reserved.
    let base = unsafe { libc::mmap(place, length, protection, flags, fd, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
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

const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

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
        let fd = memfd(c"tensorwire-block", 0).map_err(self.failed("memfd_create"))?;
        allocate(&fd, self.length).map_err(self.failed("fallocate"))?;
        self.finish(fd, libc::MAP_POPULATE, 0)
    }

    /// In huge pages that the system keeps for this.
    fn reserved(self) -> Result<Memfd, MemoryError> {
        let fd = memfd(c"tensorwire-block", libc::MFD_HUGETLB).map_err(self.failed("memfd_create"))?;
        allocate(&fd, self.length).map_err(self.failed("fallocate"))?;
        let made = self.finish(fd, libc::MAP_POPULATE, 0)?;
        Ok(Memfd { huge_bytes: self.length, ..made })
    }

    /// In pages of any size, made huge as far as the kernel can.
    fn collapsed(self, huge_page: usize) -> Result<Memfd, MemoryError> {
        let fd = memfd(c"tensorwire-block", 0).map_err(self.failed("memfd_create"))?;
        allocate(&fd, self.length).map_err(self.failed("fallocate"))?;
        let made = self.finish(fd, libc::MAP_POPULATE, huge_page)?;
        let huge_bytes = collapse(&made.mapping, huge_page);
        Ok(Memfd { huge_bytes, ..made })
    }

    fn finish(self, fd: OwnedFd, flags: libc::c_int, alignment: usize) -> Result<Memfd, MemoryError> {
        let mapping = Mapped::new(fd.as_fd(), self.length, READ_WRITE, libc::MAP_SHARED | flags, alignment)
            .map_err(self.failed("mmap"))?;
        seal(&fd).map_err(self.failed("sealing"))?;
        Ok(Memfd { fd, mapping, huge_bytes: 0 })
    }
}

pub(crate) fn page_size() -> usize {
    // SAFETY: no pointers are involved.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

fn memfd(name: &CStr, flags: libc::c_uint) -> io::Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | flags;
    // SAFETY: `name` is a valid C string for the call.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just handed us this descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Takes memory for every page, so that none is found missing when it is touched.
fn allocate(fd: &OwnedFd, length: usize) -> io::Result<()> {
    let length = libc::off_t::try_from(length).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    loop {
        // SAFETY: no pointers are involved; the descriptor is ours.
        let failed = unsafe { libc::fallocate(fd.as_raw_fd(), 0, 0, length) };
        if failed == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        // A signal with a handler ends the call half done.
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// No one can resize the memory under a neighbour's mapping, nor map it writable (DESIGN §6).
fn seal(fd: &OwnedFd) -> io::Result<()> {
    let seals = libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;
    // SAFETY: no pointers are involved; the descriptor is ours.
    let failed = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) };
    if failed != 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
