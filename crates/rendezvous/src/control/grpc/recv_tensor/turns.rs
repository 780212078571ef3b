//! Receives take their places in the queues in the order in which they were sent: HTTP/2 promises no order between
//! calls.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::poll_fn,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Poll, Waker},
};

/// Turns that may be over before an earlier one is: more than calls can be unanswered. A peer that leaves gaps loses its
/// order, and takes no memory.
const LATER_MAX: usize = 2 * super::CALLS_MAX;

/// Whose turn it is, of one peer's numbered calls.
#[derive(Debug, Default)]
pub(super) struct Turns {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Calls whose turn is over: all up to this one, and some later ones that ended early.
    over: u64,
    later: BTreeSet<u64>,
    waiting: BTreeMap<u64, Waker>,
}

/// A call's turn, which is over when this is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    turns: Arc<Turns>,
    number: u64,
}

impl Turns {
    /// The turn of the call with this number, counted from 1. It is taken even if nobody waits for it.
    pub(super) fn of(self: &Arc<Self>, number: u64) -> Turn {
        Turn { turns: self.clone(), number }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turn {
    /// Waits until all earlier calls have had theirs.
    pub(super) async fn comes(&self) {
        poll_fn(|context| {
            let mut state = self.turns.lock();
            if state.over.saturating_add(1) >= self.number {
                return Poll::Ready(());
            }
            state.waiting.insert(self.number, context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.turns.lock();
        state.waiting.remove(&self.number);
        if self.number > state.over {
            state.later.insert(self.number);
        }
        if state.later.len() > LATER_MAX
            && let Some(first) = state.later.pop_first()
        {
            state.over = first;
        }
        while state.later.first().is_some_and(|first| *first == state.over.saturating_add(1)) {
            state.later.pop_first();
            state.over += 1;
        }
        let next = state.over.saturating_add(1);
        // Those that a gap held up, too.
        let later = state.waiting.split_off(&next.saturating_add(1));
        let woken = std::mem::replace(&mut state.waiting, later);
        drop(state);
        woken.into_values().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn turns_come_in_order_also_past_those_that_end_early() {
        let turns = Arc::new(Turns::default());
        let comes = |turn: &Turn| turn.comes().now_or_never().is_some();
        let [one, two, three, four] = [1, 2, 3, 4].map(|number| turns.of(number));
        assert_eq!([comes(&four), comes(&two), comes(&one)], [false, false, true]);
        drop(three);
        drop(one);
        assert_eq!([comes(&four), comes(&two)], [false, true]);
        drop(two);
        assert!(comes(&four));
        drop(four);
        // A number that was had before, or none: nobody is held up.
        assert!(comes(&turns.of(0)) && comes(&turns.of(2)));
        assert!(comes(&turns.of(5)));
        let state = turns.lock();
        assert!(state.later.is_empty() && state.waiting.is_empty());
    }

    #[test]
    fn s4_a_peer_that_leaves_gaps_takes_no_memory() {
        let turns = Arc::new(Turns::default());
        for number in 0..10_000 {
            drop(turns.of(1_000 + 7 * number));
        }
        assert!(turns.lock().later.len() <= LATER_MAX);
        assert!(turns.of(1).comes().now_or_never().is_some());
    }
}
