//! Page-aligned memfd blocks.

use std::{
    ffi::CStr,
    fmt, io,
    os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr::NonNull,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    Buf, MemoryError, RemoteTarget,
    exposure::{self, ExposureTable},
    grant::GrantTable,
};

/// Names a block within this process; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(u64);

impl BlockId {
    /// The number itself, for wire formats and logs.
    pub fn get(self) -> u64 {
        self.0
    }
}

static NEXT_BLOCK: AtomicU64 = AtomicU64::new(1);

/// A shared handle on one mapped memfd. Cheap to clone; unmapped when the last handle is gone, so a device
/// that registered a block keeps it mapped by keeping a clone.
#[derive(Clone)]
pub struct Block {
    inner: Arc<BlockInner>,
}

struct BlockInner {
    id: BlockId,
    fd: OwnedFd,
    base: NonNull<u8>,
    length: usize,
    grants: Mutex<GrantTable>,
    exposures: Mutex<ExposureTable>,
}

// SAFETY: the mapping is plain memory owned by this value; who may read or write which part of it is decided
// by `BufMut`, `Buf` and `Granted`, each of which owns a disjoint range.
unsafe impl Send for BlockInner {}
// SAFETY: as above; the grant table is behind a mutex.
unsafe impl Sync for BlockInner {}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block").field("id", &self.inner.id).field("length", &self.inner.length).finish()
    }
}

impl Block {
    /// Makes, sizes, maps, seals and pre-faults a memfd of `length` bytes (rounded up to whole pages).
    pub(crate) fn new(pool: &'static str, length: usize) -> Result<Self, MemoryError> {
        let length = length.max(1).next_multiple_of(page_size());
        let fail =
            |step| move |source| MemoryError::Block { pool, bytes: length, step, source: Arc::new(source) };
        let fd = memfd(c"tensorwire-block").map_err(fail("memfd_create"))?;
        resize(&fd, length).map_err(fail("fallocate"))?;
        let base = map_writable(&fd, length).map_err(fail("mmap"))?;
        let inner = BlockInner {
            id: BlockId(NEXT_BLOCK.fetch_add(1, Ordering::Relaxed)),
            fd,
            base,
            length,
            grants: Mutex::default(),
            exposures: Mutex::default(),
        };
        seal(&inner.fd).map_err(fail("sealing"))?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// This block's number.
    pub fn id(&self) -> BlockId {
        self.inner.id
    }

    /// Mapped bytes, a multiple of the page size.
    pub fn length(&self) -> usize {
        self.inner.length
    }

    /// The memfd, sealed against resizing and against new writable mappings, for a neighbour on this host to
    /// map read-only (DESIGN §6).
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.inner.fd.as_fd()
    }

    /// Start of the mapping. Forming a reference through it is subject to the buffer types' rules; a device
    /// uses it to register the block.
    pub fn base(&self) -> NonNull<u8> {
        self.inner.base
    }

    /// The grant that covers all of `offset..offset + length`, for a fabric that executes a peer's access.
    ///
    /// # Errors
    /// [`MemoryError::NotGranted`] when no single grant covers the whole range now; nothing was touched.
    pub fn remote_target(&self, offset: u64, length: u64) -> Result<RemoteTarget, MemoryError> {
        RemoteTarget::find(self, offset, length)
    }

    /// The bytes `offset..offset + length`, for a fabric that executes a peer's read. They stay alive and unchanged
    /// while the answer lives, also when the exposure ends meanwhile.
    ///
    /// # Errors
    /// [`MemoryError::NotExposed`] when no single [`Exposure`](crate::Exposure) covers the whole range now.
    pub fn exposed(&self, offset: u64, length: u64) -> Result<Buf, MemoryError> {
        exposure::find(self, offset, length)
    }

    pub(crate) fn exposures(&self) -> &Mutex<ExposureTable> {
        &self.inner.exposures
    }

    pub(crate) fn grants(&self) -> &Mutex<GrantTable> {
        &self.inner.grants
    }
}

impl Drop for BlockInner {
    fn drop(&mut self) {
        // SAFETY: `base` and `length` are the mapping this value made, and no handle on it is left.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

fn page_size() -> usize {
    // SAFETY: no pointers are involved.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

fn memfd(name: &CStr) -> io::Result<OwnedFd> {
    // SAFETY: `name` is a valid C string for the call.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just handed us this descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn resize(fd: &OwnedFd, length: usize) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let length = libc::off_t::try_from(length).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    // SAFETY: no pointers are involved; the descriptor is ours.
    let failed = unsafe { libc::fallocate(fd.as_raw_fd(), 0, 0, length) };
    if failed != 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn map_writable(fd: &OwnedFd, length: usize) -> io::Result<NonNull<u8>> {
    use std::os::fd::AsRawFd;
    let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
    // SAFETY: a fresh mapping chosen by the kernel; no existing memory is replaced.
    let base = unsafe {
        libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ | libc::PROT_WRITE, flags, fd.as_raw_fd(), 0)
    };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned address 0"))
}

/// No one can resize the memory under a neighbour's mapping, nor map it writable (DESIGN §6).
fn seal(fd: &OwnedFd) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let seals = libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;
    // SAFETY: no pointers are involved; the descriptor is ours.
    let failed = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) };
    if failed != 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
