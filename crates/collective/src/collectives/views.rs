//! All-reduce on one host: each rank reads the others' elements in place.
//!
//! In [`exchange`] every rank reads all values of the others, in one step.
//!
//! In the rest every rank offers the others their parts of its value, combines its own part of all ranks' values, and offers the others the
//! result; [`Segments`] has the order. So each rank reads all inputs of its part once, writes its part once, and copies the other parts. All
//! ranks get the same result, bit by bit, because each element is combined once, in the order of the ranks.
//!
//! A rank drops its views of a content before it offers its own next content, from which the others learn that. So memory is free
//! when an offer ends, and the end of an offer wakes no rank.

use std::ops::Range;

use tensorwire_memory::copy::{CopyReason, copy_bytes};
use tensorwire_rendezvous::Tensor;

use super::{
    combination::Combination,
    running::{in_order_of_ranks, replace, stay_cached},
};
use crate::{
    error::GroupError,
    group::calling::{Arrived, Calling, Offers, message_of},
    reduction::BLOCK_BYTES,
    schedule::Segments,
};

/// Stores the combination of all ranks' `own` in `output`, which has the same length. Each rank reads the others' in place.
pub(super) async fn exchange(
    calling: &Calling,
    combination: &Combination<'_>,
    own: Tensor,
    output: &mut [u8],
) -> Result<(), GroupError> {
    let mut offers = Offers::new(calling);
    offers.offer(own.clone()).await?;
    let arrived = offers.next(|_| output.len()).await?;
    combination.fold_all(output, &in_order_of_ranks(calling, own.bytes(), &arrived, 0..output.len()))?;
    offers.end();
    Ok(())
}

/// Stores the combination of all ranks' values in `bytes`. Those of this rank are `bytes`, which are copied once into memory that the others
/// can map, or those of `input`, which the others read in place.
pub(super) async fn all_reduce(
    calling: &Calling,
    combination: &Combination<'_>,
    input: Option<&Tensor>,
    bytes: &mut [u8],
) -> Result<(), GroupError> {
    let segments = Segments::new(bytes.len(), combination.width, calling.size(), input.is_some());
    let (own, count, mut offers) = (calling.rank(), segments.count(), Offers::new(calling));
    if count == 0 {
        return Ok(());
    }
    let are_cached = stay_cached(calling, bytes.len());
    let whole = match input {
        Some(input) => Some(calling.offer(input.clone()).await?),
        None => {
            let mut content = calling.buffer(segments.content_bytes(0, own)).await?;
            copy_values(&segments, (0, own), bytes, &mut content);
            offers.offer(message_of(content.freeze())?).await?;
            None
        }
    };
    let mut values = offers.next(|from| segments.content_bytes(0, from)).await?;
    for number in 0..count {
        let mut content = calling.buffer(segments.content_bytes(number + 1, own)).await?;
        let part = segments.part(number, own);
        let others = calling.others().zip(&values);
        let others: Vec<_> =
            others.map(|(from, value)| bytes_at(value, segments.value(number, from, own))).collect();
        let input = input.and_then(|input| input.bytes().get(part.clone()));
        // A part that was combined in place was just read, so it is in the caches.
        let are_cached = are_cached || input.is_none();
        combine(calling, combination, (input, &others), (&mut bytes[part], &mut content), are_cached)?;
        copy_values(&segments, (number + 1, own), bytes, &mut content);
        if number > 0 {
            let arrived = offers.next(|from| segments.content_bytes(number, from)).await?;
            take_results(calling, &segments, number - 1, &arrived, bytes);
            if whole.is_none() {
                values = arrived;
            }
        }
        if number + 1 == count {
            values.clear();
        }
        offers.offer(message_of(content.freeze())?).await?;
    }
    let results = offers.next(|from| segments.content_bytes(count, from)).await?;
    drop(whole);
    take_results(calling, &segments, count - 1, &results, bytes);
    offers.end();
    Ok(())
}

/// Combines `own`, or `output` itself if that is `None`, with the others' bytes. Stores the result in `output`, past the caches
/// unless `are_cached`, and a copy at the beginning of `content`.
fn combine(
    calling: &Calling,
    combination: &Combination<'_>,
    (own, others): (Option<&[u8]>, &[&[u8]]),
    (output, content): (&mut [u8], &mut [u8]),
    are_cached: bool,
) -> Result<(), GroupError> {
    for start in (0..output.len()).step_by(BLOCK_BYTES) {
        let at = start..(start + BLOCK_BYTES).min(output.len());
        let inputs = in_order_of_ranks(calling, own.unwrap_or(output), others, at.clone());
        combination.fold_all(&mut content[at.clone()], &inputs)?;
        drop(inputs);
        // Copied while the block is in the first cache.
        replace(are_cached, &mut output[at.clone()], &content[at]);
    }
    Ok(())
}

fn bytes_at(content: &Arrived, at: Range<usize>) -> &[u8] {
    content.bytes().get(at).unwrap_or_default()
}

/// Copies the values of content `number` of rank `own` into it.
fn copy_values(segments: &Segments, (number, own): (usize, usize), bytes: &[u8], content: &mut [u8]) {
    for segment in segments.values_of(number) {
        for to in segments.ranks().filter(|to| *to != own) {
            let value = &mut content[segments.value(segment, own, to)];
            copy_bytes(value, &bytes[segments.part(segment, to)], CopyReason::Import);
        }
    }
}

/// Copies the others' results of segment `number`, with which their contents begin, into `bytes`.
fn take_results(
    calling: &Calling,
    segments: &Segments,
    number: usize,
    contents: &[Arrived],
    bytes: &mut [u8],
) {
    let are_cached = stay_cached(calling, bytes.len());
    for (from, content) in calling.others().zip(contents) {
        let part = segments.part(number, from);
        replace(are_cached, &mut bytes[part.clone()], bytes_at(content, 0..part.len()));
    }
}
