//! Two connections over queues that the test moves by hand. No runtime, no clock, no threads.

pub(crate) mod channel;
pub(crate) mod flip;
pub(crate) mod lone;
pub(crate) mod looks;
pub(crate) mod mailbox;
pub(crate) mod memory;
pub(crate) mod pair;
pub(crate) mod random;
pub(crate) mod source;
pub(crate) mod subscriber;
pub(crate) mod tasks;

use tensorwire_protocol::{DataType, Metadata, Scope, Shape, StepId};

/// One end of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Side {
    A,
    B,
}

impl Side {
    pub(crate) const BOTH: [Self; 2] = [Self::A, Self::B];

    pub(crate) fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

pub(crate) const STEP: Scope = Scope::Step(StepId(7));

/// Metadata of `length` bytes.
pub(crate) fn bytes_of(length: u64) -> Metadata {
    Metadata::new(DataType::U8, Shape::new([length]).unwrap()).unwrap()
}

pub(crate) fn dead() -> Metadata {
    Metadata::dead(DataType::F32, Shape::new([0]).unwrap())
}
