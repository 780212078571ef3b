//! Short calls between ranks of one host that make the call at the same time: each puts a note into the mailboxes of the others, and finds
//! theirs in its own. Such a call takes no message, no memory and no timer. It goes on as any other call if another rank is late, a note
//! differs, or a note does not fit into a mailbox.

use std::{
    sync::{MutexGuard, PoisonError, atomic::Ordering},
    task::Poll,
};

use smallvec::SmallVec;
use tensorwire_protocol::EagerContent;
use tensorwire_rendezvous::{Notes, PutNote};

use super::Calling;
use crate::{
    call::{CallKind, HEADER_BYTES},
    error::GroupError,
    group::CALLS_UNDER_WAY,
};

/// The notes of a call that were put for the other ranks, in the order of [`Calling::others`].
type Put<'notes> = SmallVec<[PutNote<'notes>; 1]>;

/// What the other ranks have put, in the same order.
type Arrived = SmallVec<[EagerContent; 1]>;

impl Calling {
    /// Exchanges `bytes` with all other ranks and completes the call with `combine`, if it is its turn, and all notes travel in
    /// mailboxes and come while this side looks. `combine` has the bytes of all ranks, in their order. `None` if the call goes on as any
    /// other: what was sent stays sent, and what was taken is received.
    pub(crate) fn exchange_at_once(
        &self,
        bytes: &mut [u8],
        combine: impl FnOnce(&mut [u8], &[&[u8]]) -> Result<(), GroupError>,
    ) -> Option<Result<(), GroupError>> {
        if self.size() < 2 || bytes.is_empty() || self.group.over.get().is_some() || !self.is_turn() {
            return None;
        }
        let lane = self.group.lane(&self.call).number;
        let header = self.call.encode();
        let put: Put<'_> =
            self.others().map_while(|to| self.group.notes(to)?.put(lane, &[&header, bytes])).collect();
        let have_come = put.len() + 1 == self.size() && self.have_all_come(&put);
        let Some(arrived) = have_come.then(|| self.take_all((header.len() + bytes.len(), &header))).flatten()
        else {
            tensorwire_testpoints::mark!("a call went on whose notes were put at once");
            let mut contacts = self.contacts();
            for to in self.others().take(put.len()) {
                if let Some(contact) = contacts.get_mut(to) {
                    (contact.is_call_sent, contact.is_content_sent) = (true, true);
                }
            }
            return None;
        };
        tensorwire_testpoints::mark!("a call was exchanged at once");
        drop(put);
        let own = SmallVec::<[u8; 64]>::from_slice(bytes);
        let (before, behind) = self.before_and_behind(&arrived);
        let inputs = before.iter().map(content).chain([&own[..]]).chain(behind.iter().map(content));
        Some(self.end(combine(bytes, &inputs.collect::<SmallVec<[&[u8]; 8]>>())))
    }

    /// Takes the next note of each other rank. If not all have `length` bytes and begin with `header`, these are received later.
    fn take_all(&self, (length, header): (usize, &[u8])) -> Option<Arrived> {
        let lane = self.group.lane(&self.call).number;
        let next = |from| self.group.notes(from)?.next(lane).ok()?;
        let is_alike = |note: &EagerContent| note.len() == length && note.starts_with(header);
        let mut arrived = Arrived::new();
        for from in self.others() {
            match next(from) {
                Some(note) if is_alike(&note) => arrived.push(note),
                unlike => {
                    *self.taken() = self.others().zip(arrived.into_iter().chain(unlike)).collect();
                    return None;
                }
            }
        }
        Some(arrived)
    }

    /// What was taken of `from` and is still to be received.
    pub(super) fn taken_of(&self, from: usize) -> Option<EagerContent> {
        let mut taken = self.taken();
        let at = taken.iter().position(|(rank, _)| *rank == from)?;
        Some(taken.swap_remove(at).1)
    }

    fn taken(&self) -> MutexGuard<'_, Vec<(usize, EagerContent)>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the notes of all other ranks come while this side looks.
    fn have_all_come(&self, put: &[PutNote<'_>]) -> bool {
        let mut left = put.iter().peekable();
        let mut look = || {
            while left.next_if(|put| put.has_next()).is_some() {}
            left.peek().is_none()
        };
        if look() {
            return true;
        }
        // A rank that sleeps is woken first.
        if put.iter().any(PutNote::seems_asleep) {
            return false;
        }
        if self.may_yield() {
            // A note that follows a message is not found before the message is received.
            let has_message = || self.met().any(Notes::poll_once);
            let polled = self.yield_until(|| match look() {
                true => Poll::Ready(true),
                false if has_message() => Poll::Ready(false),
                false => Poll::Pending,
            });
            return polled == Poll::Ready(true);
        }
        put.first().is_some_and(|first| first.look_for(look))
    }

    /// Whether the runtime's other tasks should have a turn before the call is exchanged at once.
    pub(crate) fn other_tasks_are_due(&self) -> bool {
        self.others().next().and_then(|rank| self.group.notes(rank)).is_some_and(Notes::other_tasks_are_due)
    }

    /// Whether the lane's earlier calls are complete.
    fn is_turn(&self) -> bool {
        let lane = self.group.lane(&self.call);
        self.call.kind != CallKind::Close
            && lane.complete.load(Ordering::Acquire) >= self.call.number / CALLS_UNDER_WAY as u64
    }
}

/// The bytes behind the call header.
fn content(note: &EagerContent) -> &[u8] {
    note.get(HEADER_BYTES..).unwrap_or_default()
}
