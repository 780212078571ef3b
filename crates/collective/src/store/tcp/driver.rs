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
use tensorwire_verbs_reactor::{Runtime, timeout};
use tokio::{
    io::AsyncWriteExt,
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
};

use super::{
    super::{StoreError, board::Counted},
    frames::{Ended, FrameReader},
    link::Link,
    socket,
    wire::{Answer, HELLO_BYTES, Request, VERSION, Welcome, client_hello},
};

/// The most time that one attempt to connect takes, and that a frame of the server may be unfinished.
const ATTEMPT_MAX: Duration = Duration::from_secs(10);

/// The first pause between attempts. The next ones are twice as long, to `PAUSE_MAX`.
const PAUSE_MIN: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) enum Command {
    Ask {
        number: u64,
        frame: Vec<u8>,
        answer: Answering,
    },
    /// Nobody waits for the answer to the request of this number.
    Forget(u64),
}

type Answering = oneshot::Sender<Result<Answer, Lost>>;

/// Why a request has no answer.
#[derive(Debug)]
pub(super) enum Lost {
    /// The connection broke, and the server may have seen the request. The next one makes another. Says how it broke.
    Broken(String),
    /// Another attempt would end in the same way.
    Hopeless(StoreError),
}

/// Runs until the client is dropped. Connects when there is something to send.
pub(super) async fn run(
    link: Arc<Link>,
    runtime: Arc<dyn Runtime>,
    limit: Duration,
    commands: mpsc::UnboundedReceiver<Command>,
) {
    let attempt = limit.min(ATTEMPT_MAX);
    Driver { link, runtime, attempt, commands, queue: VecDeque::new(), instance: None }.run().await;
}

struct Driver {
    link: Arc<Link>,
    runtime: Arc<dyn Runtime>,
    attempt: Duration,
    commands: mpsc::UnboundedReceiver<Command>,
    /// Requests that were never sent.
    queue: VecDeque<(u64, Vec<u8>, Answering)>,
    /// The server of the last connection.
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
            if self.converse(halves, &mut pause).await.is_err() {
                return;
            }
        }
    }

    /// Connects as long as there are requests. `None` if there are none any more, or if an attempt was hopeless.
    async fn connect(&mut self, pause: &mut Duration) -> Result<Option<Halves>, Dropped> {
        while self.queue.is_empty() {
            self.take_command().await?;
        }
        let (link, runtime, attempt) = (Arc::clone(&self.link), Arc::clone(&self.runtime), self.attempt);
        let mut halves = std::pin::pin!(async {
            runtime.sleep(*pause).await;
            *pause = (*pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
            timeout(&*runtime, attempt, dial(&link, &*runtime, attempt)).await
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
        let connected = connected.unwrap_or_else(|_| {
            Err(Dial::Again(format!("no server of a store answered within {:?}", self.attempt)))
        });
        Ok(self.outcome(connected))
    }

    fn outcome(&mut self, connected: Result<(Halves, u64), Dial>) -> Option<Halves> {
        match connected {
            Ok((halves, instance)) => {
                self.meet(instance);
                return Some(halves);
            }
            Err(Dial::Again(why)) => self.link.set_trouble(Some(why)),
            Err(Dial::Hopeless(error)) => self.give_up(&error),
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

    fn meet(&mut self, instance: u64) {
        let before = self.instance.replace(instance);
        if before.is_some_and(|before| before != instance) {
            tracing::warn!(store = self.link.address(), "the store was started again: its keys are gone");
        }
    }

    fn give_up(&mut self, error: &StoreError) {
        self.link.set_trouble(Some(error.to_string()));
        for (.., answer) in self.queue.drain(..) {
            // Nobody may wait for it.
            let _ = answer.send(Err(Lost::Hopeless(error.clone())));
        }
    }

    /// Sends and receives until the connection ends.
    async fn converse(&mut self, halves: Halves, pause: &mut Duration) -> Result<(), Dropped> {
        let (mut reader, mut writer) = halves;
        let mut talk = Talk::default();
        for (number, frame, answer) in self.queue.drain(..) {
            talk.ask(number, &frame, answer);
        }
        let ended = loop {
            tokio::select! {
                frame = reader.next(&*self.runtime) => match frame.and_then(|frame| talk.answer(&frame)) {
                    Ok(()) => *pause = Duration::ZERO,
                    Err(ended) => break ended,
                },
                command = self.commands.next() => talk.command(command.ok_or(Dropped)?),
                written = writer.write(&talk.unsent), if !talk.unsent.is_empty() => match written {
                    Ok(count) => drop(talk.unsent.drain(..count)),
                    Err(error) => break error.into(),
                },
            }
        };
        let why = ended.to_string();
        self.link.set_trouble(Some(why.clone()));
        talk.end(&why);
        Ok(())
    }
}

/// What is under way on one connection.
#[derive(Default)]
struct Talk {
    /// Grows with the futures under way alone: each has one request.
    unsent: Vec<u8>,
    asked: HashMap<u64, Answering>,
}

impl Talk {
    fn command(&mut self, command: Command) {
        match command {
            Command::Ask { number, frame, answer } => self.ask(number, &frame, answer),
            // The answer came before, mostly.
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

    fn answer(&mut self, frame: &[u8]) -> Result<(), Ended> {
        let (number, answer) = Answer::decode(frame)?;
        // It may have crossed with the cancellation.
        if let Some(asked) = self.asked.remove(&number) {
            let _ = asked.send(Ok(answer));
        }
        Ok(())
    }

    fn end(self, why: &str) {
        for asked in self.asked.into_values() {
            let _ = asked.send(Err(Lost::Broken(why.to_owned())));
        }
    }
}

/// Why there is no connection.
enum Dial {
    /// The server may come yet.
    Again(String),
    Hopeless(StoreError),
}

impl From<io::Error> for Dial {
    fn from(error: io::Error) -> Self {
        Self::Again(format!("it cannot be connected to: {error}"))
    }
}

async fn dial(link: &Link, runtime: &dyn Runtime, limit: Duration) -> Result<(Halves, u64), Dial> {
    let stream = TcpStream::connect(link.address()).await?;
    socket::prepare(&stream)?;
    let (reader, mut writer) = stream.into_split();
    writer.write_all(&client_hello()).await?;
    let mut reader = FrameReader::new(reader, limit);
    let hello = reader.hello(runtime).await.map_err(|ended| {
        Dial::Again(format!("it answers connections, but not as a store ({ended}): is this its port?"))
    })?;
    let instance = welcome(link, &hello)?;
    Ok(((reader, writer), instance))
}

fn welcome(link: &Link, hello: &[u8; HELLO_BYTES]) -> Result<u64, Dial> {
    let unreachable = |detail| Dial::Hopeless(link.unreachable(detail));
    let welcome = Welcome::decode(hello).map_err(|why| {
        unreachable(format!(
            "what listens there is no store ({why}): give the port that the serving rank bound"
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
        Some(limit) => Err(Dial::Hopeless(StoreError::Full {
            store: link.store(),
            what: Counted::Connections.name(),
            limit: limit as usize,
        })),
    }
}
