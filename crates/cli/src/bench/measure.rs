//! Rounds: tensorwire and its limit in turns, again where the hypervisor took the machine away.

use std::time::Duration;

use indicatif::ProgressBar;

use super::{
    bootstrap::median_interval,
    case::{Compares, Ready},
    cpus::{self, CpuTime},
    device_calls::DeviceCalls,
    error::BenchError,
    phase::{Phase, Plan, quantile},
    task::{Stage, Task},
};

/// A round in which the hypervisor gave more of the machine to others is measured again.
const STEAL_MAX: f64 = 0.03;
/// Share of a round's time that finding out how long an operation takes may have.
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
struct Round {
    ours: Phase,
    limit: Phase,
    steal: f64,
    /// What our phase asked of an RDMA device.
    calls: Option<DeviceCalls>,
}

/// What a case's rounds say.
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
    /// The most that was stolen in a round that counts.
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
    let wanted = settings.rounds as usize;
    let mut rounds = Vec::with_capacity(2 * wanted);
    let mut undisturbed = 0;
    while undisturbed < wanted && rounds.len() < 2 * wanted {
        let limit_first = rounds.len() % 2 == 0;
        let round = one_round(&mut ready, ours, limit, limit_first).await?;
        if round.steal <= STEAL_MAX {
            undisturbed += 1;
            bar.inc(1);
        }
        rounds.push(round);
    }
    bar.inc((wanted - undisturbed) as u64);
    Ok(sum_up(rounds, wanted, &ready, load))
}

/// What a phase of `task` has to do.
async fn plan(task: &mut Task, stage: &mut Stage, settings: Settings) -> Result<Plan, BenchError> {
    match settings.ops {
        Some(ops) => {
            let plan = Plan { ops: ops.next_multiple_of(task.batch().max(1)), group: 1 };
            // Once for nothing, to warm everything up.
            task.run(stage, plan).await?;
            Ok(plan)
        }
        None => probe(task, stage, settings.round.as_nanos() as f64 / 2.0).await,
    }
}

/// Finds out how many operations take the time of a phase; the operations also warm everything up.
async fn probe(task: &mut Task, stage: &mut Stage, budget_ns: f64) -> Result<Plan, BenchError> {
    let batch = task.batch();
    let mut plan = Plan { ops: batch, group: 1 };
    loop {
        let phase = task.run(stage, plan).await?;
        if phase.spent_ns >= budget_ns * PROBE_SHARE || plan.ops >= 1 << 24 {
            return Ok(Plan::for_budget(phase.spent_ns / plan.ops as f64, budget_ns, batch));
        }
        plan.ops *= 2;
    }
}

async fn one_round(
    ready: &mut Ready,
    ours: Plan,
    limit: Plan,
    limit_first: bool,
) -> Result<Round, BenchError> {
    let before = CpuTime::now();
    let Ready { stage, ours: our_task, limit: limit_task, .. } = ready;
    // In turns also within rounds, so that a machine that slowly gets slower is unfair to neither.
    let limit_before = if limit_first { Some(limit_task.run(stage, limit).await?) } else { None };
    let counts = stage.verbs_counts();
    let ours = our_task.run(stage, ours).await?;
    let calls = counts.zip(stage.verbs_counts()).map(|(before, after)| DeviceCalls::between(&before, &after));
    let limit = match limit_before {
        Some(limit) => limit,
        None => limit_task.run(stage, limit).await?,
    };
    Ok(Round { ours, limit, steal: CpuTime::now().stolen_since(before), calls })
}

/// Sums up the `wanted` rounds with the least steal.
fn sum_up(mut rounds: Vec<Round>, wanted: usize, ready: &Ready, load: f64) -> Measurement {
    let measured = rounds.len();
    rounds.sort_by(|a, b| a.steal.total_cmp(&b.steal));
    rounds.truncate(wanted);
    let over_rounds =
        |value: &dyn Fn(&Round) -> f64| quantile(&rounds.iter().map(value).collect::<Vec<_>>(), 0.5);
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
        repeated: measured - rounds.len(),
        outstanding: ready.outstanding,
        load,
    }
}

fn ratio(compares: Compares, round: &Round) -> f64 {
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
