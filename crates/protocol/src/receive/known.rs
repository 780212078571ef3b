//! Which of the metadata that are known of a value a request names.

use std::sync::Arc;

use crate::{Allocator, Metadata};

/// Those of the `known` metadata that the receive accepts.
pub(super) fn accepted<A: Allocator>(known: Arc<[Metadata]>, allocator: &A) -> Arc<[Metadata]> {
    those(known, |metadata| allocator.accepts(metadata).is_ok())
}

/// The metadata of `known` that fill at least half of the memory for the largest of them, or need none. Each value of one call
/// holds its memory until the last has come, while other receives wait for memory: a small value must not hold memory for
/// a large one.
pub(super) fn of_like_size(known: Arc<[Metadata]>) -> Arc<[Metadata]> {
    let largest = known.iter().map(|metadata| metadata.byte_length).max().unwrap_or_default();
    those(known, |metadata| metadata.byte_length == 0 || metadata.byte_length >= largest / 2)
}

/// The metadata of `known` for which `are` holds. Nothing is copied if it holds for all.
fn those(known: Arc<[Metadata]>, are: impl Fn(&Metadata) -> bool) -> Arc<[Metadata]> {
    if known.iter().all(&are) {
        return known;
    }
    known.iter().filter(|metadata| are(metadata)).cloned().collect()
}
