//! A process that gets versions of a set, each on an order of the publisher's process.

use std::fmt;

use futures::future::try_join_all;
use tensorwire::{
    Sharing, Worker,
    sets::{Follow, Policy, Snapshot},
};
use tensorwire_benches::{grpc::Puller, process::Process};
use tokio::sync::mpsc;

use crate::{Arguments, Fabric, Failure};

/// Environment variable of a follower: the addresses, the number and bytes of the tensors, and the bytes of its memory.
pub(crate) const FOLLOW: &str = "TENSORWIRE_BENCH_FOLLOW";

/// Calls over gRPC at once.
const CALLS: usize = 8;

/// How a follower gets a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// It follows the set.
    Follow,
    /// It fetches all of the set: by views where that is possible.
    Fetch,
    /// It fetches a copy of all of the set.
    Copy,
    /// It pulls the tensors from a service written with tonic.
    Tonic,
}

impl Order {
    const ALL: [(Self, &'static str); 4] =
        [(Self::Follow, "follow"), (Self::Fetch, "fetch"), (Self::Copy, "copy"), (Self::Tonic, "tonic")];

    fn name(self) -> &'static str {
        Self::ALL.into_iter().find(|(order, _)| *order == self).map_or("", |(_, name)| name)
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The publisher's side of a follower. Dropping it ends the process.
#[derive(Debug)]
pub(crate) struct Follower {
    process: Process,
}

impl Follower {
    pub(crate) fn start(address: &str, tonic: &str, arguments: &Arguments) -> Result<Self, Failure> {
        let tensor_bytes = arguments.tensor_bytes();
        let given = format!(
            "{address} {tonic} {} {tensor_bytes} {} {}",
            arguments.tensors,
            arguments.mebibytes << 20,
            arguments.fabric.kind()
        );
        Ok(Self { process: Process::start(FOLLOW, &given)? })
    }

    /// Tells the follower to get `version`.
    pub(crate) fn tell(&mut self, order: Order, version: u64) -> Result<(), Failure> {
        self.process.tell(&format!("{order} {version}"))
    }

    /// Waits until the follower waits for a version, or has one. Returns the bytes that it moved.
    pub(crate) fn hear(&mut self) -> Result<u64, Failure> {
        let line = self.process.hear()?;
        Ok(line.parse().map_err(|_| format!("a follower says `{line}`"))?)
    }
}

/// The follower's own side.
struct Own {
    worker: Worker,
    address: String,
    stream: Follow,
    /// The version that the stream returned last.
    held: u64,
    /// The version that was fetched last. A service keeps it until the next one is there.
    fetched: Option<Snapshot>,
    tonic: Puller,
    tensors: usize,
    tensor_bytes: usize,
}

/// The child's main function. It ends when the publisher's process closes its stdin.
pub(crate) async fn run(given: &str) -> Result<(), Failure> {
    let mut own = Own::start(given).await?;
    let mut orders = lines();
    while let Some(line) = orders.recv().await {
        let (name, version) = line.split_once(' ').ok_or("an order without a version")?;
        let order = Order::ALL.into_iter().find(|(_, known)| *known == name).ok_or("an unknown order")?.0;
        // A request for the next version is under way soon after this line.
        println!("0");
        println!("{}", own.get(order, version.parse()?).await?);
    }
    own.worker.shutdown().await;
    Ok(())
}

/// The orders of the parent.
pub(crate) fn lines() -> mpsc::Receiver<String> {
    let (give, lines) = mpsc::channel(1);
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if give.blocking_send(line).is_err() {
                return;
            }
        }
    });
    lines
}

impl Own {
    async fn start(given: &str) -> Result<Self, Failure> {
        let [address, tonic, tensors, tensor_bytes, bytes, fabric] = given
            .split(' ')
            .collect::<Vec<_>>()
            .try_into()
            .map_err(|_| "not as the parent starts a follower")?;
        let bytes: usize = bytes.parse()?;
        let kind = Fabric::kind_named(fabric)?;
        let worker = Worker::client()
            .require(kind)
            .memory(|memory| memory.receive_bytes = 5 * bytes as u64)
            .start()
            .await?;
        let peer = worker.peer_at(address).await?;
        let stream = peer.set("weights").follow(Policy::Latest);
        let tonic = Puller::connect(tonic).await?;
        let (tensors, tensor_bytes) = (tensors.parse()?, tensor_bytes.parse()?);
        Ok(Self {
            worker,
            address: address.to_owned(),
            stream,
            held: 0,
            fetched: None,
            tonic,
            tensors,
            tensor_bytes,
        })
    }

    async fn get(&mut self, order: Order, version: u64) -> Result<u64, Failure> {
        match order {
            Order::Follow => {
                let mut bytes = 0;
                while self.held < version {
                    let staged = self.stream.next().await.ok_or("the stream is over")??;
                    bytes += staged.bytes_moved();
                    self.held = staged.apply().version();
                }
                Ok(bytes)
            }
            Order::Fetch => self.fetch(Sharing::View).await,
            Order::Copy => self.fetch(Sharing::Copy).await,
            Order::Tonic => {
                let calls = (0..CALLS).map(|at| {
                    let (mut tonic, bytes) = (self.tonic.clone(), self.tensor_bytes);
                    let count = (self.tensors + CALLS - 1 - at) / CALLS;
                    async move {
                        let mut pulled = Vec::with_capacity(count);
                        for _ in 0..count {
                            pulled.push(tonic.pull(bytes).await?);
                        }
                        Ok::<_, Failure>(pulled)
                    }
                });
                let pulled = try_join_all(calls).await?;
                Ok(pulled.iter().flatten().map(|content| content.len() as u64).sum())
            }
        }
    }

    async fn fetch(&mut self, sharing: Sharing) -> Result<u64, Failure> {
        let peer = self.worker.peer_at(&self.address).await?;
        let before = self.worker.peers().iter().map(|peer| peer.fabric.bytes_received).sum::<u64>();
        let snapshot = peer.set("weights").sharing(sharing).fetch().await?;
        let after = self.worker.peers().iter().map(|peer| peer.fabric.bytes_received).sum::<u64>();
        if snapshot.len() != self.tensors {
            return Err("a version without all tensors".into());
        }
        self.fetched = Some(snapshot);
        Ok(after - before)
    }
}
