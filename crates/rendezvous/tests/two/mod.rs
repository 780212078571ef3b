//! Two workers of this process, of which one is the other's peer.

#![allow(unreachable_pub)] // each test binary compiles this as its own module

use tensorwire_rendezvous::{Peer, Worker, WorkerBuilder};

pub struct Two {
    pub server: Worker,
    pub client: Worker,
    /// The server, as the client has it.
    pub peer: Peer,
}

impl Two {
    /// Starts both as `builder` makes them by their names.
    pub async fn of(builder: impl Fn(&str) -> WorkerBuilder) -> Self {
        let (server, client) =
            (builder("server").start().await.unwrap(), builder("client").start().await.unwrap());
        let peer = client.peer_at(server.address()).await.unwrap();
        Self { server, client, peer }
    }

    /// Messages that the client has sent and what the server has written.
    pub fn messages(&self) -> (u64, u64) {
        let of = |worker: &Worker| worker.peers().iter().map(|peer| peer.fabric.operations).sum();
        (of(&self.client), of(&self.server))
    }

    pub async fn end(self) {
        self.client.shutdown().await;
        self.server.shutdown().await;
    }
}
