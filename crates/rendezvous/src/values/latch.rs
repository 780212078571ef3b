//! An outcome that several wait for, first come first served.

use std::{
    collections::BTreeMap,
    future::poll_fn,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Poll, Waker},
};

/// What something under way comes to: told once, waited for by any number of tasks, which are woken in the order in
/// which they began to wait. Cheap to clone.
#[derive(Debug)]
pub(crate) struct Outcome<T>(Arc<Mutex<State<T>>>);

#[derive(Debug)]
struct State<T> {
    /// `Some(None)`: it came to nothing.
    told: Option<Option<T>>,
    next_place: u64,
    waiting: BTreeMap<u64, Waker>,
}

impl<T> Clone for Outcome<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// Whoever makes the outcome. Dropped without one, it comes to nothing.
#[derive(Debug)]
pub(crate) struct Teller<T>(Outcome<T>);

impl<T> Teller<T> {
    pub(crate) fn tell(self, outcome: T) {
        self.0.tell(Some(outcome));
    }
}

impl<T> Drop for Teller<T> {
    fn drop(&mut self) {
        self.0.tell(None);
    }
}

/// A place among those who wait, given up when dropped.
struct Place<'outcome, T> {
    outcome: &'outcome Outcome<T>,
    place: Option<u64>,
}

impl<T> Drop for Place<'_, T> {
    fn drop(&mut self) {
        let waker = self.place.and_then(|place| self.outcome.lock().waiting.remove(&place));
        drop(waker);
    }
}

impl<T> Outcome<T> {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(State { told: None, next_place: 0, waiting: BTreeMap::new() })))
    }

    /// The duty to tell.
    pub(crate) fn teller(&self) -> Teller<T> {
        Teller(self.clone())
    }

    /// Tells everyone, first come first; `None` when it came to nothing. Only the first call counts.
    pub(crate) fn tell(&self, outcome: Option<T>) {
        let waiting = {
            let mut state = self.lock();
            state.told.get_or_insert(outcome);
            std::mem::take(&mut state.waiting)
        };
        waiting.into_values().for_each(Waker::wake);
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Clone> Outcome<T> {
    /// What was told, once it is.
    ///
    /// # Cancel safety
    /// Dropping the future gives its place up.
    pub(crate) async fn wait(&self) -> Option<T> {
        let mut place = Place { outcome: self, place: None };
        poll_fn(|context| {
            let mut state = self.lock();
            if let Some(told) = &state.told {
                return Poll::Ready(told.clone());
            }
            let State { next_place, waiting, .. } = &mut *state;
            let own = *place.place.get_or_insert_with(|| {
                *next_place += 1;
                *next_place
            });
            let replaced = waiting.insert(own, context.waker().clone());
            drop(state);
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

    /// Notes who was woken, in order.
    struct Noted(usize, Arc<Mutex<Vec<usize>>>);

    impl Wake for Noted {
        fn wake(self: Arc<Self>) {
            self.1.lock().unwrap().push(self.0);
        }
    }

    #[test]
    fn those_who_wait_are_woken_first_come_first_served() {
        let (outcome, woken) = (Outcome::new(), Arc::new(Mutex::new(Vec::new())));
        let waker = |number| Waker::from(Arc::new(Noted(number, woken.clone())));
        let mut waiting: Vec<_> = (0..100).map(|_| Box::pin(outcome.wait())).collect();
        let order: Vec<usize> = (0..100).map(|number| number * 37 % 100).collect();
        for &number in &order {
            assert!(waiting[number].as_mut().poll(&mut Context::from_waker(&waker(number))).is_pending());
        }
        // Looking again costs nobody a place; leaving gives it up.
        assert!(waiting[50].as_mut().poll(&mut Context::from_waker(&waker(50))).is_pending());
        waiting.truncate(90);
        outcome.tell(Some(7));
        outcome.tell(Some(8));
        let expected: Vec<usize> = order.into_iter().filter(|&number| number < 90).collect();
        assert_eq!(*woken.lock().unwrap(), expected);
        for one in &mut waiting {
            assert_eq!(one.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(Some(7)));
        }
        let late = pin!(outcome.wait());
        assert_eq!(late.poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(Some(7)));
    }

    #[test]
    fn nobody_waits_for_a_teller_that_is_gone() {
        let outcome = Outcome::<u8>::new();
        let teller = outcome.teller();
        let mut waiting = pin!(outcome.wait());
        let mut context = Context::from_waker(Waker::noop());
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        drop(teller);
        assert_eq!(waiting.poll(&mut context), Poll::Ready(None));
    }
}
