//! Contents that are made of a held one and deltas.

use std::{pin::pin, task::Poll};

use tensorwire_memory::{Pool, copy::CopyReason, copy::copy_bytes};
use tensorwire_protocol::{Checksums, Metadata, Validation};

use crate::{
    peer_memory::import::yield_once,
    values::{
        sets::{
            delta::{PIECE_BYTES, Run, Runs},
            manifest::ManifestEntry,
            reading::Problem,
        },
        tensor::Tensor,
    },
};

/// Why a content cannot be made: the whole one is needed.
#[derive(Debug)]
pub(super) enum Doubt {
    /// The deltas are not those of this tensor.
    Wrong(Problem),
    /// There is no memory at the moment.
    NoMemory,
}

/// The content of `entry`, made of `base`, which stays as it is, and `deltas`. Everything that the peer says in them is checked before
/// memory is allocated, and the result is compared with the checksum in the manifest.
///
/// Each piece is copied, changed and summed while the processor's cache has it.
pub(super) async fn assembled(
    pool: &Pool,
    base: &Tensor,
    deltas: &[Tensor],
    entry: &ManifestEntry,
) -> Result<Tensor, Doubt> {
    let metadata = &entry.metadata;
    for delta in deltas {
        Runs::new(delta.bytes(), metadata).and_then(Runs::check).map_err(Doubt::Wrong)?;
        yield_once().await;
    }
    let patches = deltas.iter().map(|delta| Patch::new(delta, metadata));
    let mut patches = patches.collect::<Result<Vec<_>, _>>().map_err(Doubt::Wrong)?;
    let mut buffer = pool.try_alloc(base.bytes().len()).map_err(|_| Doubt::NoMemory)?;
    let (checksums, mut found) = (Checksums::default(), None);
    for (piece, from) in base.bytes().chunks(PIECE_BYTES).enumerate() {
        let begin = piece * PIECE_BYTES;
        let into = buffer.get_mut(begin..begin + from.len()).unwrap_or_default();
        copy_bytes(into, from, CopyReason::Local);
        for patch in &mut patches {
            patch.write(into, begin).map_err(Doubt::Wrong)?;
        }
        // Sums this piece: a sum goes on where it was dropped.
        found = match futures::poll!(pin!(checksums.sum(Validation::Xxh3, &buffer))) {
            Poll::Ready(sum) => sum,
            Poll::Pending => None,
        };
        yield_once().await;
    }
    if found.is_none() || found != entry.checksum {
        return Err(Doubt::Wrong("the checksum of the result differs"));
    }
    Ok(Tensor::received(metadata.clone(), buffer.freeze(), None))
}

/// The runs of a delta that were not written yet.
struct Patch<'delta> {
    runs: Runs<'delta>,
    /// A run, or the end of one, behind the last piece.
    next: Option<Run<'delta>>,
}

impl<'delta> Patch<'delta> {
    fn new(delta: &'delta Tensor, metadata: &Metadata) -> Result<Self, Problem> {
        Ok(Self { runs: Runs::new(delta.bytes(), metadata)?, next: None })
    }

    /// Writes the runs that lie in `piece`, which begins with byte `begin` of the content. Pieces follow each other.
    fn write(&mut self, piece: &mut [u8], begin: usize) -> Result<(), Problem> {
        let end = begin + piece.len();
        loop {
            let Some(run) = self.next.take().map_or_else(|| self.runs.read(), |run| Ok(Some(run)))? else {
                return Ok(());
            };
            if run.offset >= end {
                self.next = Some(run);
                return Ok(());
            }
            let (values, later) = run.values.split_at(run.values.len().min(end - run.offset));
            let place = piece.get_mut(run.offset - begin..).and_then(|rest| rest.get_mut(..values.len()));
            write_values(place.ok_or("a run begins before the one before")?, values);
            if !later.is_empty() {
                self.next = Some(Run { offset: end, values: later });
                return Ok(());
            }
        }
    }
}

/// Copies values of the same length. Most runs have one element, for which a call of `memcpy` takes most of the time.
#[inline(always)]
fn write_values(into: &mut [u8], values: &[u8]) {
    match (into, values) {
        ([first, second], [one, two]) => (*first, *second) = (*one, *two),
        ([a, b, c, d], [e, f, g, h]) => (*a, *b, *c, *d) = (*e, *f, *g, *h),
        (into, values) => into.copy_from_slice(values),
    }
}
