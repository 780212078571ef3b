//! The server of the store.

use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{
    StreamExt,
    channel::oneshot,
    stream::{self, FuturesUnordered},
};
use tensorwire_verbs_reactor::{BoxFuture, Runtime, timeout};
use tokio::{
    io::AsyncWriteExt,
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
};

use super::{
    super::board::{Board, Counted, Refused},
    TcpLimits,
    frames::{Ended, FrameReader},
    socket,
    wire::{Answer, Request, VERSION, Welcome, client_version},
};

/// How many clients at a time receive the error that there are too many connections. Further ones are closed at once.
const REFUSED_MAX: usize = 64;

/// The pause after a failed `accept`, as when the process has no free file descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves until it is dropped.
#[derive(Debug)]
pub(super) struct Server {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
    /// Ends the task when dropped.
    _stop: oneshot::Sender<()>,
}

/// What all connections of a server share.
#[derive(Debug)]
struct Shared {
    board: Arc<Board>,
    limits: TcpLimits,
    runtime: Arc<dyn Runtime>,
    /// A random number by which clients notice a restart.
    instance: u64,
    /// The bytes of the keys of all waits.
    wait_bytes: AtomicUsize,
}

/// The share of `Shared::wait_bytes` that one wait holds.
struct WaitBytes<'a> {
    shared: &'a Shared,
    bytes: usize,
}

impl Drop for WaitBytes<'_> {
    fn drop(&mut self) {
        self.shared.wait_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Server {
    /// Serves `board` on `listener`.
    ///
    /// # Errors
    /// Those of the operating system.
    pub(super) fn start(
        listener: TcpListener,
        board: Arc<Board>,
        limits: TcpLimits,
        runtime: &Arc<dyn Runtime>,
    ) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let (stop, stopped) = oneshot::channel();
        let connections = Arc::default();
        let shared = Shared {
            board,
            limits,
            runtime: Arc::clone(runtime),
            instance: runtime.random(),
            wait_bytes: AtomicUsize::new(0),
        };
        runtime.spawn("store server", Box::pin(serve(listener, shared, Arc::clone(&connections), stopped)));
        Ok(Self { address, connections, _stop: stop })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The number of connected clients.
    pub(super) fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}

/// Owns all connections: when it ends, clients see them close.
async fn serve(
    listener: TcpListener,
    shared: Shared,
    count: Arc<AtomicUsize>,
    mut stopped: oneshot::Receiver<()>,
) {
    let mut clients: FuturesUnordered<BoxFuture<'_, ()>> = FuturesUnordered::new();
    let mut refused: FuturesUnordered<BoxFuture<'_, ()>> = FuturesUnordered::new();
    let mut streams = pin!(stream::repeat(()).then(|()| accept(&listener, &*shared.runtime)));
    loop {
        count.store(clients.len(), Ordering::Relaxed);
        tokio::select! {
            biased;
            _ = &mut stopped => return,
            Some(()) = clients.next() => {}
            Some(()) = refused.next() => {}
            Some(stream) = streams.next() => {
                if clients.len() < shared.limits.connections {
                    clients.push(Box::pin(shared.receive(stream)));
                } else if refused.len() < REFUSED_MAX {
                    refused.push(Box::pin(shared.refuse(stream)));
                }
            }
        }
    }
}

async fn accept(listener: &TcpListener, runtime: &dyn Runtime) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => {
                tracing::warn!(%error, "the store cannot accept a connection and will try again");
                runtime.sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

impl Shared {
    async fn receive(&self, stream: TcpStream) {
        let ended = match self.handshake(stream, None).await {
            Ok((mut reader, mut writer)) => self.serve_client(&mut reader, &mut writer).await,
            Err(ended) => ended,
        };
        if !matches!(ended, Ended::Closed) {
            tracing::debug!(why = %ended, "the store closes the connection of a client");
        }
    }

    async fn refuse(&self, stream: TcpStream) {
        let limit = u32::try_from(self.limits.connections).unwrap_or(u32::MAX);
        let _ = self.handshake(stream, Some(limit)).await;
        tracing::warn!(limit, "rejected a client: the store has reached its limit of connections");
    }

    /// Exchanges hellos. A client of another version receives the server's hello and is closed.
    async fn handshake(
        &self,
        stream: TcpStream,
        full: Option<u32>,
    ) -> Result<(FrameReader<OwnedReadHalf>, OwnedWriteHalf), Ended> {
        socket::prepare(&stream)?;
        let (reader, mut writer) = stream.into_split();
        let mut reader = FrameReader::new(reader, self.limits.request);
        let version = client_version(&reader.hello(&*self.runtime).await?)?;
        let welcome = Welcome { version: VERSION, full, instance: self.instance };
        self.write(&mut writer, &welcome.encode()).await?;
        if version == VERSION { Ok((reader, writer)) } else { Err(Ended::Closed) }
    }

    /// Answers requests until the connection ends. Its waits end with it.
    async fn serve_client(
        &self,
        reader: &mut FrameReader<OwnedReadHalf>,
        writer: &mut OwnedWriteHalf,
    ) -> Ended {
        let mut waits = Waits::default();
        loop {
            let turn = tokio::select! {
                frame = reader.next(&*self.runtime) => frame.map(|frame| self.request(&frame, &mut waits)),
                Some(answer) = waits.next() => Ok(Ok(Some(answer))),
            };
            let written = match turn {
                Ok(Ok(Some(answer))) => self.write(writer, &answer).await,
                Ok(Ok(None)) => Ok(()),
                Ok(Err(error)) => Err(error),
                Err(ended) => Err(ended),
            };
            if let Err(ended) = written {
                return ended;
            }
        }
    }

    /// Executes a request. `None` if it has no answer yet.
    fn request<'a>(&'a self, frame: &[u8], waits: &mut Waits<'a>) -> Result<Option<Vec<u8>>, Ended> {
        let (number, request) = Request::decode(frame)?;
        let answer = match request {
            Request::Wait { limit, keys } => match self.wait_bytes(&keys) {
                Ok(room) => {
                    let limit = Duration::from_micros(limit);
                    waits.begin(number, Box::pin(self.wait(number, keys, limit, room)));
                    return Ok(None);
                }
                Err(why) => Err(why),
            },
            Request::Cancel => {
                waits.cancel(number);
                return Ok(None);
            }
            other => self.answer(other),
        };
        Ok(Some(answer.unwrap_or_else(|why| self.refusal(why)).encode(number)))
    }

    fn answer(&self, request: Request) -> Result<Answer, Refused> {
        let board = &self.board;
        Ok(match request {
            Request::Set { key, value } => {
                board.set(&key, &value)?;
                Answer::Done
            }
            Request::Get { keys } => Answer::values(board.get(&keys)),
            Request::Add { key, delta } => Answer::Number(board.add(&key, delta)?),
            Request::CompareSet { key, expected, value } => {
                Answer::Value(board.compare_set(&key, expected.as_deref(), &value)?)
            }
            Request::Delete { key } => Answer::Deleted(board.delete(&key)),
            // Handled by `request`.
            Request::Wait { .. } | Request::Cancel => Answer::Done,
        })
    }

    /// Reserves bytes for the keys of a wait. All waits together may have as many bytes as the board.
    fn wait_bytes(&self, keys: &[String]) -> Result<WaitBytes<'_>, Refused> {
        let bytes = keys.iter().map(|key| size_of::<String>() + key.len()).sum();
        let before = self.wait_bytes.fetch_add(bytes, Ordering::Relaxed);
        let room = WaitBytes { shared: self, bytes };
        if before + bytes > self.limits.bytes { Err(Refused::Full(Counted::Bytes)) } else { Ok(room) }
    }

    async fn wait(&self, number: u64, keys: Vec<String>, limit: Duration, _room: WaitBytes<'_>) -> Answered {
        let answer = match timeout(&*self.runtime, limit, self.board.wait(&keys)).await {
            Ok(Ok(values)) => Answer::values(values.into_iter().map(Some).collect()),
            Ok(Err(why)) => self.refusal(why),
            Err(_) => self.late(&keys),
        };
        (number, answer.encode(number))
    }

    /// The last value may have come just at the end of the limit.
    fn late(&self, keys: &[String]) -> Answer {
        let values = self.board.get(keys);
        let missing = (0..).zip(&values).filter(|(_, value)| value.is_none());
        let missing: Vec<u32> = missing.map(|(index, _)| index).collect();
        if missing.is_empty() { Answer::values(values) } else { Answer::Missing(missing) }
    }

    fn refusal(&self, why: Refused) -> Answer {
        let limit = match why {
            Refused::NoSum(_) => 0,
            Refused::Full(Counted::Connections) => self.limits.connections,
            Refused::Full(Counted::Keys) => self.limits.keys,
            Refused::Full(Counted::Bytes) => self.limits.bytes,
            Refused::Full(Counted::Waits) => self.limits.waits,
        };
        Answer::Refused(why, limit as u64)
    }

    /// Limited in time: the answers to a client that does not read them would hold memory.
    async fn write(&self, writer: &mut OwnedWriteHalf, bytes: &[u8]) -> Result<(), Ended> {
        let limit = self.limits.request;
        match timeout(&*self.runtime, limit, writer.write_all(bytes)).await {
            Ok(written) => written.map_err(Ended::from),
            Err(_) => Err(Ended::Failed(io::ErrorKind::TimedOut.into())),
        }
    }
}

type Answered = (u64, Vec<u8>);

/// The waits of one connection.
#[derive(Default)]
struct Waits<'a> {
    running: FuturesUnordered<BoxFuture<'a, Option<Answered>>>,
    /// Dropping a sender ends its wait.
    stops: HashMap<u64, oneshot::Sender<()>>,
}

impl<'a> Waits<'a> {
    /// If a client uses a number twice, the first wait ends without an answer.
    fn begin(&mut self, number: u64, wait: BoxFuture<'a, Answered>) {
        let (stop, stopped) = oneshot::channel::<()>();
        self.stops.insert(number, stop);
        self.running.push(Box::pin(async move {
            tokio::select! {
                biased;
                _ = stopped => None,
                answer = wait => Some(answer),
            }
        }));
    }

    fn cancel(&mut self, number: u64) {
        self.stops.remove(&number);
    }

    /// The next answer; `None` if there are no waits.
    async fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            if let Some((number, answer)) = self.running.next().await? {
                self.stops.remove(&number);
                return Some(answer);
            }
        }
    }
}
