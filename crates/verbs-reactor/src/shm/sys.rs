//! The system calls of this fabric, as safe functions.

use std::{
    ffi::CStr,
    io, mem,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    ptr::{self, NonNull},
};

use tokio::io::{Interest, unix::AsyncFd};

use super::{
    lease::ProcessId,
    limits::{FRAME_BYTES, FRAME_FDS},
};

/// Seals that a shared memfd must have: nobody can resize it under a mapping, map it writable from now on, or
/// change the seals.
pub(super) const SEALS: libc::c_int =
    libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn owned(result: libc::c_int) -> io::Result<OwnedFd> {
    let fd = check(result)?;
    // SAFETY: the kernel just made this descriptor for us; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The page size in bytes.
pub(super) fn page_size() -> usize {
    // SAFETY: no pointers are involved.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// This process's effective user.
pub(super) fn effective_uid() -> u32 {
    // SAFETY: no pointers are involved.
    unsafe { libc::geteuid() }
}

/// The CPU this thread runs on; 0 where that can't be told.
pub(super) fn current_cpu() -> u32 {
    // SAFETY: no pointers are involved.
    u32::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(0)
}

/// An empty memfd that can be sealed.
pub(super) fn memfd(name: &CStr) -> io::Result<OwnedFd> {
    // SAFETY: `name` is a valid C string for the call.
    owned(unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) })
}

/// Gives a memfd its size, with every page allocated.
pub(super) fn allocate(fd: BorrowedFd<'_>, length: usize) -> io::Result<()> {
    let length = libc::off_t::try_from(length).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    // SAFETY: no pointers are involved; the descriptor is borrowed for the call.
    check(unsafe { libc::fallocate(fd.as_raw_fd(), 0, 0, length) }).map(drop)
}

/// Adds [`SEALS`].
pub(super) fn seal(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: no pointers are involved; the descriptor is borrowed for the call.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, SEALS) }).map(drop)
}

/// The seals of a memfd; an error for any other kind of file.
pub(super) fn seals(fd: BorrowedFd<'_>) -> io::Result<libc::c_int> {
    // SAFETY: no pointers are involved; the descriptor is borrowed for the call.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) })
}

/// Size and allocated bytes of a file.
pub(super) fn extent(fd: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    // SAFETY: all-zero is a valid `stat`.
    let mut stat: libc::stat = unsafe { mem::zeroed() };
    // SAFETY: `stat` is writable for the call.
    check(unsafe { libc::fstat(fd.as_raw_fd(), &raw mut stat) })?;
    let unsigned = |value: i64| u64::try_from(value).unwrap_or(0);
    Ok((unsigned(stat.st_size), unsigned(stat.st_blocks).saturating_mul(512)))
}

/// A shared mapping, unmapped on drop. Knows nothing of who may touch the bytes: the types that hold one do.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: a mapping is plain memory; the types that hold one decide who accesses it, and do so through atomics
// or counted raw copies only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps all of a memfd of `length` bytes.
    pub(super) fn new(fd: BorrowedFd<'_>, length: usize, writable: bool) -> io::Result<Self> {
        let protection = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        // SAFETY: a fresh mapping chosen by the kernel; no existing memory is replaced.
        let base =
            unsafe { libc::mmap(ptr::null_mut(), length, protection, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned address 0"))?;
        Ok(Self { base, length })
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(super) fn length(&self) -> usize {
        self.length
    }

    /// Makes `offset..offset + length`, widened to whole pages, resident and readable. What would be a SIGBUS
    /// at the first access is an error here.
    pub(super) fn populate(&self, offset: usize, length: usize) -> io::Result<()> {
        let start = offset.min(self.length) / page_size() * page_size();
        let end = offset.saturating_add(length).min(self.length);
        // SAFETY: the range lies inside the mapping; populating changes no byte of it.
        check(unsafe {
            libc::madvise(
                self.base.as_ptr().add(start).cast(),
                end.saturating_sub(start),
                libc::MADV_POPULATE_READ,
            )
        })
        .map(drop)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `base` and `length` are the mapping this value made; whoever could access it owned this value.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

/// A non-blocking eventfd.
pub(super) fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: no pointers are involved.
    owned(unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) })
}

/// Whether writing to the descriptor never blocks.
pub(super) fn is_non_blocking(fd: BorrowedFd<'_>) -> io::Result<bool> {
    // SAFETY: no pointers are involved; the descriptor is borrowed for the call.
    Ok(check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) })? & libc::O_NONBLOCK != 0)
}

/// Adds one to an eventfd.
pub(super) fn signal(fd: BorrowedFd<'_>) -> io::Result<()> {
    let one = 1_u64.to_ne_bytes();
    // SAFETY: `one` is readable for its length.
    let written = unsafe { libc::write(fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    if written < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Takes an eventfd's count away, which lets those go on whose writes wait for room. Never waits itself, whatever the
/// descriptor's flags are. Before Linux 5.8 an error, and nothing is done.
pub(super) fn drain_eventfd(fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut count = 0_u64;
    let part = libc::iovec { iov_base: (&raw mut count).cast(), iov_len: mem::size_of::<u64>() };
    // SAFETY: `part` is readable and names eight writable bytes, all alive for the call.
    let read = unsafe { libc::preadv2(fd.as_raw_fd(), &raw const part, 1, -1, libc::RWF_NOWAIT) };
    if read < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no pointers are involved.
    owned(unsafe { libc::socket(libc::AF_UNIX, kind, 0) })
}

/// An address in the abstract namespace: a leading zero byte, then `name`.
fn abstract_address(name: &[u8]) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: all-zero is a valid `sockaddr_un`.
    let mut address: libc::sockaddr_un = unsafe { mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let room = address.sun_path.get_mut(1..1 + name.len());
    let room = room.ok_or_else(|| io::Error::from_raw_os_error(libc::ENAMETOOLONG))?;
    for (to, from) in room.iter_mut().zip(name) {
        *to = from.cast_signed();
    }
    let length = mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len();
    Ok((address, length as libc::socklen_t))
}

/// A socket that listens under an abstract name.
pub(super) fn listen(name: &[u8], backlog: libc::c_int) -> io::Result<OwnedFd> {
    let socket = socket()?;
    let (address, length) = abstract_address(name)?;
    // SAFETY: `address` is readable for `length` bytes, which its constructor computed.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) })?;
    // SAFETY: no pointers are involved; the descriptor is ours.
    check(unsafe { libc::listen(socket.as_raw_fd(), backlog) })?;
    Ok(socket)
}

/// Connects to an abstract name. `WouldBlock` means that the listener's backlog is full: try again later.
pub(super) fn connect(name: &[u8]) -> io::Result<OwnedFd> {
    let socket = socket()?;
    let (address, length) = abstract_address(name)?;
    // SAFETY: `address` is readable for `length` bytes, which its constructor computed.
    check(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) })?;
    Ok(socket)
}

/// Takes one waiting connection.
pub(super) fn accept(listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: null pointers ask the kernel not to report the address.
    owned(unsafe { libc::accept4(listener.as_raw_fd(), ptr::null_mut(), ptr::null_mut(), flags) })
}

/// The process at the other end of a Unix socket, as the kernel saw it connect or listen.
#[derive(Debug, Clone, Copy)]
pub(super) struct Credentials {
    pub(super) uid: u32,
    /// 0 where it is not visible from this process's namespace.
    pub(super) pid: u32,
}

/// Who is at the other end of a Unix socket.
pub(super) fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<Credentials> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = mem::size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `credentials` is writable for `length` bytes.
    check(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    })?;
    Ok(Credentials { uid: credentials.uid, pid: u32::try_from(credentials.pid).unwrap_or(0) })
}

/// A handle on the process at the other end of a Unix socket, and when that process started; `None` where it can't be
/// seen, or is dead already.
pub(super) fn peer_process(socket: BorrowedFd<'_>) -> Option<(ProcessId, OwnedFd)> {
    let pid = peer_credentials(socket).ok()?.pid;
    let pidfd = peer_pidfd(socket).or_else(|_| open_pidfd(pid)).ok()?;
    let started = start_time(pid)?;
    // Only while it lives do its number and what was read under it belong to it.
    is_alive(pidfd.as_fd()).then_some((ProcessId { pid, started }, pidfd))
}

/// Linux 6.5 and newer.
fn peer_pidfd(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let (mut fd, mut length): (RawFd, _) = (-1, mem::size_of::<RawFd>() as libc::socklen_t);
    // SAFETY: `fd` is writable for `length` bytes.
    check(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut length,
        )
    })?;
    owned(fd)
}

fn open_pidfd(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: no pointers are involved.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    owned(libc::c_int::try_from(fd).unwrap_or(-1))
}

/// When a process started, in the kernel's ticks.
fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything; 19 fields lie between it and the time.
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_whitespace().nth(19)?.parse().ok()
}

fn is_alive(pidfd: BorrowedFd<'_>) -> bool {
    let mut poll = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: `poll` is one entry, valid for the call.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 0 }
}

/// Ends both directions; the peer reads end of file. A socket that is already disconnected is no error.
pub(super) fn shutdown(socket: BorrowedFd<'_>) {
    // SAFETY: no pointers are involved; the descriptor is borrowed for the call.
    unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RDWR) };
}

/// Room for one control message with [`FRAME_FDS`] descriptors, aligned as its header must be.
type Control = [u64; 3];

/// Sends one packet with descriptors attached, without blocking.
pub(super) fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    if fds.len() > FRAME_FDS {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control: Control = [0; 3];
    // SAFETY: all-zero is a valid `msghdr`.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    if !fds.is_empty() {
        let payload = (fds.len() * mem::size_of::<RawFd>()) as libc::c_uint;
        message.msg_control = control.as_mut_ptr().cast();
        // SAFETY: `CMSG_SPACE` and `CMSG_LEN` only compute; at most two descriptors fit into `Control`, so the
        // first header and its data lie inside it.
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(payload) as usize;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(payload) as usize;
            let data = libc::CMSG_DATA(header).cast::<RawFd>();
            for (index, fd) in fds.iter().enumerate() {
                data.add(index).write_unaligned(fd.as_raw_fd());
            }
        }
    }
    // SAFETY: `message` points at `part`, `bytes` and `control`, all alive for the call.
    let sent = unsafe {
        libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// One received packet.
#[derive(Debug)]
pub(super) struct Packet {
    pub(super) bytes: [u8; FRAME_BYTES],
    /// Bytes of the packet; 0 at end of file.
    pub(super) length: usize,
    pub(super) fds: Vec<OwnedFd>,
    /// More bytes or descriptors were sent than a frame may have.
    pub(super) truncated: bool,
}

/// Receives one packet without blocking.
pub(super) fn receive(socket: BorrowedFd<'_>) -> io::Result<Packet> {
    let mut bytes = [0; FRAME_BYTES];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control: Control = [0; 3];
    // SAFETY: all-zero is a valid `msghdr`.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = mem::size_of::<Control>();
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: `message` points at `part`, `bytes` and `control`, all alive for the call.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    let length = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
    let truncated = message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
    // SAFETY: the kernel filled `message` and its control buffer, which is still alive.
    let fds = unsafe { attached(&message) };
    if message.msg_flags & libc::MSG_CTRUNC != 0 && fds.len() < FRAME_FDS {
        // There was room for more in the message, so it was this process that could have no more: no fault of the peer's.
        return Err(io::Error::from_raw_os_error(libc::EMFILE));
    }
    Ok(Packet { bytes, length, fds, truncated })
}

/// Takes ownership of the descriptors attached to a received message.
///
/// # Safety
/// `message` was filled by `recvmsg`, its control buffer is alive, and this is called once for it.
unsafe fn attached(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    // SAFETY: the macros walk the control buffer that the kernel filled, within `msg_controllen`; each
    // descriptor in it was made for this process and is owned by nobody yet.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while let Some(current) = header.as_ref() {
            if current.cmsg_level == libc::SOL_SOCKET && current.cmsg_type == libc::SCM_RIGHTS {
                let payload = current.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                let data = libc::CMSG_DATA(header).cast::<RawFd>();
                for index in 0..payload / mem::size_of::<RawFd>() {
                    fds.push(OwnedFd::from_raw_fd(data.add(index).read_unaligned()));
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
    fds
}

/// Registers a descriptor with the current tokio runtime.
pub(super) fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` always answers with the one descriptor that it keeps open for its whole life.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}

/// As [`watch`], for a descriptor that its owner keeps.
pub(super) fn watch_borrowed(fd: BorrowedFd<'_>, interest: Interest) -> io::Result<AsyncFd<BorrowedFd<'_>>> {
    // SAFETY: a `BorrowedFd` always answers with the one descriptor that stays open for its lifetime.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}

/// What a descriptor is, in the kernel's words (`anon_inode:[eventfd]`).
pub(super) fn describe(fd: BorrowedFd<'_>) -> io::Result<std::path::PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))
}
