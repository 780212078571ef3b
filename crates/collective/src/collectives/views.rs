//! All-reduce on one host: each rank reads the others' elements in place.
//!
//! The value is cut into segments, and each segment has a part for each rank. Every rank sends each other rank a view of that
//! rank's part, combines its own part of all ranks' values, and sends the others a view of the result. So each rank reads all
//! inputs of its part once, writes its part once, and copies the other parts. All ranks get the same result, bit by bit, because
//! each element is combined once, in the order of the ranks.
//!
//! A segment is short enough to stay in the processor's cache between its write and its read. The next segment is sent before
//! this one is combined, so that no rank waits for it then.

use std::ops::Range;

use futures::stream::{self, Stream, StreamExt as _, TryStreamExt as _};
use tensorwire_memory::BufMut;
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{Tensor, WorkerError};

use super::{
    how::How,
    running::{Incoming, in_order_of_ranks, replace, requested, stay_cached},
};
use crate::{
    error::GroupError,
    group::calling::{Arrived, Calling},
    reduction::BLOCK_BYTES,
    schedule::{self, Algorithm},
};

/// Combines `bytes` of all ranks in place. They are copied once, into memory that the others can map.
pub(super) async fn all_reduce(calling: &Calling, how: &How<'_>, bytes: &mut [u8]) -> Result<(), GroupError> {
    begin(calling).await?;
    let segments = schedule::view_segments(bytes.len(), how.width, calling.size());
    // Requested at a time: the results of the previous segment, the values of the next one, and the results of this one.
    let ahead = 3 * (calling.size() - 1);
    let mut incoming = requested(receives(calling, &segments), ahead).await;
    send_parts(calling, bytes, segments.first()).await?;
    for (number, parts) in segments.iter().enumerate() {
        send_parts(calling, bytes, segments.get(number + 1)).await?;
        let arrived = next_of_all(calling, &mut incoming).await?;
        let own = bytes.get_mut(parts[calling.rank()].clone()).unwrap_or_default();
        // The combination has just read them, so they are in the caches.
        let result = combine(calling, how, None, &arrived, own, true).await?;
        drop(arrived);
        send_result(calling, result).await?;
        take_results(calling, &mut incoming, bytes, &segments, number).await?;
    }
    Ok(())
}

/// Stores the combination of all ranks' `input` in `output`, which has the same length. The others read `input` in place.
pub(super) async fn all_reduce_shared(
    calling: &Calling,
    how: &How<'_>,
    input: &Tensor,
    output: &mut [u8],
) -> Result<(), GroupError> {
    begin(calling).await?;
    let segments = schedule::view_segments(output.len(), how.width, calling.size());
    let (length, are_cached) = (output.len(), stay_cached(calling, output.len()));
    let whole = calling.others().map(move |from| (from, length));
    let receives = whole.chain(segments.iter().flat_map(|parts| results_of(calling, parts)));
    let receives = stream::iter(receives.map(|(from, length)| calling.receive(from, length)));
    // Requested at a time: the results of the previous segment and of this one.
    let mut incoming = requested(receives, 2 * (calling.size() - 1)).await;
    for to in calling.others() {
        match calling.is_short(output.len()) {
            true => calling.send(to, input.bytes()).await?,
            false => calling.send_tensor(to, input.clone()).await?,
        }
    }
    let whole = next_of_all(calling, &mut incoming).await?;
    for (number, parts) in segments.iter().enumerate() {
        let part = parts[calling.rank()].clone();
        let arrived: Vec<_> =
            whole.iter().map(|whole| whole.bytes().get(part.clone()).unwrap_or_default()).collect();
        let own = input.bytes().get(part.clone()).unwrap_or_default();
        let result = combine(calling, how, Some(own), &arrived, &mut output[part], are_cached).await?;
        send_result(calling, result).await?;
        take_results(calling, &mut incoming, output, &segments, number).await?;
    }
    Ok(())
}

/// Combines `own`, or `output` itself if that is `None`, with the others' bytes. Stores the result in `output`, past the caches
/// unless `are_cached`, and returns a copy that the others can map.
async fn combine(
    calling: &Calling,
    how: &How<'_>,
    own: Option<&[u8]>,
    arrived: &[impl AsRef<[u8]>],
    output: &mut [u8],
    are_cached: bool,
) -> Result<BufMut, GroupError> {
    let mut result = calling.pool().alloc(output.len()).await.map_err(WorkerError::from)?;
    for start in (0..output.len()).step_by(BLOCK_BYTES) {
        let at = start..(start + BLOCK_BYTES).min(output.len());
        let inputs = in_order_of_ranks(calling, own.unwrap_or(output), arrived, at.clone());
        how.fold_all(&mut result[at.clone()], &inputs)?;
        drop(inputs);
        // Copied while the block is in the first cache.
        replace(are_cached, &mut output[at.clone()], &result[at]);
    }
    Ok(result)
}

async fn begin(calling: &Calling) -> Result<(), GroupError> {
    if calling.hosts().len() > 1 {
        return Err(GroupError::Argument {
            field: "algorithm",
            value: Algorithm::Views.to_string(),
            remedy:
                "the ranks do not share memory: they are on several hosts, or a worker does not offer shm"
                    .to_owned(),
        });
    }
    // Receives are requested in the order of the sends only from ranks that are connected.
    for other in calling.others() {
        calling.connect(other).await?;
    }
    Ok(())
}

/// All receives, in the order in which each other rank sends: the values of the next segment before the results of this one.
fn receives<'a>(
    calling: &'a Calling,
    segments: &'a [Vec<Range<usize>>],
) -> impl Stream<Item = impl Future<Output = Result<Arrived, GroupError>> + Send + 'a> + Send + 'a {
    let own = calling.rank();
    stream::iter((0..=segments.len()).flat_map(move |number| {
        let values = segments.get(number).into_iter();
        let values = values.flat_map(move |parts| calling.others().map(move |from| (from, parts[own].len())));
        let results = number.checked_sub(1).and_then(|before| segments.get(before)).into_iter();
        values.chain(results.flat_map(|parts| results_of(calling, parts)))
    }))
    .map(|(from, length)| calling.receive(from, length))
}

/// The ranks and lengths of the results of a segment that this rank receives.
fn results_of(calling: &Calling, parts: &[Range<usize>]) -> impl Iterator<Item = (usize, usize)> {
    calling.others().map(|from| (from, parts[from].len()))
}

/// Sends each other rank its part of a segment.
async fn send_parts(
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

/// Sends the combination of this rank's part to all others.
async fn send_result(calling: &Calling, result: BufMut) -> Result<(), GroupError> {
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

/// Copies the results of the other ranks into `bytes`: those of the segment before `number`, and after the last segment its own
/// too.
async fn take_results(
    calling: &Calling,
    incoming: &mut Incoming<'_>,
    bytes: &mut [u8],
    segments: &[Vec<Range<usize>>],
    number: usize,
) -> Result<(), GroupError> {
    let are_cached = stay_cached(calling, bytes.len());
    let end = if number + 1 == segments.len() { segments.len() } else { number };
    for parts in segments.get(number.saturating_sub(1)..end).unwrap_or_default() {
        let arrived = next_of_all(calling, incoming).await?;
        for (from, arrived) in calling.others().zip(&arrived) {
            replace(are_cached, bytes.get_mut(parts[from].clone()).unwrap_or_default(), arrived.bytes());
        }
    }
    Ok(())
}
