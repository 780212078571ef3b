//! Locks that count how often this thread takes them, and calls that are counted by name.

use std::{
    cell::Cell,
    collections::BTreeMap,
    sync::{LockResult, MutexGuard, PoisonError, RwLockReadGuard, RwLockWriteGuard, TryLockResult},
};

thread_local! {
    static LOCKED: Cell<u64> = const { Cell::new(0) };
}

/// How often this thread has locked anything so far. An attempt that finds a lock taken counts, too.
pub fn locks_taken() -> u64 {
    LOCKED.get()
}

fn count() {
    // A destructor of another thread-local value may lock.
    let _during_exit = LOCKED.try_with(|locked| locked.set(locked.get() + 1));
}

/// What [`counted!`](crate::counted) has counted so far, in all threads of the process.
static COUNTED: std::sync::Mutex<BTreeMap<&'static str, u64>> = std::sync::Mutex::new(BTreeMap::new());

/// The sum of what was counted under this name so far, in all threads of the process.
pub fn counted(name: &str) -> u64 {
    COUNTED.lock().unwrap_or_else(PoisonError::into_inner).get(name).copied().unwrap_or(0)
}

/// Adds to what is counted under this name.
pub fn add(name: &'static str, amount: usize) {
    *COUNTED.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default() += amount as u64;
}

/// The standard library's, counted.
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    /// As the standard library's.
    pub const fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    /// As the standard library's.
    ///
    /// # Errors
    /// A thread panicked while it held the lock.
    pub fn into_inner(self) -> LockResult<T> {
        self.0.into_inner()
    }
}

impl<T: ?Sized> Mutex<T> {
    /// As the standard library's.
    ///
    /// # Errors
    /// A thread panicked while it held the lock.
    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        count();
        self.0.lock()
    }

    /// As the standard library's.
    ///
    /// # Errors
    /// The lock is taken, or a thread panicked while it held it.
    pub fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        count();
        self.0.try_lock()
    }

    /// As the standard library's.
    ///
    /// # Errors
    /// A thread panicked while it held the lock.
    pub fn get_mut(&mut self) -> LockResult<&mut T> {
        self.0.get_mut()
    }
}

/// The standard library's, counted.
#[derive(Debug, Default)]
pub struct RwLock<T: ?Sized>(std::sync::RwLock<T>);

impl<T> RwLock<T> {
    /// As the standard library's.
    pub const fn new(value: T) -> Self {
        Self(std::sync::RwLock::new(value))
    }
}

impl<T: ?Sized> RwLock<T> {
    /// As the standard library's.
    ///
    /// # Errors
    /// A thread panicked while it held the lock.
    pub fn read(&self) -> LockResult<RwLockReadGuard<'_, T>> {
        count();
        self.0.read()
    }

    /// As the standard library's.
    ///
    /// # Errors
    /// A thread panicked while it held the lock.
    pub fn write(&self) -> LockResult<RwLockWriteGuard<'_, T>> {
        count();
        self.0.write()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::TryLockError;

    use super::*;

    #[test]
    fn amounts_add_up_under_their_names() {
        crate::counted!("one of the test's", 2);
        crate::counted!("one of the test's", 3);
        assert_eq!((counted("one of the test's"), counted("another of the test's")), (5, 0));
    }

    #[test]
    fn each_lock_and_each_attempt_counts_on_its_thread() {
        let (mutex, lock) = (Mutex::new(1), RwLock::new(2));
        let before = locks_taken();
        let held = mutex.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(matches!(mutex.try_lock(), Err(TryLockError::WouldBlock)));
        drop(held);
        drop(lock.read());
        drop(lock.write());
        assert_eq!(locks_taken() - before, 4);
        let elsewhere = std::thread::spawn(locks_taken).join();
        assert_eq!(elsewhere.ok(), Some(0));
    }
}
