//! Fields that are mostly the same in one message after the other.

use super::{WireError, codec::Reader};

/// What such fields were when they were read last. The same bytes mean the same, so they are compared instead of read and
/// checked again.
#[derive(Debug)]
pub(crate) struct Repeated<T> {
    encoded: Vec<u8>,
    /// `None` until something was read.
    value: Option<T>,
}

impl<T> Default for Repeated<T> {
    fn default() -> Self {
        Self { encoded: Vec::new(), value: None }
    }
}

impl<T: Clone> Repeated<T> {
    /// What `read` reads next.
    pub(super) fn read<'bytes>(
        &mut self,
        reader: &mut Reader<'bytes>,
        read: impl FnOnce(&mut Reader<'bytes>) -> Result<T, WireError>,
    ) -> Result<T, WireError> {
        if let Some(value) = &self.value
            && reader.skip(&self.encoded)
        {
            return Ok(value.clone());
        }
        let before = reader.rest();
        let value = read(reader)?;
        let encoded = before.get(..before.len() - reader.remaining()).unwrap_or_default();
        self.encoded.clear();
        self.encoded.extend_from_slice(encoded);
        self.value = Some(value.clone());
        Ok(value)
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
            let value = repeated.read(&mut reader, |reader| {
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
