//! The task that owns a client's connection.

use std::{
    collections::{HashMap, VecDeque},
    io,
    sync::Arc,
    time::Duration,
};

use futures::{
    StreamExt,
    channel::{mpsc, oneshot},
};
use tensorwire_fabric::{Runtime, timeout};
use tensorwire_rendezvous::control::{Dial, host_and_port};
use tokio::{
    io::AsyncWriteExt,
    net::tcp::{OwnedReadHalf, OwnedWriteHalf},
};

use super::{
    super::{StoreError, board::Counted},
    frames::{Ended, FrameReader},
    link::Link,
    socket,
    wire::{Answer, HELLO_BYTES, Request, VERSION, Welcome, client_hello},
};

/// The longest that one attempt to connect may take, and that a frame of the server may stay incomplete.
const ATTEMPT_MAX: Duration = Duration::from_secs(10);

/// The first pause between attempts. It doubles up to `PAUSE_MAX`.
const PAUSE_MIN: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) enum Command {
    Ask {
        number: u64,
        frame: Vec<u8>,
        answer: Answering,
    },
    /// The answer to the request of this number is not needed any more.
    Forget(u64),
}

type Answering = oneshot::Sender<Result<Answer, Lost>>;

/// Why a request has no answer.
#[derive(Debug)]
pub(super) enum Lost {
    /// The connection broke, with the reason. The server may have received the request. The next request reconnects.
    Broken(String),
    /// Another attempt would fail too.
    Hopeless(StoreError),
}

/// Runs until the client is dropped. Connects when there is something to send.
pub(super) async fn run(
    link: Arc<Link>,
    runtime: Arc<dyn Runtime>,
    limit: Duration,
    commands: mpsc::UnboundedReceiver<Command>,
) {
    // Shorter than a caller's limit, whose error has the reasons of the last attempt.
    let attempt = (limit / 2).min(ATTEMPT_MAX);
    Driver { link, runtime, attempt, commands, queue: VecDeque::new(), instance: None }.run().await;
}

struct Driver {
    link: Arc<Link>,
    runtime: Arc<dyn Runtime>,
    attempt: Duration,
    commands: mpsc::UnboundedReceiver<Command>,
    /// Requests that were never sent.
    queue: VecDeque<(u64, Vec<u8>, Answering)>,
    /// The instance number of the last server.
    instance: Option<u64>,
}

/// The client was dropped.
struct Dropped;

type Halves = (FrameReader<OwnedReadHalf>, OwnedWriteHalf);

impl Driver {
    async fn run(mut self) {
        let mut pause = Duration::ZERO;
        while let Ok(halves) = self.connect(&mut pause).await {
            let Some(halves) = halves else { continue };
            self.link.set_trouble(None);
            if self.exchange(halves, &mut pause).await.is_err() {
                return;
            }
        }
    }

    /// Connects while there are requests. `None` if none is left, or if another attempt would fail too.
    async fn connect(&mut self, pause: &mut Duration) -> Result<Option<Halves>, Dropped> {
        while self.queue.is_empty() {
            self.take_command().await?;
        }
        let (link, runtime, attempt) = (Arc::clone(&self.link), Arc::clone(&self.runtime), self.attempt);
        let mut halves = std::pin::pin!(async {
            runtime.sleep(*pause).await;
            *pause = (*pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
            dial(&link, &runtime, attempt).await
        });
        let connected = loop {
            tokio::select! {
                connected = &mut halves => break connected,
                command = self.take_command() => command?,
            }
            if self.queue.is_empty() {
                return Ok(None);
            }
        };
        Ok(self.connected(connected))
    }

    fn connected(&mut self, connected: Result<(Halves, u64), Unconnected>) -> Option<Halves> {
        match connected {
            Ok((halves, instance)) => {
                self.check_instance(instance);
                return Some(halves);
            }
            Err(Unconnected::Again(why)) => self.link.set_trouble(Some(why)),
            Err(Unconnected::Hopeless(error)) => self.give_up(&error),
        }
        None
    }

    async fn take_command(&mut self) -> Result<(), Dropped> {
        match self.commands.next().await.ok_or(Dropped)? {
            Command::Ask { number, frame, answer } => self.queue.push_back((number, frame, answer)),
            Command::Forget(number) => self.queue.retain(|(queued, ..)| *queued != number),
        }
        Ok(())
    }

    fn check_instance(&mut self, instance: u64) {
        let before = self.instance.replace(instance);
        if before.is_some_and(|before| before != instance) {
            tracing::warn!(store = self.link.address(), "the store was restarted: its keys are lost");
        }
    }

    fn give_up(&mut self, error: &StoreError) {
        self.link.set_trouble(Some(error.to_string()));
        for (.., answer) in self.queue.drain(..) {
            // The caller may not wait for it any more.
            let _ = answer.send(Err(Lost::Hopeless(error.clone())));
        }
    }

    /// Sends and receives until the connection ends.
    async fn exchange(&mut self, halves: Halves, pause: &mut Duration) -> Result<(), Dropped> {
        let (mut reader, mut writer) = halves;
        let mut in_flight = InFlight::default();
        for (number, frame, answer) in self.queue.drain(..) {
            in_flight.ask(number, &frame, answer);
        }
        let ended = loop {
            tokio::select! {
                frame = reader.next(&*self.runtime) => match frame.and_then(|frame| in_flight.answer(&frame)) {
                    // A server that answers what nobody asked is not connected to without pauses.
                    Ok(was_asked) => *pause = if was_asked { Duration::ZERO } else { *pause },
                    Err(ended) => break ended,
                },
                command = self.commands.next() => in_flight.command(command.ok_or(Dropped)?),
                written = writer.write(&in_flight.unsent), if !in_flight.unsent.is_empty() => match written {
                    Ok(count) => drop(in_flight.unsent.drain(..count)),
                    Err(error) => break error.into(),
                },
            }
        };
        let why = ended.to_string();
        self.link.set_trouble(Some(why.clone()));
        in_flight.end(&why);
        Ok(())
    }
}

/// The requests in progress on one connection.
#[derive(Default)]
struct InFlight {
    /// Bounded by the futures in progress: each has one request.
    unsent: Vec<u8>,
    asked: HashMap<u64, Answering>,
}

impl InFlight {
    fn command(&mut self, command: Command) {
        match command {
            Command::Ask { number, frame, answer } => self.ask(number, &frame, answer),
            // Usually the answer has come already.
            Command::Forget(number) if self.asked.remove(&number).is_some() => {
                self.unsent.extend_from_slice(&Request::Cancel.encode(number));
            }
            Command::Forget(_) => {}
        }
    }

    fn ask(&mut self, number: u64, frame: &[u8], answer: Answering) {
        self.unsent.extend_from_slice(frame);
        self.asked.insert(number, answer);
    }

    /// Whether the answer is to a request. It may have been cancelled meanwhile.
    fn answer(&mut self, frame: &[u8]) -> Result<bool, Ended> {
        let (number, answer) = Answer::decode(frame)?;
        Ok(self.asked.remove(&number).is_some_and(|asked| asked.send(Ok(answer)).is_ok()))
    }

    fn end(self, why: &str) {
        for asked in self.asked.into_values() {
            let _ = asked.send(Err(Lost::Broken(why.to_owned())));
        }
    }
}

/// Why there is no connection.
enum Unconnected {
    /// The server may start later.
    Again(String),
    Hopeless(StoreError),
}

impl From<io::Error> for Unconnected {
    fn from(error: io::Error) -> Self {
        Self::Again(format!("cannot connect: {error}"))
    }
}

async fn dial(
    link: &Link,
    runtime: &Arc<dyn Runtime>,
    limit: Duration,
) -> Result<(Halves, u64), Unconnected> {
    let mut dial = Dial::new(runtime.clone());
    let connected = timeout(&**runtime, limit, greet(link, &**runtime, limit, &mut dial)).await;
    connected.unwrap_or_else(|_| {
        Err(Unconnected::Again(format!("{dial}; no server of a store answered within {limit:?}")))
    })
}

async fn greet(
    link: &Link,
    runtime: &dyn Runtime,
    limit: Duration,
    dial: &mut Dial,
) -> Result<(Halves, u64), Unconnected> {
    let (host, port) = host_and_port(link.address()).map_err(io::Error::other)?;
    dial.resolve(host, port).await?;
    let Some((_, stream)) = dial.connect().await else {
        return Err(Unconnected::Again(format!("cannot connect: {dial}")));
    };
    socket::prepare(&stream)?;
    link.set_own_address(stream.local_addr()?.ip());
    let (reader, mut writer) = stream.into_split();
    writer.write_all(&client_hello()).await?;
    let mut reader = FrameReader::new(reader, limit, None);
    let hello = reader.hello(runtime).await.map_err(|ended| {
        Unconnected::Again(format!(
            "it accepts connections, but does not answer as a store ({ended}): check the port"
        ))
    })?;
    let instance = welcome(link, &hello)?;
    Ok(((reader, writer), instance))
}

fn welcome(link: &Link, hello: &[u8; HELLO_BYTES]) -> Result<u64, Unconnected> {
    let unreachable = |detail| Unconnected::Hopeless(link.unreachable(detail));
    let welcome = Welcome::decode(hello).map_err(|why| {
        unreachable(format!(
            "another program listens there ({why}): give the port that the serving rank bound"
        ))
    })?;
    if welcome.version != VERSION {
        return Err(unreachable(format!(
            "it speaks version {} of the protocol, this process version {VERSION}: install the same release on all ranks",
            welcome.version
        )));
    }
    match welcome.full {
        None => Ok(welcome.instance),
        Some(limit) => Err(Unconnected::Hopeless(StoreError::Full {
            store: link.store(),
            what: Counted::Connections.name(),
            limit: limit as usize,
        })),
    }
}
