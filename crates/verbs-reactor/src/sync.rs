//! The locks and atomics of what is model-checked: `tests/models` and `tests/shm_models` compile the same source over
//! loom's.

pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU64, Ordering, fence},
};
