//! Locks that count how often this thread takes them.

use std::{
    cell::Cell,
    sync::{LockResult, MutexGuard, RwLockReadGuard, RwLockWriteGuard, TryLockResult},
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
    use std::sync::{PoisonError, TryLockError};

    use super::*;

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
