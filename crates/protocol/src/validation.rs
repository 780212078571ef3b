//! Checksums of contents, from the sender's value to the receiver's memory.
//!
//! Both peers agree on one algorithm ([`Agreed::of`](crate::Agreed::of)). The sender computes the sum of a value once
//! and remembers it beside the value ([`Checksums`]). The sum travels with the content, and the receiver compares it
//! with the sum of the bytes that it returns to the caller. How it travels:
//!
//! - For a written content it is in the *result slot*, which the destination names ([`ResultSlot`](crate::ResultSlot)):
//!   the same vectored write puts it there before the immediate, so a content of known metadata needs no further message. Where
//!   the fabric has no vectored write, a plain write before the content puts it there.
//! - For content inside META_DATA_RESPONSE, and for a loan, it is in that message. So a META_DATA_RESPONSE precedes
//!   each loan.
//! - In mode original every request is answered by META_DATA_RESPONSE first, which carries it.
//! - A written content of no bytes has none.
//!
//! A result slot, little-endian:
//!
//! | offset | bytes | field |
//! | --- | --- | --- |
//! | 0 | 4 | version, [`RESULT_VERSION`] |
//! | 4 | 4 | algorithm, by its number |
//! | 8 | 8 | length of the content in bytes |
//! | 16 | 8 | checksum; one of 32 bits has zeros above |
//!
//! The slot has room for [`RESULT_SLOT_BYTES`](crate::limits::RESULT_SLOT_BYTES); the rest is not written.

use std::{
    fmt,
    future::poll_fn,
    str::FromStr,
    sync::{Mutex, MutexGuard, PoisonError},
    task::Poll,
};

use twox_hash::xxhash3_64;

use crate::limits::RESULT_BYTES;

/// Version of the layout of result slots.
pub const RESULT_VERSION: u32 = 1;

/// Bytes that are summed before other tasks run: some ten microseconds of work.
const GO_BYTES: usize = 256 << 10;

/// Whether contents are validated, and by which checksum. Later variants are stronger.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Validation {
    /// No checksum is computed or sent.
    #[default]
    Off = 0,
    /// CRC-32C (Castagnoli): finds every flipped bit and every burst of up to 32 bits; misses other changes 1 time in 2³².
    Crc32c = 1,
    /// XXH3-64: misses a change 1 time in 2⁶⁴.
    Xxh3 = 2,
}

impl Validation {
    /// All of them, weakest first.
    pub const ALL: [Self; 3] = [Self::Off, Self::Crc32c, Self::Xxh3];

    /// Its name: `off`, `crc32c` or `xxh3`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Crc32c => "crc32c",
            Self::Xxh3 => "xxh3",
        }
    }

    /// The algorithm with this number on the wire.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|validation| *validation as u32 == number)
    }

    /// Whether contents have checksums.
    pub fn is_on(self) -> bool {
        self != Self::Off
    }

    /// The checksum of `content`, without yielding; `None` when contents have none.
    pub fn checksum(self, content: &[u8]) -> Option<u64> {
        let mut hasher = Hasher::new(self)?;
        hasher.write(content);
        Some(hasher.finish())
    }
}

impl fmt::Display for Validation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Text that names no [`Validation`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("validation = `{0}`: use off, crc32c or xxh3")]
pub struct UnknownValidation(pub String);

impl FromStr for Validation {
    type Err = UnknownValidation;

    fn from_str(text: &str) -> Result<Self, UnknownValidation> {
        let named = Self::ALL.into_iter().find(|validation| validation.name() == text);
        named.ok_or_else(|| UnknownValidation(text.to_owned()))
    }
}

/// A checksum that is being computed.
enum Hasher {
    Crc32c(u32),
    Xxh3(Box<xxhash3_64::Hasher>),
}

impl Hasher {
    fn new(validation: Validation) -> Option<Self> {
        match validation {
            Validation::Off => None,
            Validation::Crc32c => Some(Self::Crc32c(0)),
            Validation::Xxh3 => Some(Self::Xxh3(Box::default())),
        }
    }

    fn write(&mut self, bytes: &[u8]) {
        match self {
            Self::Crc32c(sum) => *sum = crc32c::crc32c_append(*sum, bytes),
            Self::Xxh3(hasher) => std::hash::Hasher::write(&mut **hasher, bytes),
        }
    }

    fn finish(&self) -> u64 {
        match self {
            Self::Crc32c(sum) => u64::from(*sum),
            Self::Xxh3(hasher) => std::hash::Hasher::finish(&**hasher),
        }
    }
}

/// A sum over a content, some bytes at a time.
pub(crate) struct Summing {
    hasher: Hasher,
    at: usize,
}

impl Summing {
    pub(crate) fn new(validation: Validation) -> Option<Self> {
        Some(Self { hasher: Hasher::new(validation)?, at: 0 })
    }

    /// Continues over `content`, which must be the same at each call. Returns the sum after the last byte.
    pub(crate) fn go_on(&mut self, content: &[u8]) -> Option<u64> {
        let rest = content.get(self.at..).unwrap_or_default();
        let (next, left) = rest.split_at(rest.len().min(GO_BYTES));
        self.hasher.write(next);
        self.at += next.len();
        left.is_empty().then(|| self.hasher.finish())
    }
}

enum Sum {
    Going(Summing),
    Done(u64),
}

impl fmt::Debug for Sum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Going(summing) => write!(f, "Going({} bytes)", summing.at),
            Self::Done(sum) => write!(f, "Done({sum:016x})"),
        }
    }
}

/// The checksums of one immutable value, each computed on first use and remembered.
#[derive(Debug, Default)]
pub struct Checksums {
    crc32c: Mutex<Option<Sum>>,
    xxh3: Mutex<Option<Sum>>,
}

impl Checksums {
    /// With a sum that is known already.
    pub fn known(validation: Validation, sum: u64) -> Self {
        let checksums = Self::default();
        if let Some(mut place) = checksums.place(validation) {
            *place = Some(Sum::Done(sum));
        }
        checksums
    }

    /// The sum over `content`, the bytes of the value: the remembered one, else computed piece by piece, with other tasks
    /// running in between. `None` when `validation` is off.
    ///
    /// # Cancel safety
    /// Cancel-safe: the next call continues where this one was dropped.
    pub async fn sum(&self, validation: Validation, content: &[u8]) -> Option<u64> {
        let summed = poll_fn(|context| match self.go_on(validation, content) {
            Some((sum, _)) => Poll::Ready(sum),
            None => {
                context.waker().wake_by_ref();
                Poll::Pending
            }
        });
        summed.await
    }

    fn place(&self, validation: Validation) -> Option<MutexGuard<'_, Option<Sum>>> {
        let place = match validation {
            Validation::Off => return None,
            Validation::Crc32c => &self.crc32c,
            Validation::Xxh3 => &self.xxh3,
        };
        Some(place.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Continues the sum over `content`, the bytes of the value, from where the latest call of any task stopped. Call it
    /// again until it returns the sum, with whether this call completed it. With `validation` off it returns at once.
    pub(crate) fn go_on(&self, validation: Validation, content: &[u8]) -> Option<(Option<u64>, bool)> {
        let Some(mut place) = self.place(validation) else { return Some((None, false)) };
        if place.is_none() {
            *place = Summing::new(validation).map(Sum::Going);
        }
        let sum = match place.as_mut()? {
            Sum::Done(sum) => return Some((Some(*sum), false)),
            Sum::Going(summing) => summing.go_on(content)?,
        };
        *place = Some(Sum::Done(sum));
        Some((Some(sum), true))
    }
}

/// The bytes of the result slot of a content with this sum.
pub(crate) fn encode_result(validation: Validation, length: u64, sum: u64) -> [u8; RESULT_BYTES] {
    let mut record = [0; RESULT_BYTES];
    let head = [RESULT_VERSION, validation as u32].map(u32::to_le_bytes);
    let tail = [length, sum].map(u64::to_le_bytes);
    let fields = head.as_flattened().iter().chain(tail.as_flattened());
    for (place, byte) in record.iter_mut().zip(fields) {
        *place = *byte;
    }
    record
}

/// The sum in a result slot, and whether the other fields match a content of `length` bytes.
pub(crate) fn decode_result(record: &[u8; RESULT_BYTES], validation: Validation, length: u64) -> (u64, bool) {
    let (rest, sum) = record.split_last_chunk().unwrap_or((record, &[0; 8]));
    let sum = u64::from_le_bytes(*sum);
    (sum, encode_result(validation, length, sum).starts_with(rest))
}

/// What was changed between sender and receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Damage {
    /// The content, or its checksum.
    Content,
    /// Another field of its result slot.
    ResultSlot,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Content => "the content or its checksum was changed on the way",
            Self::ResultSlot => "the record beside its checksum was changed on the way",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 3720, appendix B.4, and the check value of the catalogue of CRCs.
    #[test]
    fn crc32c_is_the_published_function() {
        let ascending: Vec<u8> = (0..32).collect();
        let descending: Vec<u8> = (0..32).rev().collect();
        let vectors: [(&[u8], u64); 6] = [
            (b"", 0),
            (b"123456789", 0xe306_9283),
            (&[0; 32], 0x8a91_36aa),
            (&[0xFF; 32], 0x62a8_ab43),
            (&ascending, 0x46dd_794e),
            (&descending, 0x113f_db5c),
        ];
        for (content, sum) in vectors {
            assert_eq!(Validation::Crc32c.checksum(content), Some(sum), "{content:?}");
        }
    }

    #[test]
    fn xxh3_is_the_published_function() {
        let vectors: [(&[u8], u64); 2] = [(b"", 0x2d06_8005_38d3_94c2), (b"abc", 0x78af_5f94_892f_3950)];
        for (content, sum) in vectors {
            assert_eq!(Validation::Xxh3.checksum(content), Some(sum), "{content:?}");
        }
    }

    #[test]
    fn names_and_numbers_lead_back_and_later_ones_are_stronger() {
        for validation in Validation::ALL {
            assert_eq!(validation.name().parse(), Ok(validation));
            assert_eq!(Validation::from_number(validation as u32), Some(validation));
        }
        assert!(Validation::Off < Validation::Crc32c && Validation::Crc32c < Validation::Xxh3);
        assert_eq!(Validation::from_number(3), None);
        let error = "md5".parse::<Validation>().unwrap_err();
        assert_eq!(error.to_string(), "validation = `md5`: use off, crc32c or xxh3");
    }

    #[test]
    fn a_sum_in_many_goes_is_the_sum_and_is_computed_once() {
        for length in [0, 1, GO_BYTES, GO_BYTES + 1, 3 * GO_BYTES + 5] {
            let content: Vec<u8> = (0..length).map(|at| (at * 7 + at / 251) as u8).collect();
            for validation in [Validation::Crc32c, Validation::Xxh3] {
                let checksums = Checksums::default();
                let mut goes = 1;
                let found = loop {
                    match checksums.go_on(validation, &content) {
                        Some(found) => break found,
                        None => goes += 1,
                    }
                };
                assert_eq!(found, (validation.checksum(&content), true), "{length}");
                assert_eq!(goes, length.div_ceil(GO_BYTES).max(1), "{length}");
                assert_eq!(checksums.go_on(validation, &content), Some((found.0, false)));
            }
        }
        assert_eq!(Checksums::default().go_on(Validation::Off, b"x"), Some((None, false)));
        let known = Checksums::known(Validation::Xxh3, 7);
        assert_eq!(known.go_on(Validation::Xxh3, b"x"), Some((Some(7), false)));
    }

    #[test]
    fn result_slot_has_the_documented_layout() {
        let record = encode_result(Validation::Crc32c, 0x0102_0304_0506, 0xAABB_CCDD);
        let expected = [1, 0, 0, 0, 1, 0, 0, 0, 6, 5, 4, 3, 2, 1, 0, 0, 0xDD, 0xCC, 0xBB, 0xAA, 0, 0, 0, 0];
        assert_eq!(record, expected);
        assert_eq!(decode_result(&record, Validation::Crc32c, 0x0102_0304_0506), (0xAABB_CCDD, true));
        assert!(!decode_result(&record, Validation::Xxh3, 0x0102_0304_0506).1);
        assert!(!decode_result(&record, Validation::Crc32c, 0x0102_0304_0507).1);
    }

    #[test]
    fn every_flip_of_a_result_slot_shows() {
        let (length, sum) = (12_000, 0x1234_5678_9ABC_DEF0);
        let record = encode_result(Validation::Xxh3, length, sum);
        for bit in 0..RESULT_BYTES * 8 {
            let mut flipped = record;
            flipped[bit / 8] ^= 1 << (bit % 8);
            let read = decode_result(&flipped, Validation::Xxh3, length);
            assert_ne!(read, (sum, true), "bit {bit}");
        }
    }
}
