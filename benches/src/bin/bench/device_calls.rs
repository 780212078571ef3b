//! What operations ask of an RDMA device.

use serde::Serialize;
use tensorwire_verbs_reactor::VerbsCounts;

/// Calls of this process, an operation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct DeviceCalls {
    posts: f64,
    requests: f64,
    signals: f64,
    receive_posts: f64,
    polls: f64,
    completions: f64,
    arms: f64,
    events: f64,
}

impl DeviceCalls {
    /// Nothing asked yet.
    const NONE: Self = Self {
        posts: 0.0,
        requests: 0.0,
        signals: 0.0,
        receive_posts: 0.0,
        polls: 0.0,
        completions: 0.0,
        arms: 0.0,
        events: 0.0,
    };

    /// What was asked between two counts.
    pub(super) fn between(before: &VerbsCounts, after: &VerbsCounts) -> Self {
        let since = |after: u64, before: u64| after.saturating_sub(before) as f64;
        Self {
            posts: since(after.posts, before.posts),
            requests: since(after.requests, before.requests),
            signals: since(after.signals, before.signals),
            receive_posts: since(after.receive_posts, before.receive_posts),
            polls: since(after.polls, before.polls),
            completions: since(after.completions, before.completions),
            arms: since(after.arms, before.arms),
            events: since(after.events, before.events),
        }
    }

    /// Each of `phases` with its operations, all together, an operation.
    pub(super) fn per_operation<'a>(phases: impl Iterator<Item = (&'a Self, f64)>) -> Option<Self> {
        let (all, operations) = phases.fold((Self::NONE, 0.0), |(all, operations), (calls, more)| {
            (all.with(calls, |a, b| a + b), operations + more)
        });
        (operations > 0.0).then(|| all.with(&Self::NONE, |calls, _| (calls / operations * 1e3).round() / 1e3))
    }

    fn with(self, other: &Self, join: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            posts: join(self.posts, other.posts),
            requests: join(self.requests, other.requests),
            signals: join(self.signals, other.signals),
            receive_posts: join(self.receive_posts, other.receive_posts),
            polls: join(self.polls, other.polls),
            completions: join(self.completions, other.completions),
            arms: join(self.arms, other.arms),
            events: join(self.events, other.events),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{DeviceCalls, VerbsCounts};

    #[test]
    fn calls_are_told_an_operation_over_all_phases() {
        let mut after = VerbsCounts::default();
        after.posts = 30;
        after.polls = 7;
        let first = DeviceCalls::between(&VerbsCounts::default(), &after);
        after.posts = 10;
        let second = DeviceCalls::between(&VerbsCounts::default(), &after);
        let all = DeviceCalls::per_operation([(&first, 10.0), (&second, 30.0)].into_iter()).unwrap();
        assert_eq!(all, DeviceCalls { posts: 1.0, polls: 0.35, ..DeviceCalls::NONE });
        assert_eq!(DeviceCalls::per_operation(std::iter::empty()), None);
    }
}
