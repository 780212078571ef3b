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
use tensorwire_fabric::{BoxFuture, Runtime, timeout};
use tensorwire_memory::Limit;
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
    frames::{Ended, FrameReader, Room},
    guests::{Guests, Held, Seat},
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
    guests: Arc<Guests>,
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
            guests: Arc::default(),
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
    let mut streams = pin!(stream::repeat(()).then(|()| shared.accept(&listener)));
    loop {
        count.store(clients.len(), Ordering::Relaxed);
        tokio::select! {
            biased;
            _ = &mut stopped => return,
            Some(()) = clients.next() => {}
            Some(()) = refused.next() => {}
            Some(stream) = streams.next() => {
                if clients.len() < shared.connections_max() || shared.make_room() {
                    clients.push(Box::pin(shared.receive(stream)));
                } else if refused.len() < REFUSED_MAX {
                    refused.push(Box::pin(shared.refuse(stream)));
                }
            }
        }
    }
}

impl Shared {
    async fn accept(&self, listener: &TcpListener) -> TcpStream {
        let mut has_complained = false;
        loop {
            match listener.accept().await {
                Ok((stream, _)) => return stream,
                Err(error) => {
                    if !std::mem::replace(&mut has_complained, true) {
                        tracing::warn!(%error, "the store cannot accept a connection and will try again");
                    }
                    self.make_room();
                    self.runtime.sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    /// The limit of connections, which leaves files for the workers of this process.
    fn connections_max(&self) -> usize {
        let files = Limit::OpenFiles.value().and_then(|files| usize::try_from(files).ok());
        let share = files.map_or(usize::MAX, |files| (files / 4 * 3).saturating_sub(REFUSED_MAX).max(1));
        self.limits.connections.min(share)
    }

    fn make_room(&self) -> bool {
        self.guests.make_room(self.runtime.now(), self.limits.request)
    }

    async fn receive(&self, stream: TcpStream) {
        let (seat, closed) = self.guests.enter(self.runtime.now());
        let room = Room::new(&seat, self.limits.bytes);
        let served = async {
            match self.handshake(stream, None, Some(room.clone())).await {
                Ok((reader, writer)) => self.serve_client(reader, writer, &seat, &room).await,
                Err(ended) => ended,
            }
        };
        let ended = tokio::select! {
            _ = closed => Ended::NoRoom,
            ended = served => ended,
        };
        if !matches!(ended, Ended::Closed) {
            tracing::debug!(why = %ended, "the store closes the connection of a client");
        }
    }

    async fn refuse(&self, stream: TcpStream) {
        let limit = u32::try_from(self.connections_max()).unwrap_or(u32::MAX);
        let _ = self.handshake(stream, Some(limit), None).await;
        tracing::warn!(limit, "rejected a client: the store has reached its limit of connections");
    }

    /// Exchanges hellos. A client of another version receives the server's hello and is closed.
    async fn handshake(
        &self,
        stream: TcpStream,
        full: Option<u32>,
        room: Option<Room>,
    ) -> Result<(FrameReader<OwnedReadHalf>, OwnedWriteHalf), Ended> {
        socket::prepare(&stream)?;
        let (reader, mut writer) = stream.into_split();
        let mut reader = FrameReader::new(reader, self.limits.request, room);
        let version = client_version(&reader.hello(&*self.runtime).await?)?;
        let welcome = Welcome { version: VERSION, full, instance: self.instance };
        self.write(&mut writer, &welcome.encode()).await?;
        if version == VERSION { Ok((reader, writer)) } else { Err(Ended::Closed) }
    }

    /// Answers requests until the connection ends. Its waits end with it.
    async fn serve_client(
        &self,
        mut reader: FrameReader<OwnedReadHalf>,
        mut writer: OwnedWriteHalf,
        seat: &Arc<Seat>,
        room: &Room,
    ) -> Ended {
        let mut waits = Waits::default();
        loop {
            let turn = tokio::select! {
                frame = reader.next(&*self.runtime) => frame.and_then(|frame| self.request(&frame, &mut waits, seat)),
                Some(answer) = waits.next() => Ok(Some(answer)),
            };
            seat.active(self.runtime.now(), waits.stops.len());
            let written = match turn {
                Ok(Some(answer)) => match room.hold(answer.capacity()) {
                    Ok(_held) => self.write(&mut writer, &answer).await,
                    Err(ended) => Err(ended),
                },
                Ok(None) => Ok(()),
                Err(ended) => Err(ended),
            };
            if let Err(ended) = written {
                return ended;
            }
        }
    }

    /// Executes a request. `None` if it has no answer yet.
    fn request<'a>(
        &'a self,
        frame: &[u8],
        waits: &mut Waits<'a>,
        seat: &Arc<Seat>,
    ) -> Result<Option<Vec<u8>>, Ended> {
        let (number, request) = Request::decode(frame)?;
        let answer = match request {
            Request::Wait { limit, keys } => match self.wait_bytes(&keys, seat) {
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

    /// Reserves bytes for the keys of a wait.
    fn wait_bytes(&self, keys: &[String], seat: &Arc<Seat>) -> Result<Held, Refused> {
        let bytes = keys.iter().map(|key| size_of::<String>() + key.len()).sum();
        seat.hold(bytes, self.limits.bytes).ok_or(Refused::Full(Counted::Bytes))
    }

    async fn wait(&self, number: u64, keys: Vec<String>, limit: Duration, _room: Held) -> Answered {
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
            Refused::Full(Counted::Connections) => self.connections_max(),
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
