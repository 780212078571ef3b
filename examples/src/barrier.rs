//! Synchronous training: a step is made from the gradients of several workers, and all go on together.

use std::collections::BTreeMap;

/// Collects the gradients of one step after the other.
///
/// With more workers than gradients wanted, the surplus are backup workers: a step is made from the first gradients
/// that come, and the rest, which are late, are dropped by their step number. A gradient that comes twice, because its
/// worker was started again, counts once.
#[derive(Debug)]
pub struct Barrier<G> {
    wanted: usize,
    step: u64,
    arrived: BTreeMap<usize, G>,
    late: u64,
}

/// What became of a gradient.
#[derive(Debug, PartialEq)]
pub enum Pushed<G> {
    /// Its step is over, or was never asked for: it was dropped.
    Late,
    /// The step waits for more.
    Waiting,
    /// The step is made: its gradients in the order of the workers, whatever order they came in, so that their sum does
    /// not depend on it. The next step has begun.
    Complete(Vec<G>),
}

impl<G> Barrier<G> {
    /// Steps from `step` on, each of `wanted` gradients.
    pub const fn new(wanted: usize, step: u64) -> Self {
        Self { wanted, step, arrived: BTreeMap::new(), late: 0 }
    }

    /// The step that gradients are collected for.
    pub const fn step(&self) -> u64 {
        self.step
    }

    /// How many gradients were dropped.
    pub const fn late(&self) -> u64 {
        self.late
    }

    /// Takes what `worker` computed for `step`.
    pub fn push(&mut self, worker: usize, step: u64, gradient: G) -> Pushed<G> {
        if step != self.step {
            self.late += 1;
            return Pushed::Late;
        }
        self.arrived.insert(worker, gradient);
        if self.arrived.len() < self.wanted {
            return Pushed::Waiting;
        }
        self.step += 1;
        Pushed::Complete(std::mem::take(&mut self.arrived).into_values().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::{Barrier, Pushed};

    #[test]
    fn a_step_is_made_in_the_order_of_the_workers() {
        let mut barrier = Barrier::new(3, 5);
        assert_eq!(barrier.push(2, 5, 'c'), Pushed::Waiting);
        assert_eq!(barrier.push(0, 5, 'a'), Pushed::Waiting);
        assert_eq!(barrier.push(1, 5, 'b'), Pushed::Complete(vec!['a', 'b', 'c']));
        assert_eq!((barrier.step(), barrier.late()), (6, 0));
    }

    #[test]
    fn late_gradients_of_backup_workers_are_dropped_by_their_step() {
        let mut barrier = Barrier::new(2, 0);
        assert_eq!(barrier.push(2, 0, 'c'), Pushed::Waiting);
        assert_eq!(barrier.push(1, 0, 'b'), Pushed::Complete(vec!['b', 'c']));
        assert_eq!(barrier.push(0, 0, 'x'), Pushed::Late);
        assert_eq!((barrier.step(), barrier.late()), (1, 1));
    }

    #[test]
    fn a_gradient_that_comes_twice_counts_once() {
        let mut barrier = Barrier::new(2, 0);
        assert_eq!(barrier.push(0, 0, 'a'), Pushed::Waiting);
        assert_eq!(barrier.push(0, 0, 'a'), Pushed::Waiting);
        assert_eq!(barrier.push(1, 0, 'b'), Pushed::Complete(vec!['a', 'b']));
    }
}
