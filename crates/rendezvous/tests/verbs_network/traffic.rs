//! Two workers, one here and one in another process, each with one device of the link, that move values both ways.

use std::{sync::Arc, time::Duration};

use futures::{StreamExt, future::join, stream};
use tensorwire_fabric::{FabricKind, Runtime};
use tensorwire_rendezvous::{Peer, PeerInfo, Validation, Worker, WorkerBuilder, WorkerError};

use crate::{
    harness::{CHILD_CPU, Other, PARENT, PARENT_CPU, info, is_version, parents_lines, say, step, tensor},
    rdma::{End, device_at},
};

pub(crate) const CHILD: &str = "/job:child/replica:0/task:0";

/// How long the network may take to make an operation fail: more than the adapter's retries, and less than a test's step.
const LIMIT: Duration = Duration::from_secs(20);

/// A silent peer counts as lost after this.
const LIVENESS: Duration = Duration::from_secs(10);

/// Receives of an exchange that are outstanding at once.
const OUTSTANDING: usize = 3;

/// Values of an exchange that are sent before the first is received. For the others, one goes when one comes.
const AHEAD: u64 = 16;

/// One exchange: in `step`, so many values of so many bytes each way.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Exchange {
    pub(crate) step: i64,
    pub(crate) bytes: usize,
    pub(crate) count: u64,
}

impl Exchange {
    fn version(&self, number: u64, from_child: bool) -> u64 {
        self.step as u64 * 1000 + number * 2 + u64::from(from_child)
    }

    /// This end's half: sends its values, and receives the other's, which must be what they are. An error ends the
    /// receives, not the sends.
    pub(crate) async fn run(&self, worker: &Worker, is_child: bool) -> Result<(), WorkerError> {
        let (own, other) = if is_child { (CHILD_CPU, PARENT_CPU) } else { (PARENT_CPU, CHILD_CPU) };
        let (at_step, key) = (worker.shared_step(self.step), worker.key(own, other, "value")?);
        let (at_step, key) = (&at_step, &key);
        let send = async |number| {
            at_step.send(key, tensor(worker, self.bytes, self.version(number, is_child)).await)
        };
        for number in 0..self.count.min(AHEAD) {
            send(number).await?;
        }
        let receive = worker.key(other, own, "value")?;
        // Several are on their way at any time, in order.
        let receives = (0..self.count).map(|_| at_step.recv(&receive).into_future());
        let mut received = stream::iter(receives).buffered(OUTSTANDING).zip(stream::iter(0..));
        let mut sent = Ok(());
        while let Some((got, number)) = received.next().await {
            let (got, version) = (got?, self.version(number, !is_child));
            assert!(
                got.bytes().len() == self.bytes && is_version(got.bytes(), version),
                "{self:?}: wrong bytes"
            );
            // Where no more can be sent, no more is received, and the error of a receive has the reason.
            if sent.is_ok() && number + AHEAD < self.count {
                sent = send(number + AHEAD).await;
            }
        }
        sent
    }
}

/// What workers of a test may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fabrics {
    Verbs,
    /// Tcp where verbs can't be used.
    VerbsThenTcp,
}

impl Fabrics {
    fn worker(self, name: &str, end: End) -> WorkerBuilder {
        let builder = match self {
            Self::Verbs => Worker::builder(name).require(FabricKind::VERBS),
            Self::VerbsThenTcp => Worker::builder(name).fabrics([FabricKind::VERBS, FabricKind::TCP]),
        };
        let builder = builder.rdma(|rdma| *rdma = device_at(end)).validation(Validation::Xxh3);
        builder.timeout(LIMIT).liveness(LIVENESS).memory(|memory| memory.block_bytes = 1 << 20)
    }
}

/// In the child: does what the parent's lines ask for, and reports how each exchange ended.
pub(crate) async fn child(words: Vec<String>) {
    let fabrics = if words[0] == "tcp" { Fabrics::VerbsThenTcp } else { Fabrics::Verbs };
    let worker = fabrics.worker(CHILD, End::Right).start().await.unwrap();
    say(worker.address());
    let mut lines = parents_lines();
    let parent = lines.recv().await.unwrap();
    worker.peer_at(&parent).await.unwrap();
    let mut former = None;
    while let Some(line) = lines.recv().await {
        let words: Vec<i64> = line.split(' ').map(|word| word.parse().unwrap()).collect();
        let exchange = Exchange { step: words[0], bytes: words[1] as usize, count: words[2] as u64 };
        // The parent has done its half of the one before.
        former.replace(exchange.step).into_iter().for_each(|former| worker.cleanup(former));
        match exchange.run(&worker, true).await {
            Ok(()) => say("right"),
            Err(error) => say(&format!("{} {error}", name_of(&error))),
        }
    }
}

/// The kind of an error, for the other process.
pub(crate) fn name_of(error: &WorkerError) -> &'static str {
    match error {
        WorkerError::PeerLost { .. } => "PeerLost",
        WorkerError::DeadlineExceeded { .. } => "DeadlineExceeded",
        WorkerError::NoFabric { .. } => "NoFabric",
        WorkerError::Remote { .. } => "Remote",
        _ => "other",
    }
}

/// The parent's end.
pub(crate) struct Traffic {
    pub(crate) worker: Worker,
    pub(crate) peer: Peer,
    pub(crate) child: Other,
    pub(crate) runtime: Arc<dyn Runtime>,
}

impl Traffic {
    /// Two workers that are connected. `test` is the caller's own name, which the child runs too.
    pub(crate) async fn start(test: &str, runtime: Arc<dyn Runtime>) -> Self {
        Self::start_on(Fabrics::Verbs, test, runtime).await
    }

    pub(crate) async fn start_on(fabrics: Fabrics, test: &str, runtime: Arc<dyn Runtime>) -> Self {
        let worker = fabrics.worker(PARENT, End::Left).start().await.unwrap();
        let role = if fabrics == Fabrics::VerbsThenTcp { "tcp" } else { "verbs" };
        let mut child = Other::start(test, role);
        let peer = worker.peer_at(&child.hear().await).await.unwrap();
        child.tell(worker.address());
        let mut traffic = Self { worker, peer, child, runtime };
        traffic.is_right(Exchange { step: 0, bytes: 10_000, count: 2 }).await;
        traffic
    }

    /// How an exchange ended here, and what the other process reports of its half.
    pub(crate) async fn exchange(&mut self, exchange: Exchange) -> (Result<(), WorkerError>, String) {
        let Exchange { step: id, bytes, count } = exchange;
        self.child.tell(&format!("{id} {bytes} {count}"));
        let both = join(exchange.run(&self.worker, false), self.child.hear());
        let ended = step("an exchange", both).await;
        self.worker.cleanup(id);
        ended
    }

    /// An exchange over verbs, of which nothing may be lost.
    pub(crate) async fn is_right(&mut self, exchange: Exchange) {
        self.is_right_over(FabricKind::VERBS, exchange).await;
    }

    pub(crate) async fn is_right_over(&mut self, kind: FabricKind, exchange: Exchange) {
        let (here, there) = self.exchange(exchange).await;
        here.unwrap_or_else(|error| panic!("{exchange:?}: {error}"));
        assert_eq!(there, "right", "{exchange:?}");
        let info = self.info();
        assert_eq!(info.transport, Some(kind), "{:?}", info.not_used);
    }

    pub(crate) fn info(&self) -> PeerInfo {
        info(&self.worker, &self.peer)
    }

    /// Orderly: no memory stays granted.
    pub(crate) async fn end(self) {
        let Self { worker, child, runtime, .. } = self;
        let back = async {
            while worker.receive_memory().used_bytes > 0 {
                runtime.sleep(Duration::from_millis(1)).await;
            }
        };
        step("the return of the receive memory", back).await;
        assert_eq!(worker.receive_memory().leaked_bytes, 0);
        child.kill();
        worker.shutdown().await;
    }
}
