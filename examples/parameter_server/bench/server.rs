//! The bench's server: it publishes parameters and receives gradients, over every transport.

use std::{pin::pin, sync::mpsc, thread};

use futures::future::{Either, join, join_all, select, try_join_all};
use tensorwire::{Key, Peer, Tensor, Worker, WorkerError};

use super::{Flag, SERVER, WORKERS, device, grpc, tensors::name, transport::Transport, update::Updated};
use crate::{children::lines, failure::Failure, options::RoleName, report::Report};

/// Serves until the launcher lets go.
pub(crate) async fn run(sizes: &[usize]) -> Result<(), Failure> {
    let mut launcher = lines();
    let mut ends = Vec::new();
    for transport in Transport::ours() {
        ends.push(End::start(transport, sizes).await?);
    }
    start_grpc(sizes)?;
    // The workers have connected when the launcher says so.
    let Some(_) = launcher.recv().await else { return Ok(()) };
    let gone = async { while launcher.recv().await.is_some() {} };
    let serving = try_join_all(ends.iter_mut().map(|end| end.serve()));
    let served = match select(pin!(serving), pin!(gone)).await {
        Either::Left((served, _)) => served.map(drop),
        Either::Right(_) => Ok(()),
    };
    join_all(ends.iter().map(|end| end.worker.shutdown())).await;
    Ok(served?)
}

/// gRPC gets threads of its own, as a service written with tonic has.
fn start_grpc(sizes: &[usize]) -> Result<(), Failure> {
    let sizes = sizes.to_vec();
    let (told, address) = mpsc::channel();
    thread::spawn(move || {
        let served = super::grpc_runtime().map_err(Into::into).and_then(|runtime| {
            // Who waits for the address has gone if it can't be told.
            runtime.block_on(grpc::serve(sizes, move |address| _ = told.send(address)))
        });
        if let Err(error) = served {
            eprintln!("the gRPC server failed: {error}");
        }
    });
    let address = address.recv().map_err(|_| Failure::Grpc("the server did not start".to_owned()))?;
    Report::of("transport", Transport::Grpc).with("address", address).print();
    Ok(())
}

/// The server's end of one transport.
struct End {
    worker: Worker,
    sizes: Vec<usize>,
    /// Of each worker.
    keys: Vec<Keys>,
    updated: Option<Updated>,
}

/// What passes between the server and one worker.
struct Keys {
    gradients: Vec<Key>,
    flag: Key,
    end: Key,
}

impl End {
    async fn start(transport: Transport, sizes: &[usize]) -> Result<Self, WorkerError> {
        let worker = transport.builder(SERVER).start().await?;
        for (index, &size) in sizes.iter().enumerate() {
            publish(&worker, index, &vec![1.0; size])?;
        }
        Report::of("transport", transport).with("address", worker.address()).print();
        let keys = (0..WORKERS).map(|index| Keys::new(&worker, transport, index, sizes.len()));
        Ok(Self { keys: keys.collect::<Result<_, _>>()?, worker, sizes: sizes.to_vec(), updated: None })
    }

    /// One round after the other: receives all workers' gradients, makes the update if that is asked for, and says so.
    async fn serve(&mut self) -> Result<(), WorkerError> {
        for round in 0.. {
            let step = self.worker.step(round);
            let received = self.keys.iter().map(|keys| async {
                let (flag, gradients) = join(step.recv(&keys.flag), step.recv_many(&keys.gradients)).await;
                Ok::<_, WorkerError>((flag?, gradients?))
            });
            let received = try_join_all(received).await?;
            if let [(flag, first), (_, second)] = &received[..]
                && Flag::is_set(flag)?
            {
                self.update(first, second)?;
            }
            for keys in &self.keys {
                step.send(&keys.end, Tensor::from_values(self.worker.pool(), &[], &[round])?)?;
            }
            // The workers have gone on, so they have the answer to their last round.
            self.worker.cleanup(round - 1);
        }
        Ok(())
    }

    fn update(&mut self, first: &[Tensor], second: &[Tensor]) -> Result<(), WorkerError> {
        let updated = self.updated.get_or_insert_with(|| Updated::new(&self.sizes));
        for (index, (one, other)) in first.iter().zip(second).enumerate() {
            publish(&self.worker, index, updated.update(index, [one.bytes(), other.bytes()]))?;
        }
        Ok(())
    }
}

impl Keys {
    fn new(own: &Worker, transport: Transport, worker: usize, tensors: usize) -> Result<Self, WorkerError> {
        let server = device(transport, SERVER);
        let worker = device(transport, RoleName::Worker(worker));
        let gradients = (0..tensors).map(|index| own.key(&worker, &server, &name(index)));
        Ok(Self {
            gradients: gradients.collect::<Result<_, _>>()?,
            flag: own.key(&worker, &server, "flag")?,
            end: own.key(&server, &worker, "end")?,
        })
    }
}

fn publish(worker: &Worker, index: usize, values: &[f32]) -> Result<(), WorkerError> {
    let tensor = Tensor::from_values(worker.pool(), &[values.len() as u64], values)?;
    worker.publish(&name(index), tensor).map(drop)
}

/// A worker's end of one transport that is tensorwire's.
pub(super) struct Client {
    worker: Worker,
    server: Peer,
    keys: Keys,
    names: Vec<String>,
    gradients: Vec<Tensor>,
    round: i64,
}

impl Client {
    /// Connects worker `index` to the server at `address`.
    pub(super) async fn connect(
        transport: Transport,
        address: &str,
        index: usize,
        sizes: &[usize],
    ) -> Result<Self, WorkerError> {
        let worker = transport.builder(RoleName::Worker(index)).start().await?;
        let server = worker.peer_at(address).await?;
        let keys = Keys::new(&worker, transport, index, sizes.len())?;
        let gradient =
            |&size: &usize| Tensor::from_values(worker.pool(), &[size as u64], &vec![0.5f32; size]);
        let gradients = sizes.iter().map(gradient).collect::<Result<_, _>>()?;
        let names = (0..sizes.len()).map(name).collect();
        let client = Self { worker, server, keys, names, gradients, round: 0 };
        // Connects. Only then the server knows of this worker.
        client.pull().await?;
        Ok(client)
    }

    /// Pulls all parameters.
    pub(super) async fn pull(&self) -> Result<Vec<Tensor>, WorkerError> {
        self.worker.fetch_many(&self.server, &self.names).await
    }

    /// Pushes all gradients, and waits until the server has those of all workers.
    pub(super) async fn push(&mut self, update: bool) -> Result<(), WorkerError> {
        let step = self.worker.step(self.round);
        step.send(&self.keys.flag, Flag(update).to_tensor(&self.worker)?)?;
        for (key, gradient) in self.keys.gradients.iter().zip(&self.gradients) {
            step.send(key, gradient.clone())?;
        }
        step.recv(&self.keys.end).await?;
        self.worker.cleanup(self.round);
        self.round += 1;
        Ok(())
    }

    pub(super) async fn shutdown(&self) {
        self.worker.shutdown().await;
    }

    /// The fabric in use.
    pub(super) fn uses(&self) -> String {
        let info = self.worker.peers().into_iter().find(|peer| peer.name == self.server.name());
        info.and_then(|peer| peer.transport).map_or_else(|| "none".to_owned(), |kind| kind.to_string())
    }
}
