//! Property test: the slot table and a simple model do the same over long random sequences of calls.

use std::{
    collections::VecDeque,
    task::{Context, Poll},
};

use futures::task::noop_waker;
use proptest::prelude::*;
use tensorwire_memory::Buf;

use crate::{
    FabricError, WorkRequest,
    slot::{LinePosition, Reserve, SlotKey, SlotTable},
};

const DEPTH: u32 = 4;

/// A call of the table. `which` selects one of the operations in the state that the call needs, if there are that many.
#[derive(Debug, Clone)]
enum Call {
    Reserve { weight: u64 },
    Wait { weight: u64 },
    PollWaiter { which: usize },
    Leave { which: usize },
    Complete { which: usize },
    CompleteAgain { which: usize },
    PollDone { which: usize },
    TakeDone { which: usize },
    Ignore { which: usize },
    Post { weight: u64 },
    Submit,
}

fn call() -> impl Strategy<Value = Call> {
    let weight = 1..=u64::from(DEPTH) + 1;
    let which = 0..8_usize;
    prop_oneof![
        weight.clone().prop_map(|weight| Call::Reserve { weight }),
        weight.prop_map(|weight| Call::Wait { weight }),
        which.clone().prop_map(|which| Call::PollWaiter { which }),
        which.clone().prop_map(|which| Call::Leave { which }),
        which.clone().prop_map(|which| Call::Complete { which }),
        which.clone().prop_map(|which| Call::CompleteAgain { which }),
        which.clone().prop_map(|which| Call::PollDone { which }),
        which.clone().prop_map(|which| Call::TakeDone { which }),
        which.prop_map(|which| Call::Ignore { which }),
        (1..=u64::from(DEPTH) + 1).prop_map(|weight| Call::Post { weight }),
        Just(Call::Submit),
    ]
}

fn notification() -> WorkRequest {
    WorkRequest::Write { local: Buf::empty(), remote: None, immediate: None }
}

/// An operation that has room.
#[derive(Debug)]
struct Step {
    key: SlotKey,
    weight: u64,
    is_completed: bool,
    is_ignored: bool,
}

/// An operation that waits for room, with its weight.
#[derive(Debug)]
enum Waiting {
    Future(LinePosition, u64),
    InLine(SlotKey, u64),
}

#[derive(Debug, Default)]
struct Model {
    held: Vec<Step>,
    waiting: VecDeque<Waiting>,
    over: Vec<SlotKey>,
}

impl Model {
    fn room(&self) -> u64 {
        u64::from(DEPTH) - self.held.iter().map(|operation| operation.weight).sum::<u64>()
    }

    fn take(&mut self, reserve: Reserve, weight: u64, fits: bool) {
        match reserve {
            Reserve::Reserved(key) => {
                assert!(fits, "there was no room for {weight}");
                self.held.push(Step { key, weight, is_completed: false, is_ignored: false });
            }
            Reserve::InLine(key) => {
                assert!(!fits, "there was room for {weight}");
                self.waiting.push_back(Waiting::InLine(key, weight));
            }
            Reserve::Full => assert!(!fits, "there was room for {weight}"),
            Reserve::Failed(FabricError::TooManyPieces { pieces, .. }) => assert!(pieces > u64::from(DEPTH)),
            Reserve::Failed(error) => panic!("{error}"),
        }
    }

    /// Frees the room of operations that are completed and whose future was dropped.
    fn tidy(&mut self) {
        let (over, held) = self.held.drain(..).partition(|held| held.is_completed && held.is_ignored);
        self.held = held;
        self.over.extend(Vec::into_iter(over).map(|operation: Step| operation.key));
    }

    fn post(&mut self, table: &SlotTable, weight: u64) {
        let fits = self.waiting.is_empty() && weight <= self.room();
        let in_line = self.waiting.iter().filter(|waiting| matches!(waiting, Waiting::InLine(..)));
        let is_full = in_line.count() as u32 == DEPTH;
        let posted = table.post(&notification(), weight);
        assert_eq!(matches!(posted, Reserve::Full), is_full && !fits && weight <= DEPTH.into(), "{weight}");
        self.take(posted, weight, fits);
    }

    fn submit(&mut self, table: &SlotTable) {
        let room = self.room();
        let first = match self.waiting.front() {
            Some(&Waiting::InLine(key, weight)) if weight <= room => Some((key, weight)),
            _ => None,
        };
        assert_eq!(table.next_in_line().map(|(key, _)| key), first.map(|(key, _)| key));
        let Some((key, weight)) = first else { return };
        assert!(table.next_in_line().is_none(), "the first is not submitted yet");
        table.submitted();
        self.waiting.pop_front();
        self.held.push(Step { key, weight, is_completed: false, is_ignored: false });
    }

    fn apply(&mut self, table: &SlotTable, call: &Call) {
        let request = notification();
        let waker = noop_waker();
        match *call {
            Call::Reserve { weight } => {
                let fits = self.waiting.is_empty() && weight <= self.room();
                self.take(table.reserve(&request, weight), weight, fits);
            }
            Call::Wait { weight } => {
                let mut position = LinePosition::default();
                let fits = self.waiting.is_empty() && weight <= self.room();
                let reserve = table.reserve_or_wait(&request, weight, &mut position, &waker);
                if matches!(reserve, Reserve::Full) {
                    self.waiting.push_back(Waiting::Future(position, weight));
                }
                self.take(reserve, weight, fits);
            }
            Call::PollWaiter { which } => {
                let room = self.room();
                let Some(Waiting::Future(position, weight)) = self.waiting.get_mut(which) else { return };
                let (weight, fits) = (*weight, which == 0 && *weight <= room);
                let reserve = table.reserve_or_wait(&request, weight, position, &waker);
                if fits {
                    self.waiting.pop_front();
                }
                self.take(reserve, weight, fits);
            }
            Call::Leave { which } => {
                if matches!(self.waiting.get(which), Some(Waiting::Future(..)))
                    && let Some(Waiting::Future(mut position, _)) = self.waiting.remove(which)
                {
                    table.leave(&mut position);
                }
            }
            Call::Complete { which } => {
                if let Some(operation) = self.held.get_mut(which) {
                    assert_eq!(table.complete(operation.key, Ok(())), !operation.is_completed);
                    operation.is_completed = true;
                }
            }
            Call::CompleteAgain { which } => {
                if let Some(&key) = self.over.get(which) {
                    assert!(!table.complete(key, Ok(())));
                }
            }
            Call::PollDone { which } => {
                let Some(operation) = self.held.get_mut(which).filter(|held| !held.is_ignored) else {
                    return;
                };
                let polled = table.poll_done(operation.key, &Context::from_waker(&waker));
                assert_eq!(matches!(polled, Poll::Ready(Ok(()))), operation.is_completed);
                operation.is_ignored = operation.is_completed;
            }
            Call::TakeDone { which } => {
                let Some(operation) = self.held.get_mut(which).filter(|held| !held.is_ignored) else {
                    return;
                };
                let taken = table.take_done(operation.key);
                assert_eq!(matches!(taken, Some(Ok(()))), operation.is_completed);
                operation.is_ignored = operation.is_completed;
            }
            Call::Ignore { which } => {
                if let Some(operation) = self.held.get_mut(which).filter(|held| !held.is_ignored) {
                    table.ignore(operation.key);
                    operation.is_ignored = true;
                }
            }
            Call::Post { weight } => self.post(table, weight),
            Call::Submit => self.submit(table),
        }
        self.tidy();
    }
}

proptest! {
    #[test]
    fn the_table_does_what_the_model_does(calls in prop::collection::vec(call(), 1..200)) {
        let (table, mut model) = (SlotTable::new(DEPTH), Model::default());
        for call in &calls {
            model.apply(&table, call);
            let outstanding = model.held.iter().filter(|held| !held.is_completed).count();
            prop_assert_eq!(table.outstanding() as usize, outstanding, "after {:?}", call);
            prop_assert_eq!(table.waiting() as usize, model.waiting.len(), "after {:?}", call);
        }
    }
}
