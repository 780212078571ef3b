//! Rounds: tensorwire and its limit in turns. A round in which the hypervisor took CPU time is repeated.

use std::time::Duration;

use indicatif::ProgressBar;

use super::{
    bootstrap::median_interval,
    case::{Compares, Limit, Ready},
    cpus::{self, CpuTime},
    error::BenchError,
    phase::{Phase, PhaseLength, quantile},
    task::{Stage, Task},
};

/// A round in which the hypervisor took a larger share of the CPU time is measured again.
const STEAL_MAX: f64 = 0.03;
/// Maximum number of attempts of a warm-up phase.
const WARM_UPS: usize = 4;
/// Share of a round's time for finding out how long an operation takes.
const PROBE_SHARE: f64 = 0.1;

/// How long to measure.
#[derive(Debug, Clone, Copy)]
pub(super) struct Settings {
    pub(super) rounds: u32,
    pub(super) round: Duration,
    /// Operations of a phase, instead of as many as fit into that time.
    pub(super) ops: Option<u64>,
}

/// How long to measure one phase of a round.
#[derive(Debug, Clone, Copy)]
struct PhaseSettings {
    length: Duration,
    ops: Option<u64>,
}

/// One round.
#[derive(Debug, Clone)]
struct RoundTimes {
    ours: Phase,
    limit: Phase,
    bare: Option<Phase>,
    /// CPU time of both processes in tensorwire's phase, in nanoseconds.
    cpu_ns: f64,
    steal: f64,
}

/// Times of a limit, and their relation to tensorwire's.
#[derive(Debug, Clone)]
pub(super) struct Comparison {
    pub(super) name: String,
    pub(super) median_ns: f64,
    /// Time of a round divided by its operations.
    pub(super) mean_ns: f64,
    pub(super) ratio: f64,
    /// The 90 % bootstrap interval of `ratio`.
    pub(super) ratio_interval: (f64, f64),
}

impl Comparison {
    /// The time of tensorwire's operation, in nanoseconds, at which `ratio` would have this value.
    pub(super) fn time_at_ratio(&self, ratio: f64, compares: Compares) -> f64 {
        match compares {
            Compares::Time => self.median_ns * ratio,
            Compares::Bandwidth => self.mean_ns / ratio,
        }
    }
}

/// The result of a case.
#[derive(Debug, Clone)]
pub(super) struct Measurement {
    pub(super) median_ns: f64,
    /// Time of a round divided by its operations. Rates are computed from this.
    pub(super) mean_ns: f64,
    pub(super) p99_ns: f64,
    pub(super) limit: Comparison,
    pub(super) bare: Option<Comparison>,
    pub(super) compares: Compares,
    /// CPU time of both processes for each operation.
    pub(super) cpu_ns: f64,
    /// The largest share of stolen CPU time in a round that counts.
    pub(super) steal: f64,
    pub(super) rounds: usize,
    /// Rounds that were discarded.
    pub(super) repeated: usize,
    pub(super) outstanding: usize,
    pub(super) load: f64,
}

/// The plans of a round's phases.
#[derive(Debug, Clone, Copy)]
struct Plans {
    ours: PhaseLength,
    limit: PhaseLength,
    bare: Option<PhaseLength>,
}

/// Measures a case.
pub(super) async fn measure(
    mut ready: Ready,
    settings: Settings,
    bar: &ProgressBar,
) -> Result<Measurement, BenchError> {
    let load = cpus::load();
    let phases = if ready.bare_work.is_some() { 3 } else { 2 };
    let phase = PhaseSettings { length: settings.round / phases, ops: settings.ops };
    let ours = plan(&mut ready.ours, &mut ready.stage, phase).await?;
    let limit = plan_limit(&mut ready.limit, &mut ready.stage, phase).await?;
    let bare = match &mut ready.bare_work {
        Some(bare) => Some(plan_limit(bare, &mut ready.stage, phase).await?),
        None => None,
    };
    let plans = Plans { ours, limit, bare };
    let mut rounds = Rounds::new(settings.rounds as usize);
    while rounds.are_wanted() {
        let limit_first = rounds.begun().is_multiple_of(2);
        let round = one_round(&mut ready, plans, limit_first).await;
        if rounds.take(round)? {
            bar.inc(1);
        }
    }
    bar.inc((rounds.wanted - rounds.undisturbed) as u64);
    Ok(sum_up(rounds, &ready, load))
}

/// The rounds of a case so far.
#[derive(Debug)]
struct Rounds {
    wanted: usize,
    measured: Vec<RoundTimes>,
    /// How many of them count in any case.
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

    /// The number of repeated rounds is at most the number of wanted ones.
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

/// The plan of a phase of `limit`, which uses one of its two cores from then on if that is faster.
async fn plan_limit(
    limit: &mut Limit,
    stage: &mut Stage,
    settings: PhaseSettings,
) -> Result<PhaseLength, BenchError> {
    let planned = plan(&mut limit.task, stage, settings).await?;
    let Some(mut alone) = limit.on_one_core() else { return Ok(planned) };
    let planned_alone = plan(&mut alone.task, stage, settings).await?;
    let both = limit.task.run(stage, planned).await?.mean_ns();
    if alone.task.run(stage, planned_alone).await?.mean_ns() >= both {
        return Ok(planned);
    }
    *limit = alone;
    Ok(planned_alone)
}

/// The plan of a phase of `task`.
async fn plan(
    task: &mut Task,
    stage: &mut Stage,
    settings: PhaseSettings,
) -> Result<PhaseLength, BenchError> {
    let batch = task.batch();
    match settings.ops {
        Some(ops) => {
            let plan = PhaseLength { ops: ops.next_multiple_of(batch.max(1)), group: 1 };
            // An untimed phase first, to warm everything up.
            run_warm_up(task, stage, plan).await?;
            Ok(plan)
        }
        None => {
            let mut probe = Probe::new(batch, settings.length.as_nanos() as f64);
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
    /// The plan of the next trial.
    plan: PhaseLength,
    batch: u64,
    budget_ns: f64,
    /// Discards the first operations: workers connect when the first tensor moves, which may take as long as hundreds
    /// of operations. With a plan from such times, a phase would have too few operations for adaptive waiting to take
    /// effect.
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

async fn one_round(ready: &mut Ready, plans: Plans, limit_first: bool) -> Result<RoundTimes, BenchError> {
    let before = CpuTime::now();
    let Ready { stage, ours: our_task, limit, bare_work, .. } = ready;
    let limit_task = &mut limit.task;
    // The order alternates between rounds, so that a machine that becomes slower affects both equally.
    let limit_before = if limit_first { Some(limit_task.run(stage, plans.limit).await?) } else { None };
    let cpu = stage.cpu_ns();
    let ours = our_task.run(stage, plans.ours).await?;
    let cpu_ns = stage.cpu_ns().saturating_sub(cpu) as f64;
    let limit = match limit_before {
        Some(limit) => limit,
        None => limit_task.run(stage, plans.limit).await?,
    };
    let bare = match (bare_work, plans.bare) {
        (Some(bare), Some(plan)) => Some(bare.task.run(stage, plan).await?),
        _ => None,
    };
    let steal = CpuTime::now().stolen_since(before);
    Ok(RoundTimes { ours, limit, bare, cpu_ns, steal })
}

/// The median of `value` over the rounds.
fn over_rounds(rounds: &[RoundTimes], value: impl Fn(&RoundTimes) -> f64) -> f64 {
    quantile(&rounds.iter().map(value).collect::<Vec<_>>(), 0.5)
}

/// Sums up the `wanted` rounds with the least steal.
fn sum_up(all: Rounds, ready: &Ready, load: f64) -> Measurement {
    let begun = all.begun();
    let Rounds { measured: mut rounds, wanted, .. } = all;
    rounds.sort_by(|a, b| a.steal.total_cmp(&b.steal));
    rounds.truncate(wanted);
    let all = rounds.iter().fold(Phase::default(), |all, round| all.and(&round.ours));
    let compares = ready.compares;
    let bare = ready.bare_work.as_ref();
    Measurement {
        median_ns: over_rounds(&rounds, |round| round.ours.median_ns()),
        mean_ns: over_rounds(&rounds, |round| round.ours.mean_ns()),
        p99_ns: quantile(&all.samples, 0.99),
        limit: compare(compares, &ready.limit.name, &rounds, |round| Some(&round.limit)),
        bare: bare.map(|bare| compare(compares, &bare.name, &rounds, |round| round.bare.as_ref())),
        compares,
        cpu_ns: over_rounds(&rounds, |round| round.cpu_ns / round.ours.ops.max(1.0)),
        steal: rounds.last().map_or(0.0, |round| round.steal),
        rounds: rounds.len(),
        repeated: begun - rounds.len(),
        outstanding: ready.outstanding,
        load,
    }
}

fn compare(
    compares: Compares,
    name: &str,
    rounds: &[RoundTimes],
    limit: impl Fn(&RoundTimes) -> Option<&Phase>,
) -> Comparison {
    let ratios: Vec<f64> =
        rounds.iter().filter_map(|round| Some(ratio(compares, &round.ours, limit(round)?))).collect();
    Comparison {
        name: name.to_owned(),
        median_ns: over_rounds(rounds, |round| limit(round).map_or(0.0, Phase::median_ns)),
        mean_ns: over_rounds(rounds, |round| limit(round).map_or(0.0, Phase::mean_ns)),
        ratio: quantile(&ratios, 0.5),
        ratio_interval: median_interval(&ratios),
    }
}

fn ratio(compares: Compares, ours: &Phase, limit: &Phase) -> f64 {
    if limit.samples.is_empty() {
        return 0.0;
    }
    match compares {
        // Medians, because on a shared machine single operations may be delayed by milliseconds.
        Compares::Time => ours.median_ns() / limit.median_ns(),
        // Bytes divided by time: occasional slow operations count.
        Compares::Bandwidth => limit.mean_ns() / ours.mean_ns(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(steal: f64) -> Result<RoundTimes, BenchError> {
        let phase = || Phase { samples: vec![1.0], ops: 1.0, spent_ns: 1.0 };
        Ok(RoundTimes { ours: phase(), limit: phase(), bare: None, cpu_ns: 0.0, steal })
    }

    fn no_figure() -> Result<RoundTimes, BenchError> {
        Err(BenchError::NoFigure { program: "ib_write_bw" })
    }

    #[test]
    fn bandwidths_are_compared_by_all_the_time_that_was_spent() {
        let ours = Phase { samples: vec![1.0, 1.0, 4.0], ops: 3.0, spent_ns: 6.0 };
        let limit = Phase { samples: vec![1.0, 1.0, 1.0], ops: 3.0, spent_ns: 3.0 };
        assert_eq!(ratio(Compares::Bandwidth, &ours, &limit), 0.5);
        assert_eq!(ratio(Compares::Time, &ours, &limit), 1.0);
        assert_eq!(ratio(Compares::Time, &ours, &Phase::nothing()), 0.0);
    }

    #[test]
    fn what_setting_up_took_does_not_shorten_the_rounds() {
        let mut probe = Probe::new(1, 50e6);
        // A millisecond each, and five more for the first.
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
