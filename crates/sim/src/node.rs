//! A simulated process.

use std::{fmt, future::poll_fn, sync::Arc, task::Poll, time::Duration};

use futures::channel::oneshot;
use tensorwire_fabric::{BoxFuture, FabricKind};
use tensorwire_memory::{MemoryError, MemoryObserver, Pool, PoolConfig};

use crate::{
    Fault, OperationResult, SimControl, SimFabric, SimRuntime, Violation,
    ids::{NodeId, OperationId},
    observer::NodeObserver,
    shared::Shared,
    state::OpenOperation,
    trace::Event,
};

/// One incarnation of one process: pass its parts to the code that runs in it. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Node {
    shared: Arc<Shared>,
    id: NodeId,
    address: Arc<str>,
}

impl Node {
    pub(crate) fn new(shared: Arc<Shared>, id: NodeId, address: &str) -> Self {
        Self { shared, id, address: address.into() }
    }

    /// Its number.
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// Its control-plane address, the same after restarts.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Its runtime.
    pub fn runtime(&self) -> Arc<SimRuntime> {
        Arc::new(SimRuntime::new(self.shared.clone(), self.id))
    }

    /// Its fabric.
    pub fn fabric(&self) -> Arc<SimFabric> {
        self.fabric_as(FabricKind::SIM)
    }

    /// A fabric of the node that simulates one of `kind`, on a device of its own: with two kinds there are two paths to a
    /// peer.
    pub fn fabric_as(&self, kind: FabricKind) -> Arc<SimFabric> {
        self.fabric_on_host(kind, 0)
    }

    /// As [`fabric_as`](Self::fabric_as), but it reaches only those of the same host.
    pub fn fabric_on_host(&self, kind: FabricKind, host: usize) -> Arc<SimFabric> {
        Arc::new(SimFabric::new(self.shared.clone(), self.id, kind, host))
    }

    /// Its control plane. Listens from the first call on; use one per node.
    pub fn control_plane(&self) -> Arc<SimControl> {
        Arc::new(SimControl::new(self.shared.clone(), self.id, &self.address))
    }

    /// The observer that every pool of the node must have.
    pub fn observer(&self) -> Arc<dyn MemoryObserver> {
        Arc::new(NodeObserver::new(self.shared.clone(), self.id))
    }

    /// A pool of the node, watched by the owner map.
    ///
    /// # Errors
    /// Those of [`Pool::new`].
    #[allow(clippy::needless_pass_by_value)] // as `Pool::new`
    pub fn pool(&self, config: PoolConfig) -> Result<Pool, MemoryError> {
        Pool::new(PoolConfig { observer: Some(self.observer()), ..config })
    }

    /// Runs `task` in this process until it ends or the process dies.
    pub fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.shared.spawn(self.id, name, Box::pin(task));
    }

    /// As [`spawn`](Self::spawn), and returns the task's result: `None` if the process died before it ended.
    pub fn run<T: Send + 'static>(
        &self,
        name: &'static str,
        task: impl Future<Output = T> + Send + 'static,
    ) -> BoxFuture<'static, Option<T>> {
        let (give, answer) = oneshot::channel();
        // The caller may not want the result any more.
        self.spawn(name, async move { drop(give.send(task.await)) });
        Box::pin(async move { answer.await.ok() })
    }

    /// Waits for the process's death.
    pub async fn crashed(&self) {
        poll_fn(|context| {
            let mut state = self.shared.state();
            match state.nodes.get_mut(self.id.index()) {
                Some(node) if node.alive => {
                    node.mourners.push(context.waker().clone());
                    Poll::Pending
                }
                _ => Poll::Ready(()),
            }
        })
        .await;
    }

    /// Kills the process.
    pub fn crash(&self) {
        self.shared.inject(Fault::Crash(self.id));
    }

    /// Whether the process lives.
    pub fn is_alive(&self) -> bool {
        self.shared.state().is_alive(self.id)
    }

    /// Enters an operation of this node into the ledger, with the address of the peer it depends on. It must be
    /// [ended](Operation::end) exactly once, unless the node dies.
    pub fn begin(&self, peer: Option<&str>, what: impl Into<String>) -> Operation {
        let operation = OpenOperation {
            node: self.id,
            address: self.address().to_owned(),
            peer: peer.map(str::to_owned),
            what: what.into(),
            began: self.shared.now(),
            due: None,
        };
        let id = self.shared.ledger().begin(operation);
        self.shared.record(Event::Began { operation: id, node: self.id });
        Operation { shared: self.shared.clone(), node: self.id, id, ended: false }
    }
}

/// Control messages that may precede a peer's answer, each with a latency of its own: a process that goes on after a stop first
/// sends everything that it owes, and its messages about a connection take effect after that.
const IN_LINE: u32 = 8;

/// An operation of the ledger under way. Dropping it without [`end`](Self::end) breaks S3, unless its node died.
#[must_use = "an operation must be ended"]
pub struct Operation {
    shared: Arc<Shared>,
    node: NodeId,
    id: OperationId,
    ended: bool,
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Operation").field(&self.id).finish()
    }
}

impl Operation {
    /// The operation ended.
    pub fn end(self, result: &OperationResult) {
        self.end_with(result, None);
    }

    /// Marks it as part of an operation that began at `began`: a fault that explains the failure of that operation explains
    /// this failure too.
    pub fn part_of(self, began: Duration) -> Self {
        self.shared.ledger().part_of(self.id, began);
        self
    }

    /// The operation ended because of `error`, which reports show.
    pub fn end_because(self, result: &OperationResult, error: &dyn fmt::Display) {
        self.end_with(result, Some(error.to_string()));
    }

    fn end_with(mut self, result: &OperationResult, why: Option<String>) {
        self.ended = true;
        self.shared.record(Event::Ended { operation: self.id, result: result.name() });
        let swarm = &self.shared.swarm;
        let slack = swarm.detection_max * 2 + swarm.stall_max + swarm.control_latency_max * IN_LINE;
        let result = self.shared.ledger().end(self.id, result, why, slack);
        self.shared.check(result);
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        if !self.ended && self.shared.state().is_alive(self.node) {
            let text = format!(
                "{} was dropped before it was ended; {}",
                self.id,
                self.shared.ledger().describe_open()
            );
            self.shared.violated(Violation::Operation(text));
        }
    }
}
