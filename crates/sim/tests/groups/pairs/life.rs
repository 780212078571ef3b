//! One rank while it exchanges messages with others, and the expected end of each of its waits.

use std::{
    future::{IntoFuture as _, pending},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use futures::future::{Either, select};
use tensorwire_collective::{
    Group, GroupError,
    pair::{AbortHandle, Wait},
};
use tensorwire_rendezvous::{Element, Tensor};
use tensorwire_sim::{OperationResult, Rng, Violation};

use super::{
    super::rank::{BEYOND, Rank, address},
    Books, Touched,
};

/// The limit of a wait. In a world in which each byte is delayed by itself, the messages between two ranks take a
/// minute.
pub(super) const LIMIT: Duration = Duration::from_secs(600);

/// A wait for a dead process ends within this time.
const DEATH_SEEN: Duration = Duration::from_secs(3);

/// How often memory may be refused before it counts as full: each call is made to fail once.
const ATTEMPTS: usize = 4;

pub(super) struct Life {
    pub(super) rank: Rank,
    pub(super) group: Group,
    pub(super) books: Arc<Mutex<Books>>,
    pub(super) touched: Arc<Touched>,
    /// The process of each rank.
    pub(super) members: Arc<Vec<usize>>,
    pub(super) begun: Duration,
    /// Whether faults have ended.
    pub(super) is_calm: bool,
}

/// How a wait is cancelled, and when. The next one must work.
enum Impatience {
    Never,
    Brief(Duration),
    Aborts(Duration),
    Drops(Duration),
}

impl Life {
    pub(super) fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap()
    }

    pub(super) fn own(&self) -> usize {
        self.group.rank()
    }

    /// A sequence that is equal on all ranks.
    pub(super) fn drawn<const COUNT: usize>(&self, purpose: [usize; COUNT]) -> Rng {
        let seed = self.rank.run.handle.seed() ^ self.begun.as_nanos() as u64;
        purpose.into_iter().fold(Rng::new(seed), |rng, part| rng.fork(part as u64))
    }

    /// A sequence of this rank alone.
    pub(super) fn private<const COUNT: usize>(&self, purpose: [usize; COUNT]) -> Rng {
        self.drawn(purpose).fork(1_000_000 + self.own() as u64)
    }

    /// Whether a fault may affect messages between this rank and `other`.
    pub(super) fn is_touched(&self, other: usize) -> bool {
        self.touched.has(self.rank.index, self.members[other])
    }

    pub(super) async fn pause(&self, rng: &mut Rng) {
        if rng.chance(1, 3) {
            self.rank.worker.runtime().sleep(rng.duration(Duration::from_micros(2000))).await;
        }
    }

    /// Makes a tensor without waiting, and tries again after a planned refusal.
    pub(super) fn tensor<T: Element>(&self, values: &[T]) -> Tensor {
        let pool = self.rank.worker.pool();
        let shape = [values.len() as u64];
        let mut attempts = (0..ATTEMPTS).filter_map(|_| Tensor::from_values(pool, &shape, values).ok());
        attempts.next().expect("the pool has room for all values that are under way")
    }

    /// A finding about contents.
    pub(super) fn fail_data(&self, what: &str) {
        self.rank.run.handle.fail(Violation::Data(format!("rank {}: {what}", self.own())));
    }

    /// Awaits `wait`, which needs only the ranks `with`. `None` if it was cancelled.
    pub(super) async fn wait<T: Send>(
        &self,
        rng: &mut Rng,
        what: &str,
        with: &[usize],
        wait: Wait<'_, T>,
    ) -> Option<Result<T, GroupError>> {
        let ended = self.wait_unexplained(rng, what, with, wait).await;
        if let Some(Err(error)) = &ended {
            self.explain(what, with, error);
        }
        ended
    }

    /// As [`wait`](Self::wait), where `other` may have dropped its side.
    pub(super) async fn wait_if_gone<T: Send>(
        &self,
        rng: &mut Rng,
        what: &str,
        other: usize,
        wait: Wait<'_, T>,
    ) -> Option<Result<T, GroupError>> {
        let ended = self.wait_unexplained(rng, what, &[other], wait).await;
        match &ended {
            Some(Err(GroupError::Gone { rank, .. })) if *rank == other => self.books().reached.gone += 1,
            Some(Err(error)) => self.explain(what, &[other], error),
            _ => {}
        }
        ended
    }

    async fn wait_unexplained<T: Send>(
        &self,
        rng: &mut Rng,
        what: &str,
        with: &[usize],
        wait: Wait<'_, T>,
    ) -> Option<Result<T, GroupError>> {
        let impatience = self.impatience(rng);
        let limit = if let Impatience::Brief(limit) = impatience { limit } else { LIMIT };
        let began = self.rank.run.handle.now();
        // Without faults of these ranks, the simulator finds waits that only their limits end.
        let is_sure = !with.iter().any(|other| self.is_touched(*other));
        let operation = is_sure.then(|| self.rank.node.begin(None, format!("{what} with {with:?}")));
        let ended = self.until(&impatience, wait.timeout(limit)).await;
        if let Some(operation) = operation {
            operation.end(if ended.is_some() { &OperationResult::Done } else { &OperationResult::Cancelled });
        }
        self.rank.check_bound(began, limit + BEYOND);
        let mut books = self.books();
        match (ended, impatience) {
            (None, _) => books.reached.dropped += 1,
            (Some(Err(GroupError::TimedOut { .. })), Impatience::Brief(_)) => books.reached.brief += 1,
            (Some(Err(GroupError::Aborted { .. })), Impatience::Aborts(_)) => books.reached.aborted += 1,
            (ended, _) => return ended,
        }
        None
    }

    fn impatience(&self, rng: &mut Rng) -> Impatience {
        if !rng.chance(self.rank.run.setup.impatience_of_64, 64) {
            return Impatience::Never;
        }
        let after = rng.duration(Duration::from_millis(3));
        match rng.below(3) {
            0 => Impatience::Brief(after),
            1 => Impatience::Aborts(after),
            _ => Impatience::Drops(after),
        }
    }

    async fn until<T: Send>(
        &self,
        impatience: &Impatience,
        wait: Wait<'_, T>,
    ) -> Option<Result<T, GroupError>> {
        let runtime = self.rank.worker.runtime();
        match *impatience {
            Impatience::Never | Impatience::Brief(_) => Some(wait.await),
            Impatience::Aborts(after) => {
                let handle = AbortHandle::new();
                let aborting = async {
                    runtime.sleep(after).await;
                    handle.abort();
                    pending::<()>().await;
                };
                match select(wait.abort_by(&handle).into_future(), Box::pin(aborting)).await {
                    Either::Left((ended, _)) => Some(ended),
                    Either::Right(((), _)) => None,
                }
            }
            Impatience::Drops(after) => match select(wait.into_future(), runtime.sleep(after)).await {
                Either::Left((ended, _)) => Some(ended),
                Either::Right(((), _)) => None,
            },
        }
    }

    /// Checks that an error of an operation with the ranks `with` has a reason.
    pub(super) fn explain(&self, what: &str, with: &[usize], error: &GroupError) {
        let mut books = self.books();
        match error {
            GroupError::RankLost { rank, .. } if with.contains(rank) => {
                books.reached.lost += 1;
                drop(books);
                self.blame(what, *rank, error);
            }
            GroupError::TimedOut { .. } => {
                drop(books);
                self.check_death(what, with);
                let touched = with.iter().find(|other| self.is_touched(**other));
                self.blame(what, *touched.unwrap_or(&with[0]), error);
            }
            // A rank that drops its export then has had such an error.
            GroupError::Over { .. } | GroupError::Gone { .. } if self.is_over() => books.reached.over += 1,
            GroupError::NoMemory { rank, .. } if with.contains(rank) => {
                drop(books);
                self.blame(what, *rank, error);
            }
            GroupError::Worker(_) | GroupError::Gone { .. } => {
                drop(books);
                self.blame(what, with[0], error);
            }
            error => {
                let what = format!("rank {}: {what} with {with:?}: {error}", self.own());
                drop(books);
                self.rank.run.handle.fail(Violation::Scenario(what));
            }
        }
    }

    /// Whether a rank has ended the group.
    fn is_over(&self) -> bool {
        !self.rank.run.truth().given_up.is_empty()
    }

    /// Checks that the simulator knows a fault that affects the two.
    pub(super) fn blame(&self, what: &str, other: usize, error: &dyn std::fmt::Display) {
        let what = format!("{what} of rank {} with rank {other}", self.own());
        let operation = self.rank.node.begin(Some(&address(self.members[other])), what);
        operation.part_of(self.begun).end_because(&OperationResult::PeerLost, error);
    }

    /// Checks that a wait for a dead process ends before its limit.
    fn check_death(&self, what: &str, with: &[usize]) {
        let [other] = with else { return };
        let (process, now) = (self.members[*other], self.rank.run.handle.now());
        let died = self.books().deaths.get(&process).copied();
        let is_late = died.is_some_and(|died| now.saturating_sub(died) > DEATH_SEEN);
        if is_late && !self.touched.processes.contains(&self.rank.index) {
            let what = format!("rank {}: {what} with rank {other}, which is dead since {died:?}", self.own());
            self.rank.run.handle.fail(Violation::Late { promise: "L2", what });
        }
    }
}
