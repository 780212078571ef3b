//! Primitive fields. Reading checks everything, and writing checks nothing.

use super::WireError;
use crate::{
    Code, DataType, Destination, Metadata, RequestIndex, ResultSlot, Shape, Status,
    limits::{
        RANK_MAX, RESULT_SLOT_BYTES, STATUS_DETAILS_BYTES_MAX, STATUS_MESSAGE_BYTES_MAX, TENSOR_BYTES_MAX,
    },
    repeated::Repeated,
    text::{escaped_within, has_active},
};

const TARGET_NONE: u8 = 0;
const TARGET_PLAIN: u8 = 1;
const TARGET_CHECKED: u8 = 2;

/// Takes fields off the front of a frame.
pub(super) struct Reader<'bytes> {
    rest: &'bytes [u8],
}

impl<'bytes> Reader<'bytes> {
    /// Starts after the length prefix of `frame`, whose length must be exactly `declared`.
    pub(super) fn new(frame: &'bytes [u8], declared: usize) -> Result<Self, WireError> {
        let body = frame.get(4..declared).ok_or(WireError::Truncated { field: "frame" })?;
        match frame.len() - declared {
            0 => Ok(Self { rest: body }),
            bytes => Err(WireError::Trailing { bytes }),
        }
    }

    pub(super) fn end(self) -> Result<(), WireError> {
        match self.rest.len() {
            0 => Ok(()),
            bytes => Err(WireError::Trailing { bytes }),
        }
    }

    /// Bytes not read yet. No valid count exceeds it.
    pub(super) fn remaining(&self) -> usize {
        self.rest.len()
    }

    /// Takes `bytes` off, if they are next.
    pub(super) fn skip(&mut self, bytes: &[u8]) -> bool {
        let rest = self.rest.strip_prefix(bytes);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// Reads the next field with `read`. If the next bytes equal those that `known` remembers, skips them and returns the
    /// remembered value.
    pub(super) fn repeated<T: Clone>(
        &mut self,
        known: &mut Repeated<T>,
        read: impl FnOnce(&mut Self) -> Result<T, WireError>,
    ) -> Result<T, WireError> {
        if let Some((encoded, value)) = known.last()
            && self.skip(encoded)
        {
            return Ok(value.clone());
        }
        let before = self.rest;
        let value = read(self)?;
        let encoded = before.get(..before.len() - self.rest.len()).unwrap_or_default();
        known.remember(encoded, value.clone());
        Ok(value)
    }

    pub(super) fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], WireError> {
        let (array, rest) = self.rest.split_first_chunk().ok_or(WireError::Truncated { field })?;
        self.rest = rest;
        #[cfg(test)]
        super::layout::note(field, N);
        Ok(*array)
    }

    fn slice(&mut self, length: usize, field: &'static str) -> Result<&'bytes [u8], WireError> {
        let (slice, rest) = self.rest.split_at_checked(length).ok_or(WireError::Truncated { field })?;
        self.rest = rest;
        #[cfg(test)]
        super::layout::note(field, length);
        Ok(slice)
    }

    /// All bytes not read yet. The frame's limit bounds them.
    pub(super) fn rest(&mut self, field: &'static str) -> &'bytes [u8] {
        #[cfg(test)]
        super::layout::note(field, self.rest.len());
        #[cfg(not(test))]
        let _ = field;
        std::mem::take(&mut self.rest)
    }

    pub(super) fn u8(&mut self, field: &'static str) -> Result<u8, WireError> {
        self.array(field).map(u8::from_le_bytes)
    }

    pub(super) fn u16(&mut self, field: &'static str) -> Result<u16, WireError> {
        self.array(field).map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self, field: &'static str) -> Result<u32, WireError> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, field: &'static str) -> Result<u64, WireError> {
        self.array(field).map(u64::from_le_bytes)
    }

    pub(super) fn i64(&mut self, field: &'static str) -> Result<i64, WireError> {
        self.array(field).map(i64::from_le_bytes)
    }

    pub(super) fn flag(&mut self, field: &'static str) -> Result<bool, WireError> {
        match self.u8(field)? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(WireError::Unknown { field, value: value.into() }),
        }
    }

    pub(super) fn option<T>(
        &mut self,
        field: &'static str,
        read: impl FnOnce(&mut Self) -> Result<T, WireError>,
    ) -> Result<Option<T>, WireError> {
        if self.flag(field)? { read(self).map(Some) } else { Ok(None) }
    }

    /// A count of at most `limit` things, each of at least `bytes_min` bytes.
    pub(super) fn count(
        &mut self,
        field: &'static str,
        limit: usize,
        bytes_min: usize,
    ) -> Result<usize, WireError> {
        let count = self.u32(field)? as usize;
        if count > limit {
            return Err(WireError::TooLong { field, length: count, limit });
        }
        if count.saturating_mul(bytes_min) > self.remaining() {
            return Err(WireError::Truncated { field });
        }
        Ok(count)
    }

    pub(super) fn bytes(&mut self, field: &'static str, limit: usize) -> Result<&'bytes [u8], WireError> {
        let length = usize::from(self.u16(field)?);
        if length > limit {
            return Err(WireError::TooLong { field, length, limit });
        }
        self.slice(length, field)
    }

    fn text(&mut self, field: &'static str, limit: usize) -> Result<&'bytes str, WireError> {
        std::str::from_utf8(self.bytes(field, limit)?).map_err(|_| WireError::NotUtf8 { field })
    }

    /// Text for people, escaped. Only this and [`name`](Self::name) read text of a peer.
    fn free_text(&mut self, field: &'static str, limit: usize) -> Result<String, WireError> {
        self.text(field, limit).map(|text| escaped_within(text, limit))
    }

    /// A name, key or address. It is compared and sent back, so it must be safe to show as it is.
    pub(super) fn name(&mut self, field: &'static str, limit: usize) -> Result<&'bytes str, WireError> {
        let name = self.text(field, limit)?;
        if has_active(name) {
            return Err(WireError::ActiveCharacter { field, shown: escaped_within(name, limit) });
        }
        Ok(name)
    }

    pub(super) fn index(&mut self) -> Result<RequestIndex, WireError> {
        let index = RequestIndex(self.u32("request index")?);
        if index.is_reserved() { Err(WireError::ReservedIndex(index.0)) } else { Ok(index) }
    }

    pub(super) fn destination(&mut self) -> Result<Destination, WireError> {
        let destination = Destination {
            region: self.u32("destination region")?,
            generation: self.u32("destination generation")?,
            offset: self.u64("destination offset")?,
            capacity: self.u64("destination capacity")?,
            result: None,
        };
        let Destination { offset, capacity, .. } = destination;
        if capacity == 0 || offset.checked_add(capacity).is_none() {
            return Err(WireError::Inconsistent { field: "destination range" });
        }
        Ok(destination)
    }

    /// Where a content may go, with or without a result slot.
    pub(super) fn target(&mut self) -> Result<Option<Destination>, WireError> {
        let result = match self.u8("destination")? {
            TARGET_NONE => return Ok(None),
            TARGET_PLAIN => None,
            TARGET_CHECKED => {
                let slot = ResultSlot {
                    region: self.u32("result slot region")?,
                    generation: self.u32("result slot generation")?,
                    offset: self.u64("result slot offset")?,
                };
                if slot.offset.checked_add(RESULT_SLOT_BYTES.into()).is_none() {
                    return Err(WireError::Inconsistent { field: "result slot" });
                }
                Some(slot)
            }
            value => return Err(WireError::Unknown { field: "destination", value: value.into() }),
        };
        Ok(Some(Destination { result, ..self.destination()? }))
    }

    pub(super) fn metadata(&mut self) -> Result<Metadata, WireError> {
        let number = u32::from(self.u16("element type")?);
        let dtype = DataType::from_number(number)
            .map_err(|unknown| WireError::Unknown { field: "element type", value: unknown.0.into() })?;
        let is_dead = self.flag("is_dead")?;
        let rank = usize::from(self.u8("rank")?);
        if rank > RANK_MAX {
            return Err(WireError::TooLong { field: "rank", length: rank, limit: RANK_MAX });
        }
        let shape = Shape::read(rank, || self.u64("dimension"))?;
        let shape = shape.ok_or(WireError::Inconsistent { field: "shape" })?;
        let byte_length = self.u64("byte length")?;
        let metadata = Metadata { dtype, shape, is_dead, byte_length };
        check_metadata(&metadata)?;
        Ok(metadata)
    }

    pub(super) fn status(&mut self) -> Result<Status, WireError> {
        let number = u32::from(self.u8("status code")?);
        let code = Code::from_number(number)
            .ok_or(WireError::Unknown { field: "status code", value: number.into() })?;
        let message = self.free_text("status message", STATUS_MESSAGE_BYTES_MAX)?;
        let details = self.bytes("status details", STATUS_DETAILS_BYTES_MAX)?.to_vec();
        Ok(Status { code, message, details })
    }
}

/// Whether `metadata` can travel: its byte length is that of its type and shape (0 when dead, any for an encoded
/// tensor), within the limits.
///
/// # Errors
/// [`WireError`] naming the field that is wrong.
pub(crate) fn check_metadata(metadata: &Metadata) -> Result<(), WireError> {
    let expected = if metadata.is_dead {
        Some(0)
    } else if !metadata.dtype.is_plain() {
        // The encoding has its own length; its reader checks that it is complete.
        Some(metadata.byte_length)
    } else {
        Metadata::plain_bytes(metadata.dtype, &metadata.shape)
    };
    if expected != Some(metadata.byte_length) {
        return Err(WireError::Inconsistent { field: "byte length" });
    }
    check_length("byte length", metadata.byte_length)
}

/// Checks that a content may have so many bytes.
pub(super) fn check_length(field: &'static str, bytes: u64) -> Result<(), WireError> {
    if bytes <= TENSOR_BYTES_MAX {
        return Ok(());
    }
    let [length, limit] = [bytes, TENSOR_BYTES_MAX].map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    Err(WireError::TooLong { field, length, limit })
}

/// Appends one frame to `into`: a length prefix, then what `body` writes.
pub(super) fn frame(into: &mut Vec<u8>, body: impl FnOnce(&mut Writer<'_>)) {
    let start = into.len();
    into.extend_from_slice(&[0; 4]);
    body(&mut Writer { bytes: into });
    let length = u32::try_from(into.len() - start).unwrap_or(u32::MAX);
    if let Some(prefix) = into.get_mut(start..start + 4) {
        prefix.copy_from_slice(&length.to_le_bytes());
    }
}

/// Appends fields.
pub(super) struct Writer<'bytes> {
    bytes: &'bytes mut Vec<u8>,
}

impl Writer<'_> {
    pub(super) fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    pub(super) fn u8(&mut self, value: u8) {
        self.raw(&[value]);
    }

    pub(super) fn u16(&mut self, value: u16) {
        self.raw(&value.to_le_bytes());
    }

    pub(super) fn u32(&mut self, value: u32) {
        self.raw(&value.to_le_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.raw(&value.to_le_bytes());
    }

    pub(super) fn i64(&mut self, value: i64) {
        self.raw(&value.to_le_bytes());
    }

    pub(super) fn option<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Self, T)) {
        self.u8(value.is_some().into());
        if let Some(value) = value {
            write(self, value);
        }
    }

    /// A length that does not fit its field is written as the largest, which every reader refuses.
    pub(super) fn count(&mut self, count: usize) {
        self.u32(u32::try_from(count).unwrap_or(u32::MAX));
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.u16(u16::try_from(bytes.len()).unwrap_or(u16::MAX));
        self.raw(bytes);
    }

    /// A byte string of `length` bytes, which `append` appends.
    pub(super) fn appended(&mut self, length: u64, append: impl FnOnce(&mut Vec<u8>)) {
        self.u16(u16::try_from(length).unwrap_or(u16::MAX));
        append(self.bytes);
    }

    pub(super) fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    pub(super) fn destination(&mut self, destination: Destination) {
        self.u32(destination.region);
        self.u32(destination.generation);
        self.u64(destination.offset);
        self.u64(destination.capacity);
    }

    pub(super) fn target(&mut self, destination: Option<Destination>) {
        let Some(destination) = destination else { return self.u8(TARGET_NONE) };
        match destination.result {
            None => self.u8(TARGET_PLAIN),
            Some(slot) => {
                self.u8(TARGET_CHECKED);
                self.u32(slot.region);
                self.u32(slot.generation);
                self.u64(slot.offset);
            }
        }
        self.destination(destination);
    }

    pub(super) fn metadata(&mut self, metadata: &Metadata) {
        // Numbers of element types are below 2¹⁶ and ranks below 2⁸, by their types.
        self.u16(metadata.dtype as u16);
        self.u8(metadata.is_dead.into());
        let dimensions = metadata.shape.dimensions();
        self.u8(u8::try_from(dimensions.len()).unwrap_or(u8::MAX));
        dimensions.iter().for_each(|&dimension| self.u64(dimension));
        self.u64(metadata.byte_length);
    }

    /// The message is cut at a character, details that are too long are dropped.
    pub(super) fn status(&mut self, status: &Status) {
        self.u8(status.code as u8);
        let message = status.message.as_str();
        let end = (0..=STATUS_MESSAGE_BYTES_MAX).rev().find(|&end| message.is_char_boundary(end));
        self.text(if message.len() > STATUS_MESSAGE_BYTES_MAX {
            &message[..end.unwrap_or(0)]
        } else {
            message
        });
        let fits = status.details.len() <= STATUS_DETAILS_BYTES_MAX;
        self.bytes(if fits { &status.details } else { &[] });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_bytes_are_read_once_and_others_take_their_place() {
        let (mut repeated, mut reads) = (Repeated::default(), 0);
        let mut read = |frame: &[u8]| {
            let mut reader = Reader::new(frame, frame.len()).unwrap();
            let value = reader.repeated(&mut repeated, |reader| {
                reads += 1;
                reader.u16("field")
            });
            (value.ok(), reader.remaining(), reads)
        };
        assert_eq!(read(&[0, 0, 0, 0, 7, 0, 1]), (Some(7), 1, 1));
        assert_eq!(read(&[0, 0, 0, 0, 7, 0]), (Some(7), 0, 1));
        assert_eq!(read(&[0, 0, 0, 0, 7]), (None, 1, 2));
        assert_eq!(read(&[0, 0, 0, 0, 7, 0]), (Some(7), 0, 2));
        assert_eq!(read(&[0, 0, 0, 0, 8, 0]), (Some(8), 0, 3));
        assert_eq!(read(&[0, 0, 0, 0, 7, 0]), (Some(7), 0, 4));
    }
}
