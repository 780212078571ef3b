//! Operations of several threads or processes on shared state, under every interleaving that loom finds: the fabrics'
//! own source, compiled with loom's locks and atomics.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a failed test
#![allow(dead_code, unreachable_pub)] // the sources are compiled whole

/// Replaces the crate's own module of this name for the included sources.
mod sync {
    use std::task::Waker;

    pub(crate) use loom::sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, fence},
    };

    pub(crate) use crate::alarm_source::Alarm;

    /// Replaces `futures::task::AtomicWaker` by a lock.
    pub(crate) struct AtomicWaker(Mutex<Option<Waker>>);

    impl AtomicWaker {
        pub(crate) fn new() -> Self {
            Self(Mutex::new(None))
        }

        pub(crate) fn register(&self, waker: &Waker) {
            let before = self.0.lock().unwrap().replace(waker.clone());
            drop(before);
        }

        pub(crate) fn take(&self) -> Option<Waker> {
            self.0.lock().unwrap().take()
        }

        pub(crate) fn wake(&self) {
            self.take().into_iter().for_each(Waker::wake);
        }
    }
}

/// Replaces the pages of `fabric-shm`: each side has the words of a mailbox of two boxes.
mod ring {
    use loom::sync::atomic::AtomicU64;

    const WORDS: usize = 64;

    /// What a side writes.
    #[derive(Debug, Clone)]
    pub(crate) struct OwnPage(std::sync::Arc<[AtomicU64]>);

    /// The same words, for the other side.
    #[derive(Debug)]
    pub(crate) struct PeerPage(pub(crate) OwnPage);

    impl OwnPage {
        pub(crate) fn new() -> Self {
            Self((0..WORDS).map(|_| AtomicU64::new(0)).collect())
        }

        pub(crate) fn board(&self, at: usize) -> &AtomicU64 {
            &self.0[at]
        }
    }

    impl PeerPage {
        pub(crate) fn board(&self, at: usize) -> &AtomicU64 {
            self.0.board(at)
        }
    }
}

pub(crate) use tensorwire_fabric::{FabricError, WorkRequest};

#[path = "../../src/alarm.rs"]
mod alarm_source;
#[path = "../../src/arrival_queue.rs"]
mod arrival_queue;
#[path = "../../../fabric-shm/src/board.rs"]
mod board;
#[path = "../../../fabric-shm/src/chunks.rs"]
mod chunks;
#[path = "../../../rendezvous/src/connection/entries.rs"]
mod entries;
#[path = "../../../rendezvous/src/connection/mailbox.rs"]
mod mailbox;
#[path = "../../src/noted.rs"]
mod noted;
#[path = "../../../fabric-shm/src/sequence.rs"]
mod sequence;
#[path = "../../src/slot.rs"]
mod slot;
#[path = "../../../verbs-reactor/src/submissions.rs"]
mod submissions;
#[path = "../../../fabric-shm/src/tail.rs"]
mod tail;
#[path = "../../../fabric-shm/src/words.rs"]
mod words;

mod alarm;
mod arrivals;
mod catalogue;
mod notes;
mod regions;
mod shm;
mod slots;
mod verbs;

/// Every interleaving with at most three switches that a thread did not ask for.
fn model(threads: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(threads);
}

fn word() -> loom::sync::atomic::AtomicU64 {
    loom::sync::atomic::AtomicU64::new(0)
}
