//! Who is hostile.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{GrantNumber, NodeId};

/// Who is hostile, and what it may write.
#[derive(Debug, Default)]
pub(crate) struct Hostility {
    /// With the grants that each claims.
    pub(crate) hostile: BTreeMap<NodeId, BTreeSet<GrantNumber>>,
    /// Nodes whose peers share a domain.
    pub(crate) sharing: BTreeSet<NodeId>,
}
