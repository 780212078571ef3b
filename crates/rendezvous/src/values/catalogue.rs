//! Published tensors as contents of a catalogue, which neighbours on the same host read directly.

use std::{
    ptr,
    sync::{Arc, OnceLock},
};

use tensorwire_fabric::{CELL_WORDS, Catalogue, CellContent, CellNumber, CellReading};
use tensorwire_memory::Buf;
use tensorwire_protocol::{DataType, Metadata, Shape, limits::TENSOR_BYTES_MAX};

use crate::values::tensor::Tensor;

/// The catalogue that neighbours read, once one of them has fetched a tensor.
#[derive(Debug, Default)]
pub(crate) struct OwnCatalogue(OnceLock<Arc<dyn Catalogue>>);

impl OwnCatalogue {
    /// The catalogue, if the worker has one.
    pub(crate) fn get(&self) -> Option<&Arc<dyn Catalogue>> {
        self.0.get()
    }

    /// The first call sets the catalogue. `None` if `catalogue` is not that one.
    pub(crate) fn get_or_set(&self, catalogue: &Arc<dyn Catalogue>) -> Option<&Arc<dyn Catalogue>> {
        let own = self.0.get_or_init(|| catalogue.clone());
        ptr::addr_eq(Arc::as_ptr(own), Arc::as_ptr(catalogue)).then_some(own)
    }

    /// Replaces the content of `cell`, which neighbours read. Returns memory to be dropped without a lock.
    pub(crate) fn write(&self, cell: CellNumber, content: Option<CellContent>) -> Vec<Buf> {
        self.get().map(|catalogue| catalogue.write(cell, content)).unwrap_or_default()
    }
}

/// Whether a tensor is in the catalogue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Listing {
    /// No neighbour has fetched it yet.
    Unlisted,
    /// In this cell.
    Cell(CellNumber),
    /// The catalogue has no room for the name.
    Refused,
}

impl Listing {
    pub(crate) fn cell(self) -> Option<CellNumber> {
        match self {
            Self::Cell(cell) => Some(cell),
            Self::Unlisted | Self::Refused => None,
        }
    }
}

/// The cell's content for a published tensor; `number` is the number of its version. `None` for a tensor with too many
/// dimensions, which neighbours must request.
pub(crate) fn content(number: u64, tensor: &Tensor) -> Option<CellContent> {
    let Metadata { dtype, shape, is_dead, .. } = tensor.metadata();
    let mut words = [0; CELL_WORDS];
    let [version, form, dimensions @ ..] = &mut words;
    *version = number;
    *form = *dtype as u64 | (shape.len() as u64) << 32 | u64::from(*is_dead) << 40;
    dimensions.get_mut(..shape.len())?.copy_from_slice(shape.dimensions());
    Some(CellContent { words, bytes: tensor.buf().clone() })
}

/// The version number of a cell's content.
pub(crate) fn version(reading: &CellReading) -> u64 {
    let [version, ..] = reading.words;
    version
}

/// The version number and the metadata of a cell's content; `None` if they contradict each other.
pub(crate) fn parse(reading: &CellReading) -> Option<(u64, Metadata)> {
    let [version, form, ref dimensions @ ..] = reading.words;
    let (dtype, rank, is_dead) = (form as u32, (form >> 32 & 0xff) as usize, form >> 40);
    let dtype = DataType::from_number(dtype).ok()?;
    let shape = Shape::new(dimensions.get(..rank)?)?;
    let metadata = match is_dead {
        0 if dtype.is_plain() => Metadata::new(dtype, shape)?,
        0 => Metadata::encoded(dtype, shape, reading.length)?,
        1 => Metadata::dead(dtype, shape),
        _ => return None,
    };
    let is_sound = metadata.byte_length == reading.length && reading.length <= TENSOR_BYTES_MAX;
    is_sound.then_some((version, metadata))
}

const _: () = assert!(CELL_WORDS == 4 + 2);

#[cfg(test)]
mod tests {
    use tensorwire_fabric::{CELL_CONTENT_BYTES, CellOrigin};
    use tensorwire_memory::Buf;

    use super::*;

    fn reading(words: [u64; CELL_WORDS], length: u64) -> CellReading {
        let origin = CellOrigin { cell: CellNumber(0), edition: 2, block: 0, offset: 0 };
        CellReading { words, length, content: [0; CELL_CONTENT_BYTES], origin }
    }

    fn tensor(metadata: Metadata) -> Tensor {
        Tensor::received(metadata, Buf::empty(), None)
    }

    #[test]
    fn metadata_goes_through_a_cell() {
        let shapes: [&[u64]; 5] = [&[], &[3], &[0, 1], &[2, 3, 4], &[1, 2, 3, 4]];
        for shape in shapes {
            for &dtype in DataType::ALL {
                let shape = Shape::new(shape).unwrap();
                let live = Metadata::new(dtype, shape.clone());
                let live = live.or_else(|| Metadata::encoded(dtype, shape.clone(), 99)).unwrap();
                for metadata in [live, Metadata::dead(dtype, shape)] {
                    let written = content(7, &tensor(metadata.clone())).unwrap();
                    let read = parse(&reading(written.words, metadata.byte_length));
                    assert_eq!(read, Some((7, metadata)));
                }
            }
        }
        let many = Metadata::new(DataType::U8, Shape::new([1; 5]).unwrap()).unwrap();
        assert!(content(7, &tensor(many)).is_none());
    }

    #[test]
    fn s5_a_cell_that_contradicts_itself_is_not_used() {
        let form = |dtype: u64, rank: u64, dead: u64| dtype | rank << 32 | dead << 40;
        let float = DataType::F32 as u64;
        assert!(parse(&reading([1, form(float, 1, 0), 2, 0, 0, 0], 8)).is_some());
        let wrong = [
            ([1, form(float, 1, 0), 2, 0, 0, 0], 12),
            ([1, form(float, 5, 0), 1, 1, 1, 1], 4),
            ([1, form(0, 1, 0), 2, 0, 0, 0], 8),
            ([1, form(float, 1, 2), 2, 0, 0, 0], 8),
            ([1, form(float, 1, 1), 2, 0, 0, 0], 8),
            ([1, form(float, 4, 0), u64::MAX, u64::MAX, 2, 2], 8),
            ([1, form(DataType::String as u64, 1, 0), 2, 0, 0, 0], TENSOR_BYTES_MAX + 1),
        ];
        for (words, length) in wrong {
            assert!(parse(&reading(words, length)).is_none(), "{words:?} {length}");
        }
    }
}
