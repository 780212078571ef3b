//! The limits of TCP: one raw stream over loopback. It polls, or sleeps: in epoll for small messages, in the call
//! itself for large ones.

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    os::fd::OwnedFd,
    time::Duration,
};

use rustix::{
    buffer::spare_capacity,
    event::{Timespec, epoll},
};
use tensorwire::fabric::Runtime;

use super::{LimitWait, signal::look};
use crate::error::{BenchError, system};

const DURING: &str = "reading a raw stream";
const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// Largest message whose reader sleeps in epoll: it fits the socket's buffer, so the writer never waits.
const EPOLL_MESSAGE_MAX: usize = 32 << 10;
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// A stream with the same options as the fabric's: NODELAY, and the system's congestion control.
#[derive(Debug)]
pub(crate) struct RawStream {
    stream: TcpStream,
    epoll: OwnedFd,
}

/// How calls on a stream wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamWait {
    /// In the call itself.
    Blocking,
    /// In epoll.
    Epoll,
    /// By calling again.
    Looking(LimitWait),
}

/// A listener for the other process, and its port.
pub(crate) fn listen() -> Result<(TcpListener, u16), BenchError> {
    let listener = TcpListener::bind((HOST, 0)).map_err(system("bind"))?;
    let port = listener.local_addr().map_err(system("getsockname"))?.port();
    Ok((listener, port))
}

/// Connects, sends `ask`, and reads the same number of bytes.
pub(crate) fn connect_once(port: u16, mut ask: [u8; 8]) -> Result<(), BenchError> {
    let mut stream = TcpStream::connect((HOST, port)).map_err(system("connect"))?;
    limit_calls(&stream)?;
    stream.write_all(&ask).and_then(|()| stream.read_exact(&mut ask)).map_err(failed)
}

/// The other side of [`connect_once`].
pub(crate) fn answer_once(listener: &TcpListener) -> Result<(), BenchError> {
    let (mut stream, _) = listener.accept().map_err(system("accept"))?;
    limit_calls(&stream)?;
    let mut ask = [0; 8];
    stream.read_exact(&mut ask).and_then(|()| stream.write_all(&ask)).map_err(failed)
}

fn limit_calls(stream: &TcpStream) -> Result<(), BenchError> {
    stream.set_nodelay(true).map_err(system("TCP_NODELAY"))?;
    stream.set_read_timeout(Some(ANSWER_LIMIT)).map_err(system("SO_RCVTIMEO"))?;
    stream.set_write_timeout(Some(ANSWER_LIMIT)).map_err(system("SO_SNDTIMEO"))
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
        let to = SocketAddr::new(HOST, port);
        let stream = tokio::net::TcpStream::connect(to).await.map_err(system("connect"))?;
        Self::new(stream.into_std().map_err(system("connect"))?)
    }

    fn new(stream: TcpStream) -> Result<Self, BenchError> {
        stream.set_nonblocking(false).map_err(system("fcntl"))?;
        limit_calls(&stream)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("epoll_create"))?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, &stream, epoll::EventData::new_u64(1), flags).map_err(system("epoll_ctl"))?;
        Ok(Self { stream, epoll })
    }

    /// Prepares for messages of at most `bytes` bytes.
    pub(crate) fn prepare(&self, wait: LimitWait, bytes: usize) -> Result<StreamWait, BenchError> {
        let wait = match wait {
            LimitWait::Sleep if bytes > EPOLL_MESSAGE_MAX => StreamWait::Blocking,
            LimitWait::Sleep => StreamWait::Epoll,
            looking => StreamWait::Looking(looking),
        };
        self.stream.set_nonblocking(wait != StreamWait::Blocking).map_err(system("fcntl"))?;
        Ok(wait)
    }

    /// Writes all of `bytes`.
    pub(crate) fn write(
        &self,
        mut bytes: &[u8],
        wait: StreamWait,
        clock: &dyn Runtime,
    ) -> Result<(), BenchError> {
        while !bytes.is_empty() {
            let wrote = self.retry(wait, clock, || (&self.stream).write(bytes))?;
            bytes = bytes.get(wrote..).unwrap_or_default();
        }
        Ok(())
    }

    /// Fills `into`.
    pub(crate) fn read(
        &self,
        into: &mut [u8],
        wait: StreamWait,
        clock: &dyn Runtime,
    ) -> Result<(), BenchError> {
        let mut filled = 0;
        while let Some(rest) = into.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.retry(wait, clock, || (&self.stream).read(rest))? {
                0 => return Err(BenchError::PeerGone { during: DURING }),
                bytes => filled += bytes,
            }
        }
        Ok(())
    }

    /// Repeats the call while the stream is not ready, waiting by `wait`.
    fn retry(
        &self,
        wait: StreamWait,
        clock: &dyn Runtime,
        mut call: impl FnMut() -> std::io::Result<usize>,
    ) -> Result<usize, BenchError> {
        loop {
            let mut result = call();
            if let (StreamWait::Looking(looking), true) = (wait, is_not_ready(&result)) {
                look(looking, clock, || {
                    result = call();
                    !is_not_ready(&result)
                })?;
            }
            match result {
                Ok(bytes) => return Ok(bytes),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock && wait == StreamWait::Epoll => {
                    self.wait()?;
                }
                Err(error) => return Err(failed(error)),
            }
        }
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

fn is_not_ready(result: &std::io::Result<usize>) -> bool {
    matches!(result, Err(error) if error.kind() == ErrorKind::WouldBlock)
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
