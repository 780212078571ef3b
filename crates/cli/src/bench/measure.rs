//! Rounds: tensorwire and its limit in turns, repeated where the hypervisor took CPU time away.

use std::time::Duration;

use indicatif::ProgressBar;

use super::{
    bootstrap::median_interval,
    case::{Compares, Ready},
    cpus::{self, CpuTime},
    device_calls::DeviceCalls,
    error::BenchError,
    phase::{Phase, PhaseLength, quantile},
    task::{Stage, Task},
};

/// A round in which the hypervisor took a larger share of the CPU time is measured again.
const STEAL_MAX: f64 = 0.03;
/// How often a warm-up phase is tried.
const WARM_UPS: usize = 4;
/// Share of a round's time for finding out how long an operation takes.
const PROBE_SHARE: f64 = 0.1;

/// How long to measure.
#[derive(Debug, Clone, Copy)]
pub(super) struct Settings {
    pub(super) rounds: u32,
    pub(super) round: Duration,
    /// Operations of a phase, instead of as many as take that time.
    pub(super) ops: Option<u64>,
}

/// One round.
#[derive(Debug, Clone)]
struct RoundTimes {
    ours: Phase,
    limit: Phase,
    steal: f64,
    /// Calls of tensorwire's phase to an RDMA device.
    calls: Option<DeviceCalls>,
}

/// The result of a case.
#[derive(Debug, Clone)]
pub(super) struct Measurement {
    pub(super) median_ns: f64,
    pub(super) p99_ns: f64,
    pub(super) limit_name: &'static str,
    pub(super) limit_median_ns: f64,
    pub(super) compares: Compares,
    pub(super) ratio: f64,
    /// The 90 % bootstrap interval of `ratio`.
    pub(super) ratio_interval: (f64, f64),
    pub(super) device_calls: Option<DeviceCalls>,
    /// The largest share of stolen CPU time in a round that counts.
    pub(super) steal: f64,
    pub(super) rounds: usize,
    /// Rounds that were thrown away.
    pub(super) repeated: usize,
    pub(super) outstanding: usize,
    pub(super) load: f64,
}

/// Measures a case.
pub(super) async fn measure(
    mut ready: Ready,
    settings: Settings,
    bar: &ProgressBar,
) -> Result<Measurement, BenchError> {
    let load = cpus::load();
    let ours = plan(&mut ready.ours, &mut ready.stage, settings).await?;
    let limit = plan(&mut ready.limit, &mut ready.stage, settings).await?;
    let mut rounds = Rounds::new(settings.rounds as usize);
    while rounds.are_wanted() {
        let limit_first = rounds.begun().is_multiple_of(2);
        let round = one_round(&mut ready, ours, limit, limit_first).await;
        if rounds.take(round)? {
            bar.inc(1);
        }
    }
    bar.inc((rounds.wanted - rounds.undisturbed) as u64);
    Ok(sum_up(rounds, &ready, load))
}

/// The rounds of a case, as they come.
#[derive(Debug)]
struct Rounds {
    wanted: usize,
    measured: Vec<RoundTimes>,
    /// Of those, the ones that count in any case.
    undisturbed: usize,
    /// Rounds whose limit gave no figure.
    without_figure: usize,
}

impl Rounds {
    fn new(wanted: usize) -> Self {
        Self { wanted, measured: Vec::with_capacity(2 * wanted), undisturbed: 0, without_figure: 0 }
    }

    fn begun(&self) -> usize {
        self.measured.len() + self.without_figure
    }

    /// At most as many are repeated as are wanted.
    fn are_wanted(&self) -> bool {
        self.undisturbed < self.wanted && self.begun() < 2 * self.wanted
    }

    /// Takes a round. Returns whether it certainly counts.
    ///
    /// # Errors
    /// The error of a round that cannot be repeated. A perftest report without a figure only repeats the round, unless no
    /// round has a figure.
    fn take(&mut self, round: Result<RoundTimes, BenchError>) -> Result<bool, BenchError> {
        match round {
            Ok(round) => {
                let counts = round.steal <= STEAL_MAX;
                self.undisturbed += usize::from(counts);
                self.measured.push(round);
                Ok(counts)
            }
            Err(error) => {
                self.without_figure += 1;
                let is_last = self.begun() >= 2 * self.wanted && self.measured.is_empty();
                let can_repeat = matches!(error, BenchError::NoFigure { .. }) && !is_last;
                if can_repeat { Ok(false) } else { Err(error) }
            }
        }
    }
}

/// The plan of a phase of `task`.
async fn plan(task: &mut Task, stage: &mut Stage, settings: Settings) -> Result<PhaseLength, BenchError> {
    let batch = task.batch();
    match settings.ops {
        Some(ops) => {
            let plan = PhaseLength { ops: ops.next_multiple_of(batch.max(1)), group: 1 };
            // Once for nothing, to warm everything up.
            run_warm_up(task, stage, plan).await?;
            Ok(plan)
        }
        None => {
            let mut probe = Probe::new(batch, settings.round.as_nanos() as f64 / 2.0);
            loop {
                let phase = run_warm_up(task, stage, probe.plan).await?;
                if let Some(plan) = probe.take(&phase) {
                    return Ok(plan);
                }
            }
        }
    }
}

/// Finds out how many operations take the time of a phase; the operations also warm everything up.
#[derive(Debug)]
struct Probe {
    /// What to try next.
    plan: PhaseLength,
    batch: u64,
    budget_ns: f64,
    /// Discards the first operations: workers connect when the first tensor moves, which may take as long as hundreds of
    /// operations. Planned by that time, a phase would have too few operations for adaptive waiting to take effect.
    is_set_up: bool,
}

impl Probe {
    fn new(batch: u64, budget_ns: f64) -> Self {
        Self { plan: PhaseLength { ops: batch, group: 1 }, batch, budget_ns, is_set_up: false }
    }

    /// Takes the times of a trial. Once these are long enough, returns the plan of a phase.
    fn take(&mut self, phase: &Phase) -> Option<PhaseLength> {
        if !std::mem::replace(&mut self.is_set_up, true) {
            return None;
        }
        if phase.spent_ns >= self.budget_ns * PROBE_SHARE || self.plan.ops >= 1 << 24 {
            return Some(PhaseLength::for_budget(
                phase.spent_ns / self.plan.ops as f64,
                self.budget_ns,
                self.batch,
            ));
        }
        self.plan.ops *= 2;
        None
    }
}

/// Runs a warm-up phase, again if a limit gives no figure.
async fn run_warm_up(task: &mut Task, stage: &mut Stage, plan: PhaseLength) -> Result<Phase, BenchError> {
    for _ in 1..WARM_UPS {
        match task.run(stage, plan).await {
            Err(BenchError::NoFigure { .. }) => {}
            result => return result,
        }
    }
    task.run(stage, plan).await
}

async fn one_round(
    ready: &mut Ready,
    ours: PhaseLength,
    limit: PhaseLength,
    limit_first: bool,
) -> Result<RoundTimes, BenchError> {
    let before = CpuTime::now();
    let Ready { stage, ours: our_task, limit: limit_task, .. } = ready;
    // In turns also within rounds, so that a machine that becomes slower affects both alike.
    let limit_before = if limit_first { Some(limit_task.run(stage, limit).await?) } else { None };
    let counts = stage.verbs_counts();
    let ours = our_task.run(stage, ours).await?;
    let calls = counts.zip(stage.verbs_counts()).map(|(before, after)| DeviceCalls::between(&before, &after));
    let limit = match limit_before {
        Some(limit) => limit,
        None => limit_task.run(stage, limit).await?,
    };
    Ok(RoundTimes { ours, limit, steal: CpuTime::now().stolen_since(before), calls })
}

/// Sums up the `wanted` rounds with the least steal.
fn sum_up(all: Rounds, ready: &Ready, load: f64) -> Measurement {
    let begun = all.begun();
    let Rounds { measured: mut rounds, wanted, .. } = all;
    rounds.sort_by(|a, b| a.steal.total_cmp(&b.steal));
    rounds.truncate(wanted);
    let over_rounds =
        |value: &dyn Fn(&RoundTimes) -> f64| quantile(&rounds.iter().map(value).collect::<Vec<_>>(), 0.5);
    let ratios: Vec<f64> = rounds.iter().map(|round| ratio(ready.compares, round)).collect();
    let calls = rounds.iter().filter_map(|round| Some((round.calls.as_ref()?, round.ours.ops)));
    let device_calls = DeviceCalls::per_operation(calls);
    let all = rounds.iter().fold(Phase::default(), |all, round| all.and(&round.ours));
    Measurement {
        median_ns: over_rounds(&|round| round.ours.median_ns()),
        p99_ns: quantile(&all.samples, 0.99),
        limit_name: ready.limit_name,
        limit_median_ns: over_rounds(&|round| round.limit.median_ns()),
        compares: ready.compares,
        ratio: quantile(&ratios, 0.5),
        ratio_interval: median_interval(&ratios),
        device_calls,
        steal: rounds.last().map_or(0.0, |round| round.steal),
        rounds: rounds.len(),
        repeated: begun - rounds.len(),
        outstanding: ready.outstanding,
        load,
    }
}

fn ratio(compares: Compares, round: &RoundTimes) -> f64 {
    if round.limit.samples.is_empty() {
        return 0.0;
    }
    // Medians, since a machine that others use too takes single operations away for milliseconds.
    let times = round.ours.median_ns() / round.limit.median_ns();
    match compares {
        Compares::Time => times,
        Compares::Bandwidth => 1.0 / times,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(steal: f64) -> Result<RoundTimes, BenchError> {
        let phase = || Phase { samples: vec![1.0], ops: 1.0, spent_ns: 1.0 };
        Ok(RoundTimes { ours: phase(), limit: phase(), steal, calls: None })
    }

    fn no_figure() -> Result<RoundTimes, BenchError> {
        Err(BenchError::NoFigure { program: "ib_write_bw" })
    }

    #[test]
    fn what_setting_up_took_does_not_shorten_the_rounds() {
        let mut probe = Probe::new(1, 50e6);
        // A millisecond each, and the first five more.
        let mut set_up_ns = 5e6;
        let plan = loop {
            let ops = probe.plan.ops as f64;
            let spent_ns = ops * 1e6 + std::mem::take(&mut set_up_ns);
            if let Some(plan) = probe.take(&Phase { samples: Vec::new(), ops, spent_ns }) {
                break plan;
            }
        };
        assert_eq!(plan, PhaseLength { ops: 50, group: 1 });
    }

    #[test]
    fn a_round_without_a_figure_is_repeated() {
        let mut rounds = Rounds::new(2);
        assert!(!rounds.take(no_figure()).unwrap());
        assert!(rounds.take(round(0.0)).unwrap() && rounds.are_wanted());
        assert!(rounds.take(round(0.0)).unwrap() && !rounds.are_wanted());
        assert_eq!((rounds.begun(), rounds.measured.len()), (3, 2));
    }

    #[test]
    fn no_more_are_repeated_than_are_wanted() {
        let mut rounds = Rounds::new(2);
        for _ in 0..2 {
            assert!(!rounds.take(no_figure()).unwrap());
        }
        assert!(!rounds.take(round(1.0)).unwrap() && rounds.are_wanted());
        assert!(!rounds.take(no_figure()).unwrap() && !rounds.are_wanted());
        assert_eq!(rounds.measured.len(), 1);

        let mut rounds = Rounds::new(2);
        for _ in 0..3 {
            assert!(!rounds.take(no_figure()).unwrap() && rounds.are_wanted());
        }
        assert!(matches!(rounds.take(no_figure()), Err(BenchError::NoFigure { .. })), "none at all");
    }

    #[test]
    fn what_else_fails_ends_the_row() {
        let mut rounds = Rounds::new(2);
        let gone = Err(BenchError::PeerGone { during: "writes" });
        assert!(matches!(rounds.take(gone), Err(BenchError::PeerGone { .. })));
    }
}
