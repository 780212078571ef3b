//! The peers that join, as a stream.

use std::collections::{BTreeMap, BTreeSet};

use futures::stream::{self, Stream, StreamExt as _};

use crate::{
    session::{known_peer::KnownPeer, node::Node},
    worker::{Worker, peer::Peer},
};

impl Worker {
    /// The peers that are connected, and those that connect later, on either side's initiative: each [incarnation](Peer::incarnation) of each peer once.
    /// One that has gone before the stream is polled is left out. The stream ends when this worker shuts down. It keeps the worker running.
    ///
    /// ```
    /// use futures::StreamExt;
    /// use tensorwire::Worker;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tensorwire::WorkerError> {
    /// let service = Worker::builder("service").start().await?;
    /// let mut joining = service.joining();
    /// let client = Worker::client().start().await?;
    /// client.peer_at(service.address()).await?;
    /// let joined = joining.next().await;
    /// assert_eq!(joined.map(|peer| peer.name().to_owned()), Some(client.name().to_owned()));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Cancel safety
    /// A peer is taken out of the stream by the poll that returns it.
    pub fn joining(&self) -> impl Stream<Item = Peer> + Send + Unpin + use<> {
        let next = |(worker, mut seen): (Self, Seen)| async move {
            let joined = worker.meets(|node| seen.next(node)).await?;
            Some((Peer::new(&worker, joined), (worker, seen)))
        };
        stream::unfold((self.clone(), Seen::default()), next).fuse().boxed()
    }
}

/// The incarnations that a stream has returned, by the names of their peers.
#[derive(Debug, Default)]
struct Seen(BTreeMap<String, u64>);

impl Seen {
    /// A connected peer that was not returned yet. Forgets peers that the worker has forgotten.
    fn next(&mut self, node: &Node) -> Option<KnownPeer> {
        let known = node.all_peers();
        let names: BTreeSet<&str> = known.iter().map(KnownPeer::name).collect();
        self.0.retain(|name, _| names.contains(&**name));
        known.into_iter().find(|peer| {
            let life = peer.life();
            let is_new = life.is_some() && life != self.0.get(peer.name()).copied();
            if let Some(life) = life.filter(|_| is_new) {
                self.0.insert(peer.name().to_owned(), life);
            }
            is_new
        })
    }
}
