//! One process: it joins or rejoins, makes calls with the ranks of its generation, and continues with those that are
//! left and newcomers.

use std::time::Duration;

use tensorwire_collective::{Group, GroupError, Reduction};
use tensorwire_sim::{OperationResult, Rng, Violation};

use super::{
    super::rank::{BEYOND, LIMIT, Rank, SHRINK_MAX, is_wrong},
    CALM_LIMIT, Reached, Scene,
};

/// Steps of the common work.
const STEPS: u64 = 10;

/// After every so many steps, all check whether newcomers wait.
const LOOK_EVERY: u64 = 2;

/// How often a process rejoins before it gives up.
const COMES: u32 = 3;

/// A call and the end of an earlier group, and what agreeing takes.
const ADMIT_MAX: Duration = Duration::from_millis(1_000 * LIMIT.as_secs() + SHRINK_MAX.as_millis() as u64);

/// Waiting to be admitted, meeting, and agreeing without those that are lost meanwhile.
const COME_MAX: Duration = Duration::from_millis(2_000 * LIMIT.as_secs() + SHRINK_MAX.as_millis() as u64);

pub(super) struct Life {
    scene: Scene,
    rank: Rank,
}

impl Life {
    pub(super) fn of(scene: &Scene, rank: &Rank) -> Self {
        Self { scene: scene.clone(), rank: rank.clone() }
    }

    /// Joins a new group, while there are no faults.
    pub(super) async fn join(&self, name: &str, rank: usize, size: usize) -> Group {
        let limit = if name == "calm" { CALM_LIMIT } else { LIMIT };
        let joined = self.scene.builder(name, rank, size).timeout(limit).join(&self.rank.worker).await;
        self.count(|reached| reached.joined += 1);
        joined.unwrap_or_else(|error| panic!("rank {rank} of `{name}`: {error}"))
    }

    /// Works until all steps are done, or the others go on without this process.
    pub(super) async fn live(self, group: Option<Group>, mut rng: Rng) {
        let mut group = match group {
            Some(group) => Some(group),
            None => {
                self.rank.worker.runtime().sleep(rng.duration(Duration::from_millis(30))).await;
                self.come().await
            }
        };
        let mut done = 0;
        while let Some(now) = group.take() {
            match self.work(&now, &mut done, &mut rng).await {
                Ok(true) => {
                    self.scene.known().is_done = true;
                    return;
                }
                Ok(false) => group = self.go_on("admit", now, ADMIT_MAX).await,
                Err(_) => group = self.go_on("shrink", now, SHRINK_MAX).await,
            }
        }
    }

    /// Rejoins the existing group.
    async fn come(&self) -> Option<Group> {
        for _ in 0..COMES {
            let coming = self.scene.builder("ranks", 0, 1).rejoin(&self.rank.worker);
            match self.bounded("come", COME_MAX, coming).await {
                Ok(group) => {
                    self.count(|reached| reached.admitted += 1);
                    return Some(group);
                }
                Err(GroupError::NotAdmitted { .. }) => self.count(|reached| reached.not_admitted += 1),
                Err(_) => {}
            }
            if self.scene.known().is_done {
                return None;
            }
        }
        None
    }

    /// The next generation, or the one that admits this process again.
    async fn go_on(&self, what: &'static str, group: Group, bound: Duration) -> Option<Group> {
        let size = group.size();
        let next = async { if what == "admit" { group.admit().await } else { group.shrink().await } };
        let next = self.bounded(what, bound, next).await;
        drop(group);
        let is_out = matches!(next, Err(GroupError::LeftOut { .. } | GroupError::NoMajority { .. }));
        self.count(|reached| match &next {
            Ok(next) => {
                reached.grown += u64::from(next.size() > size);
                reached.shrunk += u64::from(next.size() < size);
            }
            Err(GroupError::LeftOut { .. }) => reached.left_out += 1,
            Err(GroupError::NoMajority { store, .. }) => {
                reached.no_majority += 1;
                reached.without_store += u64::from(store.is_some());
            }
            Err(_) => {}
        });
        if is_out { self.come().await } else { next.ok() }
    }

    fn count(&self, count: impl FnOnce(&mut Reached)) {
        count(&mut self.scene.known().reached);
    }

    /// Whether all steps are done. `false` if others wait to be admitted.
    async fn work(&self, group: &Group, done: &mut u64, rng: &mut Rng) -> Result<bool, GroupError> {
        self.rank.note(group);
        // Newcomers, and ranks whose last call failed, learn the progress of the others.
        let mut far = [*done];
        self.call(group, group.all_reduce(&mut far).reduction(Reduction::Max)).await?;
        *done = far[0];
        while *done < STEPS {
            if rng.chance(1, 3) {
                self.rank.worker.runtime().sleep(rng.duration(Duration::from_millis(4))).await;
            }
            let mut sum = [1 + group.rank() as u64];
            self.call(group, group.all_reduce(&mut sum)).await?;
            let size = group.size() as u64;
            if sum[0] != size * (size + 1) / 2 {
                let what = format!("{group:?}: the sum is {sum:?}");
                self.scene.run.handle.fail(Violation::Data(what));
            }
            *done += 1;
            if done.is_multiple_of(LOOK_EVERY) && self.is_awaited(group).await? {
                return Ok(false);
            }
        }
        self.call(group, group.clone().close()).await?;
        self.count(|reached| reached.closed += 1);
        Ok(true)
    }

    /// Whether newcomers wait. One rank asks the store, so that all ranks decide alike.
    async fn is_awaited(&self, group: &Group) -> Result<bool, GroupError> {
        let mut waiting = [0];
        if group.rank() == 0 {
            match self.bounded("waiting", LIMIT, group.waiting()).await {
                Ok(count) => waiting = [count as u64],
                Err(_) => self.count(|reached| reached.without_store += 1),
            }
        }
        self.call(group, group.all_reduce(&mut waiting)).await?;
        Ok(waiting[0] > 0)
    }

    async fn call<T>(
        &self,
        group: &Group,
        call: impl IntoFuture<Output = Result<T, GroupError>>,
    ) -> Result<T, GroupError> {
        self.bounded(&format!("call in {group:?}"), LIMIT + BEYOND, call).await
    }

    /// Checks that it ends within `bound`, and with an error only if that has a reason.
    async fn bounded<T>(
        &self,
        what: &str,
        bound: Duration,
        call: impl IntoFuture<Output = Result<T, GroupError>>,
    ) -> Result<T, GroupError> {
        let (node, began) = (&self.rank.node, self.scene.run.handle.now());
        // Without faults, the simulator finds operations that only a limit ends, except those that wait to be admitted.
        let is_sure = !self.scene.is_disturbed && what != "come";
        let operation = is_sure.then(|| node.begin(None, what.to_owned()));
        let ended = call.into_future().await;
        self.rank.check_bound(began, bound);
        if let Some(operation) = operation {
            operation.end(&OperationResult::Done);
        }
        if let Err(error) = &ended {
            self.explain(what, error);
        }
        ended
    }

    fn explain(&self, what: &str, error: &GroupError) {
        let is_allowed = match error {
            GroupError::NotAdmitted { .. } => true,
            GroupError::Store(_) => self.scene.is_disturbed,
            error => self.scene.is_disturbed && !is_wrong(error),
        };
        if !is_allowed {
            let what = format!("process {}: {what}: {error}", self.rank.index);
            self.scene.run.handle.fail(Violation::Scenario(what));
        }
    }
}
