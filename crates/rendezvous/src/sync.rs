//! The locks of what is model-checked: `tests/models` of `fabric` compiles the same source over loom's.

pub(crate) use std::sync::{
    MutexGuard,
    atomic::{AtomicBool, Ordering},
};

pub(crate) use tensorwire_fabric::Alarm;
pub(crate) use tensorwire_testpoints::sync::Mutex;
