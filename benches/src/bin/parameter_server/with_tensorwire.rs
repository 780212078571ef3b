//! The server and the worker on tensorwire: each publishes its tensors under constant names, and requests the tensors
//! that the other publishes next.

use std::time::Duration;

use tensorwire::{DataType, FabricKind, Peer, Sharing, Tensor, Version, Worker, WorkerBuilder, WorkerError};

use crate::model::{Model, descend};

/// A connection is idle while the other ways are measured.
const PATIENCE: Duration = Duration::from_secs(3_600);

/// A way of tensorwire: the settings of both sides.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Way {
    pub(crate) name: &'static str,
    fabric: FabricKind,
    sharing: Sharing,
}

/// All ways of tensorwire.
pub(crate) const WAYS: [Way; 3] = [
    Way { name: "shm", fabric: FabricKind::SHM, sharing: Sharing::Copy },
    Way { name: "shm, views", fabric: FabricKind::SHM, sharing: Sharing::View },
    Way { name: "tcp", fabric: FabricKind::TCP, sharing: Sharing::Copy },
];

impl Way {
    fn builder(self, job: &str) -> WorkerBuilder {
        let builder = Worker::builder(job).require(self.fabric);
        builder.sharing(self.sharing).timeout(PATIENCE)
    }
}

/// The tensors that one side publishes: the parameters, or a gradient.
struct Published {
    worker: Worker,
    names: Vec<String>,
    tensors: Vec<Tensor>,
}

impl Published {
    /// A tensor for each of the model's, all of whose floats are `value`. Nothing is published yet.
    async fn start(way: Way, job: &str, model: Model, value: f32) -> Result<Self, WorkerError> {
        let worker = way.builder(job).start().await?;
        let tensor = |bytes: Vec<u8>| {
            let shape = [(bytes.len() / size_of::<f32>()) as u64];
            Tensor::from_bytes(worker.pool(), DataType::F32, &shape, &bytes)
        };
        let tensors = model.filled(value).map(tensor).collect::<Result<_, _>>()?;
        Ok(Self { worker, names: model.names(), tensors })
    }

    fn publish(&self) -> Result<(), WorkerError> {
        for (name, tensor) in self.names.iter().zip(&self.tensors) {
            self.worker.publish(name, tensor.clone())?;
        }
        Ok(())
    }
}

/// The tensors that the other side publishes.
struct Followed {
    peer: Peer,
    version: Option<Version>,
}

impl Followed {
    fn of(peer: Peer) -> Self {
        Self { peer, version: None }
    }

    /// The next version of all tensors. The requests are already at the peer, which answers them when it publishes.
    async fn next(&mut self, names: &[String]) -> Result<Vec<Tensor>, WorkerError> {
        let fetch = self.peer.fetch_many(names);
        let fetch = match self.version {
            Some(version) => fetch.newer_than(version),
            None => fetch.wait(),
        };
        let fetched = fetch.versioned().await?;
        self.version = fetched.iter().map(|fetched| fetched.version).max_by_key(|version| version.number());
        Ok(fetched.into_iter().map(|fetched| fetched.tensor).collect())
    }
}

/// A server whose first parameters are published.
pub(crate) struct Server {
    parameters: Published,
}

impl Server {
    pub(crate) async fn start(way: Way, model: Model) -> Result<Self, WorkerError> {
        let parameters = Published::start(way, "ps", model, 1.0).await?;
        parameters.publish()?;
        Ok(Self { parameters })
    }

    pub(crate) fn address(&self) -> &str {
        self.parameters.worker.address()
    }

    /// Follows one gradient after the other, until the worker is gone.
    pub(crate) async fn serve(mut self) -> Result<(), WorkerError> {
        let peer = self.parameters.worker.wait_for_peer("worker").await?;
        let mut gradients = Followed::of(peer);
        loop {
            let gradient = gradients.next(&self.parameters.names).await?;
            self.follow(&gradient)?;
            self.parameters.publish()?;
        }
    }

    /// Published tensors do not change, because a peer may be reading them: the next version goes into other memory.
    fn follow(&mut self, gradient: &[Tensor]) -> Result<(), WorkerError> {
        let Published { worker, tensors, .. } = &mut self.parameters;
        for (before, slope) in tensors.iter_mut().zip(gradient) {
            let mut after = worker.pool().try_alloc(before.bytes().len())?;
            descend(&mut after, before.bytes(), slope.bytes());
            *before = Tensor::new(after, DataType::F32, before.shape())?;
        }
        Ok(())
    }
}

/// A worker that is connected.
pub(crate) struct Client {
    gradient: Published,
    server: Followed,
}

impl Client {
    pub(crate) async fn connect(way: Way, model: Model, address: &str) -> Result<Self, WorkerError> {
        let gradient = Published::start(way, "worker", model, 0.5).await?;
        let peer = gradient.worker.peer_at(address).await?;
        Ok(Self { gradient, server: Followed::of(peer) })
    }

    /// Waits for the parameters after the latest gradient.
    pub(crate) async fn pull(&mut self) -> Result<usize, WorkerError> {
        let pulled = self.server.next(&self.gradient.names).await?;
        Ok(pulled.iter().map(|tensor| tensor.bytes().len()).sum())
    }

    pub(crate) fn push(&mut self) -> Result<(), WorkerError> {
        self.gradient.publish()
    }

    pub(crate) async fn shutdown(self) {
        self.gradient.worker.shutdown().await;
    }
}
