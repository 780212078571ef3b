//! The observer of one node's pools, which reports to the owner map.

use std::{fmt, io, sync::Arc};

use tensorwire_memory::{GrantEnd, GrantId, MemoryObserver, Span};

use crate::{
    fault::Call,
    ids::{BlockNumber, NodeId},
    shared::Shared,
    state::{Checked, Owners},
    trace::Event,
};

/// Reports the ownership changes of one node's pools.
pub(crate) struct NodeObserver {
    shared: Arc<Shared>,
    node: NodeId,
}

impl fmt::Debug for NodeObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeObserver").field("node", &self.node).finish_non_exhaustive()
    }
}

impl NodeObserver {
    pub(crate) fn new(shared: Arc<Shared>, node: NodeId) -> Self {
        Self { shared, node }
    }

    fn change(&self, span: &Span, change: impl FnOnce(&mut Owners, BlockNumber) -> (Checked<()>, Event)) {
        let mut owners = self.shared.owners();
        if owners.dead.contains(&self.node) {
            return;
        }
        let block = owners.block(span.block);
        let (result, event) = change(&mut owners, block);
        drop(owners);
        self.shared.record(event);
        self.shared.check(result);
    }

    fn place(&self, span: &Span) -> (NodeId, usize, usize) {
        (self.node, span.range.start, span.range.len())
    }
}

impl MemoryObserver for NodeObserver {
    fn allocating(&self, _bytes: usize) -> io::Result<()> {
        self.shared.attempt(self.node, Call::Allocate).map_err(io::Error::other)
    }

    fn allocated(&self, span: &Span) {
        let (node, offset, length) = self.place(span);
        self.change(span, |owners, block| {
            let event = Event::Allocated { node, block, offset, length };
            (owners.allocated(node, block, &span.range), event)
        });
    }

    fn freed(&self, span: &Span) {
        let (node, offset, length) = self.place(span);
        self.change(span, |owners, block| {
            (owners.freed(block, &span.range), Event::Freed { node, block, offset, length })
        });
    }

    fn granted(&self, span: &Span, grant: GrantId) {
        let (node, offset, length) = self.place(span);
        self.change(span, |owners, block| {
            let grant = owners.grant(grant);
            let event = Event::Granted { node, block, offset, length, grant };
            (owners.granted(block, &span.range, grant), event)
        });
    }

    fn grant_ended(&self, span: &Span, grant: GrantId, end: Option<GrantEnd>) {
        self.change(span, |owners, block| {
            let grant = owners.grant(grant);
            let event = Event::GrantEnded { node: self.node, grant, how: name_of(end) };
            (owners.grant_ended(block, &span.range, grant, end.is_none()), event)
        });
        if end.is_some() {
            self.shared.check_no_write_in_flight(self.node, span);
        }
    }
}

fn name_of(end: Option<GrantEnd>) -> &'static str {
    match end {
        None => "leaked",
        Some(GrantEnd::Content) => "content",
        Some(GrantEnd::MetaDataResponse) => "metadata response",
        Some(GrantEnd::ErrorStatus) => "error status",
        Some(GrantEnd::CancelAck) => "cancel acknowledged",
        Some(GrantEnd::NeverSent) => "never sent",
        Some(GrantEnd::RingMoved) => "ring moved",
        Some(GrantEnd::QueuePairDrained) => "queue pair drained",
        Some(GrantEnd::ReadCompleted) => "read completed",
        Some(_) => "other",
    }
}
