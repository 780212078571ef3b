//! What fabrics differ in.

use crate::WorkRequest;

/// What a fabric can and cannot do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Many ranges in one logical write.
    pub vectored: bool,
    /// One-sided reads, of one range or of many.
    pub read: bool,
    /// Views of the peer's memory without a copy.
    pub lend: bool,
    /// Bytes are encrypted between the two sides, and changes on the way are detected.
    pub encrypted: bool,
    /// The largest piece a logical write is split into, in bytes.
    pub piece_bytes_max: u64,
}

impl Capabilities {
    /// Writes of one range only, unsplit.
    pub const WRITES: Self =
        Self { vectored: false, read: false, lend: false, encrypted: false, piece_bytes_max: u64::MAX };

    /// Whether the fabric can execute `request`.
    pub fn allow(&self, request: &WorkRequest) -> bool {
        match request {
            WorkRequest::Write { .. } => true,
            WorkRequest::WriteVectored { .. } => self.vectored,
            WorkRequest::Lend { .. } => self.lend,
            WorkRequest::Read { .. } | WorkRequest::ReadVectored { .. } => self.read,
        }
    }
}
