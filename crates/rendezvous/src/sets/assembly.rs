//! Contents that are made of a held one and deltas.

use std::{pin::pin, task::Poll};

use tensorwire_memory::{BufMut, Pool, copy::CopyReason, copy::copy_bytes};
use tensorwire_protocol::{Checksums, Metadata, Validation};

use crate::{
    peer_memory::import::yield_once,
    values::{
        cut::{Place, RUNS_PER_TURN, each_common_run},
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
        check(delta, metadata).await.map_err(Doubt::Wrong)?;
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

/// Checks all that a peer says in a delta for a content of `metadata`. Other tasks have their turn in between.
pub(super) async fn check(delta: &Tensor, metadata: &Metadata) -> Result<(), Problem> {
    if tensorwire_testpoints::chance!("a delta is not used") {
        return Err("a test does not use it");
    }
    let mut runs = Runs::new(delta.bytes(), metadata)?;
    let mut read = 0;
    while runs.read()?.is_some() {
        read += 1;
        if read % RUNS_PER_TURN == 0 {
            yield_once().await;
        }
    }
    Ok(())
}

/// The runs of a delta that were not written yet.
pub(super) struct Patch<'delta> {
    runs: Runs<'delta>,
    /// A run, or the end of one, behind the last piece.
    next: Option<Run<'delta>>,
}

impl<'delta> Patch<'delta> {
    pub(super) fn new(delta: &'delta Tensor, metadata: &Metadata) -> Result<Self, Problem> {
        Ok(Self { runs: Runs::new(delta.bytes(), metadata)?, next: None })
    }

    /// Writes the runs that lie in a slice of the content, to a slice of another tensor that has the same lengths. Elements have `bytes`
    /// bytes. Slices of one content follow each other. Other tasks have their turn in between.
    ///
    /// # Errors
    /// The slices are not those of these tensors, or the delta was not [checked](check).
    pub(super) async fn write_slice(
        &mut self,
        from: Place<'_>,
        (into, result): (Place<'_>, &mut BufMut),
        bytes: usize,
    ) -> Result<(), Problem> {
        let mut written = Ok(());
        each_common_run((from, into), bytes, |run, at| {
            if written.is_ok() {
                let piece = result.get_mut(at..at + run.len());
                let piece = piece.ok_or("a piece is outside of the tensor");
                written = piece.and_then(|piece| self.write(piece, run.start));
            }
        })
        .await;
        written
    }

    /// Writes the runs that lie in `piece`, which begins with byte `begin` of the content. Pieces ascend; what is between them is left
    /// out.
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
            let Some(run) = run.from(begin) else { continue };
            let (values, later) = run.values.split_at(run.values.len().min(end - run.offset));
            let place = piece.get_mut(run.offset - begin..).and_then(|rest| rest.get_mut(..values.len()));
            write_values(place.ok_or("a run is outside of its piece")?, values);
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tensorwire_memory::PoolConfig;
    use tensorwire_protocol::{DataType, Shape, slice::Slice};

    use super::*;
    use crate::values::{
        cut::Cut,
        sets::{
            delta::{Compared, Comparison},
            encoded,
        },
    };

    fn run<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    fn pool() -> Pool {
        Pool::new(PoolConfig { block_bytes: 65_536, ..PoolConfig::new("test") }).unwrap()
    }

    fn delta(metadata: &Metadata, old: &Tensor, new: &Tensor) -> Option<Tensor> {
        let mut comparison = Comparison::new(metadata);
        loop {
            match comparison.go_on(old.bytes(), new.bytes()) {
                None => {}
                Some(Compared::Runs(delta)) => return Some(encoded(&delta)),
                Some(Compared::Same | Compared::Full) => return None,
            }
        }
    }

    /// The slice of `old`, changed by what is left of a delta.
    fn patched(patch: &mut Patch<'_>, old: &Tensor, slice: &Slice) -> Vec<u8> {
        let lengths = slice.lengths();
        let (from, whole) = (Place { slice, shape: old.shape() }, Slice::whole(&lengths));
        let into = Place { slice: &whole, shape: &lengths };
        let bytes = 2 * lengths.iter().product::<u64>() as usize;
        let mut result = pool().try_alloc(bytes).unwrap();
        run(async {
            Cut::new(old, slice).unwrap().copied(&mut result, into, copy_bytes).await;
            patch.write_slice(from, (into, &mut result), 2).await.unwrap();
        });
        result.to_vec()
    }

    fn cut(whole: &Tensor, slice: &Slice) -> Vec<u8> {
        run(Cut::new(whole, slice).unwrap().made(&pool())).unwrap().bytes().to_vec()
    }

    proptest! {
        /// Of two slices, of which one begins behind the end of the other.
        #[test]
        fn slices_of_the_new_content_are_those_of_the_old_one_changed_by_the_delta(
            (rows, columns, depth) in (2..12_u64, 1..20_u64, 1..20_u64),
            begins in any::<[prop::sample::Index; 6]>(),
            changes in prop::collection::vec((any::<prop::sample::Index>(), 1..30_usize), 1..12),
        ) {
            let range = |low: u64, high: u64, at: usize| {
                let begin = low + begins[at].index((high - low) as usize) as u64;
                begin..begin + 1 + begins[at + 1].index((high - begin) as usize) as u64
            };
            let [middle, wide, deep] = [rows / 2, columns, depth];
            let slice = |rows| Slice::new(&[rows, range(0, wide, 2), range(0, deep, 4)]).unwrap();
            let slices = [slice(range(0, middle, 0)), slice(range(middle, rows, 0))];
            let elements = (rows * columns * depth) as usize;
            let old: Vec<u16> = (0..elements as u16).collect();
            let mut new = old.clone();
            for (begin, length) in changes {
                let begin = begin.index(elements);
                new[begin..elements.min(begin + length)].iter_mut().for_each(|element| *element ^= 1 << 15);
            }
            let shape = [rows, columns, depth];
            let [old, new] = [old, new].map(|values| Tensor::from_values(&pool(), &shape, &values).unwrap());
            let metadata = Metadata::new(DataType::U16, Shape::new(shape).unwrap()).unwrap();
            let Some(delta) = delta(&metadata, &old, &new) else { return Ok(()) };
            let mut patch = Patch::new(&delta, &metadata).unwrap();
            for slice in &slices {
                prop_assert_eq!(patched(&mut patch, &old, slice), cut(&new, slice));
            }
        }
    }
}
