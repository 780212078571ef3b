//! Messages of the two processes between measurements: lines of JSON over a Unix socket.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

use super::{
    error::{BenchError, system},
    fabrics::FabricChoice,
    limits::{LimitWait, bare::Answers, perftest::Perftest},
    ranks::{Seat, Values},
    workers::Names,
};

/// Longest line that is read, in bytes.
const LINE_MAX: usize = 64 << 10;

/// Orders of the measuring process to the second one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Order {
    /// Answer signals in shared memory, and copy.
    Answer { answers: Answers },
    /// Make a content of this byte, and write it over this many pieces of the shared memory.
    Fill { value: u8, bytes: usize, pieces: usize },
    /// Connect a raw stream to this port.
    Stream { port: u16 },
    /// Send back this many messages of the stream.
    StreamEcho { count: u64, bytes: usize, wait: LimitWait },
    /// Read this many messages, and answer with one byte.
    StreamTake { count: u64, bytes: usize, wait: LimitWait },
    /// Answer each of this many small messages with a message of this size.
    StreamServe { count: u64, asked: usize, bytes: usize, wait: LimitWait },
    /// Listen for raw connections.
    Listen,
    /// Accept this many raw connections, each for one round trip.
    Accept { count: u64 },
    /// Open this fabric, for later orders.
    Open { choice: FabricChoice },
    /// Make one side of a connection for writes of this many bytes.
    Prepare { bytes: usize },
    /// Connect it to the described side.
    Connect { side: SideData },
    /// Answer each of this many writes with a write.
    Echo { count: u64 },
    /// Take this many writes, then answer one.
    Take { count: u64 },
    /// Meet the other process, and then write all bytes this many times while it does the same.
    WriteBothWays { count: u64 },
    /// Start a worker.
    Worker,
    /// Start a server of this program for one run.
    Perftest { test: Perftest, operations: u64, bytes: usize },
    /// Publish this many tensors again, filled with `value`.
    Publish { names: Names, value: u8, bytes: usize, copies: usize },
    /// Expose an arena.
    Expose { pages: u32, page_bytes: usize },
    /// Send a tensor of 8 bytes under each of this many keys of a step, to the worker of this name.
    Send { to: String, step: i64, keys: usize },
    /// Join a group, for calls of these values.
    Join { seat: Seat, values: Values },
    /// Call this many collectives, after one that is not timed.
    Collectives { count: u64 },
}

/// Answers of the second process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Answer {
    /// The order was executed.
    Done,
    /// The side that was prepared.
    Side(SideData),
    /// The address of the worker.
    Address(String),
    /// The port of a server.
    Port(u16),
    /// The reason why the order was not executed.
    Failed(String),
}

/// Takes an answer that only confirms the order.
pub(super) fn done(answer: Answer) -> Result<(), BenchError> {
    match answer {
        Answer::Done => Ok(()),
        other => Err(BenchError::Unexpected(format!("{other:?}"))),
    }
}

/// The data that one side of a connection needs about the other.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SideData {
    pub(super) connection: Vec<u8>,
    pub(super) region: u32,
    pub(super) generation: u32,
    pub(super) region_bytes: u64,
    pub(super) base: u64,
    pub(super) key: u32,
    pub(super) offset: u64,
}

/// One side of the control stream.
#[derive(Debug)]
pub(super) struct Control {
    stream: BufReader<tokio::net::UnixStream>,
}

impl Control {
    /// Takes over `stream`, on a tokio runtime.
    pub(super) fn new(stream: UnixStream) -> Result<Self, BenchError> {
        let call = "the control stream";
        stream.set_nonblocking(true).map_err(system(call))?;
        let stream = tokio::net::UnixStream::from_std(stream).map_err(system(call))?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    /// Sends `message`.
    pub(super) async fn send(
        &mut self,
        message: &impl Serialize,
        during: &'static str,
    ) -> Result<(), BenchError> {
        let mut line =
            serde_json::to_vec(message).map_err(|error| BenchError::Unexpected(error.to_string()))?;
        line.push(b'\n');
        self.stream.get_mut().write_all(&line).await.map_err(|error| gone(&error, during))
    }

    /// The next message; `None` at the stream's end.
    pub(super) async fn receive<M: DeserializeOwned>(
        &mut self,
        during: &'static str,
    ) -> Result<Option<M>, BenchError> {
        let mut line = Vec::new();
        loop {
            let chunk = self.stream.fill_buf().await.map_err(|error| gone(&error, during))?;
            let end = chunk.iter().position(|&byte| byte == b'\n');
            let taken = end.map_or(chunk.len(), |end| end + 1);
            if taken == 0 {
                return Ok(None);
            }
            line.extend_from_slice(chunk.get(..taken).unwrap_or_default());
            self.stream.consume(taken);
            if end.is_some() || line.len() > LINE_MAX {
                let message = serde_json::from_slice(&line);
                return message.map(Some).map_err(|error| BenchError::Unexpected(error.to_string()));
            }
        }
    }
}

fn gone(error: &io::Error, during: &'static str) -> BenchError {
    tracing::debug!(%error, during, "control stream");
    BenchError::PeerGone { during }
}

/// Sends descriptors, with one byte.
pub(super) fn send_descriptors(
    stream: &UnixStream,
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), BenchError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(BenchError::Unexpected(format!("{} descriptors to hand over", descriptors.len())));
    }
    let bytes = [IoSlice::new(&[0])];
    sendmsg(stream, &bytes, &mut control, SendFlags::empty()).map(drop).map_err(system("sendmsg"))
}

/// Receives `N` descriptors.
pub(super) fn receive_descriptors<const N: usize>(stream: &UnixStream) -> Result<[OwnedFd; N], BenchError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut bytes = [IoSliceMut::new(&mut byte)];
    recvmsg(stream.as_fd(), &mut bytes, &mut control, RecvFlags::CMSG_CLOEXEC).map_err(system("recvmsg"))?;
    let mut taken = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            taken.extend(descriptors);
        }
    }
    let count = taken.len();
    taken.try_into().map_err(|_| BenchError::Unexpected(format!("{count} descriptors instead of {N}")))
}

#[cfg(test)]
mod tests {
    use std::{io::Write, os::fd::AsFd, os::unix::net::UnixStream};

    use super::{Answer, BenchError, Control, Order, receive_descriptors, send_descriptors};

    #[tokio::test(flavor = "current_thread")]
    async fn messages_arrive_one_by_one_and_the_end_is_told() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(b"\"Done\"\n{\"Accept\":{\"count\":3}}\n").unwrap();
        drop(ours);
        let mut control = Control::new(theirs).unwrap();
        assert!(matches!(control.receive("test").await.unwrap(), Some(Answer::Done)));
        assert!(matches!(control.receive("test").await.unwrap(), Some(Order::Accept { count: 3 })));
        assert!(control.receive::<Answer>("test").await.unwrap().is_none());
    }

    #[tokio::test(flavor = "current_thread")]
    async fn line_that_is_no_message_is_an_error() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(b"hello\n").unwrap();
        let received = Control::new(theirs).unwrap().receive::<Answer>("test").await;
        assert!(matches!(received, Err(BenchError::Unexpected(_))));
    }

    #[test]
    fn descriptors_are_handed_over_by_number() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (handed, mut near_end) = UnixStream::pair().unwrap();
        send_descriptors(&ours, &[handed.as_fd(), handed.as_fd()]).unwrap();
        let [first, second] = receive_descriptors::<2>(&theirs).unwrap();
        drop((handed, first));
        near_end.write_all(b"x").unwrap();
        drop(second);
        send_descriptors(&ours, &[near_end.as_fd()]).unwrap();
        assert!(matches!(receive_descriptors::<2>(&theirs), Err(BenchError::Unexpected(_))));
    }
}
