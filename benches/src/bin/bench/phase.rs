//! Times of one phase, and their statistics.

use tensorwire::fabric::Runtime;

/// The number of operations of a phase, and of each sample. One reading of the clock takes about 25 ns, so short
/// operations are timed in groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PhaseLength {
    pub(super) ops: u64,
    pub(super) group: u64,
}

/// Shortest sample, in nanoseconds.
const SAMPLE_NS: f64 = 2_000.0;

impl PhaseLength {
    /// The same plan with at least `group` operations per sample, or all if there are fewer.
    pub(super) fn grouped(self, group: u64) -> Self {
        Self { group: self.group.max(group).min(self.ops.max(1)), ..self }
    }

    /// A plan that takes about `budget_ns` with operations of `op_ns`, in whole batches of `batch`.
    pub(super) fn for_budget(op_ns: f64, budget_ns: f64, batch: u64) -> Self {
        let batches = (budget_ns / op_ns.max(1.0) / batch as f64).round().clamp(1.0, 1e9);
        let group = (SAMPLE_NS / op_ns.max(1.0)).ceil().clamp(1.0, 1e4);
        Self { ops: batches as u64 * batch, group: (group as u64).min(batch.max(1) * batches as u64) }
    }
}

/// The times of a phase, in nanoseconds per operation.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Phase {
    pub(super) samples: Vec<f64>,
    /// Operations, and the time of all of them together.
    pub(super) ops: f64,
    pub(super) spent_ns: f64,
}

impl Phase {
    /// A phase without operations.
    pub(super) fn nothing() -> Self {
        Self { samples: Vec::new(), ops: 0.0, spent_ns: f64::INFINITY }
    }

    /// The median of the samples.
    pub(super) fn median_ns(&self) -> f64 {
        quantile(&self.samples, 0.5)
    }

    /// The time of all operations divided by their number.
    pub(super) fn mean_ns(&self) -> f64 {
        if self.ops > 0.0 { self.spent_ns / self.ops } else { 0.0 }
    }

    /// The same phase with every operation counted as `parts` equal ones: a round trip as two ways.
    pub(super) fn split(mut self, parts: f64) -> Self {
        self.samples.iter_mut().for_each(|sample| *sample /= parts);
        self.ops *= parts;
        self
    }

    /// Both phases as one.
    pub(super) fn and(mut self, other: &Self) -> Self {
        self.samples.extend_from_slice(&other.samples);
        self.ops += other.ops;
        self.spent_ns += other.spent_ns;
        self
    }
}

/// Times operations, starting when it is made.
#[derive(Debug)]
pub(super) struct Watch<'clock> {
    clock: &'clock dyn Runtime,
    group: u64,
    open: u64,
    ops: u64,
    begin_ns: f64,
    last_ns: f64,
    samples: Vec<f64>,
}

impl<'clock> Watch<'clock> {
    pub(super) fn start(clock: &'clock dyn Runtime, plan: PhaseLength) -> Self {
        let samples = Vec::with_capacity(usize::try_from(plan.ops / plan.group.max(1)).unwrap_or(0) + 1);
        let mut watch =
            Self { clock, group: plan.group.max(1), open: 0, ops: 0, begin_ns: 0.0, last_ns: 0.0, samples };
        watch.resume();
        watch.begin_ns = watch.last_ns;
        watch
    }

    fn now_ns(&self) -> f64 {
        self.clock.now().as_nanos() as f64
    }

    /// Begins a sample now, so that earlier work is not timed.
    fn resume(&mut self) {
        self.last_ns = self.now_ns();
    }

    /// One operation has ended.
    #[inline]
    pub(super) fn tick(&mut self) {
        self.open += 1;
        if self.open == self.group {
            self.close();
        }
    }

    fn close(&mut self) {
        let now = self.now_ns();
        self.samples.push((now - self.last_ns) / self.open as f64);
        self.last_ns = now;
        self.ops += self.open;
        self.open = 0;
    }

    /// Ends the phase and returns it.
    pub(super) fn stop(mut self) -> Phase {
        if self.open > 0 {
            self.close();
        }
        let spent_ns = self.now_ns() - self.begin_ns;
        Phase { samples: self.samples, ops: self.ops as f64, spent_ns }
    }
}

/// The `q`-quantile of `values`, by the nearest rank; 0 without values.
pub(super) fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = ((sorted.len() as f64 * q).ceil() as usize).clamp(1, sorted.len().max(1));
    sorted.get(rank - 1).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::{Phase, PhaseLength, quantile};

    #[test]
    fn quantiles_are_values_that_were_measured() {
        let values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!((quantile(&values, 0.5), quantile(&values, 0.99)), (50.0, 99.0));
        assert_eq!((quantile(&[3.0], 0.99), quantile(&[], 0.5)), (3.0, 0.0));
    }

    #[test]
    fn short_operations_are_timed_in_groups() {
        assert_eq!(PhaseLength::for_budget(100.0, 1e6, 1), PhaseLength { ops: 10_000, group: 20 });
        assert_eq!(PhaseLength::for_budget(5e6, 1e6, 16), PhaseLength { ops: 16, group: 1 });
        assert_eq!(PhaseLength::for_budget(0.0, 100.0, 1).group, 100);
    }

    #[test]
    fn round_trip_is_two_ways() {
        let trips = Phase { samples: vec![10.0, 20.0], ops: 2.0, spent_ns: 30.0 };
        let ways = trips.split(2.0);
        assert_eq!(ways, Phase { samples: vec![5.0, 10.0], ops: 4.0, spent_ns: 30.0 });
        assert_eq!((ways.median_ns(), ways.mean_ns()), (5.0, 7.5));
    }
}
