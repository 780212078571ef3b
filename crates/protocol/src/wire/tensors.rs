//! [`TensorList`]: several tensors as one content.

use std::ops::Range;

use super::{
    FRAME_BYTES_MIN,
    codec::{self, Reader},
};
use crate::{Metadata, WireError, limits::TENSORS_PER_LIST_MAX};

/// Bytes of the shortest metadata: element type, is_dead, rank, and length.
const METADATA_BYTES_MIN: usize = 2 + 1 + 1 + 8;

/// Contents of fewer bytes than this follow the head. They begin at multiples of [`ALIGNMENT`], which suffices for every element type.
const LONG_BYTES: u64 = 1024;
const ALIGNMENT: u64 = 16;

/// At multiples of this begin the others, which follow them: copies from and to whole cache lines are faster.
const LONG_ALIGNMENT: u64 = 64;

/// Where several tensors are in one content: a head that describes them, then the bytes of short ones, then those of long ones. The arguments and
/// the answer of a [call](crate::Scope::Call) travel so.
///
/// ```
/// use tensorwire_protocol::{DataType, Metadata, Shape, TensorList};
///
/// let vector = Metadata::new(DataType::F32, Shape::new([3]).unwrap()).unwrap();
/// let list = TensorList::new(vec![vector.clone()])?;
/// let mut content = list.head();
/// content.resize(list.byte_length() as usize, 7);
///
/// let read = TensorList::read(&content)?;
/// let (metadata, place) = read.tensors().next().unwrap();
/// assert_eq!((metadata, &content[place.start as usize..place.end as usize]), (&vector, &[7; 12][..]));
/// # Ok::<(), tensorwire_protocol::WireError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorList {
    metadata: Vec<Metadata>,
    /// Each where the content of its tensor is.
    places: Vec<Range<u64>>,
    /// Where the first long tensor is.
    front: u64,
    byte_length: u64,
}

impl TensorList {
    /// The list of tensors of these metadata.
    ///
    /// # Errors
    /// [`WireError::TooLong`] if they are more than [`TENSORS_PER_LIST_MAX`], or have more bytes than one tensor may have.
    pub fn new(metadata: Vec<Metadata>) -> Result<Self, WireError> {
        if metadata.len() > TENSORS_PER_LIST_MAX {
            let (length, limit) = (metadata.len(), TENSORS_PER_LIST_MAX);
            return Err(WireError::TooLong { field: "tensors", length, limit });
        }
        let head = encoded(&metadata).len();
        Self::after(head as u64, metadata)
    }

    /// The list whose head has so many bytes.
    fn after(head: u64, metadata: Vec<Metadata>) -> Result<Self, WireError> {
        let mut places = vec![0..0; metadata.len()];
        let (mut end, mut front) = (head, None);
        for (are_long, alignment) in [(false, ALIGNMENT), (true, LONG_ALIGNMENT)] {
            let lengths = metadata.iter().map(|metadata| metadata.byte_length);
            let of_kind = places.iter_mut().zip(lengths).filter(|(_, length)| is_long(*length) == are_long);
            for (place, length) in of_kind {
                let start = if length == 0 { end } else { end.next_multiple_of(alignment) };
                end = start.saturating_add(length);
                codec::check_length("bytes of the tensors", end)?;
                if are_long {
                    front.get_or_insert(start);
                }
                *place = start..end;
            }
        }
        Ok(Self { metadata, places, front: front.unwrap_or(end), byte_length: end })
    }

    /// The list that `content` begins with. All of its tensors are in `content`, which has no other bytes.
    ///
    /// # Errors
    /// [`WireError`] names what is wrong; the peer is faulty or hostile.
    pub fn read(content: &[u8]) -> Result<Self, WireError> {
        let truncated = WireError::Truncated { field: "head" };
        let prefix = content.first_chunk().ok_or(truncated.clone())?;
        let length = u32::from_le_bytes(*prefix) as usize;
        let head = content.get(..length).filter(|_| length >= FRAME_BYTES_MIN).ok_or(truncated)?;
        let mut reader = Reader::new(head, length)?;
        let count = reader.count("tensors", TENSORS_PER_LIST_MAX, METADATA_BYTES_MIN)?;
        let metadata = (0..count).map(|_| reader.metadata()).collect::<Result<_, _>>()?;
        reader.end()?;
        let list = Self::after(length as u64, metadata)?;
        if list.byte_length != content.len() as u64 {
            return Err(WireError::Inconsistent { field: "bytes of the tensors" });
        }
        Ok(list)
    }

    /// What the content begins with.
    pub fn head(&self) -> Vec<u8> {
        encoded(&self.metadata)
    }

    /// Bytes of the whole content.
    pub fn byte_length(&self) -> u64 {
        self.byte_length
    }

    /// Bytes before the first long tensor: the head, and the contents of short tensors.
    pub fn front(&self) -> u64 {
        self.front
    }

    /// The tensors, each with the place of its bytes in the content.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&Metadata, Range<u64>)> {
        self.metadata.iter().zip(self.places.iter().cloned())
    }
}

/// Whether a content of so many bytes follows those of the short tensors.
fn is_long(bytes: u64) -> bool {
    bytes >= LONG_BYTES
}

fn encoded(metadata: &[Metadata]) -> Vec<u8> {
    let mut head = Vec::new();
    codec::frame(&mut head, |writer| {
        writer.count(metadata.len());
        metadata.iter().for_each(|metadata| writer.metadata(metadata));
    });
    head
}
