//! The limits of TCP: one raw stream over loopback, blocking for bandwidth, in epoll for latency.

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    os::fd::OwnedFd,
    time::Duration,
};

use rustix::{
    buffer::spare_capacity,
    event::{Timespec, epoll},
    net::sockopt::set_tcp_congestion,
};

use crate::bench::error::{BenchError, system};

const DURING: &str = "reading a raw stream";
const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// Largest message that is written without blocking.
const EPOLL_MESSAGE_MAX: usize = 32 << 10;
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// A stream with the same options as the fabric's: NODELAY, and `cubic` where the system has it.
#[derive(Debug)]
pub(crate) struct RawStream {
    stream: TcpStream,
    epoll: OwnedFd,
}

/// A listener for the other process, and its port.
pub(crate) fn listen() -> Result<(TcpListener, u16), BenchError> {
    let listener = TcpListener::bind((HOST, 0)).map_err(system("bind"))?;
    // Inherited by accepted streams. Best effort, as in the fabric.
    let _ = set_tcp_congestion(&listener, "cubic");
    let port = listener.local_addr().map_err(system("getsockname"))?.port();
    Ok((listener, port))
}

impl RawStream {
    /// Accepts the other process's stream.
    pub(crate) async fn accept(listener: TcpListener) -> Result<Self, BenchError> {
        listener.set_nonblocking(true).map_err(system("accept"))?;
        let listener = tokio::net::TcpListener::from_std(listener).map_err(system("accept"))?;
        let (stream, _) = listener.accept().await.map_err(system("accept"))?;
        Self::new(stream.into_std().map_err(system("accept"))?)
    }

    /// Connects to the other process.
    pub(crate) async fn connect(port: u16) -> Result<Self, BenchError> {
        let socket = tokio::net::TcpSocket::new_v4().map_err(system("socket"))?;
        let _ = set_tcp_congestion(&socket, "cubic");
        let stream = socket.connect(SocketAddr::new(HOST, port)).await.map_err(system("connect"))?;
        Self::new(stream.into_std().map_err(system("connect"))?)
    }

    fn new(stream: TcpStream) -> Result<Self, BenchError> {
        stream.set_nodelay(true).map_err(system("TCP_NODELAY"))?;
        stream.set_nonblocking(false).map_err(system("fcntl"))?;
        stream.set_read_timeout(Some(ANSWER_LIMIT)).map_err(system("SO_RCVTIMEO"))?;
        stream.set_write_timeout(Some(ANSWER_LIMIT)).map_err(system("SO_SNDTIMEO"))?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("epoll_create"))?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, &stream, epoll::EventData::new_u64(1), flags).map_err(system("epoll_ctl"))?;
        Ok(Self { stream, epoll })
    }

    /// Gets ready for round trips of messages of `bytes` bytes: asleep in epoll, or blocking where a message may
    /// not fit the socket's buffer.
    pub(crate) fn prepare_message(&self, bytes: usize) -> Result<(), BenchError> {
        self.set_blocking(bytes > EPOLL_MESSAGE_MAX)
    }

    /// Reads a message of a round trip.
    pub(crate) fn read_message(&self, into: &mut [u8]) -> Result<(), BenchError> {
        if into.len() > EPOLL_MESSAGE_MAX { self.read(into) } else { self.read_in_epoll(into) }
    }

    /// Whether reads and writes block.
    pub(crate) fn set_blocking(&self, blocking: bool) -> Result<(), BenchError> {
        self.stream.set_nonblocking(!blocking).map_err(system("fcntl"))
    }

    pub(crate) fn write(&self, bytes: &[u8]) -> Result<(), BenchError> {
        (&self.stream).write_all(bytes).map_err(failed)
    }

    pub(crate) fn read(&self, into: &mut [u8]) -> Result<(), BenchError> {
        (&self.stream).read_exact(into).map_err(failed)
    }

    /// Fills `into`, asleep in epoll while nothing is there.
    fn read_in_epoll(&self, into: &mut [u8]) -> Result<(), BenchError> {
        let mut read = 0;
        while let Some(rest) = into.get_mut(read..).filter(|rest| !rest.is_empty()) {
            match (&self.stream).read(rest) {
                Ok(0) => return Err(BenchError::PeerGone { during: DURING }),
                Ok(bytes) => read += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.wait()?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(())
    }

    fn wait(&self) -> Result<(), BenchError> {
        let limit = Timespec { tv_sec: ANSWER_LIMIT.as_secs().cast_signed(), tv_nsec: 0 };
        let mut events = Vec::with_capacity(1);
        match epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&limit)) {
            Ok(0) => Err(BenchError::PeerSilent { during: DURING, limit: ANSWER_LIMIT }),
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(system("epoll_wait")(error)),
        }
    }
}

fn failed(error: std::io::Error) -> BenchError {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            BenchError::PeerSilent { during: DURING, limit: ANSWER_LIMIT }
        }
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            BenchError::PeerGone { during: DURING }
        }
        _ => system("a raw stream")(error),
    }
}
