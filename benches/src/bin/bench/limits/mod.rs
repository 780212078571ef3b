//! The limits: the same work without tensorwire. A limit waits like the row that it is compared with, and has as many
//! CPUs.

pub(super) mod bare;
pub(super) mod perftest;
pub(super) mod shared_memory;
pub(super) mod signal;
pub(super) mod stream;

use std::hint::black_box;

use serde::{Deserialize, Serialize};

use super::cpus::Placement;
use crate::arguments::WaitChoice;

/// How a limit waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum LimitWait {
    /// Asleep in the kernel.
    Sleep,
    /// Polls.
    Look,
    /// Polls, and yields its CPU after each look, because the other process runs there, too.
    LookInTurns,
}

impl LimitWait {
    /// The wait of a row with `wait`. Adaptive rows poll while operations follow each other.
    pub(super) fn of(wait: WaitChoice, placement: Placement) -> Self {
        match wait {
            WaitChoice::Sleep => Self::Sleep,
            _ if placement.is_one_cpu() => Self::LookInTurns,
            _ => Self::Look,
        }
    }
}

/// Reads all of `bytes` once, as fast as one core can.
pub(super) fn read_once(bytes: &[u8]) {
    let (words, rest) = bytes.as_chunks::<8>();
    let sum = words.iter().fold(0_u64, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)));
    black_box((sum, rest.first()));
}
