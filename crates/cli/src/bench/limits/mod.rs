//! The limits: the same work without tensorwire.

pub(super) mod bell;
pub(super) mod perftest;
pub(super) mod stream;

use std::hint::black_box;

/// Reads all of `bytes` once, as fast as one core can.
pub(super) fn read_once(bytes: &[u8]) {
    let (words, rest) = bytes.as_chunks::<8>();
    let sum = words.iter().fold(0_u64, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)));
    black_box((sum, rest.first()));
}
