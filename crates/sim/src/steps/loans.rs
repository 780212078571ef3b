//! Loans: views of a peer's memory without a copy.
//!
//! The rules are those of shared memory: a lease holds the bytes until the holder's last view is gone and the lender
//! has seen that. When the lender's side of the connection is over, open leases are retired: their bytes come back when
//! the holder drops its views, however late, or when the holder's process is seen to be dead. Open and retired leases
//! count per holder; over the cap a loan is refused at once.

use std::{hash::Hasher as _, sync::Arc};

use tensorwire_fabric::{FabricError, FabricKind, Immediate, SlotKey};
use tensorwire_memory::{Block, Buf, Loan};

use crate::{
    Violation,
    ids::{EndpointId, LeaseId, NodeId},
    shared::Shared,
    state::{Action, Kind, Lease, LentBytes, State, Write},
    trace::{Event, Fnv},
};

impl Shared {
    /// Posts a loan, or refuses it at once.
    pub(crate) fn post_loan(
        &self,
        id: EndpointId,
        key: SlotKey,
        local: &Buf,
        immediate: Immediate,
    ) -> Result<(), FabricError> {
        let (lender_node, holder) = self.may_lend(id, local)?;
        let source = self.post_source(local);
        let length = local.len() as u64;
        let content = contents(local);
        let (lease, number) = {
            let mut state = self.state();
            let lease = LeaseId(state.leases.next);
            state.leases.next += 1;
            let bytes = Some(LentBytes::Lent(local.clone()));
            let entry = Lease { lender: id, lender_node, holder, source, bytes, content };
            state.leases.open.insert(lease, entry);
            (lease, state.endpoints[id.index()].outbound.next_number)
        };
        self.record(Event::Lent { endpoint: id, write: number, lease, length });
        let kind = Kind::Loan { lease, withdrawn: false };
        self.queue(id, Write { immediate: Some(immediate), ..Write::new(number, key, length, kind) });
        Ok(())
    }

    /// Lender and holder, if `local` can be lent now.
    fn may_lend(&self, id: EndpointId, local: &Buf) -> Result<(NodeId, NodeId), FabricError> {
        let kind = FabricKind::SIM;
        let block = local.block().filter(|block| !local.is_empty() && block.shareable());
        let what = "lend bytes that are in no pool";
        let block = block.map(Block::id).ok_or(FabricError::Unsupported { kind, what })?;
        let (held, nodes) = {
            let state = self.state();
            let endpoint = &state.endpoints[id.index()];
            endpoint.domain.table.check_local(kind, Some(block))?;
            let peer = endpoint.peer.ok_or(FabricError::Closed)?;
            let nodes = (endpoint.node, state.endpoints[peer.index()].node);
            (state.leases.held(nodes.0, nodes.1), nodes)
        };
        let cap = self.swarm.leases_max;
        if held >= cap {
            self.record(Event::LoanRefused { endpoint: id });
            return Err(FabricError::LeasesExhausted { open: held, cap });
        }
        Ok(nodes)
    }

    /// The holder's view of `lease`.
    pub(crate) fn view(&self, lease: LeaseId) -> Option<Buf> {
        let (bytes, content, is_alive) = {
            let state = self.state();
            let found = state.leases.open.get(&lease)?;
            let bytes = match found.bytes.as_ref()? {
                LentBytes::Lent(bytes) => bytes.clone(),
                LentBytes::Retired(retired) => retired.buf()?.clone(),
            };
            (bytes, found.content, state.is_alive(found.lender_node))
        };
        if !is_alive {
            self.record(Event::LoanOfTheDead { lease });
        }
        let (world, seen) = (self.weak(), bytes.clone());
        let loan = Loan::new(bytes, move || {
            if let Some(world) = world.upgrade() {
                world.let_go(lease, contents(&seen) == content);
            }
        });
        Some(Buf::foreign(Arc::new(loan)))
    }

    /// The holder's last view is gone.
    fn let_go(&self, lease: LeaseId, is_unchanged: bool) {
        if !is_unchanged {
            self.violated(Violation::Memory(format!("the bytes of {lease} changed under a view")));
        }
        let mut state = self.state();
        let Some(Lease { lender, holder, .. }) = state.leases.open.get(&lease) else { return };
        let (lender, holder) = (*lender, *holder);
        if state.is_alive(holder) {
            self.plan_release(&mut state, lender, lease);
        }
    }

    fn plan_release(&self, state: &mut State, lender: EndpointId, lease: LeaseId) {
        let at = self.now() + self.swarm.delay(&mut state.rng, self.swarm.latency_max);
        state.agenda.plan(at, Action::Release(lender, lease));
    }

    /// The lender sees that `lease` is over.
    pub(crate) fn release_lease(&self, lease: LeaseId) {
        let (found, is_alive) = {
            let mut state = self.state();
            let Some(found) = state.leases.open.remove(&lease) else { return };
            let is_alive = state.is_alive(found.lender_node);
            (found, is_alive)
        };
        let mut found = found;
        let retired = matches!(found.bytes, Some(LentBytes::Retired(_)));
        self.record(Event::Released { lease, retired });
        if is_alive {
            self.release(found.source.take());
        }
        drop(found);
    }

    /// The connection of `lender` is over: open leases are retired, and loans that were never `delivered` come back.
    pub(crate) fn retire_leases(&self, lender: EndpointId, undelivered: Vec<LeaseId>) {
        let lent = {
            let mut state = self.state();
            for lease in undelivered {
                self.plan_release(&mut state, lender, lease);
            }
            let ours = state.leases.of(|lease| lease.lender == lender);
            let take = |id: &LeaseId| Some((*id, state.leases.open.get_mut(id)?.bytes.take()?));
            ours.iter().filter_map(take).collect::<Vec<_>>()
        };
        for (lease, bytes) in lent {
            let bytes = match bytes {
                LentBytes::Lent(bytes) => LentBytes::Retired(bytes.retire()),
                retired @ LentBytes::Retired(_) => retired,
            };
            self.record(Event::Retired { lease });
            if let Some(found) = self.state().leases.open.get_mut(&lease) {
                found.bytes = Some(bytes);
            }
        }
    }

    /// `holder` is seen to be dead: it no longer has views.
    pub(crate) fn bury(&self, holder: NodeId) {
        let held = self.state().leases.of(|lease| lease.holder == holder);
        if !held.is_empty() {
            self.record(Event::Buried { node: holder, leases: held.len() });
        }
        held.into_iter().for_each(|lease| self.release_lease(lease));
    }
}

/// The hash of the bytes that a loan of `buffer` covers.
fn contents(buffer: &Buf) -> u64 {
    let mut hasher = Fnv::new();
    hasher.write(buffer);
    buffer.attached().for_each(|attached| hasher.write(&attached));
    hasher.finish()
}
