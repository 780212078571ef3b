//! One rank: it makes the common calls, shrinks its group when one fails, and continues.

use std::time::Duration;

use futures::future::{Either, select};
use tensorwire_collective::{Group, GroupError};
use tensorwire_fabric::Runtime;
use tensorwire_rendezvous::Worker;
use tensorwire_sim::{Node, Operation, OperationResult, Rng, Violation};

use super::{
    Run,
    calls::{Call, What},
};
use crate::common::builder;
use crate::join_all::join_all;

/// The limit of joining and of each call.
pub(super) const LIMIT: Duration = Duration::from_secs(5);

/// Time that a call may take beyond its limit: time also passes between two steps of a process.
pub(super) const BEYOND: Duration = Duration::from_secs(1);

/// The longest agreement on the remaining ranks: attempts begin until four times the limit are over, and the last one
/// takes four and a half.
pub(super) const SHRINK_MAX: Duration = Duration::from_millis(8_500 * LIMIT.as_secs());

/// Calls of each generation.
const CALLS: usize = 16;

/// Calls are cancelled only before this generation, so that the last one completes.
const PATIENT_FROM: u64 = 2;

pub(super) fn address(index: usize) -> String {
    format!("r{index}:1")
}

/// A rank's process and worker.
#[derive(Debug, Clone)]
pub(super) struct Rank {
    pub(super) index: usize,
    pub(super) node: Node,
    pub(super) worker: Worker,
    pub(super) run: Run,
}

impl Rank {
    pub(super) async fn start(run: &Run, index: usize) -> Self {
        let node = run.handle.start_node(&address(index)).unwrap();
        let setup = &run.setup;
        let builder = builder(&node, &format!("/job:r/replica:0/task:{index}"))
            .local_fabrics(setup.fabrics(&node, index))
            .memory(|memory| memory.receive_bytes = setup.receive_bytes)
            .flow(|flow| {
                flow.depth = setup.depth;
                flow.requests_max = setup.requests_max;
                flow.eager_bytes_max = setup.eager_bytes_max;
            });
        let worker = node.run("start", builder.start()).await.unwrap().unwrap();
        Self { index, node, worker, run: run.clone() }
    }

    /// Joins the group `name` as `rank` of `size`, while there are no faults.
    pub(super) async fn join(&self, name: &'static str, rank: usize, size: usize) -> Group {
        let builder = Group::builder(self.run.store.clone(), rank, size).name(name).timeout(LIMIT);
        let operation = self.node.begin(None, format!("rank {rank} joins `{name}`"));
        let joined = builder.join(&self.worker).await;
        self.ended(operation, &joined, self.run.handle.now());
        joined.unwrap_or_else(|error| panic!("rank {rank} of `{name}`: {error}"))
    }

    /// Makes calls until all those of one generation have completed, or the others continue without this rank.
    pub(super) async fn live(self, mut group: Group, mut rng: Rng) {
        loop {
            let began = self.run.handle.now();
            self.note(&group);
            match self.calls(&group, &mut rng, began).await {
                Ok(()) => return,
                // The others must learn of it, even if the failed group was derived from this one.
                Err(_) => match self.shrink(&group, began).await {
                    Ok(shrunk) => group = shrunk,
                    Err(_) => return,
                },
            }
        }
    }

    /// Makes the calls of this generation, several at a time, and closes the group.
    async fn calls(&self, group: &Group, rng: &mut Rng, began: Duration) -> Result<(), GroupError> {
        let mut drawn = Rng::new(self.run.handle.seed()).fork(1000 + group.generation());
        let mut left = CALLS;
        while left > 0 {
            let together = (1 + drawn.below(4)).min(left);
            left -= together;
            let draw = |_| Call::draw(&mut drawn, group.size(), group.hosts().len() == 1);
            let calls: Vec<Call> = (0..together).map(draw).collect();
            self.pause(rng).await;
            let gives_up =
                group.generation() < PATIENT_FROM && rng.chance(self.run.setup.impatience_of_64, 64);
            let patience = gives_up.then(|| rng.duration(Duration::from_micros(300)));
            self.together(group, &calls, patience, began).await?;
        }
        let operation = self.begin(group, "close", began);
        let closing = self.run.handle.now();
        let closed = group.clone().close().await;
        self.ended(operation, &closed, closing);
        closed
    }

    /// Makes `calls` at the same time, and cancels them if it loses patience.
    async fn together(
        &self,
        group: &Group,
        calls: &[Call],
        patience: Option<Duration>,
        began: Duration,
    ) -> Result<(), GroupError> {
        let made = join_all(calls.iter().map(|call| self.one(group, *call, began)));
        let Some(patience) = patience else { return made.await.into_iter().collect() };
        let made = match select(Box::pin(made), self.worker.runtime().sleep(patience)).await {
            Either::Left((made, _)) => return made.into_iter().collect(),
            Either::Right(((), made)) => made,
        };
        // All ranks may see the cancellation, in derived groups too.
        self.run.truth().given_up.insert(group.generation());
        drop(made);
        Err(group.failure().unwrap_or(GroupError::Over { rank: None, why: "given up".to_owned() }))
    }

    async fn one(&self, group: &Group, call: Call, began: Duration) -> Result<(), GroupError> {
        let operation = Some(self.begin(group, &format!("{call:?}"), began));
        let mut entry = Entry { rank: self, operation };
        let calling = self.run.handle.now();
        let made = call.make(&self.run.handle, group).await;
        // One that derives makes three.
        let calls = if matches!(call.what, What::Derive) { 3 } else { 1 };
        if let Some(operation) = entry.operation.take() {
            self.ended_within(operation, &made, calling, (LIMIT + BEYOND) * calls);
        }
        made
    }

    async fn shrink(&self, group: &Group, began: Duration) -> Result<Group, GroupError> {
        let operation = self.begin(group, "shrink", began);
        let calling = self.run.handle.now();
        let shrunk = group.shrink().await;
        self.ended_within(operation, &shrunk, calling, SHRINK_MAX);
        shrunk
    }

    /// Notes the group, and checks that all ranks of a generation have the same members.
    pub(super) fn note(&self, group: &Group) {
        let members: Vec<String> = group.members().map(str::to_owned).collect();
        let mut truth = self.run.truth();
        truth.sizes.insert(group.generation(), group.size());
        let known = truth.members.entry(group.generation()).or_insert_with(|| members.clone()).clone();
        drop(truth);
        if known != members || members.get(group.rank()).is_none_or(|name| name != self.worker.name()) {
            let what = format!("generation {}: {members:?}, and {known:?}", group.generation());
            self.run.handle.fail(Violation::Scenario(what));
        }
    }

    async fn pause(&self, rng: &mut Rng) {
        if rng.chance(1, 3) {
            self.worker.runtime().sleep(rng.duration(Duration::from_micros(2000))).await;
        }
    }

    fn begin(&self, group: &Group, what: &str, began: Duration) -> Operation {
        let what = format!("{what} of rank {} in generation {}", group.rank(), group.generation());
        self.node.begin(None, what).part_of(began)
    }

    fn ended<T>(&self, operation: Operation, result: &Result<T, GroupError>, began: Duration) {
        self.ended_within(operation, result, began, LIMIT + BEYOND);
    }

    /// Enters the end of a call into the ledger. An error needs a reason, and the time a bound unless the process was
    /// stopped.
    fn ended_within<T>(
        &self,
        operation: Operation,
        result: &Result<T, GroupError>,
        began: Duration,
        bound: Duration,
    ) {
        self.check_bound(began, bound);
        let Err(error) = result else { return operation.end(&OperationResult::Done) };
        if is_wrong(error) {
            self.run.handle.fail(Violation::Scenario(format!("rank {}: {error}", self.index)));
        }
        let result =
            if self.run.truth().is_excused() { OperationResult::Refused } else { OperationResult::PeerLost };
        operation.end_because(&result, error);
    }

    /// Checks that what began at `began` has ended within `bound`, unless the process was stopped.
    pub(super) fn check_bound(&self, began: Duration, bound: Duration) {
        let took = self.run.handle.now() - began;
        if took > bound && !self.run.truth().stopped.contains(&self.index) {
            let what = format!("rank {}: a call took {took:?}, and {bound:?} is the most", self.index);
            self.run.handle.fail(Violation::Late { promise: "L1", what });
        }
    }

    /// Ends the worker, and checks that all its memory has returned.
    pub(super) async fn stop(&self) {
        let worker = self.worker.clone();
        self.node.run("shutdown", async move { worker.shutdown().await }).await.unwrap();
        self.run.handle.runtime().sleep(Duration::from_secs(2)).await;
        for pool in [self.worker.receive_memory(), self.worker.pool().stats()] {
            let left = (pool.used_bytes, pool.retired_bytes, pool.leaked_bytes);
            assert_eq!(left, (0, 0, 0), "rank {}", self.index);
        }
    }
}

/// Ranks that make the same calls, with the same arguments, never get these.
pub(super) fn is_wrong(error: &GroupError) -> bool {
    matches!(
        error,
        GroupError::Argument { .. }
            | GroupError::Reduction(_)
            | GroupError::Store(_)
            | GroupError::Mismatch { .. }
            | GroupError::Misbehaved { .. }
            | GroupError::RankTaken { .. }
            | GroupError::OtherRun { .. }
    )
}

/// A call in the ledger, which is cancelled if it is dropped.
struct Entry<'rank> {
    rank: &'rank Rank,
    operation: Option<Operation>,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        if let Some(operation) = self.operation.take()
            && self.rank.node.is_alive()
        {
            operation.end(&OperationResult::Cancelled);
        }
    }
}
