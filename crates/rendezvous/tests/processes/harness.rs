//! A second process: this test binary again, asked to run the same test with [`CHILD`] set.
//!
//! The two talk in lines of text. The child's begin with `@@`; all else on its standard output is the test
//! harness's.

#[path = "../bounded.rs"]
mod bounded;

use std::{
    env,
    future::Future,
    io::{BufRead, BufReader, Write},
    process::{ChildStdin, Command, Stdio},
    sync::Arc,
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use tensorwire_fabric::{FabricKind, Runtime, TokioRuntime, timeout};
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{Peer, PeerInfo, Tensor, Worker, WorkerBuilder};
use tokio::sync::mpsc;

use crate::rdma::{End, over_at, patient};

const CHILD: &str = "TENSORWIRE_WORKER_TEST_CHILD";

/// How long one step of a test may take that has no bound of its own.
pub(crate) const STEP: Duration = Duration::from_secs(20);

/// A published name that is too long for a catalogue: over shared memory, too, every fetch of it asks the publisher.
pub(crate) const ALWAYS_ASKED: &str = concat!(
    "a name of more than a hundred and twelve bytes, which is the longest that a cell of the catalogue has room for, so ",
    "that it has no cell"
);

pub(crate) const PARENT: &str = "/job:parent/replica:0/task:0";
pub(crate) const PARENT_CPU: &str = "/job:parent/replica:0/task:0/device:CPU:0";
pub(crate) const CHILD_CPU: &str = "/job:child/replica:0/task:0/device:CPU:0";

/// In the child: the words that its parent gave it. From then on it ends with its parent, however that ends.
pub(crate) fn role() -> Option<Vec<String>> {
    let words = env::var(CHILD).ok()?.split(' ').map(str::to_owned).collect();
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    Some(words)
}

/// Runs `body` to its end, within `limit`.
pub(crate) fn bounded<F: Future<Output = ()>>(limit: Duration, body: impl FnOnce(Arc<dyn Runtime>) -> F) {
    bounded::bounded(patient(limit), async {
        body(Arc::new(TokioRuntime::current().unwrap())).await;
    });
}

/// Awaits one step of a test.
pub(crate) async fn step<T>(what: &str, future: impl Future<Output = T>) -> T {
    let runtime = TokioRuntime::current().unwrap();
    let limit = patient(STEP);
    let ended = timeout(&runtime, limit, future).await;
    ended.unwrap_or_else(|_| panic!("{what} took longer than {limit:?}"))
}

/// Waits until the receive pool has all of its memory. What a peer could write returns when the task of its connection has ended, which a
/// shutdown does not wait for.
pub(crate) async fn memory_returns(worker: &Worker) {
    step("the return of all memory", async {
        while worker.receive_memory().used_bytes > 0 {
            worker.runtime().sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

/// The other process. Killed when dropped.
pub(crate) struct Other {
    process: std::process::Child,
    to: ChildStdin,
    lines: mpsc::UnboundedReceiver<String>,
}

impl Other {
    /// Starts `test` (`module::name`) in a process of its own, which finds `role` in [`role`].
    pub(crate) fn start(test: &str, role: &str) -> Self {
        Self::start_by(Command::new(env::current_exe().unwrap()), test, role)
    }

    /// As [`start`](Self::start), by a command that runs this program.
    pub(crate) fn start_by(mut command: Command, test: &str, role: &str) -> Self {
        command
            .args([test, "--exact", "--nocapture", "--include-ignored"])
            .env(CHILD, role)
            .env_remove("TENSORWIRE_SECRET_FILE");
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (to, from) = (process.stdin.take().unwrap(), BufReader::new(process.stdout.take().unwrap()));
        let (found, lines) = mpsc::unbounded_channel();
        thread::spawn(move || {
            for line in from.lines().map_while(Result::ok) {
                if let Some((_, said)) = line.split_once("@@") {
                    let _ = found.send(said.trim().to_owned());
                }
            }
        });
        Self { process, to, lines }
    }

    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.to, "{line}").unwrap();
    }

    /// The next line that is meant for us.
    pub(crate) async fn hear(&mut self) -> String {
        step("a line of the child", self.lines.recv()).await.expect("the child has ended")
    }

    /// A line that has come already.
    pub(crate) fn heard(&mut self) -> Option<String> {
        self.lines.try_recv().ok()
    }

    /// Whether it has ended by itself.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.process.try_wait().unwrap().is_some()
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.process.id().cast_signed()).unwrap()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Kills it, and waits until it is gone.
    pub(crate) fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// In the child: sends the parent a line.
pub(crate) fn say(line: &str) {
    println!("@@ {line}");
    std::io::stdout().flush().unwrap();
}

/// In the child: the parent's lines, read without blocking the runtime.
pub(crate) fn parents_lines() -> mpsc::UnboundedReceiver<String> {
    let (found, lines) = mpsc::unbounded_channel();
    thread::spawn(move || {
        std::io::stdin().lines().map_while(Result::ok).try_for_each(|line| found.send(line.trim().to_owned()))
    });
    lines
}

/// A worker of these tests.
pub(crate) fn builder(name: &str, kind: FabricKind) -> WorkerBuilder {
    // A child and its parent have a device each.
    let end = if role().is_some() { End::Right } else { End::Left };
    over_at(Worker::builder(name), kind, end).timeout(patient(STEP))
}

pub(crate) fn kind(name: &str) -> FabricKind {
    match name {
        "shm" => FabricKind::SHM,
        "tcp" => FabricKind::TCP,
        "verbs" => FabricKind::VERBS,
        other => panic!("no fabric of these tests: {other}"),
    }
}

/// Bytes that depend on their offset and `version`; filled and compared at memory speed.
const CHUNK: usize = 64 << 10;

fn chunk_byte(chunk: usize, version: u64) -> u8 {
    (chunk as u64 ^ version.wrapping_mul(31)) as u8
}

pub(crate) async fn tensor(worker: &Worker, bytes: usize, version: u64) -> Tensor {
    let mut buffer = worker.pool().alloc(bytes).await.unwrap();
    for (number, chunk) in buffer.chunks_mut(CHUNK).enumerate() {
        chunk.fill(chunk_byte(number, version));
    }
    Tensor::new(buffer, DataType::U8, &[bytes as u64]).unwrap()
}

/// Whether `bytes` are exactly those of `version`.
pub(crate) fn is_version(bytes: &[u8], version: u64) -> bool {
    let mut expected = vec![0; CHUNK];
    bytes.chunks(CHUNK).enumerate().all(|(number, chunk)| {
        expected.fill(chunk_byte(number, version));
        *chunk == expected[..chunk.len()]
    })
}

/// What `worker` knows of `peer`.
pub(crate) fn info(worker: &Worker, peer: &Peer) -> PeerInfo {
    worker.peers().into_iter().find(|known| known.name == peer.name()).unwrap()
}
