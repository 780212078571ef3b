//! The locks of model-checked code: `tests/models` compiles the same source with loom's locks.

pub(crate) use std::sync::{
    MutexGuard,
    atomic::{AtomicU8, AtomicU64, Ordering, fence},
};

pub(crate) use futures::task::AtomicWaker;
pub(crate) use tensorwire_testpoints::sync::Mutex;
