//! Short calls between ranks of one host that come to the call together: each puts its note where the others look, and finds theirs
//! there. Such a call takes no message, no memory and no timer. All else is as in any other call, which this one becomes if something
//! is missing: another rank is late, a note differs, or does not fit into a box.

use std::sync::atomic::Ordering;

use smallvec::SmallVec;
use tensorwire_rendezvous::{BoxedNote, NoteExchange, Notes};

use super::Calling;
use crate::{
    call::{CallKind, HEADER_BYTES},
    error::GroupError,
    group::CALLS_UNDER_WAY,
};

/// The notes of a call that were put where the other ranks look, in the order of [`Calling::others`].
type Exchanges<'notes> = SmallVec<[NoteExchange<'notes>; 1]>;

/// What the other ranks have put.
type Arrived = SmallVec<[BoxedNote; 1]>;

impl Calling {
    /// Exchanges `bytes` with all other ranks and completes the call with `combine`, if it is its turn, and all notes travel in fast
    /// boxes and come while this side looks. `combine` has the bytes of all ranks, in their order. `None` if the call goes on as any
    /// other: what was sent stays sent, and nothing was taken.
    pub(crate) fn exchange_at_once(
        &self,
        bytes: &mut [u8],
        combine: impl FnOnce(&mut [u8], &[&[u8]]) -> Result<(), GroupError>,
    ) -> Option<Result<(), GroupError>> {
        if self.size() < 2 || self.group.over.get().is_some() || !self.is_turn() {
            return None;
        }
        let mut own = BoxedNote::of(&[&self.call.encode(), bytes])?;
        let lane = self.group.lane(&self.call).number;
        let exchange = |to: usize| self.group.notes(to)?.exchange(lane);
        let mut exchanges: Exchanges<'_> = self.others().map_while(exchange).collect();
        if exchanges.len() + 1 < self.size() {
            return None;
        }
        let mut arrived: Arrived = exchanges.iter().map(|_| BoxedNote::EMPTY).collect();
        exchanges.iter_mut().for_each(|exchange| exchange.put(&mut own));
        if !have_all_come(&exchanges, &own, &mut arrived) {
            tensorwire_testpoints::mark!("a call went on whose notes were put at once");
            drop(exchanges);
            self.others().for_each(|to| {
                self.claim_send(to);
            });
            return None;
        }
        tensorwire_testpoints::mark!("a call was exchanged at once");
        exchanges.iter_mut().for_each(|exchange| {
            exchange.take();
        });
        drop(exchanges);
        let (before, behind) = self.before_and_behind(&arrived);
        let inputs = before.iter().chain([&own]).chain(behind).map(content);
        Some(self.end(combine(bytes, &inputs.collect::<SmallVec<[&[u8]; 8]>>())))
    }

    /// Whether the runtime's other tasks should have a turn before the call is exchanged at once.
    pub(crate) fn is_others_turn(&self) -> bool {
        self.others().next().and_then(|rank| self.group.notes(rank)).is_some_and(Notes::is_others_turn)
    }

    /// Whether the lane's earlier calls are complete.
    fn is_turn(&self) -> bool {
        let lane = self.group.lane(&self.call);
        self.call.kind != CallKind::Close
            && lane.complete.load(Ordering::Acquire) >= self.call.number / CALLS_UNDER_WAY as u64
    }
}

/// The bytes behind the call header.
fn content(note: &BoxedNote) -> &[u8] {
    note.bytes().get(HEADER_BYTES..).unwrap_or_default()
}

/// Whether the notes of all other ranks come while this side looks, each with the same call as `own`, and as long.
fn have_all_come(exchanges: &[NoteExchange<'_>], own: &BoxedNote, arrived: &mut Arrived) -> bool {
    let mut left = exchanges.iter().zip(arrived).peekable();
    let mut is_same = true;
    let mut look = || {
        while let Some((exchange, note)) = left.peek_mut() {
            if !exchange.peek(note) {
                return false;
            }
            is_same &= note.is_like(own, HEADER_BYTES);
            left.next();
        }
        true
    };
    // One that sleeps is woken first.
    let may_look = |_: &&NoteExchange<'_>| !exchanges.iter().any(NoteExchange::seems_asleep);
    (look() || exchanges.first().filter(may_look).is_some_and(|exchange| exchange.look_for(look))) && is_same
}
