//! Reduces a plan that makes a run fail to a small one that makes it fail the same way.

use crate::{Entry, Failure, Plan};

/// The smallest plan that was found.
#[derive(Debug)]
pub struct Shrunk {
    /// Its failure.
    pub failure: Box<Failure>,
    /// The plan.
    pub plan: Plan,
    /// Runs that shrinking took.
    pub runs: u32,
}

/// Shrinks `plan`, which ends in `failure`: drops halves, then ever smaller parts, then single entries, then makes
/// entries milder. `run` runs a plan with the same seed. A smaller plan counts if its failure is of the same
/// [kind](crate::Violation::kind). Stops after `runs_max` runs, or when `may_go_on` returns false.
pub fn shrink(
    failure: Box<Failure>,
    plan: Plan,
    runs_max: u32,
    may_go_on: impl FnMut() -> bool,
    run: impl FnMut(&Plan) -> Option<Box<Failure>>,
) -> Shrunk {
    let kind = failure.violation.kind();
    let best = Shrunk { failure, plan, runs: 0 };
    let mut shrinking = Shrinking { best, kind, runs_max, may_go_on, run };
    shrinking.drop_parts();
    while shrinking.make_milder() {}
    shrinking.best
}

struct Shrinking<M, R> {
    best: Shrunk,
    kind: &'static str,
    runs_max: u32,
    may_go_on: M,
    run: R,
}

impl<M: FnMut() -> bool, R: FnMut(&Plan) -> Option<Box<Failure>>> Shrinking<M, R> {
    /// Keeps `entries` if they fail the same way. `None` when no more may be tried.
    fn attempt(&mut self, entries: Vec<Entry>) -> Option<bool> {
        if self.best.runs >= self.runs_max || !(self.may_go_on)() {
            return None;
        }
        self.best.runs += 1;
        let plan = Plan { entries };
        let found = (self.run)(&plan).filter(|failure| failure.violation.kind() == self.kind);
        let Some(failure) = found else { return Some(false) };
        (self.best.failure, self.best.plan) = (failure, plan);
        Some(true)
    }

    fn drop_parts(&mut self) {
        let mut size = self.best.plan.entries.len();
        while size > 0 {
            let mut start = 0;
            while start < self.best.plan.entries.len() {
                let entries = &self.best.plan.entries;
                let numbered = entries.iter().enumerate();
                let others = numbered.filter(|(index, _)| !(start..start + size).contains(index));
                let others = others.map(|(_, entry)| *entry).collect();
                match self.attempt(others) {
                    Some(true) => {}
                    Some(false) => start += size,
                    None => return,
                }
            }
            size /= 2;
        }
    }

    /// Makes each entry as mild as possible. Returns whether that changed anything.
    fn make_milder(&mut self) -> bool {
        let mut changed = false;
        for index in 0..self.best.plan.entries.len() {
            while let Some(smaller) = self.milder(index) {
                if !smaller {
                    break;
                }
                changed = true;
            }
        }
        changed
    }

    /// Whether one entry could be made milder; `None` when no more may be tried.
    fn milder(&mut self, index: usize) -> Option<bool> {
        for milder in self.best.plan.entries.get(index)?.milder() {
            let mut entries = self.best.plan.entries.clone();
            entries[index] = milder;
            if self.attempt(entries)? {
                return Some(true);
            }
        }
        Some(false)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Disturbance, Violation};

    fn failing(violation: Violation) -> Box<Failure> {
        Box::new(Failure {
            seed: 1,
            violation,
            hash: 0,
            events: 0,
            at: Duration::ZERO,
            tail: Vec::new(),
            swarm: String::new(),
            phase: "safety",
            plan: String::new(),
            replay: String::new(),
        })
    }

    /// Entries 0 to 15; a run fails while both a pause of at least a second and the crash of member 3 are in it.
    fn plan() -> Plan {
        let what = |number: u64| match number {
            5 => Disturbance::Pause(1, Duration::from_secs(90)),
            11 => Disturbance::Crash(3, Duration::from_millis(20)),
            _ => Disturbance::Slow(number as usize),
        };
        Plan { entries: (0..16).map(|number| Entry { round: 0, after: 100, what: what(number) }).collect() }
    }

    fn fails(plan: &Plan) -> bool {
        let long =
            |entry: &Entry| matches!(entry.what, Disturbance::Pause(_, length) if length.as_secs() > 0);
        let crash = |entry: &Entry| matches!(entry.what, Disturbance::Crash(3, _));
        plan.entries.iter().any(long) && plan.entries.iter().any(crash)
    }

    fn stuck() -> Box<Failure> {
        failing(Violation::Stuck(String::new()))
    }

    #[test]
    fn only_what_matters_is_left_and_mild() {
        let shrunk = shrink(stuck(), plan(), 200, || true, |plan| fails(plan).then(stuck));
        assert_eq!(shrunk.plan.to_string(), "0@1 pause 1 1406250us, 0@1 crash 3 0us");
        assert!(shrunk.runs <= 60, "{}", shrunk.runs);
    }

    #[test]
    fn another_kind_of_failure_does_not_count() {
        let other = |_: &Plan| Some(failing(Violation::Panicked(String::new())));
        let shrunk = shrink(stuck(), plan(), 200, || true, other);
        assert_eq!(shrunk.plan, plan());
    }

    #[test]
    fn runs_and_time_are_bounded() {
        let mut runs = 0;
        let shrunk = shrink(
            stuck(),
            plan(),
            7,
            || true,
            |plan| {
                runs += 1;
                fails(plan).then(stuck)
            },
        );
        assert_eq!((shrunk.runs, runs), (7, 7));
        assert!(fails(&shrunk.plan));
        assert_eq!(shrink(stuck(), plan(), 200, || false, |_| Some(stuck())).runs, 0);
    }

    #[test]
    fn what_fails_without_any_fault_needs_no_plan() {
        let shrunk = shrink(stuck(), plan(), 200, || true, |_| Some(stuck()));
        assert_eq!((shrunk.plan, shrunk.runs), (Plan::default(), 1));
    }
}
