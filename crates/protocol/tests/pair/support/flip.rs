//! Bits that change on the way.

use super::channel::Write;

/// What changes on the way, once: this bit of the next content, result slot, loan, or message with a content. In a
/// message, bits count from its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flip {
    Content(usize),
    Result(usize),
    Loan(usize),
    Message(usize),
}

fn flip_bit(bytes: &mut [u8], bit: usize) {
    bytes[bit / 8] ^= 1 << (bit % 8);
}

impl Flip {
    /// Whether `write` had what it changes.
    pub(super) fn change(self, write: &mut Write) -> bool {
        match self {
            Self::Content(bit) => write.content.as_mut().is_some_and(|(_, bytes)| {
                flip_bit(bytes, bit);
                true
            }),
            Self::Result(bit) => write.result.as_mut().is_some_and(|result| {
                flip_bit(result, bit);
                true
            }),
            Self::Loan(bit) => write.loan.as_mut().is_some_and(|bytes| {
                flip_bit(bytes, bit);
                true
            }),
            Self::Message(bit) if write.is_eager => {
                let mut bytes = write.ring.iter_mut().rev().flat_map(|(_, part)| part.iter_mut().rev());
                *bytes.nth(bit / 8).unwrap() ^= 1 << (bit % 8);
                true
            }
            Self::Message(_) => false,
        }
    }
}
