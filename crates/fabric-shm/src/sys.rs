//! The system calls of this fabric as safe functions, with the flags that it needs, and those that rustix lacks.

use std::{
    ffi::CStr,
    io::{self, IoSlice, IoSliceMut},
    mem::{self, MaybeUninit},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    ptr::{self, NonNull},
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec},
    fs::{FallocateFlags, MemfdFlags, OFlags, SealFlags, SeekFrom},
    io::{Errno, ReadWriteFlags},
    mm::{Advice, MapFlags, ProtFlags},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    },
    process::{Pid, PidfdFlags},
    thread::CpuSet,
};
use tokio::io::{Interest, unix::AsyncFd};

use crate::limits::{FRAME_BYTES, FRAME_FDS};

/// Seals that a shared memfd must have: no process can resize it under a mapping, map it writable from now on, or
/// change the seals.
pub(super) const SEALS: SealFlags =
    SealFlags::FUTURE_WRITE.union(SealFlags::GROW).union(SealFlags::SHRINK).union(SealFlags::SEAL);

/// The CPU this thread runs on; 0 where that is unknown. Each batch calls this; rustix would call the kernel on some
/// processors.
pub(super) fn current_cpu() -> u32 {
    // SAFETY: no pointers are involved.
    u32::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(0)
}

/// Restricts a thread of this process to these CPUs. If the kernel refuses, nothing changes.
pub(super) fn run_on(thread: i32, cpus: &CpuSet) {
    let Some(thread) = Pid::from_raw(thread) else { return };
    let _may_run_anywhere = rustix::thread::sched_setaffinity(Some(thread), cpus);
}

/// Bytes of the host's memory, with swap: no process can share more.
pub(super) fn host_bytes() -> u64 {
    let host = rustix::system::sysinfo();
    (host.totalram as u64).saturating_add(host.totalswap as u64).saturating_mul(host.mem_unit.into())
}

/// An empty memfd that can be sealed.
pub(super) fn memfd(name: &CStr) -> io::Result<OwnedFd> {
    Ok(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?)
}

/// Gives a memfd its size, with every page allocated.
pub(super) fn allocate(fd: BorrowedFd<'_>, length: usize) -> io::Result<()> {
    Ok(rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, length as u64)?)
}

/// Gives a memfd its size, with zeros in every page. The peer checks for holes, and a page that is allocated and was never
/// written counts as one until something touches it.
pub(super) fn fill(fd: BorrowedFd<'_>, length: usize) -> io::Result<()> {
    static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
    let mut filled = 0;
    while filled < length {
        let zeros = &ZEROS[..ZEROS.len().min(length - filled)];
        filled += rustix::io::retry_on_intr(|| rustix::io::pwrite(fd, zeros, filled as u64))?;
    }
    Ok(())
}

/// Adds [`SEALS`].
pub(super) fn seal(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::fs::fcntl_add_seals(fd, SEALS)?)
}

/// Whether `fd` is a memfd of `length` bytes with [`SEALS`] of which every page is allocated permanently, so that
/// reading it takes no memory of this process.
pub(super) fn is_sealed(fd: BorrowedFd<'_>, length: u64) -> io::Result<bool> {
    // A file that cannot be sealed answers EINVAL.
    let sealed = rustix::fs::fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SEALS));
    // The seals prevent removing pages, and adding pages beyond the end.
    Ok(sealed && size_and_blocks(fd)?.0 == length && has_every_page(fd, length)?)
}

/// Blocks beyond the end count as the file's, so their number proves nothing: the first hole must be at the end. In
/// hugetlbfs no hole is ever reported; there blocks are counted, after those beyond the end are removed.
fn has_every_page(fd: BorrowedFd<'_>, length: u64) -> io::Result<bool> {
    if rustix::fs::fstatfs(fd)?.f_type != libc::HUGETLBFS_MAGIC {
        return Ok(rustix::fs::seek(fd, SeekFrom::Hole(0))? == length);
    }
    let is_cut = rustix::fs::ftruncate(fd, length).is_ok();
    Ok(is_cut && size_and_blocks(fd)?.1 >= length)
}

/// Bytes of a file, and bytes that are allocated for it.
fn size_and_blocks(fd: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    let stat = rustix::fs::fstat(fd)?;
    Ok((stat.st_size.cast_unsigned(), stat.st_blocks.cast_unsigned().saturating_mul(512)))
}

/// A shared mapping, unmapped on drop. The types that hold one decide who may access the bytes.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: a mapping is plain memory; the types that hold one decide who accesses it, and do so through atomics
// or counted raw copies only.
unsafe impl Send for Mapping {}
// SAFETY: as above: this value itself forms no reference to the memory.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps all of a memfd of `length` bytes.
    pub(super) fn new(fd: BorrowedFd<'_>, length: usize, writable: bool) -> io::Result<Self> {
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a fresh mapping chosen by the kernel; no existing memory is replaced.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), length, protection, MapFlags::SHARED, fd, 0) }?;
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned address 0"))?;
        Ok(Self { base, length })
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(super) fn length(&self) -> usize {
        self.length
    }

    /// Makes `offset..offset + length`, widened to whole pages, resident and readable. A failure that would be a SIGBUS
    /// at the first access is an error here.
    pub(super) fn populate(&self, offset: usize, length: usize) -> io::Result<()> {
        let page = rustix::param::page_size();
        let start = offset.min(self.length) / page * page;
        let end = offset.saturating_add(length).min(self.length);
        let place = self.base.as_ptr().wrapping_add(start).cast();
        // SAFETY: the range lies inside the mapping; populating changes no byte of it.
        Ok(unsafe { rustix::mm::madvise(place, end.saturating_sub(start), Advice::LinuxPopulateRead) }?)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `base` and `length` are the mapping this value made; whoever could access it owned this value.
        let _cannot_fail = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

/// A non-blocking eventfd.
pub(super) fn eventfd() -> io::Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?)
}

/// Whether writing to the descriptor never blocks.
pub(super) fn is_non_blocking(fd: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(rustix::fs::fcntl_getfl(fd)?.contains(OFlags::NONBLOCK))
}

/// Adds one to an eventfd.
pub(super) fn signal(fd: BorrowedFd<'_>) -> io::Result<()> {
    rustix::io::write(fd, &1_u64.to_ne_bytes())?;
    Ok(())
}

/// Resets an eventfd's count, which frees writers that wait for room. Never waits itself, with any flags of the
/// descriptor. Before Linux 5.8 this is an error without effect.
pub(super) fn drain_eventfd(fd: BorrowedFd<'_>) -> io::Result<()> {
    // The offset that stands for the descriptor's own.
    const HERE: u64 = u64::MAX;
    let mut count = [0; 8];
    rustix::io::preadv2(fd, &mut [IoSliceMut::new(&mut count)], HERE, ReadWriteFlags::NOWAIT)?;
    Ok(())
}

fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// A socket that listens under an abstract name.
pub(super) fn listen(name: &[u8], backlog: i32) -> io::Result<OwnedFd> {
    let socket = socket()?;
    rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
    rustix::net::listen(&socket, backlog)?;
    Ok(socket)
}

/// Connects to an abstract name. `WouldBlock` means that the listener's backlog is full: try again later.
pub(super) fn connect(name: &[u8]) -> io::Result<OwnedFd> {
    let socket = socket()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
    Ok(socket)
}

/// Takes one waiting connection.
pub(super) fn accept(listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    Ok(rustix::net::accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)?)
}

/// The process of a Unix socket's peer, as the kernel recorded it when it connected or listened.
#[derive(Debug, Clone, Copy)]
pub(super) struct Credentials {
    pub(super) uid: u32,
    /// 0 where it is not visible from this process's namespace.
    pub(super) pid: u32,
}

/// The user of a Unix socket's peer.
pub(super) fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<Credentials> {
    // Not by rustix, whose process numbers cannot be 0.
    let [pid, uid, _gid] = socket_option(socket, libc::SO_PEERCRED)?;
    Ok(Credentials { uid, pid })
}

/// An option of a socket that consists of `N` numbers.
fn socket_option<const N: usize>(socket: BorrowedFd<'_>, option: libc::c_int) -> io::Result<[u32; N]> {
    let mut value = [0; N];
    let mut length = mem::size_of_val(&value) as libc::socklen_t;
    let place = value.as_mut_ptr().cast();
    // SAFETY: `value` is writable for `length` bytes, and whatever is written there is `N` numbers.
    let failed =
        unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, place, &raw mut length) };
    if failed < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

/// Names a process for as long as the host runs: its number, and when it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ProcessId {
    pub(super) pid: u32,
    pub(super) started: u64,
}

/// A handle on the process of a Unix socket's peer, and when that process started; `None` if it is not visible, or is
/// dead already.
pub(super) fn peer_process(socket: BorrowedFd<'_>) -> Option<(ProcessId, OwnedFd)> {
    let pid = peer_credentials(socket).ok()?.pid;
    let pidfd = peer_pidfd(socket).or_else(|_| open_pidfd(pid)).ok()?;
    let started = start_time(pid)?;
    // Only if it is still alive, the number and the start time are its own.
    is_alive(pidfd.as_fd()).then_some((ProcessId { pid, started }, pidfd))
}

/// Linux 6.5 and newer.
fn peer_pidfd(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let [fd] = socket_option(socket, SO_PEERPIDFD)?;
    // SAFETY: the kernel just made this descriptor for us; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(RawFd::try_from(fd).map_err(io::Error::other)?) })
}

fn open_pidfd(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
}

/// When a process started, in the kernel's ticks.
fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain anything; 19 fields are between it and the time.
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_whitespace().nth(19)?.parse().ok()
}

fn is_alive(pidfd: BorrowedFd<'_>) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&now)) == Ok(0)
}

/// Sends one packet with descriptors attached, without blocking.
pub(super) fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FRAME_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL.into());
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?;
    Ok(())
}

/// One received packet.
#[derive(Debug)]
pub(super) struct Packet {
    pub(super) bytes: [u8; FRAME_BYTES],
    /// Bytes of the packet; 0 at end of file.
    pub(super) length: usize,
    pub(super) fds: Vec<OwnedFd>,
    /// More bytes or descriptors were sent than there was room for.
    pub(super) truncated: bool,
}

/// Receives one packet without blocking.
pub(super) fn receive(socket: BorrowedFd<'_>) -> io::Result<Packet> {
    let mut bytes = [0; FRAME_BYTES];
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FRAME_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let message = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
    let mut fds = Vec::new();
    for attached in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = attached {
            fds.extend(rights);
        }
    }
    if message.flags.contains(ReturnFlags::CTRUNC) && fds.len() < FRAME_FDS {
        // The message had room for more, so this process has reached its limit of descriptors: it is no fault of the
        // peer.
        return Err(Errno::MFILE.into());
    }
    let truncated = message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    Ok(Packet { bytes, length: message.bytes, fds, truncated })
}

/// Registers a descriptor with the current tokio runtime.
pub(super) fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` always answers with the one descriptor that it keeps open for its whole life.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}

/// As [`watch`], for a borrowed descriptor.
pub(super) fn watch_borrowed(fd: BorrowedFd<'_>, interest: Interest) -> io::Result<AsyncFd<BorrowedFd<'_>>> {
    // SAFETY: a `BorrowedFd` always answers with the one descriptor that stays open for its lifetime.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}

/// The kernel's description of a descriptor (`anon_inode:[eventfd]`).
pub(super) fn describe(fd: BorrowedFd<'_>) -> io::Result<std::path::PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}
