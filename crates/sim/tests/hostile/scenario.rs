//! One run: honest workers with rogues among them, and then without them.

use std::{collections::BTreeMap, time::Duration};

use futures::future::join;
use tensorwire_fabric::Runtime;
use tensorwire_sim::{Bounds, Failure, Handle, Holdings, Rng, Summary, Violation, World};

use super::{
    honest::{self, Honest},
    log::Log,
    rogue,
    rules::RULES,
    stage::{Setup, Stage},
};
use crate::join_all::join_all;

/// The figures of one run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Report {
    pub(super) summary: Summary,
    pub(super) transfers: u64,
    pub(super) taken_from_rogues: u64,
    pub(super) operations_with_rogues: u64,
    pub(super) deeds: BTreeMap<&'static str, u64>,
    /// Broken rules that honest workers have logged.
    pub(super) rules: BTreeMap<String, u64>,
    /// Maximum that any honest worker held.
    pub(super) most: Most,
}

/// Maximum of each resource that any honest worker held at a time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Most {
    tasks: usize,
    queue_pairs: usize,
    sessions: usize,
}

/// Operations with any peer end within this time: the deadline of each is 5 s, including connecting.
const BOUNDS: Bounds = Bounds {
    after_faults: Duration::from_secs(15),
    new_work: Duration::from_secs(15),
    after_death: Duration::from_secs(15),
};

/// S4: the maximum that a worker may hold. The worker's own limits (eight sessions of each of at most eight names, with
/// 16 data connections each) allow far more than the few deeds of these rogues need. A leak for each deed would exceed
/// it.
const MOST: Most = Most { tasks: 3000, queue_pairs: 200, sessions: 64 };

/// S4: lines of a log for each session and data connection that a rogue tries to set up, each operation with it, and
/// each worker.
const LINES_EACH: u64 = 4;

pub(super) fn run_seed(seed: u64) -> Result<Report, Box<Failure>> {
    let log = Log::default();
    tracing::subscriber::with_default(log.clone(), || {
        let world = World::new(seed);
        world.replayed_by("hostile");
        let stage = Stage::new(&world.handle(), Setup::draw(&mut Rng::new(seed).fork(90)));
        let most = world.run(scenario(stage.clone(), log.clone()))?;
        let summary = world.finish()?;
        let truth = stage.truth();
        Ok(Report {
            summary,
            transfers: truth.transfers,
            taken_from_rogues: truth.taken_from_rogues,
            operations_with_rogues: truth.operations_with_rogues,
            deeds: truth.deeds.clone(),
            rules: log.lines().rules.clone(),
            most,
        })
    })
}

async fn scenario(stage: Stage, log: Log) -> Most {
    let mut rng = Rng::new(stage.handle.seed()).fork(91);
    let handle = &stage.handle;
    handle.bound(BOUNDS);
    // Rogues are no fault that excuses a failure between honest workers: the bounds apply from here on.
    handle.heal();
    let members = join_all((0..stage.setup.honest).map(|index| Honest::start(&stage, index))).await;
    stage.truth().nodes = members.iter().map(|member| member.node.id()).collect();
    honest::round(&stage, &members, 0, false, &mut rng).await;
    quiet(handle).await;
    let before = held(&members);

    stage.truth().rogues_at_work = stage.setup.rogues;
    let rogues = (0..stage.setup.rogues).map(|place| lives(&stage, place, Rng::new(rng.next_u64())));
    let rogues = join_all(rogues);
    let traffic = async {
        let mut round = 1;
        let mut most = Most::default();
        while round == 1 || stage.truth().rogues_at_work > 0 && round < 6 {
            honest::round(&stage, &members, round, true, &mut rng).await;
            note_most(&mut most, &members);
            round += 1;
        }
        most
    };
    let watched = async {
        let mut most = Most::default();
        while stage.truth().rogues_at_work > 0 {
            note_most(&mut most, &members);
            handle.runtime().sleep(Duration::from_millis(50)).await;
        }
        most
    };
    let ((_, most), watched) = join(join(rogues, traffic), watched).await;
    let most = most.max(watched);
    check_most(handle, most);

    quiet(handle).await;
    honest::round(&stage, &members, 100, false, &mut rng).await;
    quiet(handle).await;
    check_back(&stage, &before, &held(&members));
    check_lines(&stage, log.lines().count);
    join_all(members.iter().map(Honest::stop)).await;
    most
}

/// All lives of one rogue, one after the other.
async fn lives(stage: &Stage, place: usize, mut rng: Rng) {
    for _ in 0..stage.setup.lives {
        rogue::live(stage.clone(), place, Rng::new(rng.next_u64())).await;
    }
    stage.truth().rogues_at_work -= 1;
}

/// Sleeps until everything in progress has ended.
async fn quiet(handle: &Handle) {
    handle.runtime().sleep(Duration::from_secs(20)).await;
}

fn held(members: &[Honest]) -> Vec<Holdings> {
    members.iter().map(Honest::holdings).collect()
}

impl Most {
    fn max(self, other: Self) -> Self {
        Self {
            tasks: self.tasks.max(other.tasks),
            queue_pairs: self.queue_pairs.max(other.queue_pairs),
            sessions: self.sessions.max(other.sessions),
        }
    }
}

fn note_most(most: &mut Most, members: &[Honest]) {
    for Holdings { tasks, queue_pairs, sessions, .. } in held(members) {
        *most = most.max(Most { tasks, queue_pairs, sessions });
    }
}

fn check_most(handle: &Handle, most: Most) {
    if most.max(MOST) != MOST {
        handle.fail(Violation::Scenario(format!("S4: a worker held {most:?}, and {MOST:?} is the most")));
    }
}

/// S4: when the rogues are gone, honest workers hold what they held before. Connections between honest workers stay.
fn check_back(stage: &Stage, before: &[Holdings], after: &[Holdings]) {
    if stage.setup.impostor {
        // Workers that the impostor separated connect again when necessary.
        return;
    }
    for (index, (before, after)) in before.iter().zip(after).enumerate() {
        let grown = after.tasks > before.tasks
            || after.queue_pairs > before.queue_pairs
            || after.sessions > before.sessions
            || after.leases > before.leases
            || after.granted_bytes > before.granted_bytes;
        if grown {
            let text =
                format!("S4: worker {index} held {before:?} before the rogues came, and holds {after:?}");
            stage.handle.fail(Violation::Scenario(text));
        }
    }
}

fn check_lines(stage: &Stage, lines: u64) {
    let truth = stage.truth();
    let workers = (stage.setup.honest * stage.setup.honest) as u64;
    let most = LINES_EACH * (truth.attempts + truth.operations_with_rogues + 4 * workers);
    if lines > most {
        let attempts = truth.attempts;
        drop(truth);
        let text =
            format!("S4: {lines} lines were logged, {most} is the most for {attempts} attempts of rogues");
        stage.handle.fail(Violation::Scenario(text));
    }
}

/// Every rule that a peer can break.
pub(super) fn all_rules() -> Vec<String> {
    RULES.iter().map(ToString::to_string).collect()
}
