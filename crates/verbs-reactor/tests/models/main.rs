//! What several threads or processes do to shared state, under every interleaving that loom finds: the fabrics' own source,
//! compiled over loom's locks and atomics.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a failed test
#![allow(dead_code, unreachable_pub)] // the sources are compiled whole

/// What the sources take from here in place of the crate's own.
mod sync {
    pub(crate) use loom::sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering, fence},
    };
}

pub(crate) use tensorwire_verbs_reactor::{FabricError, WorkRequest};

#[path = "../../../fabric-shm/src/chunks.rs"]
mod chunks;
#[path = "../../src/slot.rs"]
mod slot;
#[path = "../../src/verbs/submissions.rs"]
mod submissions;
#[path = "../../../fabric-shm/src/words.rs"]
mod words;

mod shm;
mod slots;
mod verbs;
