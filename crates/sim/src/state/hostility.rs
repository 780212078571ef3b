//! The hostile nodes of a world.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{GrantNumber, NodeId};

/// Hostile nodes, and what they may write.
#[derive(Debug, Default)]
pub(crate) struct Hostility {
    /// The hostile nodes, with the grants that each claims.
    pub(crate) hostile: BTreeMap<NodeId, BTreeSet<GrantNumber>>,
    /// Nodes whose peers share a domain.
    pub(crate) sharing: BTreeSet<NodeId>,
}
