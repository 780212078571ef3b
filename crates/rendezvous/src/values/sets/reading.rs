//! Numbers and texts of encoded manifests and deltas.

/// What is wrong with encoded bytes of a peer.
pub(crate) type Problem = &'static str;

/// Takes fields off the front of encoded bytes, and checks each.
#[derive(Debug)]
pub(crate) struct Reader<'bytes> {
    rest: &'bytes [u8],
}

impl<'bytes> Reader<'bytes> {
    pub(crate) fn new(bytes: &'bytes [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(crate) fn bytes(&mut self, length: usize) -> Result<&'bytes [u8], Problem> {
        let (bytes, rest) = self.rest.split_at_checked(length).ok_or("the bytes end early")?;
        self.rest = rest;
        Ok(bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Problem> {
        let bytes = self.bytes(8)?.first_chunk().ok_or("the bytes end early")?;
        Ok(u64::from_le_bytes(*bytes))
    }

    /// A number in LEB128, of at most 64 bits.
    pub(crate) fn number(&mut self) -> Result<u64, Problem> {
        let mut number = 0_u64;
        for (index, &byte) in self.rest.iter().enumerate() {
            let (bits, shift) = (u64::from(byte & 0x7f), 7 * index as u32);
            if shift > 63 || bits << shift >> shift != bits {
                return Err("a number has more than 64 bits");
            }
            number |= bits << shift;
            if byte < 0x80 {
                self.rest = self.rest.get(index + 1..).unwrap_or_default();
                return Ok(number);
            }
        }
        Err("the bytes end early")
    }

    /// A number of things, each of at least `bytes_min` bytes of the rest.
    pub(crate) fn count(&mut self, bytes_min: usize) -> Result<usize, Problem> {
        let count = self.number()?;
        let most = self.rest.len() / bytes_min.max(1);
        usize::try_from(count).ok().filter(|&count| count <= most).ok_or("a count exceeds the bytes")
    }

    /// The bytes that were not read yet.
    pub(crate) fn rest(self) -> &'bytes [u8] {
        self.rest
    }

    /// How many bytes were not read yet.
    pub(crate) fn left(&self) -> usize {
        self.rest.len()
    }

    pub(crate) fn end(self) -> Result<(), Problem> {
        if self.rest.is_empty() { Ok(()) } else { Err("bytes follow the end") }
    }
}

/// Appends `number` in LEB128.
pub(crate) fn write_number(into: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        into.push(number as u8 | 0x80);
        number >>= 7;
    }
    into.push(number as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_lead_back_and_long_ones_are_refused() {
        for number in [0, 1, 127, 128, 300, u64::from(u32::MAX), u64::MAX - 1, u64::MAX] {
            let mut bytes = Vec::new();
            write_number(&mut bytes, number);
            let mut reader = Reader::new(&bytes);
            assert_eq!(reader.number(), Ok(number));
            assert_eq!(reader.end(), Ok(()));
            let (_, cut) = bytes.split_last().unwrap();
            assert!(Reader::new(cut).number().is_err());
        }
        let long = [0xff; 9].into_iter().chain([2]).collect::<Vec<_>>();
        assert!(Reader::new(&long).number().is_err());
        assert!(Reader::new(&[0x80; 20]).number().is_err());
    }

    #[test]
    fn s4_a_count_never_exceeds_the_bytes() {
        let mut bytes = Vec::new();
        write_number(&mut bytes, 1 << 40);
        bytes.extend([0; 100]);
        assert!(Reader::new(&bytes).count(1).is_err());
        assert_eq!(Reader::new(&[10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).count(1), Ok(10));
        assert!(Reader::new(&[10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).count(2).is_err());
    }
}
