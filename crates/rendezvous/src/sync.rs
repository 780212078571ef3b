//! The locks and atomics of what is model-checked: `tests/models` of `fabric` compiles the same source over loom's.

pub(crate) use std::sync::{
    MutexGuard,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

pub(crate) use tensorwire_fabric::Alarm;
pub(crate) use tensorwire_testpoints::sync::Mutex;
