//! Who may read a set.

#![allow(clippy::single_range_in_vec_init)] // tensors of one dimension

use tensorwire_fabric::FabricKind;
use tensorwire_protocol::Code;
use tensorwire_rendezvous::{Tensor, Worker, WorkerError, sets::Policy};

use crate::tls::{CLIENT, SERVER, bounded, builder};

const OTHER: &str = "/job:worker/replica:0/task:1";

fn is_denied(error: &WorkerError) -> bool {
    matches!(error, WorkerError::Remote { status, .. } if status.code == Code::PermissionDenied)
}

#[test]
fn e_only_the_readers_of_a_set_read_it() {
    bounded(|| async {
        let start = async |name| builder(name, FabricKind::TCP).start().await.unwrap();
        let (server, reader, other) = (start(SERVER).await, start(CLIENT).await, start(OTHER).await);
        let commit = async |version: u64| {
            let tensor = Tensor::from_values(server.pool(), &[1], &[version]).unwrap();
            server.set("policy").commit(version, [("w", tensor)]).await.unwrap();
        };
        let of = async |worker: &Worker| worker.peer_at(server.address()).await.unwrap().set("policy");
        commit(1).await;
        let (own, others) = (of(&reader).await, of(&other).await);
        assert!(others.fetch_slice("w", &[0..1]).await.is_ok());
        assert_eq!(others.fetch().await.unwrap().version(), 1, "every member reads a set without readers");
        let mut waiting = others.follow(Policy::Latest);
        assert_eq!(waiting.next().await.unwrap().unwrap().version(), 1);
        server.set("policy").readers([CLIENT]).unwrap();
        assert!(is_denied(&others.fetch().await.unwrap_err()));
        assert!(is_denied(&others.fetch_slice("w", &[0..1]).await.unwrap_err()));
        assert_eq!(own.fetch_slice("w", &[0..1]).await.unwrap().0, 1);
        assert!(
            others.peer().list_sets().await.unwrap().is_empty()
                && own.peer().list_sets().await.unwrap().len() == 1
        );
        assert!(
            others.peer().report().await.unwrap().sets.is_empty()
                && own.peer().report().await.unwrap().sets.len() == 1
        );
        assert!(is_denied(&waiting.next().await.unwrap().unwrap_err()));
        assert!(is_denied(&others.follow(Policy::Latest).next().await.unwrap().unwrap_err()));
        commit(2).await;
        assert_eq!(own.fetch().await.unwrap().get("w").unwrap().values::<u64>().unwrap(), [2]);
        assert_eq!(own.follow(Policy::Every).next().await.unwrap().unwrap().version(), 2);
        // A set that no one has committed yet has readers, too.
        server.set("next").readers([CLIENT]).unwrap();
        let next = other.peer_at(server.address()).await.unwrap().set("next");
        assert!(is_denied(&next.fetch().await.unwrap_err()));
        for worker in [reader, other, server] {
            worker.shutdown().await;
        }
    });
}
