//! The loan of a version: a table of the places of its tensors, to which they are attached. A peer that gets a view of the table can
//! view all of them, under one lease.

use tensorwire_memory::{Buf, Place, Pool};
use tensorwire_protocol::limits::EAGER_BYTES_MAX;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, little_endian::U64};

use super::{bytes_of, encoded, manifest::ManifestEntry};
use crate::values::tensor::Tensor;

/// The place of a tensor in the publisher's memory. Its length is that of the manifest.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Entry {
    /// The number of the block; 0 if the tensor cannot be lent.
    block: U64,
    offset: U64,
}

/// Bytes of the table of `tensors` tensors. It is longer than contents that messages carry, because these are not lent.
pub(crate) fn table_bytes(tensors: usize) -> usize {
    (tensors * size_of::<Entry>()).max(EAGER_BYTES_MAX as usize + 1)
}

/// The table of `tensors`, in memory of `pool`. If that is full, the table names no places.
pub(crate) fn table(pool: &Pool, tensors: &[Tensor]) -> Tensor {
    let length = table_bytes(tensors.len());
    let Ok(mut buffer) = pool.try_alloc(length) else { return encoded(&vec![0; length]) };
    buffer.fill(0);
    let (mut attached, size) = (Vec::with_capacity(tensors.len()), size_of::<Entry>());
    for (tensor, into) in tensors.iter().zip(buffer.chunks_exact_mut(size)) {
        if let Some(Place { block, offset, .. }) = place(tensor.buf()) {
            let entry = Entry { block: block.into(), offset: offset.into() };
            into.copy_from_slice(entry.as_bytes());
            attached.push(tensor.buf().clone());
        }
    }
    Tensor::received(bytes_of(length as u64), buffer.freeze_with(attached), None).remember_checksums()
}

/// The place of bytes that can be lent.
fn place(bytes: &Buf) -> Option<Place> {
    let is_shareable = bytes.block().is_some_and(|block| block.shareable());
    bytes.place().filter(|_| is_shareable && !bytes.is_empty())
}

/// The places that `table`, which comes from a peer, names for the tensors of `entries`; `None` for each that it does not lend.
pub(crate) fn places(table: &[u8], entries: &[ManifestEntry]) -> Vec<Option<Place>> {
    let named = table.chunks_exact(size_of::<Entry>()).map(|bytes| Entry::read_from_bytes(bytes).ok());
    let places = entries.iter().zip(named).map(|(entry, named)| {
        let Entry { block, offset } = named.filter(|named| named.block != 0)?;
        let length = entry.metadata.byte_length;
        Some(Place { block: block.get(), offset: offset.get(), length })
    });
    places.collect()
}
