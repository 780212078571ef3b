//! The other process, as the test's process sees it.

use std::{
    collections::HashMap,
    env,
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::{Child, Command as Program, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use futures::channel::oneshot;
use tensorwire_fabric::{
    Arrival, Capabilities, FabricError, FabricKind, QueuePair, QueuePairConfig, QueuePairCore, SlotKey,
};

use crate::contract::patience;

use super::{
    OTHER,
    away::{AwayLink, SharedBlocks},
    message::{Command, Event, Number, hear, say},
    wire::Wire,
};

/// How long it may take to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// The test binary once more, with the fabric under test. Killed when dropped.
#[derive(Debug)]
pub(super) struct Other {
    process: Mutex<Child>,
    to: Mutex<UnixStream>,
    next: AtomicU64,
    waiting: Arc<Waiting>,
}

/// The calls and ends that wait for its messages. A thread reads them.
#[derive(Debug, Default)]
struct Waiting {
    /// The calls that wait for an answer; `None` once the process is gone.
    calls: Mutex<Option<HashMap<Number, mpsc::Sender<Answer>>>>,
    ends: Mutex<HashMap<Number, End>>,
}

type Answer = Result<Vec<u8>, FabricError>;

/// An end of a connection that the other process holds.
#[derive(Debug)]
enum End {
    Connecting(Connecting),
    /// Stays until it is drained: its slots own the memory that the other process's device uses.
    Connected(Arc<AwayLink>),
}

/// The data to make its queue pair.
#[derive(Debug)]
pub(super) struct Connecting {
    pub(super) kind: FabricKind,
    pub(super) config: QueuePairConfig,
    pub(super) blocks: Arc<SharedBlocks>,
    pub(super) other: Arc<Other>,
    pub(super) done: oneshot::Sender<Result<QueuePair, FabricError>>,
}

impl Other {
    /// Starts the other process. It runs the test of this name, which serves there.
    pub(super) fn start(test: &str) -> Arc<Self> {
        let (here, there) = UnixStream::pair().unwrap();
        let mut program = Program::new(env::current_exe().unwrap());
        program.args([test, "--exact", "--include-ignored", "--nocapture"]).env(OTHER, "1");
        // Its panic messages appear among the test's own lines.
        let program = program.stdin(Stdio::from(OwnedFd::from(there))).stdout(Stdio::null());
        let process = program.spawn().unwrap();
        let waiting = Arc::new(Waiting { calls: Mutex::new(Some(HashMap::new())), ends: Mutex::default() });
        let (from, hearing) = (here.try_clone().unwrap(), waiting.clone());
        thread::spawn(move || hearing.listen(&from));
        Arc::new(Self {
            process: Mutex::new(process),
            to: Mutex::new(here),
            next: AtomicU64::new(1),
            waiting,
        })
    }

    /// A new number.
    pub(super) fn number(&self) -> Number {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends a command. Does not wait: the other process reads all the time, and all commands that can be under way fit
    /// into the socket.
    pub(super) fn post(&self, command: &Command) {
        // If the process is gone, the next call fails.
        let _gone = say(&*self.to.lock().unwrap(), command);
    }

    /// Sends a command and waits for its answer. Answering needs nothing from this process.
    pub(super) fn call<T: Wire>(&self, command: impl FnOnce(Number) -> Command) -> Result<T, FabricError> {
        let (call, (sender, answer)) = (self.number(), mpsc::channel());
        let mut calls = self.waiting.calls.lock().unwrap();
        calls.as_mut().expect("the other process has ended").insert(call, sender);
        drop(calls);
        let command = command(call);
        self.post(&command);
        let answer = answer.recv_timeout(ANSWER_LIMIT * patience());
        let answer = answer.unwrap_or_else(|why| panic!("the other process, asked {command:?}: {why}"));
        answer.map(|bytes| T::get(&mut &bytes[..]))
    }

    /// Begins to wait for `end` to be connected.
    pub(super) fn expect_connected(&self, end: Number, connecting: Connecting) {
        self.waiting.ends.lock().unwrap().insert(end, End::Connecting(connecting));
    }

    /// Makes it release everything, after a test that passed. A process that ended or hangs fails the test.
    pub(super) fn end_test(&self) {
        self.call::<()>(|call| Command::EndTest { call }).unwrap();
        let ends = std::mem::take(&mut *self.waiting.ends.lock().unwrap());
        drop(ends);
    }

    /// Ends the process, after a test that failed.
    pub(super) fn kill(&self) {
        let mut process = self.process.lock().unwrap();
        let _already_dead = process.kill();
        let _ = process.wait();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Waiting {
    fn listen(&self, from: &UnixStream) {
        while let Some(event) = hear(from) {
            self.take_in(event);
        }
        // Dropping the senders ends every wait for an answer or a connection.
        drop(self.calls.lock().unwrap().take());
        let ends = std::mem::take(&mut *self.ends.lock().unwrap());
        for end in ends.into_values() {
            if let End::Connected(link) = end {
                link.lost();
            }
        }
    }

    fn take_in(&self, event: Event) {
        match event {
            Event::Answered { call, answer } => {
                let waiting = self.calls.lock().unwrap().as_mut().and_then(|calls| calls.remove(&call));
                let _gave_up = waiting.expect("an answer to nothing").send(answer);
            }
            Event::Connected { end, result } => self.connected(end, result),
            Event::Completed { end, key, result } => {
                self.with(end, |link| link.completed(SlotKey::from_bits(key), result));
            }
            Event::Arrived { end, immediate, length } => {
                self.with(end, |link| link.arrived(Arrival::Immediate { immediate, length }));
            }
            Event::Failed { end, failure } => self.with(end, |link| link.failed(&failure)),
            Event::Drained { end } => {
                self.with(end, AwayLink::drained);
                let gone = self.ends.lock().unwrap().remove(&end);
                drop(gone);
            }
        }
    }

    fn connected(&self, number: Number, result: Result<Capabilities, FabricError>) {
        let Some(End::Connecting(connecting)) = self.ends.lock().unwrap().remove(&number) else {
            panic!("end {number} was not to be connected");
        };
        let Connecting { kind, config, blocks, other, done } = connecting;
        let result = result.map(|capabilities| {
            let core = Arc::new(QueuePairCore::new(kind, config, capabilities));
            let link = Arc::new(AwayLink::new(number, core.clone(), other, blocks));
            self.ends.lock().unwrap().insert(number, End::Connected(link.clone()));
            QueuePair::new(core, link)
        });
        // If no task waits any more, dropping the queue pair closes it.
        let _cancelled = done.send(result);
    }

    /// Calls `tell` with `end`, unless it is drained.
    fn with(&self, end: Number, tell: impl FnOnce(&AwayLink)) {
        let link = match self.ends.lock().unwrap().get(&end) {
            Some(End::Connected(link)) => link.clone(),
            Some(End::Connecting(_)) | None => return,
        };
        tell(&link);
    }
}
