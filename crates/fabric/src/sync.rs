//! The locks of what is model-checked: `tests/models` compiles the same source over loom's.

pub(crate) use std::sync::{
    MutexGuard,
    atomic::{AtomicU8, AtomicU64, Ordering, fence},
};

pub(crate) use futures::task::AtomicWaker;
pub(crate) use tensorwire_testpoints::sync::Mutex;
