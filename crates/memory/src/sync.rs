//! Locks and atomics: the standard library's, or the scheduler's in models (`scripts/check-models`).

#[cfg(shuttle)]
pub(crate) use shuttle::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64, Ordering},
};
#[cfg(not(shuttle))]
pub(crate) use std::sync::{
    MutexGuard,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

#[cfg(not(shuttle))]
pub(crate) use tensorwire_testpoints::sync::Mutex;

/// Locks `mutex`. A holder that panicked has left a consistent state: each of its steps changes the state as a whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
