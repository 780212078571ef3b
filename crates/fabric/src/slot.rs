//! Slots: each operation has one from the post to the completion, and it owns the operation's buffers.

use std::{
    collections::BTreeMap,
    mem,
    sync::PoisonError,
    task::{Context, Poll, Waker},
};

use crate::{
    FabricError, WorkRequest,
    sync::{AtomicU64, Mutex, MutexGuard, Ordering},
};

/// Names one use of one slot. A fabric finds the slot of a completion by it. The generation tells a key of an earlier
/// use from that of the present one, and a completion under an earlier key is ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotKey {
    index: u32,
    generation: u32,
}

impl SlotKey {
    /// The key as one number, which a fabric can pass through a device.
    pub fn to_bits(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    /// The key for which [`to_bits`](Self::to_bits) returned `bits`.
    pub fn from_bits(bits: u64) -> Self {
        Self { index: bits as u32, generation: (bits >> 32) as u32 }
    }
}

/// The state of one slot.
#[derive(Debug)]
enum SlotState {
    /// Unused.
    Free,
    /// Waits in line for room in the send queue. It is posted even if its future is dropped.
    InLine { request: WorkRequest, waker: Option<Waker>, is_ignored: bool },
    /// Posted, and its future exists.
    Posted { request: WorkRequest, waker: Option<Waker> },
    /// Posted, and its future was dropped. The slot still owns the buffers until the completion.
    Ignored { request: WorkRequest },
    /// Completed; its future has not taken the result yet.
    Done(Result<(), FabricError>),
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    /// How many work requests the operation takes.
    weight: u32,
    state: SlotState,
}

#[derive(Debug, Default)]
struct Inner {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// How many operations are posted and not completed.
    outstanding: u32,
    /// Sum of the weights of posted operations.
    weight: u32,
    /// Operations that wait for room, by their number in the line. Only the first may take room, so that light
    /// operations cannot pass a heavy one again and again.
    waiting: BTreeMap<u64, Waiter>,
    /// The number that was assigned last.
    next_place: u64,
    /// How many operations in the line have a slot.
    in_line: u32,
    /// The first operation in the line has its room and is being submitted. It stays the first until that is done, so
    /// that nothing is posted before it.
    is_submitting: bool,
    /// The task that submits operations that wait in slots.
    poster: Option<Waker>,
    /// Set once, by the first failure: nothing is posted after it.
    failure: Option<FabricError>,
    /// Tasks that wait for `outstanding` to reach zero.
    idle: Vec<Waker>,
}

#[derive(Debug)]
struct Waiter {
    weight: u32,
    who: Who,
}

/// Who posts the operation once there is room.
#[derive(Debug)]
enum Who {
    /// The operation's future, when it is polled again.
    Future(Waker),
    /// The task that [submits](SlotTable::next_in_line) what is in this slot.
    Slot(SlotKey),
}

/// An operation's number in the line of operations that wait for room. An operation that is dropped while it waits must
/// [leave](SlotTable::leave) the line.
#[derive(Debug, Default)]
pub(crate) struct LinePosition(Option<u64>);

/// The task to wake once the lock is released.
#[derive(Debug, Default)]
struct Wakes {
    first: Option<Waker>,
}

impl Wakes {
    fn wake(self) {
        self.first.into_iter().for_each(Waker::wake);
    }
}

/// The slots of a queue pair. They own the buffers of operations under way, and they limit the work requests of these
/// operations. The weight of an operation is its number of work requests: one, or the number of pieces into which a
/// fabric splits it. At most `depth` work requests are posted, and at most `depth` more operations wait in slots for
/// room.
#[derive(Debug)]
pub struct SlotTable {
    depth: u32,
    inner: Mutex<Inner>,
    /// How many operations wait for room. Written under the lock, read without it.
    waiting: AtomicU64,
}

/// The result of an attempt to reserve a slot.
pub(crate) enum Reserve {
    /// The slot holds the request, and there is room to post it now.
    Reserved(SlotKey),
    /// The slot holds the request, which waits in line.
    InLine(SlotKey),
    /// All slots are taken.
    Full,
    /// The queue pair has failed.
    Failed(FabricError),
}

impl SlotTable {
    /// A table with room for `depth` work requests.
    pub fn new(depth: u32) -> Self {
        let slots = (0..depth).map(|_| Slot { generation: 0, weight: 0, state: SlotState::Free }).collect();
        let inner = Inner { slots, free: (0..depth).rev().collect(), ..Inner::default() };
        Self { depth, inner: Mutex::new(inner), waiting: AtomicU64::new(0) }
    }

    /// How many work requests can be posted at once.
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// How many operations are posted and not yet completed.
    pub fn outstanding(&self) -> u32 {
        self.lock().outstanding
    }

    /// The operation posted under `key`; `None` once it has completed. A software fabric reads the local bytes through
    /// this clone; a NIC reads memory that the slot keeps alive.
    pub fn request(&self, key: SlotKey) -> Option<WorkRequest> {
        let inner = self.lock();
        let slot = inner.slots.get(key.index as usize).filter(|s| s.generation == key.generation)?;
        match &slot.state {
            SlotState::Posted { request, .. } | SlotState::Ignored { request } => Some(request.clone()),
            SlotState::Free | SlotState::InLine { .. } | SlotState::Done(_) => None,
        }
    }

    /// Takes a slot for an operation of `weight` work requests, if there is room and nothing waits in line.
    pub(crate) fn reserve(&self, request: &WorkRequest, weight: u64) -> Reserve {
        self.reserve_in_turn(request, weight, None)
    }

    /// Like [`reserve`](Self::reserve), but an operation that finds no room waits in line in a slot. At most `depth`
    /// operations wait; beyond that this returns [`Reserve::Full`].
    pub(crate) fn post(&self, request: &WorkRequest, weight: u64) -> Reserve {
        let Some(needed) = self.weight_of(weight) else {
            return Reserve::Failed(FabricError::TooManyPieces { pieces: weight, depth: self.depth });
        };
        let mut inner = self.lock();
        if let Some(failure) = &inner.failure {
            return Reserve::Failed(failure.clone());
        }
        let must_wait =
            !inner.waiting.is_empty() && !tensorwire_testpoints::planted!("a post overtakes posts that wait");
        let waits =
            must_wait || tensorwire_testpoints::chance!("a post waits although the send queue has room");
        if !waits && let Some(key) = self.take_room(&mut inner, request, needed) {
            return Reserve::Reserved(key);
        }
        if inner.in_line >= self.depth {
            return Reserve::Full;
        }
        let key = inner.stand_in_line(request, needed);
        self.count_waiting(&inner);
        Reserve::InLine(key)
    }

    /// How many operations wait for room.
    pub(crate) fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::Acquire)
    }

    /// Stores the waker of the task that submits. It is woken when there may be room for the first in line.
    pub(crate) fn leave_poster(&self, waker: &Waker) {
        let before = self.lock().poster.replace(waker.clone());
        drop(before);
    }

    /// The first operation in line, if it waits in a slot and there is room for it. The caller submits it and then
    /// calls [`submitted`](Self::submitted); until then this returns `None`.
    pub(crate) fn next_in_line(&self) -> Option<(SlotKey, WorkRequest)> {
        let mut inner = self.lock();
        let (_, first) = inner.waiting.first_key_value()?;
        let (Who::Slot(key), weight) = (&first.who, first.weight) else { return None };
        let key = *key;
        if inner.is_submitting || weight > self.depth - inner.weight {
            return None;
        }
        let slot = inner.slot_mut(key)?;
        let SlotState::InLine { request, waker, is_ignored } = mem::replace(&mut slot.state, SlotState::Free)
        else {
            return None;
        };
        let posted = request.clone();
        slot.weight = weight;
        slot.state =
            if is_ignored { SlotState::Ignored { request } } else { SlotState::Posted { request, waker } };
        inner.is_submitting = true;
        inner.outstanding += 1;
        inner.weight += weight;
        Some((key, posted))
    }

    /// Removes the operation that [`next_in_line`](Self::next_in_line) returned from the line: it was submitted.
    pub(crate) fn submitted(&self) {
        let mut inner = self.lock();
        if mem::take(&mut inner.is_submitting) {
            inner.waiting.pop_first();
            inner.in_line -= 1;
        }
        self.count_waiting(&inner);
        let wakes = inner.wakes(self.depth);
        drop(inner);
        wakes.wake();
    }

    fn count_waiting(&self, inner: &Inner) {
        self.waiting.store(inner.waiting.len() as u64, Ordering::Release);
    }

    fn weight_of(&self, weight: u64) -> Option<u32> {
        u32::try_from(weight).ok().filter(|&weight| weight <= self.depth)
    }

    /// Like [`reserve`](Self::reserve), but waits in line: operations get room in the order in which they began to
    /// wait. After [`Reserve::Full`], `position` is a number in the line, and `waker` is woken when the call should be
    /// repeated.
    pub(crate) fn reserve_or_wait(
        &self,
        request: &WorkRequest,
        weight: u64,
        position: &mut LinePosition,
        waker: &Waker,
    ) -> Reserve {
        self.reserve_in_turn(request, weight, Some((position, waker)))
    }

    fn reserve_in_turn(
        &self,
        request: &WorkRequest,
        weight: u64,
        mut queued: Option<(&mut LinePosition, &Waker)>,
    ) -> Reserve {
        let Some(needed) = self.weight_of(weight) else {
            return Reserve::Failed(FabricError::TooManyPieces { pieces: weight, depth: self.depth });
        };
        let mut inner = self.lock();
        if let Some(failure) = &inner.failure {
            return Reserve::Failed(failure.clone());
        }
        let position = queued.as_ref().and_then(|(position, _)| position.0);
        let in_turn = inner.waiting.first_key_value().is_none_or(|(&first, _)| Some(first) == position);
        let Some(key) = (if in_turn { self.take_room(&mut inner, request, needed) } else { None }) else {
            if let Some((position, waker)) = &mut queued {
                inner.wait(position, needed, waker);
                self.count_waiting(&inner);
            }
            return Reserve::Full;
        };
        let left = queued
            .and_then(|(position, _)| position.0.take())
            .and_then(|position| inner.waiting.remove(&position));
        self.count_waiting(&inner);
        // There may be room for the next in line, too.
        let wakes = inner.wakes(self.depth);
        drop(inner);
        drop(left);
        wakes.wake();
        Reserve::Reserved(key)
    }

    /// Takes a slot if there is room. Ignores the line.
    fn take_room(&self, inner: &mut Inner, request: &WorkRequest, weight: u32) -> Option<SlotKey> {
        // Only while an operation is outstanding: its completion wakes the task that waits.
        let counts_as_full =
            inner.outstanding > 0 && tensorwire_testpoints::chance!("a send queue with room counts as full");
        if weight > self.depth - inner.weight || counts_as_full {
            return None;
        }
        inner.outstanding += 1;
        inner.weight += weight;
        let index = inner.free_slot();
        let slot = &mut inner.slots[index as usize];
        slot.weight = weight;
        slot.state = SlotState::Posted { request: request.clone(), waker: None };
        Some(SlotKey { index, generation: slot.generation })
    }

    /// Removes an operation whose future was dropped from the line, and wakes the next one if there is room for it.
    pub(crate) fn leave(&self, position: &mut LinePosition) {
        let Some(position) = position.0.take() else { return };
        let mut inner = self.lock();
        let left = inner.waiting.remove(&position);
        self.count_waiting(&inner);
        let wakes = inner.wakes(self.depth);
        drop(inner);
        drop(left);
        wakes.wake();
    }

    /// Ends one operation. For an unknown or outdated key this does nothing and returns `false`, so that a late or
    /// repeated completion cannot end another operation.
    pub fn complete(&self, key: SlotKey, result: Result<(), FabricError>) -> bool {
        let mut inner = self.lock();
        let Some(slot) = inner.slot_mut(key) else {
            return false;
        };
        let (request, waker) = match mem::replace(&mut slot.state, SlotState::Free) {
            SlotState::Posted { request, waker } => {
                slot.state = SlotState::Done(result);
                (request, waker)
            }
            SlotState::Ignored { request } => {
                if !tensorwire_testpoints::planted!("the slot of a dropped operation is not freed") {
                    inner.release(key.index);
                }
                (request, None)
            }
            other => {
                slot.state = other;
                return false;
            }
        };
        inner.outstanding -= 1;
        let idle = if inner.outstanding == 0 { mem::take(&mut inner.idle) } else { Vec::new() };
        let wakes = inner.wakes(self.depth);
        drop(inner);
        // Buffers go back to their pool, and wakers run, outside the lock.
        drop(request);
        waker.into_iter().chain(idle).for_each(Waker::wake);
        wakes.wake();
        true
    }

    /// Ends every outstanding operation with `failure` and refuses new ones. A later failure does not replace the
    /// first.
    pub fn fail(&self, failure: &FabricError) {
        let keys: Vec<SlotKey> = {
            let mut inner = self.lock();
            inner.failure.get_or_insert_with(|| failure.clone());
            let posted =
                |slot: &Slot| matches!(slot.state, SlotState::Posted { .. } | SlotState::Ignored { .. });
            let slots = inner.slots.iter().enumerate().filter(|(_, slot)| posted(slot));
            slots.map(|(index, slot)| SlotKey { index: index as u32, generation: slot.generation }).collect()
        };
        for key in keys {
            self.complete(key, Err(failure.clone()));
        }
        self.refuse(failure);
    }

    /// Refuses new operations and ends those in line, with `failure`. Posted operations end by their own completions.
    /// For a fabric whose device still uses the buffers. A later failure does not replace the first.
    pub fn refuse(&self, failure: &FabricError) {
        let (waiting, poster) = {
            let mut inner = self.lock();
            inner.failure.get_or_insert_with(|| failure.clone());
            let waiting = inner.end_line(failure);
            self.count_waiting(&inner);
            (waiting, inner.poster.take())
        };
        // Buffers go back to their pool, and wakers run, outside the lock.
        let wakers = waiting.into_iter().filter_map(|(request, waker)| {
            drop(request);
            waker
        });
        wakers.chain(poster).for_each(Waker::wake);
    }

    pub(crate) fn poll_done(&self, key: SlotKey, context: &Context<'_>) -> Poll<Result<(), FabricError>> {
        self.take_end(key, Some(context)).map_or(Poll::Pending, Poll::Ready)
    }

    /// The operation's result, if it has ended. Frees the slot.
    pub(crate) fn take_done(&self, key: SlotKey) -> Option<Result<(), FabricError>> {
        self.take_end(key, None)
    }

    /// Like [`take_done`](Self::take_done). If the operation has not ended, its slot stores the waker of `waiting`.
    fn take_end(&self, key: SlotKey, waiting: Option<&Context<'_>>) -> Option<Result<(), FabricError>> {
        let mut inner = self.lock();
        let Some(slot) = inner.slot_mut(key) else {
            return Some(Err(FabricError::Closed));
        };
        if let SlotState::Posted { waker, .. } | SlotState::InLine { waker, .. } = &mut slot.state {
            match (waker, waiting) {
                (_, None) => {}
                (Some(known), Some(context)) => known.clone_from(context.waker()),
                (none, Some(context)) => *none = Some(context.waker().clone()),
            }
            return None;
        }
        let SlotState::Done(result) = mem::replace(&mut slot.state, SlotState::Free) else {
            return Some(Err(FabricError::Closed));
        };
        inner.release(key.index);
        let wakes = inner.wakes(self.depth);
        drop(inner);
        wakes.wake();
        Some(result)
    }

    /// For an operation whose future was dropped. A posted operation keeps its slot until its completion.
    pub(crate) fn ignore(&self, key: SlotKey) {
        let mut inner = self.lock();
        let Some(slot) = inner.slot_mut(key) else {
            return;
        };
        let mut wakes = Wakes::default();
        match mem::replace(&mut slot.state, SlotState::Free) {
            SlotState::Posted { request, .. } => slot.state = SlotState::Ignored { request },
            SlotState::InLine { request, .. } => {
                slot.state = SlotState::InLine { request, waker: None, is_ignored: true };
            }
            SlotState::Done(_) => {
                inner.release(key.index);
                wakes = inner.wakes(self.depth);
            }
            other => slot.state = other,
        }
        drop(inner);
        wakes.wake();
    }

    /// The error of the operation, if it has failed already. Then this frees the slot.
    pub(crate) fn take_refusal(&self, key: SlotKey) -> Option<FabricError> {
        let has_failed =
            self.lock().slot_mut(key).is_some_and(|slot| matches!(slot.state, SlotState::Done(Err(_))));
        if has_failed { self.take_done(key)?.err() } else { None }
    }

    pub(crate) fn poll_idle(&self, context: &Context<'_>) -> Poll<()> {
        let mut inner = self.lock();
        if inner.outstanding == 0 {
            return Poll::Ready(());
        }
        remember(&mut inner.idle, context.waker());
        Poll::Pending
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// The slot of `key`; `None` if that use of the slot is over.
    fn slot_mut(&mut self, key: SlotKey) -> Option<&mut Slot> {
        self.slots.get_mut(key.index as usize).filter(|slot| slot.generation == key.generation)
    }

    /// Joins the line, or replaces the waker if the operation is in it already.
    fn wait(&mut self, position: &mut LinePosition, weight: u32, waker: &Waker) {
        let position = *position.0.get_or_insert_with(|| {
            self.next_place += 1;
            self.next_place
        });
        match self.waiting.get_mut(&position) {
            Some(Waiter { who: Who::Future(known), .. }) => known.clone_from(waker),
            _ => {
                self.waiting.insert(position, Waiter { weight, who: Who::Future(waker.clone()) });
            }
        }
    }

    /// Puts `request` into a slot at the end of the line.
    fn stand_in_line(&mut self, request: &WorkRequest, weight: u32) -> SlotKey {
        let index = self.free_slot();
        let slot = &mut self.slots[index as usize];
        slot.state = SlotState::InLine { request: request.clone(), waker: None, is_ignored: false };
        let key = SlotKey { index, generation: slot.generation };
        self.next_place += 1;
        self.waiting.insert(self.next_place, Waiter { weight, who: Who::Slot(key) });
        self.in_line += 1;
        key
    }

    /// Empties the line: each operation in it ends with `failure`. Returns their requests, and the tasks to wake.
    fn end_line(&mut self, failure: &FabricError) -> Vec<(Option<WorkRequest>, Option<Waker>)> {
        // An operation that is being submitted is in state `Posted`, and ends as posted ones do.
        (self.in_line, self.is_submitting) = (0, false);
        let mut ended = Vec::new();
        for waiter in mem::take(&mut self.waiting).into_values() {
            let key = match waiter.who {
                Who::Future(waker) => {
                    ended.push((None, Some(waker)));
                    continue;
                }
                Who::Slot(key) => key,
            };
            let Some(slot) = self.slot_mut(key) else { continue };
            match mem::replace(&mut slot.state, SlotState::Done(Err(failure.clone()))) {
                SlotState::InLine { request, waker, is_ignored } => {
                    if is_ignored {
                        self.release(key.index);
                    }
                    ended.push((Some(request), waker));
                }
                other => slot.state = other,
            }
        }
        ended
    }

    /// A free slot. Adds one if none is free: operations in line have slots beside the posted ones. [`SlotTable::post`]
    /// limits their number.
    fn free_slot(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, weight: 0, state: SlotState::Free });
            self.slots.len() as u32 - 1
        })
    }

    /// The task to wake for the present room: the task of the first operation in line, if that fits.
    fn wakes(&mut self, depth: u32) -> Wakes {
        let room = depth - self.weight;
        let first = self.waiting.first_key_value().filter(|(_, first)| first.weight <= room);
        let first = match first.map(|(_, first)| &first.who) {
            Some(Who::Future(waker)) => Some(waker.clone()),
            Some(Who::Slot(_)) if !self.is_submitting => self.poster.take(),
            Some(Who::Slot(_)) | None => None,
        };
        Wakes { first }
    }

    fn release(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        self.weight -= mem::take(&mut slot.weight);
        slot.state = SlotState::Free;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index);
        debug_assert!(
            self.free.len() < self.slots.len() || self.weight == 0,
            "no operation has {}",
            self.weight
        );
    }
}

/// Adds `waker` unless the list has a waker of the same task.
pub(crate) fn remember(wakers: &mut Vec<Waker>, waker: &Waker) {
    if !wakers.iter().any(|known| known.will_wake(waker)) {
        wakers.push(waker.clone());
    }
}
