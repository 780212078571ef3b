//! Takes numbers and bytes from the front of a fuzzer's input; zeros once the input is used up.

#![allow(dead_code)] // each body needs some of it

/// The rest of the input.
#[derive(Debug)]
pub(crate) struct Input<'data>(&'data [u8]);

impl<'data> Input<'data> {
    pub(crate) fn new(data: &'data [u8]) -> Self {
        Self(data)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn array<const N: usize>(&mut self) -> [u8; N] {
        let (head, rest) = self.0.split_at(N.min(self.0.len()));
        self.0 = rest;
        let mut array = [0; N];
        array.iter_mut().zip(head).for_each(|(place, byte)| *place = *byte);
        array
    }

    pub(crate) fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    pub(crate) fn flag(&mut self) -> bool {
        self.u8() & 1 == 1
    }

    /// A number below `bound`, which must not be 0.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        let number = if bound <= 256 { usize::from(self.u8()) } else { self.u32() as usize };
        number % bound
    }

    /// One of `from`.
    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Any number. One byte of input usually gives a small one or a neighbour of a power of two.
    pub(crate) fn number(&mut self) -> u64 {
        match self.u8() {
            small @ 0..=63 => small.into(),
            power @ 64..=127 => 1 << (power - 64),
            power @ 128..=191 => (1 << (power - 128)) - 1,
            192..=207 => self.u8().into(),
            208..=223 => self.u16().into(),
            224..=239 => self.u32().into(),
            240..=253 => self.u64(),
            254 => u64::MAX - 1,
            255 => u64::MAX,
        }
    }

    /// Usually a small number; otherwise `bytes`, one more than that, or any number.
    pub(crate) fn near(&mut self, bytes: u64) -> u64 {
        match self.u8() {
            0 => self.number(),
            1 => bytes,
            2 => bytes + 1,
            small => u64::from(small - 3),
        }
    }

    /// At most `most` bytes, with their count before them.
    pub(crate) fn bytes(&mut self, most: usize) -> &'data [u8] {
        let length = self.below(most.saturating_add(1)).min(self.0.len());
        let (head, rest) = self.0.split_at(length);
        self.0 = rest;
        head
    }

    pub(crate) fn rest(self) -> &'data [u8] {
        self.0
    }
}

/// A frame of the wire: `body` after its length.
pub(crate) fn framed(body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len() + 4).unwrap();
    [&length.to_le_bytes(), body].concat()
}
