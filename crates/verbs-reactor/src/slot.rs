//! Slots: where an operation lives from post to completion.

use std::{
    mem,
    sync::{Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use crate::{FabricError, WorkRequest};

/// Names one use of one slot. Travels with a completion (as `wr_id` on verbs); a key whose use is over is
/// recognised by its generation and ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotKey {
    index: u32,
    generation: u32,
}

impl SlotKey {
    /// As one number, for a work request id.
    pub fn to_bits(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    /// From [`to_bits`](Self::to_bits).
    pub fn from_bits(bits: u64) -> Self {
        Self { index: bits as u32, generation: (bits >> 32) as u32 }
    }
}

/// The state of one slot.
#[derive(Debug)]
enum State {
    /// Unused.
    Free,
    /// Posted, and someone awaits it.
    Posted { request: WorkRequest, waker: Option<Waker> },
    /// Posted, and its future was dropped: the buffers stay until the completion all the same.
    Ignored { request: WorkRequest },
    /// Completed, not yet taken by its future.
    Done(Result<(), FabricError>),
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    /// Work requests that the operation in it takes.
    weight: u32,
    state: State,
}

#[derive(Debug, Default)]
struct Inner {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Operations posted and not completed.
    outstanding: u32,
    /// Sum of the weights of slots in use.
    weight: u32,
    /// Futures that wait for a free slot.
    waiting: Vec<Waker>,
    /// Set once: nothing can be posted any more.
    failure: Option<FabricError>,
    /// Everyone who waits for `outstanding` to reach zero.
    idle: Vec<Waker>,
}

/// A fixed number of slots: a home for the buffers of operations under way, and the bound on the work requests
/// they take. An operation that a fabric splits weighs as many as it has pieces.
#[derive(Debug)]
pub struct SlotTable {
    depth: u32,
    inner: Mutex<Inner>,
}

/// What became of an attempt to reserve a slot.
pub(crate) enum Reserve {
    /// The slot holds the request now.
    Reserved(SlotKey),
    /// All slots are taken.
    Full,
    /// The queue pair has failed.
    Failed(FabricError),
}

impl SlotTable {
    /// A table of `depth` slots.
    pub fn new(depth: u32) -> Self {
        let slots = (0..depth).map(|_| Slot { generation: 0, weight: 0, state: State::Free }).collect();
        let inner = Inner { slots, free: (0..depth).rev().collect(), ..Inner::default() };
        Self { depth, inner: Mutex::new(inner) }
    }

    /// The number of slots.
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// Operations posted and not yet completed.
    pub fn outstanding(&self) -> u32 {
        self.lock().outstanding
    }

    /// What was posted under `key`, while it has not completed: a software fabric reads the bytes through the
    /// slot that owns them, as a NIC reads memory that the slot keeps.
    pub fn request(&self, key: SlotKey) -> Option<WorkRequest> {
        let inner = self.lock();
        let slot = inner.slots.get(key.index as usize).filter(|s| s.generation == key.generation)?;
        match &slot.state {
            State::Posted { request, .. } | State::Ignored { request } => Some(request.clone()),
            State::Free | State::Done(_) => None,
        }
    }

    pub(crate) fn reserve(&self, request: &WorkRequest, weight: u64, waiter: Option<&Waker>) -> Reserve {
        let Some(weight) = u32::try_from(weight).ok().filter(|&weight| weight <= self.depth) else {
            return Reserve::Failed(FabricError::TooManyPieces { pieces: weight, depth: self.depth });
        };
        let mut inner = self.lock();
        if let Some(failure) = &inner.failure {
            return Reserve::Failed(failure.clone());
        }
        let room = self.depth - inner.weight >= weight;
        let Some(index) = inner.free.pop_if(|_| room) else {
            if let Some(waker) = waiter {
                remember(&mut inner.waiting, waker);
            }
            return Reserve::Full;
        };
        inner.outstanding += 1;
        inner.weight += weight;
        let slot = &mut inner.slots[index as usize];
        slot.weight = weight;
        slot.state = State::Posted { request: request.clone(), waker: None };
        Reserve::Reserved(SlotKey { index, generation: slot.generation })
    }

    /// Ends one operation. An unknown or outdated key is ignored and gives `false`: a late or doubled
    /// completion must not end someone else's operation.
    pub fn complete(&self, key: SlotKey, result: Result<(), FabricError>) -> bool {
        let mut inner = self.lock();
        let Some(slot) = inner.slots.get_mut(key.index as usize).filter(|s| s.generation == key.generation)
        else {
            return false;
        };
        let (request, waker) = match mem::replace(&mut slot.state, State::Free) {
            State::Posted { request, waker } => {
                slot.state = State::Done(result);
                (request, waker)
            }
            State::Ignored { request } => {
                inner.release(key.index);
                (request, None)
            }
            other => {
                slot.state = other;
                return false;
            }
        };
        inner.outstanding -= 1;
        let idle = if inner.outstanding == 0 { mem::take(&mut inner.idle) } else { Vec::new() };
        let room = if inner.free.is_empty() { Vec::new() } else { mem::take(&mut inner.waiting) };
        drop(inner);
        // Buffers go back to their pool, and wakers run, outside the lock.
        drop(request);
        waker.into_iter().chain(idle).chain(room).for_each(Waker::wake);
        true
    }

    /// Ends every outstanding operation with `failure` and refuses new ones. The first failure stays.
    pub fn fail(&self, failure: &FabricError) {
        let keys: Vec<SlotKey> = {
            let mut inner = self.lock();
            inner.failure.get_or_insert_with(|| failure.clone());
            let posted = |slot: &Slot| matches!(slot.state, State::Posted { .. } | State::Ignored { .. });
            let slots = inner.slots.iter().enumerate().filter(|(_, slot)| posted(slot));
            slots.map(|(index, slot)| SlotKey { index: index as u32, generation: slot.generation }).collect()
        };
        for key in keys {
            self.complete(key, Err(failure.clone()));
        }
        let waiting = mem::take(&mut self.lock().waiting);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Refuses new operations with `failure` and lets those under way end by themselves (a fabric whose device
    /// still holds the buffers). The first failure stays.
    pub fn refuse(&self, failure: &FabricError) {
        let waiting = {
            let mut inner = self.lock();
            inner.failure.get_or_insert_with(|| failure.clone());
            mem::take(&mut inner.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }

    pub(crate) fn poll_done(&self, key: SlotKey, context: &Context<'_>) -> Poll<Result<(), FabricError>> {
        let mut inner = self.lock();
        let Some(slot) = inner.slots.get_mut(key.index as usize).filter(|s| s.generation == key.generation)
        else {
            return Poll::Ready(Err(FabricError::Closed));
        };
        if let State::Posted { waker, .. } = &mut slot.state {
            match waker {
                Some(known) => known.clone_from(context.waker()),
                None => *waker = Some(context.waker().clone()),
            }
            return Poll::Pending;
        }
        let State::Done(result) = mem::replace(&mut slot.state, State::Free) else {
            return Poll::Ready(Err(FabricError::Closed));
        };
        inner.release(key.index);
        let room = mem::take(&mut inner.waiting);
        drop(inner);
        room.into_iter().for_each(Waker::wake);
        Poll::Ready(result)
    }

    /// The future of `key` was dropped.
    pub(crate) fn ignore(&self, key: SlotKey) {
        let mut inner = self.lock();
        let Some(slot) = inner.slots.get_mut(key.index as usize).filter(|s| s.generation == key.generation)
        else {
            return;
        };
        let mut room = Vec::new();
        match mem::replace(&mut slot.state, State::Free) {
            State::Posted { request, .. } => slot.state = State::Ignored { request },
            State::Done(_) => {
                inner.release(key.index);
                room = mem::take(&mut inner.waiting);
            }
            other => slot.state = other,
        }
        drop(inner);
        room.into_iter().for_each(Waker::wake);
    }

    /// Ready when a slot is free, or never will be because the queue pair has failed.
    pub(crate) fn poll_room(&self, context: &Context<'_>) -> Poll<()> {
        let mut inner = self.lock();
        if inner.failure.is_some() || !inner.free.is_empty() {
            return Poll::Ready(());
        }
        remember(&mut inner.waiting, context.waker());
        Poll::Pending
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
    fn release(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        self.weight -= mem::take(&mut slot.weight);
        slot.state = State::Free;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index);
    }
}

/// Adds `waker` unless its task is noted already.
pub(crate) fn remember(wakers: &mut Vec<Waker>, waker: &Waker) {
    if !wakers.iter().any(|known| known.will_wake(waker)) {
        wakers.push(waker.clone());
    }
}
