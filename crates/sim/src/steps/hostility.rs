//! Nodes that may do anything, also what would be a finding among honest nodes.
//!
//! A hostile node may have every access refused, post immediates without a receive, and name destinations that do not
//! exist; every operation with it may fail. A hostile node never excuses a failure between honest nodes. Its writes are
//! real: they land wherever the target's own checks allow.
//!
//! There is one exception. Where a worker's peers share a protection domain (`Trust::Cluster`), a grant does not name
//! its peer, so a hostile peer can write where another peer is about to write (SECURITY.md). In such a domain its
//! writes land only in grants that it [claims](crate::Handle::claim): the grants that were named to it.

use std::{collections::BTreeSet, ops::Range};

use tensorwire_fabric::RemoteRange;
use tensorwire_memory::BlockId;

use crate::{
    ids::{BlockNumber, EndpointId, GrantNumber, NodeId},
    shared::Shared,
    state::{Phase, PostedUnder, Reach, State},
    trace::Event,
};

/// The resources of a node at a moment. A hostile peer must not make them grow without bound, and they must be released when
/// it is gone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub struct Holdings {
    /// Tasks that have not ended.
    pub tasks: usize,
    /// Queue pairs that are not drained.
    pub queue_pairs: usize,
    /// Control sessions of which it has one side.
    pub sessions: usize,
    /// Bytes that peers may write.
    pub granted_bytes: usize,
    /// Leases of its memory.
    pub leases: usize,
}

impl State {
    fn is_hostile(&self, node: NodeId) -> bool {
        self.hostility.hostile.contains_key(&node)
    }

    /// Whether the node of either side is hostile.
    pub(crate) fn has_hostile_end(&self, one: EndpointId, other: EndpointId) -> bool {
        self.is_hostile_end(one) || self.is_hostile_end(other)
    }

    pub(crate) fn is_hostile_end(&self, id: EndpointId) -> bool {
        self.endpoints.get(id.index()).is_some_and(|end| self.is_hostile(end.node))
    }

    /// The grants that the writes of `requester` to `target` are restricted to; `None` if there is no restriction.
    pub(crate) fn kept_to(
        &self,
        requester: EndpointId,
        target: EndpointId,
    ) -> Option<&BTreeSet<GrantNumber>> {
        let (requester, target) =
            (self.endpoints.get(requester.index())?, self.endpoints.get(target.index())?);
        let claims = self.hostility.hostile.get(&requester.node)?;
        self.hostility.sharing.contains(&target.node).then_some(claims)
    }
}

impl Shared {
    pub(crate) fn turn_hostile(&self, node: NodeId) {
        let address = {
            let mut state = self.state();
            let Some(address) = state.nodes.get(node.index()).map(|node| node.address.clone()) else {
                return;
            };
            state.hostility.hostile.entry(node).or_default();
            address
        };
        self.record(Event::TurnedHostile { node });
        let mut ledger = self.ledger();
        ledger.hostile.insert(address.clone());
        ledger.fault(Reach::Address(address), None);
    }

    pub(crate) fn share_domain(&self, node: NodeId) {
        self.state().hostility.sharing.insert(node);
    }

    pub(crate) fn claim(&self, hostile: NodeId, target: NodeId, range: &RemoteRange) {
        let length = usize::try_from(range.length).unwrap_or(usize::MAX);
        let places: Vec<_> = {
            let state = self.state();
            let Some(target) = state.nodes.get(target.index()) else { return };
            let domains = target.domains.iter().filter_map(|domain| domain.upgrade());
            domains.filter_map(|domain| domain.place(range, &(0..length))).collect()
        };
        let grants: Vec<_> = places.iter().filter_map(|place| self.grant_at(place)).collect();
        if let Some(claims) = self.state().hostility.hostile.get_mut(&hostile) {
            claims.extend(grants);
        }
    }

    fn grant_at(&self, (block, range): &(BlockId, Range<usize>)) -> Option<GrantNumber> {
        let owners = self.owners();
        match owners.posted_under(owners.observed(*block)?, range) {
            PostedUnder::Grant(grant) => Some(grant),
            PostedUnder::Nothing | PostedUnder::Unchecked => None,
        }
    }

    /// Whether the requester may write to `place`.
    pub(crate) fn is_within(
        &self,
        kept_to: Option<&BTreeSet<GrantNumber>>,
        place: &(BlockId, Range<usize>),
    ) -> bool {
        kept_to.is_none_or(|claims| self.grant_at(place).is_some_and(|grant| claims.contains(&grant)))
    }

    /// S1 for a hostile write that has landed in `range`: the range must be granted.
    pub(crate) fn check_hostile_write(&self, block: BlockNumber, range: &Range<usize>) {
        let checked = self.owners().check_write(block, range, PostedUnder::Unchecked);
        self.check(checked);
    }

    pub(crate) fn holdings(&self, node: NodeId) -> Holdings {
        let granted_bytes = self.owners().granted_bytes(node);
        let state = self.state();
        let is_held = |phase: Phase| !matches!(phase, Phase::Drained | Phase::Dead);
        let ends = state.endpoints.iter().filter(|end| end.node == node && is_held(end.phase));
        Holdings {
            tasks: state.tasks.of(node),
            queue_pairs: ends.count(),
            sessions: state.control.held_by(node),
            granted_bytes,
            leases: state.leases.lent_by(node),
        }
    }
}
