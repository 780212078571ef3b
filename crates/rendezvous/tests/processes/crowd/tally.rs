//! What became of operations.

use tensorwire_rendezvous::WorkerError;

use tensorwire_protocol::Code;

/// Operations of one member with one peer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) begun: u64,
    pub(crate) ended: u64,
    pub(crate) right: u64,
    /// Ended with a typed error that the loss of a peer may cause.
    pub(crate) failed: u64,
}

impl Tally {
    /// As words.
    pub(crate) fn told(&self) -> String {
        format!("{} {} {} {}", self.begun, self.ended, self.right, self.failed)
    }

    /// From words.
    pub(crate) fn heard(words: &mut impl Iterator<Item = u64>) -> Option<Self> {
        let mut next = || words.next();
        Some(Self { begun: next()?, ended: next()?, right: next()?, failed: next()? })
    }
}

/// Whether the loss of the peer of an operation can end it so.
pub(crate) fn is_a_loss(error: &WorkerError) -> bool {
    match error {
        WorkerError::PeerLost { .. } | WorkerError::NoFabric { .. } | WorkerError::Control(_) => true,
        // A new life has published nothing yet, or knows nothing of the step.
        WorkerError::Remote { status, .. } | WorkerError::Aborted { status, .. } => {
            matches!(status.code, Code::NotFound | Code::Aborted | Code::Unavailable)
        }
        _ => false,
    }
}
