//! [`Cut`]: a slice of a tensor, made of the tensor.

use std::ops::Range;

use tensorwire_memory::{
    Buf, BufMut, MemoryError, Pool,
    copy::{CopyBytes, CopyReason, copy_bytes},
};
use tensorwire_protocol::{
    Metadata,
    slice::{InvalidSlice, Slice},
};

use crate::{
    peer_memory::import::{PIECE_BYTES, yield_once},
    values::tensor::Tensor,
};

/// Copies past the caches are as quick as others from so long runs on: 4 KiB take 1.1 of the time, 170 KiB 0.7.
const LONG_RUN_BYTES: usize = 16 << 10;

/// Short runs that are visited before other tasks have their turn.
pub(crate) const RUNS_PER_TURN: usize = 16 << 10;

/// A slice of a tensor, which has it.
#[derive(Debug)]
pub(crate) struct Cut {
    whole: Tensor,
    slice: Slice,
    metadata: Metadata,
}

impl Cut {
    /// Allocates nothing for the slice.
    ///
    /// # Errors
    /// [`InvalidSlice`] if the tensor has no such slice.
    pub(crate) fn new(whole: &Tensor, slice: &Slice) -> Result<Self, InvalidSlice> {
        // Some elements can be moved whole only.
        if *slice == Slice::whole(whole.shape()) {
            return Ok(Self::all(whole.clone()));
        }
        let metadata = slice.metadata(whole.metadata())?;
        Ok(Self { whole: whole.clone(), slice: slice.clone(), metadata })
    }

    /// All of a tensor.
    pub(crate) fn all(whole: Tensor) -> Self {
        let (slice, metadata) = (Slice::whole(whole.shape()), whole.metadata().clone());
        Self { whole, slice, metadata }
    }

    /// The slice as a part of the tensor's memory, if it is one run of bytes.
    pub(crate) fn shared(&self) -> Option<Tensor> {
        if self.metadata == *self.whole.metadata() {
            return Some(self.whole.clone());
        }
        if self.metadata.byte_length == 0 {
            return Some(Tensor::received(self.metadata.clone(), Buf::empty(), None));
        }
        let bytes = self.bytes();
        let run = self.slice.contiguous(self.whole.shape())?;
        let range = bytes * run.start as usize..bytes * run.end as usize;
        Some(Tensor::received(self.metadata.clone(), self.whole.buf().slice(range)?, None))
    }

    /// The slice in memory of `pool`, when there is room. Other tasks have their turn after every 256 KiB.
    pub(crate) async fn gathered(self, pool: &Pool) -> Result<Tensor, MemoryError> {
        let mut buffer = pool.alloc(self.metadata.byte_length as usize).await?;
        let shape = self.metadata.shape.dimensions();
        self.copied(&mut buffer, Place { slice: &Slice::whole(shape), shape }, copy_bytes).await;
        Ok(Tensor::received(self.metadata, buffer.freeze(), None))
    }

    /// Copies the slice into a tensor, to a place of the same lengths. `long` copies long runs.
    pub(crate) async fn copied(&self, into: &mut BufMut, place: Place<'_>, long: CopyBytes) {
        if self.metadata == *self.whole.metadata() && *place.slice == Slice::whole(place.shape) {
            // Some elements have no fixed size.
            let shape = [self.metadata.byte_length];
            let bytes = Place { slice: &Slice::whole(&shape), shape: &shape };
            return copy((self.whole.bytes(), bytes), (into, bytes), 1, long).await;
        }
        let from = Place { slice: &self.slice, shape: self.whole.shape() };
        copy((self.whole.bytes(), from), (into, place), self.bytes(), long).await;
    }

    /// The slice, without a copy if it is one run of bytes.
    pub(crate) async fn made(self, pool: &Pool) -> Result<Tensor, MemoryError> {
        match self.shared() {
            Some(tensor) => Ok(tensor),
            None => self.gathered(pool).await,
        }
    }

    /// Bytes of the slice.
    pub(crate) fn length(&self) -> u64 {
        self.metadata.byte_length
    }

    /// Bytes of an element.
    fn bytes(&self) -> usize {
        (self.metadata.dtype.bits() / 8) as usize
    }
}

/// Where a slice is in a tensor of a shape.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) slice: &'a Slice,
    pub(crate) shape: &'a [u64],
}

/// Copies a slice of one tensor to a slice of another, which has the same lengths. Elements are `bytes` long. `long` copies long runs.
async fn copy(
    (from, source): (&[u8], Place<'_>),
    (into, destination): (&mut BufMut, Place<'_>),
    bytes: usize,
    long: CopyBytes,
) {
    each_common_run((source, destination), bytes, |run, at| {
        let copy = if run.len() < LONG_RUN_BYTES { copy_bytes } else { long };
        let Some(place) = into.get_mut(at..at + run.len()) else { return };
        let Some(piece) = from.get(run) else { return };
        copy(place, piece, CopyReason::Local);
    })
    .await;
}

/// Calls `act` with each run of bytes that a slice of one tensor and a slice of another have in common: with its place in the first, and
/// its begin in the second. The slices have the same lengths; elements are `bytes` long. Other tasks have their turn after every 256 KiB.
pub(crate) async fn each_common_run(
    (source, destination): (Place<'_>, Place<'_>),
    bytes: usize,
    mut act: impl FnMut(Range<usize>, usize),
) {
    let mut sources = source.slice.runs(source.shape);
    let mut rest = 0..0;
    let (mut seen, mut runs) = (0, 0);
    for run in destination.slice.runs(destination.shape) {
        let (mut at, end) = (bytes * run.start as usize, bytes * run.end as usize);
        while at < end {
            if rest.is_empty() {
                let Some(next) = sources.next() else { return };
                rest = bytes * next.start as usize..bytes * next.end as usize;
            }
            let length = rest.len().min(end - at).min(PIECE_BYTES);
            act(rest.start..rest.start + length, at);
            (rest.start, at) = (rest.start + length, at + length);
            (seen, runs) = (seen + length, runs + 1);
            if seen >= PIECE_BYTES || runs >= RUNS_PER_TURN {
                (seen, runs) = (0, 0);
                yield_once().await;
            }
        }
    }
}
