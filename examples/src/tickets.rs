//! Asynchronous training with bounded staleness: workers go on without waiting for each other, but not too far.

use std::collections::{BTreeMap, BTreeSet};

/// Hands out steps, each to one worker, and holds back the workers that are too far ahead of the slowest.
///
/// A worker's *clock* counts its gradients. Only workers that are there count: one that is lost holds nobody back, and
/// its step is handed out again. One that comes late, or comes back, begins at the clock of the slowest.
#[derive(Debug)]
pub struct Tickets {
    steps: u64,
    staleness: u64,
    next: u64,
    applied: u64,
    returned: BTreeSet<u64>,
    present: BTreeMap<usize, Worker>,
    /// Clocks of the workers that are lost.
    former: BTreeMap<usize, u64>,
    most_ahead: u64,
}

#[derive(Debug)]
struct Worker {
    clock: u64,
    ticket: Option<u64>,
}

/// The bound was broken, which must not happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "worker {worker} sent a gradient {ahead} steps ahead of the slowest worker, but at most {staleness} are allowed; \
     this is a bug of the example: report it"
)]
pub struct TooStale {
    /// Whose gradient it was.
    pub worker: usize,
    /// How far ahead it was.
    pub ahead: u64,
    /// The bound.
    pub staleness: u64,
}

impl Tickets {
    /// Tickets for the steps from `first` to before `steps`. A worker waits while it is more than `staleness` steps
    /// ahead.
    pub const fn new(first: u64, steps: u64, staleness: u64) -> Self {
        Self {
            steps,
            staleness,
            next: first,
            applied: first,
            returned: BTreeSet::new(),
            present: BTreeMap::new(),
            former: BTreeMap::new(),
            most_ahead: 0,
        }
    }

    /// How many gradients were taken, with those before the first ticket.
    pub const fn applied(&self) -> u64 {
        self.applied
    }

    /// How far ahead of the slowest a worker was at most when its gradient came.
    pub const fn most_ahead(&self) -> u64 {
        self.most_ahead
    }

    /// `worker` is there.
    pub fn join(&mut self, worker: usize) {
        self.leave(worker);
        let former = self.former.remove(&worker).unwrap_or(0);
        let clock = former.max(self.slowest().unwrap_or(former));
        self.present.insert(worker, Worker { clock, ticket: None });
    }

    /// `worker` is lost; its step is for others.
    pub fn leave(&mut self, worker: usize) {
        if let Some(Worker { clock, ticket }) = self.present.remove(&worker) {
            self.former.insert(worker, clock);
            self.returned.extend(ticket);
        }
    }

    /// A step for `worker`; the number of all steps once they are all done, and `None` while it has to wait.
    pub fn take(&mut self, worker: usize) -> Option<u64> {
        if self.applied >= self.steps {
            return Some(self.steps);
        }
        let slowest = self.slowest()?;
        let taker = self.present.get_mut(&worker)?;
        if taker.clock - slowest > self.staleness || (self.returned.is_empty() && self.next >= self.steps) {
            return None;
        }
        let ticket = self.returned.pop_first().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        });
        taker.ticket = Some(ticket);
        Some(ticket)
    }

    /// Takes note of the gradient for `ticket`; false if `worker` does not hold that, and the gradient is to be dropped.
    ///
    /// # Errors
    /// [`TooStale`] if the bound was broken.
    pub fn push(&mut self, worker: usize, ticket: u64) -> Result<bool, TooStale> {
        let (staleness, slowest) = (self.staleness, self.slowest().unwrap_or(0));
        let Some(taker) = self.present.get_mut(&worker).filter(|taker| taker.ticket == Some(ticket)) else {
            return Ok(false);
        };
        let ahead = taker.clock - slowest;
        if ahead > staleness {
            return Err(TooStale { worker, ahead, staleness });
        }
        taker.clock += 1;
        taker.ticket = None;
        self.most_ahead = self.most_ahead.max(ahead);
        self.applied += 1;
        Ok(true)
    }

    fn slowest(&self) -> Option<u64> {
        self.present.values().map(|worker| worker.clock).min()
    }
}

#[cfg(test)]
mod tests {
    use super::{Tickets, TooStale, Worker};

    fn of_two(steps: u64, staleness: u64) -> Tickets {
        let mut tickets = Tickets::new(0, steps, staleness);
        tickets.join(0);
        tickets.join(1);
        tickets
    }

    fn step(tickets: &mut Tickets, worker: usize) -> Option<u64> {
        let ticket = tickets.take(worker)?;
        assert_eq!(tickets.push(worker, ticket), Ok(true));
        Some(ticket)
    }

    #[test]
    fn a_worker_that_is_too_far_ahead_waits_for_the_slowest() {
        let mut tickets = of_two(100, 2);
        assert_eq!([0; 4].map(|worker| step(&mut tickets, worker)), [Some(0), Some(1), Some(2), None]);
        assert_eq!(step(&mut tickets, 1), Some(3));
        assert_eq!([0; 2].map(|worker| step(&mut tickets, worker)), [Some(4), None]);
        assert_eq!(tickets.most_ahead(), 2);
    }

    #[test]
    fn a_lost_worker_holds_nobody_back_and_its_step_is_done_by_others() {
        let mut tickets = of_two(100, 0);
        assert_eq!(tickets.take(1), Some(0));
        assert_eq!(step(&mut tickets, 0), Some(1));
        assert_eq!(tickets.take(0), None);
        tickets.leave(1);
        assert_eq!([0; 2].map(|worker| step(&mut tickets, worker)), [Some(0), Some(2)]);
        assert_eq!(tickets.push(1, 0), Ok(false), "it is not there");
        tickets.join(1);
        assert_eq!(step(&mut tickets, 1), Some(3), "it begins where the slowest is");
        assert_eq!(tickets.take(1), None);
        assert_eq!(step(&mut tickets, 0), Some(4));
    }

    #[test]
    fn the_end_is_told_when_every_step_is_done() {
        let mut tickets = of_two(2, 5);
        let (first, second) = (tickets.take(0), tickets.take(1));
        assert_eq!((first, second, tickets.take(0)), (Some(0), Some(1), None));
        assert_eq!(tickets.push(0, 0), Ok(true));
        assert_eq!(tickets.take(0), None, "the other's step may come back");
        assert_eq!(tickets.push(1, 1), Ok(true));
        assert_eq!((tickets.take(0), tickets.take(1), tickets.applied()), (Some(2), Some(2), 2));
    }

    #[test]
    fn a_broken_bound_is_an_error() {
        let mut tickets = of_two(100, 3);
        tickets.present.insert(0, Worker { clock: 4, ticket: Some(7) });
        assert_eq!(tickets.push(0, 7), Err(TooStale { worker: 0, ahead: 4, staleness: 3 }));
    }
}
