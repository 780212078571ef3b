//! What is posted, and what arrives.

use memory::Buf;

use crate::RemoteRange;

/// The 32-bit value that travels with a write and tells the target what landed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Immediate(pub u32);

/// One operation for a queue pair. Owns its local bytes.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum WorkRequest {
    /// A one-sided write of `local` to `remote`, with a notification if `immediate` is given. It is one
    /// *logical* write: the fabric splits it as it must, and the immediate comes last.
    Write {
        /// The bytes.
        local: Buf,
        /// Where they go; `None` (with an empty `local`) for a bare notification.
        remote: Option<RemoteRange>,
        /// What the target is told.
        immediate: Option<Immediate>,
    },
}

impl WorkRequest {
    /// Payload bytes of the operation.
    pub fn length(&self) -> u64 {
        match self {
            Self::Write { local, .. } => local.len() as u64,
        }
    }
}

/// Something a peer did that this side is told about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Arrival {
    /// A write with immediate has landed completely, and all earlier writes of its queue pair too.
    Immediate {
        /// The value.
        immediate: Immediate,
        /// Bytes written by it.
        length: u64,
    },
}
