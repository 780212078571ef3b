//! A lender's table of the memory that its peers view.

use std::{collections::BTreeMap, fmt};

use tensorwire_memory::{Buf, Retired};

use super::outbound::SourceSpan;
use crate::ids::{EndpointId, LeaseId, NodeId};

/// The bytes under a lease.
pub(crate) enum LentBytes {
    /// The connection lives.
    Lent(Buf),
    /// The connection is over, and the holder may still read.
    Retired(Retired),
}

/// One lease, from the loan until the lender has seen that it is over.
pub(crate) struct Lease {
    pub(crate) lender: EndpointId,
    pub(crate) lender_node: NodeId,
    pub(crate) holder: NodeId,
    /// Only where the owner map watches it.
    pub(crate) source: Option<SourceSpan>,
    /// Always present, except during its retirement.
    pub(crate) bytes: Option<LentBytes>,
    /// Hash of the bytes.
    pub(crate) content: u64,
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_retired = matches!(self.bytes, Some(LentBytes::Retired(_)));
        f.debug_struct("Lease")
            .field("lender", &self.lender)
            .field("retired", &is_retired)
            .finish_non_exhaustive()
    }
}

impl Drop for Lease {
    /// After the run nothing releases a lease, and that must not count as a leak.
    fn drop(&mut self) {
        if let Some(LentBytes::Retired(retired)) = self.bytes.take() {
            retired.release();
        }
    }
}

/// All leases of the world.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    pub(crate) open: BTreeMap<LeaseId, Lease>,
    pub(crate) next: u64,
}

impl Leases {
    pub(crate) fn held(&self, lender: NodeId, holder: NodeId) -> u32 {
        let held = |lease: &&Lease| lease.lender_node == lender && lease.holder == holder;
        self.open.values().filter(held).count() as u32
    }

    /// Leases of `lender`'s memory.
    pub(crate) fn lent_by(&self, lender: NodeId) -> usize {
        self.open.values().filter(|lease| lease.lender_node == lender).count()
    }

    pub(crate) fn of(&self, matching: impl Fn(&Lease) -> bool) -> Vec<LeaseId> {
        self.open.iter().filter(|(_, lease)| matching(lease)).map(|(id, _)| *id).collect()
    }
}
