//! Versions of published tensors, and fetches that wait for them, by whole workers on any fabric.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test support: a failed step is a failed test
#![allow(unreachable_pub)] // each test binary compiles this as its own module

use std::{pin::pin, task::Poll, time::Duration};

use futures::{
    future::{join, try_join_all},
    poll,
};
use tensorwire_protocol::{Code, DataType};
use tensorwire_rendezvous::{Peer, Sharing, Tensor, Version, Worker, WorkerError};

pub const SERVER: &str = "/job:ps/replica:0/task:0";
pub const CLIENT: &str = "/job:worker/replica:0/task:0";

/// Receives that may be outstanding at once.
pub const REQUESTS: u32 = 8;

/// A server and a client that knows it.
pub struct Two {
    pub server: Worker,
    pub client: Worker,
    pub peer: Peer,
}

/// `length` numbers, each `number`.
fn filled(worker: &Worker, number: u64, length: usize) -> Tensor {
    Tensor::from_values(worker.pool(), &[length as u64], &vec![number as u32; length]).unwrap()
}

fn assert_filled(tensor: &Tensor, number: u64, length: usize) {
    assert_eq!(tensor.values::<u32>().unwrap(), vec![number as u32; length]);
}

fn code(error: &WorkerError) -> Option<Code> {
    match error {
        WorkerError::Remote { status, .. } => Some(status.code),
        _ => None,
    }
}

impl Two {
    fn publish(&self, name: &str, number: u64, length: usize) -> Version {
        self.server.publish(name, filled(&self.server, number, length)).unwrap()
    }

    pub async fn every_case(&self) {
        self.a_version_is_that_of_what_comes().await;
        self.what_is_replaced_meanwhile_keeps_its_version().await;
        self.a_fetch_waits_for_the_first_and_for_newer_versions().await;
        self.waits_end().await;
        self.waits_that_are_given_up_leave_nothing().await;
    }

    async fn a_version_is_that_of_what_comes(&self) {
        let Self { client, peer, .. } = self;
        // Metadata unknown, known, too large for a message, empty, known again.
        for (number, length) in [(1, 3), (2, 3), (3, 5000), (4, 5000), (5, 0), (6, 5000), (7, 3)] {
            let version = self.publish("t", number, length);
            for sharing in [Sharing::Copy, Sharing::View] {
                let fetched = peer.fetch("t").sharing(sharing).versioned().await.unwrap();
                assert_eq!(fetched.version, version);
                assert_filled(&fetched.tensor, number, length);
            }
            let buffer = client.receive_pool().alloc(20_000).await.unwrap();
            let filled = peer.fetch("t").into_buffer(buffer).dtype(DataType::U32).versioned().await.unwrap();
            assert_eq!((filled.version, filled.bytes().len()), (Some(version), length * 4));
            let plain = client.receive_pool().alloc(20_000).await.unwrap();
            let plain = peer.fetch("t").into_buffer(plain).dtype(DataType::U32).await.unwrap();
            assert_eq!((plain.version, plain.bytes().len()), (None, length * 4));
            let other = self.publish("other", number, 3);
            assert_eq!(other.number(), version.number() + 1);
            let many = peer.fetch_many(["t", "other", "t"]).versioned().await.unwrap();
            assert_eq!(many.iter().map(|one| one.version).collect::<Vec<_>>(), [version, other, version]);
            let listed = peer.list().await.unwrap();
            let listed: Vec<_> = listed.iter().map(|entry| (entry.name.as_str(), entry.version)).collect();
            assert_eq!(listed, [("other", other), ("t", version)]);
            assert_eq!(version.incarnation(), self.server.incarnation());
        }
        let unknown = peer.fetch("nothing").versioned().await.unwrap_err();
        assert_eq!(code(&unknown), Some(Code::NotFound), "{unknown}");
    }

    /// Versions are published while others are fetched: content and version number of each fetch belong together.
    async fn what_is_replaced_meanwhile_keeps_its_version(&self) {
        let first = self.publish("busy", 0, 3).number();
        let publishing = async {
            for number in 1..40 {
                let length = [3, 5000, 0, 40][(number % 4) as usize];
                let version = self.publish("busy", number, length);
                assert_eq!(version.number(), first + number);
                drop(self.peer.fetch("other").await.unwrap());
            }
        };
        let fetching = async {
            let mut last = first;
            while last < first + 39 {
                let fetched = self.peer.fetch("busy").versioned().await.unwrap();
                let number = fetched.version.number();
                assert!(number >= last, "{number} after {last}");
                let length = fetched.tensor.metadata().shape.dimensions()[0] as usize;
                assert_filled(&fetched.tensor, number - first, length);
                last = number;
            }
        };
        join(publishing, fetching).await;
    }

    async fn a_fetch_waits_for_the_first_and_for_newer_versions(&self) {
        let Self { server, client, peer } = self;
        let publish = async |number| {
            // The wait is there by then: what comes after it on the connection is answered.
            assert!(peer.fetch("never").await.is_err());
            self.publish("late", number, 10)
        };
        let (fetched, version) = join(peer.fetch("late").wait().versioned().into_future(), publish(1)).await;
        let mut latest = fetched.unwrap();
        assert_eq!(latest.version, version);
        for number in 2..5 {
            // What is newer already is there at once, and the newest of it.
            let (fetched, version) = join(
                peer.fetch("late").versioned().newer_than(latest.version).into_future(),
                publish(number),
            )
            .await;
            latest = fetched.unwrap();
            assert_eq!(latest.version, version);
            assert_filled(&latest.tensor, number, 10);
        }
        let before = latest.version;
        let (_, newest) = (self.publish("late", 5, 10), self.publish("late", 6, 10));
        let fetched = peer.fetch("late").newer_than(before).versioned().await.unwrap();
        assert_eq!(fetched.version, newest);
        // Any version is newer than one of another life.
        let buffer = client.receive_pool().alloc(40).await.unwrap();
        let own = client.publish("own", filled(client, 1, 1)).unwrap();
        let filled =
            peer.fetch("late").into_buffer(buffer).dtype(DataType::U32).newer_than(own).await.unwrap();
        assert_eq!(filled.version, Some(newest));
        // Many waits for one publication, and one wait for many.
        let many =
            try_join_all((0..REQUESTS - 1).map(|_| peer.fetch("late").newer_than(newest).into_future()));
        let (many, _) = join(many, publish(7)).await;
        many.unwrap().iter().for_each(|tensor| assert_filled(tensor, 7, 10));
        assert!(server.withdraw("late"));
        let names = ["late", "later"];
        let both = async {
            publish(8).await;
            self.publish("later", 9, 10);
        };
        let (all, ()) = join(peer.fetch_many(names).wait().into_future(), both).await;
        let all = all.unwrap();
        assert_filled(&all[0], 8, 10);
        assert_filled(&all[1], 9, 10);
    }

    async fn waits_end(&self) {
        let Self { server, peer, .. } = self;
        let version = self.publish("old", 1, 10);
        let withdraw = async {
            assert!(peer.fetch("never").await.is_err());
            assert!(server.withdraw("old"));
        };
        let (fetched, ()) = join(peer.fetch("old").newer_than(version).into_future(), withdraw).await;
        let error = fetched.unwrap_err();
        assert_eq!(code(&error), Some(Code::NotFound), "{error}");
        assert!(error.to_string().contains("withdrawn"), "{error}");
        let limit = Duration::from_millis(30);
        let ended = peer.fetch("never").wait().timeout(limit).await.unwrap_err();
        assert!(matches!(ended, WorkerError::DeadlineExceeded { .. }), "{ended}");
    }

    /// More than may be outstanding, one after the other.
    async fn waits_that_are_given_up_leave_nothing(&self) {
        let Self { peer, .. } = self;
        for _ in 0..3 * REQUESTS {
            let mut waiting = pin!(peer.fetch("never").wait().into_future());
            assert!(matches!(poll!(&mut waiting), Poll::Pending));
            assert!(peer.fetch("never").await.is_err());
            assert!(matches!(poll!(&mut waiting), Poll::Pending));
        }
        self.publish("after", 1, 10);
        assert_filled(&peer.fetch("after").await.unwrap(), 1, 10);
    }

    /// A wait ends when the server does.
    pub async fn the_end(self) {
        let Self { server, client, peer } = self;
        let end = async {
            assert!(peer.fetch("still never").await.is_err());
            server.shutdown().await;
        };
        let (fetched, ()) = join(peer.fetch("still never").wait().into_future(), end).await;
        let error = fetched.unwrap_err();
        let told = matches!(&error, WorkerError::PeerLost { .. }) || code(&error) == Some(Code::Unavailable);
        assert!(told, "{error}");
        client.shutdown().await;
    }
}
