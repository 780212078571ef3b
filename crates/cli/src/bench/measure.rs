//! Rounds: tensorwire and its limit in turns, again where the hypervisor took the machine away.

use std::time::Duration;

use indicatif::ProgressBar;

use super::{
    case::{Compares, Ready},
    cpus::{self, CpuTime},
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
}

/// One round.
#[derive(Debug, Clone)]
struct Round {
    ours: Phase,
    limit: Phase,
    steal: f64,
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
    let budget_ns = settings.round.as_nanos() as f64 / 2.0;
    let ours = probe(&mut ready.ours, &mut ready.stage, budget_ns).await?;
    let limit = probe(&mut ready.limit, &mut ready.stage, budget_ns).await?;
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
    let (ours, limit) = if limit_first {
        let limit = limit_task.run(stage, limit).await?;
        (our_task.run(stage, ours).await?, limit)
    } else {
        let ours = our_task.run(stage, ours).await?;
        (ours, limit_task.run(stage, limit).await?)
    };
    Ok(Round { ours, limit, steal: CpuTime::now().stolen_since(before) })
}

/// Sums up the `wanted` rounds with the least steal.
fn sum_up(mut rounds: Vec<Round>, wanted: usize, ready: &Ready, load: f64) -> Measurement {
    let measured = rounds.len();
    rounds.sort_by(|a, b| a.steal.total_cmp(&b.steal));
    rounds.truncate(wanted);
    let over_rounds =
        |value: &dyn Fn(&Round) -> f64| quantile(&rounds.iter().map(value).collect::<Vec<_>>(), 0.5);
    let all = rounds.iter().fold(Phase::default(), |all, round| all.and(&round.ours));
    Measurement {
        median_ns: over_rounds(&|round| round.ours.median_ns()),
        p99_ns: quantile(&all.samples, 0.99),
        limit_name: ready.limit_name,
        limit_median_ns: over_rounds(&|round| round.limit.median_ns()),
        compares: ready.compares,
        ratio: over_rounds(&|round| ratio(ready.compares, round)),
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
