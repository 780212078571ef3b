//! Runs a plan: sends and receives elements, and combines those that arrive.

use std::{mem, ops::Range, pin::Pin};

use futures::{
    future::try_join_all,
    poll,
    stream::{self, BoxStream, Peekable, StreamExt as _},
};
use smallvec::SmallVec;
use tensorwire_memory::{
    Buf,
    copy::{CopyReason, copy_bytes, copy_past_caches},
};
use tensorwire_rendezvous::Tensor;

use super::combination::Combination;
use crate::{
    error::GroupError,
    group::calling::{Arrived, Calling, message_of},
    schedule::{AHEAD, Arrival, Exchange, Plan},
};

/// From this size on, counted for all ranks of a host together, results leave the last cache before the call is complete. They are
/// written past the caches, so that these keep what is still to be combined and sent. Measured with a cache of 32 MiB, which the
/// values and the messages share: 8 MiB take longer that way, and 16 MiB less time.
const PAST_CACHES_BYTES_MIN: usize = 16 << 20;

/// The messages of the other ranks, in the order in which they are requested.
type Incoming<'a> = Peekable<BoxStream<'a, Result<Arrived, GroupError>>>;

/// The messages of `plan`, in its order. Requests the first ones at once, before this rank sends anything: a rank that combines answers
/// no request until it is done.
async fn requested<'a>(calling: &'a Calling, plan: &'a Plan, width: usize) -> Incoming<'a> {
    let receives = plan.exchanges.iter().flat_map(|exchange| exchange.receive.iter());
    let receives = receives.map(move |(from, range, _)| calling.receive(*from, range.len() * width));
    let ahead = if plan.combines_all_at_once() { 2 * (calling.size() - 1) } else { 0 };
    let mut incoming = stream::iter(receives).buffered(ahead.max(AHEAD)).boxed().peekable();
    // A message that has arrived already stays in the stream.
    let _ = poll!(Pin::new(&mut incoming).peek());
    incoming
}

/// Messages with what a later exchange sends: received messages, and combinations of them. Sending them takes no copy.
struct Forwarded<'plan> {
    plan: &'plan Plan,
    messages: Vec<(Range<usize>, Tensor)>,
}

impl<'plan> Forwarded<'plan> {
    fn of(plan: &'plan Plan) -> Self {
        Self { plan, messages: Vec::new() }
    }

    /// Whether an exchange after `number` sends exactly the elements of `range`.
    fn is_sent_after(&self, number: usize, range: &Range<usize>) -> bool {
        let later = self.plan.exchanges.get(number + 1..).unwrap_or_default();
        later.iter().flat_map(|exchange| &exchange.send).any(|(_, sent)| sent == range)
    }

    /// The message with exactly the elements of `range`, if there is one.
    fn message(&self, range: &Range<usize>) -> Option<&Tensor> {
        self.messages.iter().find(|(of, _)| of == range).map(|(_, message)| message)
    }

    /// Exchange `number` was sent: drops what no later one sends.
    fn sent(&mut self, number: usize) {
        let mut messages = mem::take(&mut self.messages);
        messages.retain(|(range, _)| self.is_sent_after(number, range));
        self.messages = messages;
    }

    /// Exchange `number` has changed `range`. `message` has its elements.
    fn changed(&mut self, number: usize, range: &Range<usize>, message: Option<Tensor>) {
        self.messages.retain(|(of, _)| of.end <= range.start || range.end <= of.start);
        let message = message.filter(|_| self.is_sent_after(number, range));
        self.messages.extend(message.map(|message| (range.clone(), message)));
    }
}

/// Sends elements to several ranks: those of `message`, if there is one, and otherwise one copy of `own`.
async fn send(
    calling: &Calling,
    sends: &[(usize, Range<usize>)],
    own: &[u8],
    message: Option<&Tensor>,
) -> Result<(), GroupError> {
    // A short one may have to travel with the call header.
    if calling.is_short(own.len()) {
        for (to, _) in sends {
            calling.send(*to, message.map_or(own, Tensor::bytes)).await?;
        }
        return Ok(());
    }
    let message = match message {
        Some(message) => message.clone(),
        None => calling.message(own).await?,
    };
    for (to, _) in sends {
        calling.send_tensor(*to, message.clone()).await?;
    }
    Ok(())
}

/// Runs `plan` on `bytes`, the elements of a call. They are those of `own`, which are sent without a copy until they change.
pub(super) async fn run(
    calling: &Calling,
    combination: &Combination<'_>,
    plan: &Plan,
    own: Option<&Tensor>,
    bytes: &mut [u8],
) -> Result<(), GroupError> {
    // Boxed: moving the future of the other would take longer than a short call.
    if calling.is_short(bytes.len()) && plan.receives_one_of_each() {
        Box::pin(run_noted(calling, combination, plan, bytes)).await
    } else {
        Box::pin(run_requested(calling, combination, plan, own, bytes)).await
    }
}

/// As [`run`], for a plan whose messages come with the call header and need no request.
async fn run_noted(
    calling: &Calling,
    combination: &Combination<'_>,
    plan: &Plan,
    bytes: &mut [u8],
) -> Result<(), GroupError> {
    let width = combination.width;
    let in_bytes = |elements: &Range<usize>| elements.start * width..elements.end * width;
    for Exchange { send, receive } in &plan.exchanges {
        for (to, range) in send {
            calling.send(*to, bytes.get(in_bytes(range)).unwrap_or_default()).await?;
        }
        let arrives =
            |(from, range, _): &(usize, Range<usize>, Arrival)| calling.receive(*from, range.len() * width);
        let arrived: SmallVec<[Arrived; 1]> = match receive.as_slice() {
            [only] => [arrives(only).await?].into(),
            several => try_join_all(several.iter().map(arrives)).await?.into(),
        };
        for ((_, range, arrival), one) in receive.iter().zip(&arrived) {
            let own = bytes.get_mut(in_bytes(range)).unwrap_or_default();
            if *arrival == Arrival::FoldAll {
                combine_all(calling, combination, own, &arrived)?;
                break;
            }
            take_in(combination, *arrival, own, one.bytes(), true)?;
        }
    }
    Ok(())
}

async fn run_requested(
    calling: &Calling,
    combination: &Combination<'_>,
    plan: &Plan,
    own: Option<&Tensor>,
    bytes: &mut [u8],
) -> Result<(), GroupError> {
    let (width, are_cached) = (combination.width, stay_cached(calling, bytes.len()));
    let in_bytes = |elements: &Range<usize>| elements.start * width..elements.end * width;
    let mut incoming = requested(calling, plan, width).await;
    let mut forwarded = Forwarded::of(plan);
    if let Some(own) = own {
        for (range, sent) in plan.sent().map(|range| (range, own.buf().slice(in_bytes(range)))) {
            forwarded.messages.push((range.clone(), message_of(sent.unwrap_or_else(Buf::empty))?));
        }
    }
    let mut unsent = plan.exchanges.iter().enumerate().peekable();
    for (number, exchange) in plan.exchanges.iter().enumerate() {
        while let Some((next, exchange)) = unsent.next_if(|(next, _)| may_be_sent(plan, number, *next)) {
            for sends in exchange.send.chunk_by(|(_, one), (_, other)| one == other) {
                let Some((_, range)) = sends.first() else { continue };
                let own = bytes.get(in_bytes(range)).unwrap_or_default();
                send(calling, sends, own, forwarded.message(range)).await?;
            }
            forwarded.sent(next);
        }
        let mut arrived_together = SmallVec::<[Arrived; 8]>::new();
        for (_, range, arrival) in &exchange.receive {
            let arrived = incoming.next().await.unwrap_or(Ok(Arrived::EMPTY))?;
            let own = bytes.get_mut(in_bytes(range)).unwrap_or_default();
            let message = match arrival {
                Arrival::FoldAll => {
                    arrived_together.push(arrived);
                    if arrived_together.len() < exchange.receive.len() {
                        continue;
                    }
                    if forwarded.is_sent_after(number, range) {
                        let all = in_order_of_ranks(calling, own, &arrived_together, 0..own.len());
                        let result = combined_of_all(calling, combination, &all).await?;
                        drop(all);
                        replace(are_cached, own, result.bytes());
                        Some(result)
                    } else {
                        combine_all(calling, combination, own, &arrived_together)?;
                        None
                    }
                }
                Arrival::Pass => Some(combined(calling, combination, own, arrived.bytes()).await?),
                _ => {
                    take_in(combination, *arrival, own, arrived.bytes(), are_cached)?;
                    arrived.into_own_tensor().filter(|_| *arrival == Arrival::Replace)
                }
            };
            forwarded.changed(number, range, message);
        }
    }
    Ok(())
}

/// A message with the combination of `own` and what has `arrived`.
async fn combined(
    calling: &Calling,
    combination: &Combination<'_>,
    own: &[u8],
    arrived: &[u8],
) -> Result<Tensor, GroupError> {
    let mut buffer = calling.buffer(own.len()).await?;
    combination.reduction.fold_into(combination.dtype, &mut buffer, own, arrived)?;
    message_of(buffer.freeze())
}

/// A message with the combination of `inputs`, which have one length.
async fn combined_of_all(
    calling: &Calling,
    combination: &Combination<'_>,
    inputs: &[&[u8]],
) -> Result<Tensor, GroupError> {
    let mut buffer = calling.buffer(inputs.first().map_or(0, |input| input.len())).await?;
    combination.fold_all(&mut buffer, inputs)?;
    message_of(buffer.freeze())
}

/// Stores the combination of `own` and what has `arrived` of all other ranks in `own`.
fn combine_all(
    calling: &Calling,
    combination: &Combination<'_>,
    own: &mut [u8],
    arrived: &[Arrived],
) -> Result<(), GroupError> {
    let copy = SmallVec::<[u8; 256]>::from_slice(own);
    combination.fold_all(own, &in_order_of_ranks(calling, &copy, arrived, 0..copy.len()))
}

/// Combines `own` with what has `arrived`, or replaces it.
fn take_in(
    combination: &Combination<'_>,
    arrival: Arrival,
    own: &mut [u8],
    arrived: &[u8],
    are_cached: bool,
) -> Result<(), GroupError> {
    let Combination { reduction, dtype, .. } = combination;
    match arrival {
        Arrival::Replace => replace(are_cached, own, arrived),
        Arrival::FoldLower => reduction.fold_lower(*dtype, own, arrived)?,
        _ => reduction.fold(*dtype, own, arrived)?,
    }
    Ok(())
}

/// Whether exchange `next` may be sent while `current` is not complete: none of the exchanges between changes what it sends.
fn may_be_sent(plan: &Plan, current: usize, next: usize) -> bool {
    let unfinished = plan.exchanges.get(current..next).unwrap_or_default();
    let changes = |(_, sent): &(usize, Range<usize>)| {
        let mut received = unfinished.iter().flat_map(|exchange| &exchange.receive);
        received.any(|(_, range, _)| range.start < sent.end && sent.start < range.end)
    };
    next <= current + AHEAD && !plan.exchanges[next].send.iter().any(changes)
}

/// Whether results of `bytes` bytes in all stay in the caches until the call is complete.
pub(super) fn stay_cached(calling: &Calling, bytes: usize) -> bool {
    let host = calling.hosts().iter().find(|ranks| ranks.contains(&calling.rank()));
    bytes.saturating_mul(host.map_or(1, Vec::len)) < PAST_CACHES_BYTES_MIN
}

/// Copies a part of the results over `own`, which has the same length.
pub(super) fn replace(are_cached: bool, own: &mut [u8], arrived: &[u8]) {
    if own.len() == arrived.len() {
        let copy = if are_cached { copy_bytes } else { copy_past_caches };
        copy(own, arrived, CopyReason::Local);
    }
}

/// The bytes `at` of all ranks' elements, in the order of the ranks. `arrived` has those of the others, in the order of
/// [`Calling::others`].
pub(super) fn in_order_of_ranks<'a>(
    calling: &Calling,
    own: &'a [u8],
    arrived: &'a [impl AsRef<[u8]>],
    at: Range<usize>,
) -> SmallVec<[&'a [u8]; 8]> {
    let (before, behind) = calling.before_and_behind(arrived);
    let all = before.iter().map(AsRef::as_ref).chain([own]).chain(behind.iter().map(AsRef::as_ref));
    all.map(|bytes| bytes.get(at.clone()).unwrap_or_default()).collect()
}

#[cfg(test)]
mod tests {
    use super::{AHEAD, Forwarded, may_be_sent};
    use crate::schedule::{Exchange, Plan, halving_doubling, ring};
    use tensorwire_protocol::DataType;
    use tensorwire_rendezvous::Tensor;

    #[test]
    fn a_message_is_kept_until_the_last_exchange_that_sends_just_its_elements() {
        let sends = [vec![], vec![(1, 0..4), (2, 0..4)], vec![(3, 0..4)], vec![(1, 4..6)]];
        let exchanges = sends.map(|send| Exchange { send, receive: vec![] }).into();
        let plan = Plan { exchanges };
        let mut forwarded = Forwarded::of(&plan);
        let message = || Some(Tensor::dead(DataType::U8, &[4]).unwrap());
        forwarded.changed(0, &(0..4), message());
        assert!(forwarded.message(&(0..4)).is_some() && forwarded.message(&(0..2)).is_none());
        forwarded.sent(1);
        assert!(forwarded.message(&(0..4)).is_some(), "exchange 2 sends it, too");
        forwarded.sent(2);
        assert!(forwarded.message(&(0..4)).is_none());
        forwarded.changed(0, &(0..4), message());
        forwarded.changed(1, &(3..5), message());
        assert!(
            forwarded.messages.is_empty(),
            "one has changed in part, and no exchange sends just the other"
        );
        forwarded.changed(2, &(0..4), message());
        assert!(forwarded.messages.is_empty(), "no later exchange sends it");
    }

    #[test]
    fn segments_of_a_ring_are_sent_ahead_and_halves_are_not() {
        // Two ranks: a step has 8 segments, and each segment of the second step is one that arrives in the first.
        let ring = ring::all_reduce(0, 2, 1600, 100);
        assert!(may_be_sent(&ring, 0, 0) && may_be_sent(&ring, 0, AHEAD) && may_be_sent(&ring, 3, 3 + AHEAD));
        assert!(!may_be_sent(&ring, 0, AHEAD + 1));
        assert!(may_be_sent(&ring, 5, 5 + AHEAD), "segment 1 of the second step, which has arrived");
        let short = ring::all_reduce(0, 2, 200, 100);
        assert!(may_be_sent(&short, 1, 1) && !may_be_sent(&short, 0, 1), "it sends what is still to arrive");
        let halves = halving_doubling::all_reduce(0, 4, 1000);
        assert!((1..halves.exchanges.len()).all(|next| !may_be_sent(&halves, next - 1, next)));
    }
}
