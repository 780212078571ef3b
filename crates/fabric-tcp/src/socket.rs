//! The system calls of a connected stream. All of them return at once.

use std::{
    io::{self, IoSlice, Read},
    net::{Shutdown, TcpStream},
    os::fd::{AsRawFd, RawFd},
    sync::LazyLock,
    time::Duration,
};

use tensorwire_fabric::{FabricError, FabricKind, LossCause, Unacknowledged};
use tensorwire_memory::RemoteAccess;

use crate::protection::Stream;
#[cfg(feature = "tls")]
use crate::sealed::{Bare, Sealed};

/// A connected, non-blocking stream, encrypted or not.
#[derive(Debug)]
pub(super) struct Socket {
    bare: BareSocket,
    #[cfg(feature = "tls")]
    sealed: Option<Sealed>,
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.bare.as_raw_fd()
    }
}

impl Socket {
    /// Streams of tokio are non-blocking, and stay so.
    pub(super) fn new(stream: Stream) -> io::Result<Self> {
        match stream {
            Stream::Plain(stream) => Ok(Self {
                bare: BareSocket(stream.into_std()?),
                #[cfg(feature = "tls")]
                sealed: None,
            }),
            #[cfg(feature = "tls")]
            Stream::Tls(stream) => {
                let (stream, connection) = match *stream {
                    tokio_rustls::TlsStream::Client(stream) => {
                        let (stream, connection) = stream.into_inner();
                        (stream, connection.into())
                    }
                    tokio_rustls::TlsStream::Server(stream) => {
                        let (stream, connection) = stream.into_inner();
                        (stream, connection.into())
                    }
                };
                Ok(Self { bare: BareSocket(stream.into_std()?), sealed: Some(Sealed::new(connection)) })
            }
        }
    }

    /// Whether a read that returns less than requested means that nothing more has arrived.
    pub(super) fn short_reads_drain(&self) -> bool {
        #[cfg(feature = "tls")]
        return self.sealed.is_none();
        #[cfg(not(feature = "tls"))]
        true
    }

    /// Accepts bytes of `slices`, in order, and returns how many. They are not needed afterwards. See
    /// [`flush`](Self::flush).
    pub(super) fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        #[cfg(feature = "tls")]
        if let Some(sealed) = &self.sealed {
            return sealed.send(&self.bare, slices);
        }
        self.bare.send(slices)
    }

    /// Passes accepted bytes that are still buffered to the kernel.
    ///
    /// # Errors
    /// `WouldBlock`: the socket is full.
    pub(super) fn flush(&self) -> io::Result<()> {
        #[cfg(feature = "tls")]
        if let Some(sealed) = &self.sealed {
            return sealed.flush(&self.bare);
        }
        Ok(())
    }

    /// Ends this direction of an encrypted stream by TLS's close alert, which no one on the network can forge.
    pub(super) fn finish(&self) -> io::Result<()> {
        #[cfg(feature = "tls")]
        if let Some(sealed) = &self.sealed {
            return sealed.finish(&self.bare);
        }
        Ok(())
    }

    /// Reads bytes of a header or of a handshake, never of a payload.
    pub(super) fn receive(&self, into: &mut [u8]) -> io::Result<usize> {
        #[cfg(feature = "tls")]
        if let Some(sealed) = &self.sealed {
            return sealed.receive(&self.bare, into);
        }
        self.bare.receive(into)
    }

    /// Reads payload bytes into granted memory, and the following bytes, if there are some, into `next`.
    pub(super) fn receive_into(&self, access: &RemoteAccess<'_>, next: &mut [u8]) -> io::Result<usize> {
        #[cfg(feature = "tls")]
        if let Some(sealed) = &self.sealed {
            return sealed.receive_into(&self.bare, access, next);
        }
        self.bare.receive_into(access, next)
    }

    /// Lets readiness announce bytes only once this many have arrived, or the stream has ended. Reads still return
    /// fewer. The kernel announces fewer if its buffer has no room for this many, and acknowledges them at once.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] before Linux 5.12, which may announce nothing while its buffer is full.
    pub(super) fn announce_from(&self, bytes: libc::c_int) -> io::Result<()> {
        static ANNOUNCES_WHEN_FULL: LazyLock<bool> =
            LazyLock::new(|| announces_when_full(&rustix::system::uname().release().to_string_lossy()));
        if !*ANNOUNCES_WHEN_FULL {
            return Err(io::ErrorKind::Unsupported.into());
        }
        set(&self.bare, libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes)
    }

    /// The bytes or probes that wait for an acknowledgement, from the kernel's `TCP_INFO`.
    pub(super) fn unacknowledged(&self) -> Option<Unacknowledged> {
        let information = TcpInformation::of(&self.bare)?;
        // A peer that accepts no data answers probes, and sometimes data, without acknowledging any.
        let is_probed = information.unacknowledged() == 0 || information.window() == Some(0);
        (information.unacknowledged() > 0 || information.probes() > 0).then(|| Unacknowledged {
            acknowledged: information.acknowledged(),
            silence: is_probed.then(|| information.silence()),
        })
    }

    /// Discards up to `limit` received bytes, without touching memory.
    pub(super) fn discard(&self, limit: usize) -> io::Result<usize> {
        self.bare.discard(limit)
    }

    /// Shuts down one or both directions. It is no error if the stream is down already.
    pub(super) fn shutdown(&self, how: Shutdown) {
        if let Err(error) = self.bare.0.shutdown(how)
            && error.kind() != io::ErrorKind::NotConnected
        {
            log!(DEBUG, %error, "cannot shut down a tcp stream");
        }
    }
}

#[cfg(feature = "tls")]
impl Bare for BareSocket {
    fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.send(slices)
    }

    fn receive(&self, into: &mut [u8]) -> io::Result<usize> {
        self.receive(into)
    }
}

/// The kernel's stream, without encryption.
#[derive(Debug)]
struct BareSocket(TcpStream);

impl AsRawFd for BareSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl BareSocket {
    /// Passes bytes of `slices`, in order, to the kernel, and returns how many it accepted.
    fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        // Not `write`: that raises SIGPIPE in programs that have not ignored it.
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        if let [bytes] = slices {
            // SAFETY: the slice outlives the call, which only reads it.
            return retry(|| unsafe {
                libc::send(self.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags)
            });
        }
        // SAFETY: all-zero is a valid `msghdr`: null pointers with zero lengths.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = slices.as_ptr().cast::<libc::iovec>().cast_mut();
        message.msg_iovlen = slices.len() as _; // the type depends on the C library
        // SAFETY: `IoSlice` has the layout of `iovec` on Unix (its documentation promises so), and the slices
        // outlive the call, which only reads them.
        retry(|| unsafe { libc::sendmsg(self.as_raw_fd(), &raw const message, flags) })
    }

    fn receive(&self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            match (&self.0).read(into) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                answer => return answer,
            }
        }
    }

    fn receive_into(&self, access: &RemoteAccess<'_>, next: &mut [u8]) -> io::Result<usize> {
        let mut slices = [
            libc::iovec { iov_base: access.pointer().cast(), iov_len: access.length() },
            libc::iovec { iov_base: next.as_mut_ptr().cast(), iov_len: next.len() },
        ];
        // SAFETY: all-zero is a valid `msghdr`: null pointers with zero lengths.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = slices.as_mut_ptr();
        message.msg_iovlen = slices.len() as _; // the type depends on the C library
        // SAFETY: a `RemoteAccess` is writable for its length while it lives, which is beyond the call, and
        // `next` is borrowed exclusively.
        retry(|| unsafe { libc::recvmsg(self.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) })
    }

    fn discard(&self, limit: usize) -> io::Result<usize> {
        let flags = libc::MSG_TRUNC | libc::MSG_DONTWAIT;
        // SAFETY: with MSG_TRUNC a TCP socket drops the bytes and writes nothing to the (null) buffer.
        retry(|| unsafe { libc::recv(self.as_raw_fd(), std::ptr::null_mut(), limit, flags) })
    }
}

fn retry(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        if let Ok(bytes) = usize::try_from(call()) {
            return Ok(bytes);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// The longest time between two probes that the kernel takes.
const KEEPALIVE_SECONDS_MAX: u64 = 32_767;

/// Makes the kernel probe the peer's kernel, which answers even if the process is stopped, after half of `silence` on an idle
/// connection. The kernel ends the connection when the peer's kernel has accepted no bytes, or answered no probe, for `stall`: that
/// limit replaces the number of probes. [`Socket::unacknowledged`] shows earlier that the path is lost.
pub(super) fn watch(socket: &impl AsRawFd, silence: Duration, stall: Duration) -> io::Result<()> {
    let seconds = |part: Duration| part.as_secs().clamp(1, KEEPALIVE_SECONDS_MAX) as libc::c_int;
    let milliseconds = libc::c_int::try_from(stall.as_millis()).unwrap_or(libc::c_int::MAX);
    set(socket, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
    set(socket, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, seconds(silence / 2))?;
    set(socket, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, seconds(silence / 6))?;
    set(socket, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, milliseconds.max(1))
}

/// The most bytes of a stream that the kernel has and has not sent: what is posted next waits for them.
const UNSENT_BYTES_MAX: libc::c_int = 256 << 10;

/// Bounds the bytes that the kernel takes before it can send them. Otherwise it takes megabytes while the peer's window is full.
pub(super) fn bound_unsent(socket: &impl AsRawFd) -> io::Result<()> {
    set(socket, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)
}

/// The beginning of the kernel's `struct tcp_info`, whose fields have the same offsets in all releases. Fields that a
/// kernel does not know are missing.
struct TcpInformation([u8; 232], usize);

impl TcpInformation {
    fn of(socket: &impl AsRawFd) -> Option<Self> {
        let mut bytes = [0; 232];
        let mut length = bytes.len() as libc::socklen_t;
        // SAFETY: the pointers are those of `bytes` and of its length, and the call writes no more than that.
        let answer = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                bytes.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        (answer == 0).then_some(Self(bytes, length as usize))
    }

    /// Probes without an answer.
    fn probes(&self) -> u8 {
        self.0[3]
    }

    /// Segments without an acknowledgement.
    fn unacknowledged(&self) -> u32 {
        u32::from_ne_bytes(self.field(24))
    }

    /// Time since the last segment of the peer's host with an acknowledgement, even a repeated one.
    fn silence(&self) -> Duration {
        Duration::from_millis(u32::from_ne_bytes(self.field(56)).into())
    }

    /// Acknowledged bytes.
    fn acknowledged(&self) -> u64 {
        u64::from_ne_bytes(self.field(120))
    }

    /// How many bytes the peer accepts now. Known from Linux 5.4 on.
    fn window(&self) -> Option<u32> {
        (self.1 >= 232).then(|| u32::from_ne_bytes(self.field(228)))
    }

    fn field<const BYTES: usize>(&self, at: usize) -> [u8; BYTES] {
        self.0[at..].first_chunk().copied().unwrap_or([0; BYTES])
    }
}

fn set(socket: &impl AsRawFd, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let length = std::mem::size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: pointer and length are those of `value`, which the call only reads.
    let answer =
        unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), length) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether a kernel of this release announces bytes when its buffer is full, even if it should wait for more.
fn announces_when_full(release: &str) -> bool {
    let mut numbers = release.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(5), Some(12))
}

/// The error of a connection after a failed call on its stream.
pub(super) fn loss(call: &'static str, error: io::Error) -> FabricError {
    let kind = FabricKind::TCP;
    #[cfg(feature = "tls")]
    if let Some(tls) = crate::tls::tls_error(&error) {
        let cause = LossCause::Tampered;
        return FabricError::PeerLost { kind, cause, detail: crate::tls::explain(tls) };
    }
    let cause = match error.raw_os_error() {
        Some(libc::ECONNRESET | libc::EPIPE | libc::ECONNABORTED) => LossCause::Reset,
        Some(libc::ETIMEDOUT | libc::EHOSTUNREACH | libc::ENETUNREACH | libc::ENETDOWN) => {
            LossCause::RetryExceeded
        }
        _ => return FabricError::device(kind, call, error),
    };
    FabricError::PeerLost { kind, cause, detail: format!("{call}: {error}") }
}

#[cfg(test)]
mod tests {
    use std::{
        net::{TcpListener, TcpStream},
        time::Duration,
    };

    use super::{announces_when_full, watch};

    #[test]
    fn the_kernel_takes_the_times_of_probes_at_their_ends() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let ends = [Duration::ZERO, Duration::from_nanos(1), Duration::MAX];
        for (silence, stall) in ends.iter().flat_map(|silence| ends.map(|stall| (*silence, stall))) {
            watch(&stream, silence, stall).unwrap_or_else(|why| panic!("{silence:?}, {stall:?}: {why}"));
        }
    }

    #[test]
    fn kernels_that_may_announce_nothing_are_known() {
        for (release, announces) in [
            ("5.4.0-204-generic", false),
            ("5.11.22", false),
            ("4.18.0-553.el8.x86_64", false),
            ("unknown", false),
            ("5.12-rc1", true),
            ("5.14.0-427.el9.x86_64", true),
            ("6.1.0-56-amd64", true),
            ("10.0", true),
        ] {
            assert_eq!(announces_when_full(release), announces, "{release}");
        }
    }
}
