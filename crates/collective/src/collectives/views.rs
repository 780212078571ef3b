//! All-reduce on one host: each rank reads the others' elements where they are.
//!
//! The value is cut into segments, and each segment has a part for each rank. Every rank lends each other one a view of that one's part;
//! it combines its own part of all ranks' values, and lends the others the result. So each rank reads all inputs of its part once and
//! writes it once, and copies the other parts. All ranks have the same result, bit by bit, because each element is combined once, in the
//! order of the ranks.
//!
//! A segment is short enough to stay in the processor's cache from when it is lent until it is read. The next one is lent before this one
//! is combined, so that nobody waits for it then.

use std::{ops::Range, pin::Pin};

use futures::stream::{self, Stream, StreamExt as _, TryStreamExt as _};
use tensorwire_memory::BufMut;
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{Tensor, WorkerError};

use super::running::{in_order_of_ranks, replace};
use crate::{
    error::GroupError,
    group::calling::{Arrived, Calling},
    schedule,
};

/// What all other ranks send this one, as it comes.
type Incoming<'a> = Pin<Box<dyn Stream<Item = Result<Arrived, GroupError>> + Send + 'a>>;

/// Combines `bytes`, elements of `width` bytes, of all ranks. `fold_all` writes the combination of its inputs.
pub(super) async fn all_reduce(
    calling: &Calling,
    bytes: &mut [u8],
    width: usize,
    fold_all: impl Fn(&mut [u8], &[&[u8]]) -> Result<(), GroupError> + Sync,
) -> Result<(), GroupError> {
    // Receives are requested in the order of the sends only from ranks that are connected.
    for other in calling.others() {
        calling.connect(other).await?;
    }
    let segments = schedule::view_segments(bytes.len(), width, calling.size());
    // Beside what is awaited: the results of the segment before, the values of the next one, and the own results.
    let ahead = 3 * (calling.size() - 1);
    let mut incoming: Incoming<'_> = Box::pin(receives(calling, &segments).buffered(ahead));
    lend(calling, bytes, segments.first()).await?;
    for (number, parts) in segments.iter().enumerate() {
        lend(calling, bytes, segments.get(number + 1)).await?;
        let own = bytes.get_mut(parts[calling.rank()].clone()).unwrap_or_default();
        let arrived = next_of_all(calling, &mut incoming).await?;
        let mut result = calling.pool().alloc(own.len()).await.map_err(WorkerError::from)?;
        fold_all(&mut result, &in_order_of_ranks(calling, own, &arrived))?;
        drop(arrived);
        replace(own, &result);
        lend_result(calling, result).await?;
        if let Some(before) = number.checked_sub(1) {
            take_results(calling, &mut incoming, bytes, &segments[before]).await?;
        }
    }
    match segments.last() {
        Some(last) => take_results(calling, &mut incoming, bytes, last).await,
        None => Ok(()),
    }
}

/// All that this rank receives, in the order in which each other rank sends it: it lends the next segment before a result.
fn receives<'a>(
    calling: &'a Calling,
    segments: &'a [Vec<Range<usize>>],
) -> impl Stream<Item = impl Future<Output = Result<Arrived, GroupError>> + Send + 'a> + Send + 'a {
    let own = calling.rank();
    stream::iter((0..=segments.len()).flat_map(move |number| {
        let values = segments.get(number).into_iter();
        let values = values.flat_map(move |parts| calling.others().map(move |from| (from, parts[own].len())));
        let results = number.checked_sub(1).and_then(|before| segments.get(before)).into_iter();
        let results = results.flat_map(|parts| calling.others().map(|from| (from, parts[from].len())));
        values.chain(results)
    }))
    .map(|(from, length)| calling.receive(from, length))
}

/// Lends each other rank its part of a segment.
async fn lend(
    calling: &Calling,
    bytes: &[u8],
    segment: Option<&Vec<Range<usize>>>,
) -> Result<(), GroupError> {
    let Some(parts) = segment else { return Ok(()) };
    for to in calling.others() {
        calling.send(to, bytes.get(parts[to].clone()).unwrap_or_default()).await?;
    }
    Ok(())
}

/// Lends all others the combination of this rank's part.
async fn lend_result(calling: &Calling, result: BufMut) -> Result<(), GroupError> {
    let length = result.len() as u64;
    if length == 0 {
        return Ok(());
    }
    let result = Tensor::new(result, DataType::U8, &[length])?;
    for to in calling.others() {
        calling.send_tensor(to, result.clone()).await?;
    }
    Ok(())
}

/// One message of each other rank, in the order of [`Calling::others`].
async fn next_of_all(calling: &Calling, incoming: &mut Incoming<'_>) -> Result<Vec<Arrived>, GroupError> {
    incoming.take(calling.size() - 1).try_collect().await
}

/// Puts the combinations of the other ranks in their places.
async fn take_results(
    calling: &Calling,
    incoming: &mut Incoming<'_>,
    bytes: &mut [u8],
    parts: &[Range<usize>],
) -> Result<(), GroupError> {
    let arrived = next_of_all(calling, incoming).await?;
    for (from, arrived) in calling.others().zip(&arrived) {
        replace(bytes.get_mut(parts[from].clone()).unwrap_or_default(), arrived.bytes());
    }
    Ok(())
}
