//! A value that is set once and that several tasks wait for, first come first served.

use std::{
    collections::BTreeMap,
    future::poll_fn,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Poll, Waker},
};

/// A value that is set once. Any number of tasks wait for it, and are woken in the order in which they began to wait.
/// Cheap to clone: all clones are the same latch.
#[derive(Debug)]
pub(crate) struct Latch<T>(Arc<Mutex<LatchState<T>>>);

#[derive(Debug)]
struct LatchState<T> {
    /// `Some(None)` if it was set without a value.
    value: Option<Option<T>>,
    next_waiter: u64,
    waiters: BTreeMap<u64, Waker>,
}

impl<T> Clone for Latch<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// Sets a latch; dropped unused, it sets the latch without a value.
#[derive(Debug)]
pub(crate) struct LatchSetter<T>(Latch<T>);

impl<T> LatchSetter<T> {
    pub(crate) fn set(self, value: T) {
        self.0.set(Some(value));
    }
}

impl<T> Drop for LatchSetter<T> {
    fn drop(&mut self) {
        self.0.set(None);
    }
}

/// One task's registration with a latch, removed when dropped.
struct LatchWaiter<'latch, T> {
    latch: &'latch Latch<T>,
    /// `None` before the first poll.
    number: Option<u64>,
}

impl<T> Drop for LatchWaiter<'_, T> {
    fn drop(&mut self) {
        let waker = self.number.and_then(|number| self.latch.lock().waiters.remove(&number));
        // Dropped outside the lock, because a waker's drop may run foreign code.
        drop(waker);
    }
}

impl<T> Latch<T> {
    pub(crate) fn new() -> Self {
        let state = LatchState { value: None, next_waiter: 0, waiters: BTreeMap::new() };
        Self(Arc::new(Mutex::new(state)))
    }

    pub(crate) fn setter(&self) -> LatchSetter<T> {
        LatchSetter(self.clone())
    }

    /// Sets the value and wakes every waiter in order. `None` sets the latch without a value. Later calls change nothing.
    pub(crate) fn set(&self, value: Option<T>) {
        let waiters = {
            let mut state = self.lock();
            state.value.get_or_insert(value);
            std::mem::take(&mut state.waiters)
        };
        waiters.into_values().for_each(Waker::wake);
    }

    fn lock(&self) -> MutexGuard<'_, LatchState<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Clone> Latch<T> {
    /// The value, once it is set; `None` when it is set without one.
    ///
    /// # Cancel safety
    /// Cancel-safe. A later call waits behind the tasks that wait at that time.
    pub(crate) async fn wait(&self) -> Option<T> {
        let mut waiter = LatchWaiter { latch: self, number: None };
        poll_fn(|context| {
            let mut state = self.lock();
            if let Some(value) = &state.value {
                return Poll::Ready(value.clone());
            }
            let LatchState { next_waiter, waiters, .. } = &mut *state;
            // The first poll assigns the number: polling again does not move a task back.
            let own = *waiter.number.get_or_insert_with(|| {
                *next_waiter += 1;
                *next_waiter
            });
            let replaced = waiters.insert(own, context.waker().clone());
            drop(state);
            // Outside the lock, as above.
            drop(replaced);
            Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::{future::Future, pin::pin, sync::Arc, task::Context, task::Wake};

    use super::*;

    /// Records the numbers of woken tasks, in order.
    struct Noted(usize, Arc<Mutex<Vec<usize>>>);

    impl Wake for Noted {
        fn wake(self: Arc<Self>) {
            self.1.lock().unwrap().push(self.0);
        }
    }

    #[test]
    fn those_who_wait_are_woken_first_come_first_served() {
        let (latch, woken) = (Latch::new(), Arc::new(Mutex::new(Vec::new())));
        let waker = |number| Waker::from(Arc::new(Noted(number, woken.clone())));
        let mut waiting: Vec<_> = (0..100).map(|_| Box::pin(latch.wait())).collect();
        let order: Vec<usize> = (0..100).map(|number| number * 37 % 100).collect();
        for &number in &order {
            assert!(waiting[number].as_mut().poll(&mut Context::from_waker(&waker(number))).is_pending());
        }
        // Polling again keeps the place; dropping the future gives it up.
        assert!(waiting[50].as_mut().poll(&mut Context::from_waker(&waker(50))).is_pending());
        waiting.truncate(90);
        latch.set(Some(7));
        latch.set(Some(8));
        let expected: Vec<usize> = order.into_iter().filter(|&number| number < 90).collect();
        assert_eq!(*woken.lock().unwrap(), expected);
        for one in &mut waiting {
            assert_eq!(one.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(Some(7)));
        }
        let late = pin!(latch.wait());
        assert_eq!(late.poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(Some(7)));
    }

    #[test]
    fn nobody_waits_for_a_setter_that_is_gone() {
        let latch = Latch::<u8>::new();
        let setter = latch.setter();
        let mut waiting = pin!(latch.wait());
        let mut context = Context::from_waker(Waker::noop());
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        drop(setter);
        assert_eq!(waiting.poll(&mut context), Poll::Ready(None));
    }
}
