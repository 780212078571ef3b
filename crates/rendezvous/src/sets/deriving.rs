//! Pieces of a sharded set's tensors that are made of held ones and deltas.

use std::ops::Range;

use tensorwire_memory::{BufMut, copy::copy_bytes};
use tensorwire_protocol::{ReceiveOptions, SetContent};

use crate::{
    error::WorkerError,
    sets::{
        assembly::{Patch, check},
        fetching::NotMoved,
        part::Part,
        plan::{Delta, bytes},
        room::in_pool,
        shard_plan::Piece,
    },
    values::{
        cut::{Cut, Place},
        sets::{bytes_of, manifest::ManifestEntry, reading::Problem},
        tensor::Tensor,
    },
    worker::fetch::slice::unfit,
};

/// Pieces of a publisher's tensor, which are made of those that this worker has in the same places and of the tensor's deltas.
pub(super) struct Derived<'a> {
    pub(super) part: &'a Part<'a>,
    /// Of the publisher's tensor.
    pub(super) entry: &'a ManifestEntry,
    pub(super) deltas: &'a [Delta],
    pub(super) pieces: Vec<&'a Piece>,
}

/// A delta, and which of how many it is.
pub(super) type Received<'a, 'b> = (&'b Derived<'a>, usize, Result<Tensor, Problem>);

impl<'a> Derived<'a> {
    /// Brings the pieces into the order in which a delta is read.
    pub(super) fn sort(&mut self) {
        let entry = self.entry;
        self.pieces.sort_by_key(|piece| span(entry, piece).start);
    }

    /// The pieces that one reading of a delta changes, of which each begins behind the end of the one before. Other columns need another
    /// reading.
    fn readings(&self) -> impl Iterator<Item = &[&'a Piece]> {
        self.pieces.chunk_by(|one, next| span(self.entry, one).end <= span(self.entry, next).start)
    }

    /// Bytes of the deltas, as often as they are read.
    pub(super) fn bytes_read(&self) -> u64 {
        bytes(self.deltas).saturating_mul(self.readings().count() as u64)
    }

    /// The room that its deltas need in the receive pool: one at a time.
    pub(super) fn room(&self) -> u64 {
        self.deltas.iter().map(|delta| in_pool(delta.bytes)).max().unwrap_or_default()
    }

    /// Copies the pieces that `held` has to the same places in `result`, which has `shape`.
    pub(super) async fn copy_held(
        &self,
        (result, shape): (&mut BufMut, &[u64]),
        held: &Tensor,
    ) -> Result<(), WorkerError> {
        for piece in &self.pieces {
            tokio::task::coop::consume_budget().await;
            let cut = Cut::new(held, &piece.into).map_err(|invalid| unfit(&piece.into, &invalid))?;
            cut.copied(result, Place { slice: &piece.into, shape }, copy_bytes).await;
        }
        Ok(())
    }

    /// Receives the delta with this number.
    pub(super) async fn received(&self, number: usize) -> Result<Received<'a, '_>, NotMoved> {
        let delta = self.deltas.get(number).ok_or_else(WorkerError::handed_out)?;
        let is_last = self.part.asks_last();
        let content = SetContent { edition: delta.edition, number: delta.number, is_last };
        let expected = (content, bytes_of(delta.bytes));
        match self.part.set.content(&self.part.link, expected, ReceiveOptions::default()).await {
            // The publisher holds only the version that is moved.
            Err(NotMoved::Superseded) if delta.edition != self.part.edition => {
                Ok((self, number, Err("the publisher does not have it any more")))
            }
            received => Ok((self, number, Ok(received?))),
        }
    }

    /// Changes the pieces in `result`, which has `shape`, by a delta.
    ///
    /// # Errors
    /// The delta is not one of this tensor: the pieces are needed as they are.
    pub(super) async fn apply(
        &self,
        delta: &Tensor,
        (result, shape): (&mut BufMut, &[u64]),
    ) -> Result<(), Problem> {
        let metadata = &self.entry.metadata;
        check(delta, metadata).await?;
        for pieces in self.readings() {
            let mut patch = Patch::new(delta, metadata)?;
            for piece in pieces {
                tokio::task::coop::consume_budget().await;
                let from = Place { slice: &piece.from, shape: metadata.shape.dimensions() };
                let into = Place { slice: &piece.into, shape };
                patch.write_slice(from, (into, result), (metadata.dtype.bits() / 8) as usize).await?;
            }
        }
        Ok(())
    }
}

/// The first element of a piece in the publisher's tensor, and the end of the last one.
fn span(entry: &ManifestEntry, piece: &Piece) -> Range<u64> {
    let dimensions = || piece.from.ranges().iter().zip(entry.metadata.shape.dimensions());
    let first = dimensions().fold(0, |at, (range, length)| at * length + range.start);
    let last = dimensions().fold(0, |at, (range, length)| at * length + range.end.saturating_sub(1));
    first..last + 1
}
