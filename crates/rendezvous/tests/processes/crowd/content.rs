//! Values that name their owner. The receiver checks each byte.

use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{Tensor, Worker};

/// Words that a value begins with.
const WORDS: usize = 3;

/// Bytes of a word.
const WIDTH: usize = size_of::<u64>();

/// An odd number without a pattern.
const ODD: u64 = 0x9E37_79B9_7F4A_7C15;

/// Which value it is: its owner's number, the owner's life, and its number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Label {
    pub(crate) owner: u64,
    pub(crate) life: u64,
    pub(crate) number: u64,
}

/// A number that depends on each bit of `from`.
pub(crate) fn mixed(from: u64) -> u64 {
    let mut word = from.wrapping_add(ODD);
    word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

impl Label {
    /// The words of a value of this label, in order; no two labels have the same ones.
    fn words(self) -> impl Iterator<Item = u64> {
        let Self { owner, life, number } = self;
        let seed = mixed(owner ^ mixed(life ^ mixed(number)));
        let rest = (0..).map(move |at: u64| seed.wrapping_add(at.wrapping_mul(ODD)));
        [owner, life, number].into_iter().chain(rest)
    }

    /// A value of `bytes` bytes (a multiple of 8), in `worker`'s memory.
    pub(crate) async fn value(self, worker: &Worker, bytes: usize) -> Tensor {
        let mut buffer = worker.pool().alloc(bytes).await.unwrap();
        for (place, word) in buffer.chunks_exact_mut(WIDTH).zip(self.words()) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        Tensor::new(buffer, DataType::U8, &[bytes as u64]).unwrap()
    }

    /// Which value `bytes` are, if they are one to the last byte.
    pub(crate) fn of(bytes: &[u8]) -> Option<Self> {
        let words = || bytes.chunks_exact(WIDTH).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
        let mut first = words();
        let mut next = || first.next();
        let label = Self { owner: next()?, life: next()?, number: next()? };
        let is_whole = bytes.len() >= WORDS * WIDTH && bytes.len().is_multiple_of(WIDTH);
        (is_whole && words().zip(label.words()).all(|(found, expected)| found == expected)).then_some(label)
    }
}
