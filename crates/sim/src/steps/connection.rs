//! The life of a connection: meeting, posting, failing, closing.

use std::{ops::Range, sync::Arc};

use futures::channel::oneshot;
use tensorwire_fabric::{
    Board, FabricError, FabricKind, Link, LossCause, QueuePair, QueuePairCore, Role, SharedMemory, SlotKey,
    WorkRequest,
};
use tensorwire_memory::Span;

use crate::{
    Violation,
    ids::{EndpointId, NodeId},
    shared::Shared,
    state::{Action, DomainShared, Ended, Endpoint, Outbound, Phase, Reach, State, Words},
    swarm::Completions,
    trace::Event,
};

type Meeting = oneshot::Sender<Result<QueuePair, FabricError>>;

pub(crate) fn lost(cause: LossCause, detail: &str) -> FabricError {
    FabricError::PeerLost { kind: FabricKind::SIM, cause, detail: detail.to_owned() }
}

pub(crate) fn cannot_connect(step: &'static str, detail: &str) -> FabricError {
    FabricError::Connect { kind: FabricKind::SIM, step, detail: detail.to_owned() }
}

/// The fabric's half of a queue pair.
#[derive(Debug)]
struct SimLink {
    shared: Arc<Shared>,
    endpoint: EndpointId,
}

impl Drop for SimLink {
    fn drop(&mut self) {
        self.shared.queue_pair_dropped(self.endpoint);
    }
}

impl Link for SimLink {
    fn submit(&self, key: SlotKey, request: &WorkRequest) {
        self.shared.post(self.endpoint, key, request);
    }

    fn start_close(&self) {
        self.shared.start_close(self.endpoint);
    }

    fn shared_memory(&self) -> Option<&dyn SharedMemory> {
        Some(self)
    }
}

impl SharedMemory for SimLink {
    fn board(&self) -> Option<Arc<dyn Board>> {
        self.shared.board(self.endpoint)
    }
}

/// What two sides must agree on to be connected.
fn roles_fit(one: Role, other: Role) -> bool {
    one != other
}

impl Shared {
    pub(crate) fn note_domain(&self, node: NodeId, domain: &Arc<DomainShared>) {
        if let Some(node) = self.state().nodes.get_mut(node.index()) {
            node.domains.push(Arc::downgrade(domain));
        }
    }

    pub(crate) fn add_endpoint(
        &self,
        node: NodeId,
        domain: Arc<DomainShared>,
        core: Arc<QueuePairCore>,
        token: u64,
    ) -> EndpointId {
        let mut state = self.state();
        let id = EndpointId(state.endpoints.len() as u32);
        let alive = state.is_alive(node);
        state.endpoints.push(Endpoint {
            node,
            domain,
            core,
            token,
            phase: if alive { Phase::Prepared } else { Phase::Dead },
            wish: None,
            peer: None,
            meet: None,
            stopped: false,
            completes_after_reading: false,
            is_dropped: false,
            outbound: Outbound::default(),
            words: Words::default(),
        });
        id
    }

    /// `id` asks to be connected with `peer`, whose `token` it has.
    pub(crate) fn meet(
        &self,
        id: EndpointId,
        peer: EndpointId,
        token: u64,
        role: Role,
        meeting: Meeting,
    ) -> Result<(), FabricError> {
        let mut state = self.state();
        let delay = state.rng.duration(self.swarm.control_latency_max);
        let at = self.now() + delay;
        let own = state.endpoints.get_mut(id.index()).filter(|own| own.phase == Phase::Prepared);
        let own = own.ok_or(FabricError::Closed)?;
        own.phase = Phase::Meeting;
        own.wish = Some((peer, role));
        own.meet = Some(meeting);
        let others = state.endpoints.get(peer.index()).filter(|_| peer != id);
        let Some(other) = others.filter(|other| other.token == token) else {
            return Err(cannot_connect("presenting the token", "the peer did not issue it"));
        };
        match (other.phase, other.wish) {
            (Phase::Prepared, _) => Ok(()),
            (Phase::Meeting, Some((wanted, other_role))) if wanted == id => {
                if !roles_fit(role, other_role) {
                    return Err(cannot_connect("agreeing on roles", "both sides have the same role"));
                }
                self.join(&mut state, id, peer);
                Ok(())
            }
            _ => {
                let error = cannot_connect("meeting", "the other side is gone");
                state.agenda.plan(at, Action::RefuseConnect(id, error));
                Ok(())
            }
        }
    }

    fn join(&self, state: &mut State, id: EndpointId, peer: EndpointId) {
        let after_reading = match self.swarm.completions {
            Completions::AfterDelivery => false,
            Completions::AfterReading => true,
            Completions::Mixed => state.rng.chance(1, 2),
        };
        let lost_half = self.take_half_open(state, id, peer);
        for (one, other) in [(id, peer), (peer, id)] {
            let delay = state.rng.duration(self.swarm.control_latency_max);
            let seen = if lost_half == Some(one) { Action::LoseHalf(one) } else { Action::Connect(one) };
            state.agenda.plan(self.now() + delay, seen);
            let endpoint = &mut state.endpoints[one.index()];
            endpoint.phase = Phase::Open;
            endpoint.peer = Some(other);
            endpoint.completes_after_reading = after_reading;
            let node = endpoint.node;
            self.record(Event::Connected { endpoint: one, node, peer: other });
        }
    }

    /// The side that never sees that `id` and `peer` are connected, if that is planned.
    fn take_half_open(&self, state: &mut State, id: EndpointId, peer: EndpointId) -> Option<EndpointId> {
        let nodes = (state.endpoints[id.index()].node, state.endpoints[peer.index()].node);
        let planned = |(one, other): &(NodeId, NodeId)| nodes == (*one, *other) || nodes == (*other, *one);
        let index = state.half_open.iter().position(planned)?;
        let (one, other) = state.half_open.swap_remove(index);
        let address = |node: NodeId| state.nodes[node.index()].address.clone();
        self.ledger().fault(Reach::Between(address(one), address(other)), Some(self.now()));
        Some(state.rng.pick([id, peer]))
    }

    /// `id`, one side of a half-open queue pair, gives up: its `connect` fails once nothing of the peer can land.
    pub(crate) fn lose_half(&self, id: EndpointId) {
        self.record(Event::HalfOpened { endpoint: id });
        self.start_close(id);
    }

    /// The waiting `connect` of `id` succeeds.
    pub(crate) fn hand_over(&self, id: EndpointId) {
        let (meeting, core) = {
            let mut state = self.state();
            let endpoint = &mut state.endpoints[id.index()];
            (endpoint.meet.take(), endpoint.core.clone())
        };
        let Some(shared) = self.strong() else { return };
        if let Some(meeting) = meeting {
            let queue_pair = QueuePair::new(core, Arc::new(SimLink { shared, endpoint: id }));
            // A connect that was dropped meanwhile drops the queue pair, which closes it.
            drop(meeting.send(Ok(queue_pair)));
        }
    }

    pub(crate) fn refuse_connect(&self, id: EndpointId, error: FabricError) {
        let meeting = {
            let mut state = self.state();
            let endpoint = &mut state.endpoints[id.index()];
            if endpoint.phase != Phase::Meeting {
                return;
            }
            endpoint.phase = Phase::Drained;
            endpoint.meet.take()
        };
        self.record(Event::ConnectFailed { endpoint: id });
        if let Some(meeting) = meeting {
            drop(meeting.send(Err(error)));
        }
    }

    /// Abandons a side before its queue pair was returned.
    pub(crate) fn abandon(&self, id: EndpointId) {
        let mut state = self.state();
        // After the run there is nothing to release.
        let Some(endpoint) = state.endpoints.get_mut(id.index()) else { return };
        match endpoint.phase {
            Phase::Prepared | Phase::Meeting => {
                endpoint.phase = Phase::Drained;
                let meeting = endpoint.meet.take();
                self.refuse_suitors(&mut state, id);
                drop(state);
                drop(meeting);
            }
            // Connected, but the queue pair was never returned: it is destroyed at once, as one of a NIC without posts, so
            // that nothing can land once `connect` has failed.
            Phase::Open | Phase::Failed | Phase::Closing | Phase::Flushed if endpoint.meet.is_some() => {
                let meeting = endpoint.meet.take();
                let core = endpoint.core.clone();
                self.tell_peer_of_close(&mut state, id);
                let endpoint = &mut state.endpoints[id.index()];
                endpoint.phase = Phase::Drained;
                endpoint.outbound.cut(|| false);
                drop(state);
                self.record(Event::Drained { endpoint: id });
                core.fail(&FabricError::Closed);
                core.mark_drained();
                drop((core, meeting));
                self.queue_pair_dropped(id);
            }
            _ => {}
        }
    }

    /// Lets tasks that wait for `id` see, after a delay, that it is gone.
    pub(crate) fn refuse_suitors(&self, state: &mut State, id: EndpointId) {
        let wants = |endpoint: &Endpoint| {
            endpoint.phase == Phase::Meeting && endpoint.wish.is_some_and(|(wanted, _)| wanted == id)
        };
        let numbered = state.endpoints.iter().enumerate().filter(|(_, endpoint)| wants(endpoint));
        let suitors: Vec<_> = numbered.map(|(number, _)| EndpointId(number as u32)).collect();
        for suitor in suitors {
            let at = self.now() + state.rng.duration(self.swarm.detection_max);
            let error = cannot_connect("meeting", "the other side was given up");
            state.agenda.plan(at, Action::RefuseConnect(suitor, error));
        }
    }

    /// This side sees that its connection is over.
    pub(crate) fn fail_endpoint(&self, id: EndpointId, error: &FabricError) {
        if !self.complete_delivered(id, error) {
            return;
        }
        let (core, ended) = {
            let mut state = self.state();
            let endpoint = &mut state.endpoints[id.index()];
            endpoint.phase = Phase::Failed;
            // Writes under way may still land at the peer.
            endpoint.outbound.cut(|| false);
            (endpoint.core.clone(), endpoint.outbound.end_all())
        };
        self.operations_ended(id, ended);
        self.record(Event::Failed { endpoint: id, why: name_of(error) });
        core.fail(error);
    }

    /// Delivers the completions that are due before a failure: all of them when the peer refused a later write, else a
    /// random number. False if the side is no longer open.
    fn complete_delivered(&self, id: EndpointId, error: &FabricError) -> bool {
        loop {
            let more = {
                let mut state = self.state();
                let in_order = matches!(error, FabricError::RemoteRefused { .. });
                let lucky = in_order || state.rng.chance(1, 2);
                let endpoint = &state.endpoints[id.index()];
                if endpoint.phase != Phase::Open || !state.is_alive(endpoint.node) {
                    return false;
                }
                lucky && endpoint.outbound.next_completion(false).is_some()
            };
            if !more {
                return true;
            }
            self.complete(id);
        }
    }

    /// The user closes this side.
    pub(crate) fn start_close(&self, id: EndpointId) {
        let mut state = self.state();
        let Some(endpoint) = state.endpoints.get(id.index()) else { return };
        if !matches!(endpoint.phase, Phase::Open | Phase::Failed) {
            return;
        }
        self.tell_peer_of_close(&mut state, id);
        state.endpoints[id.index()].phase = Phase::Closing;
        let flush = self.now() + self.swarm.delay(&mut state.rng, self.swarm.latency_max);
        state.agenda.plan(flush, Action::Flush(id));
        drop(state);
        self.record(Event::Closing { endpoint: id });
    }

    /// Plans when the peer of an open side that is about to close sees that.
    fn tell_peer_of_close(&self, state: &mut State, id: EndpointId) {
        let endpoint = &state.endpoints[id.index()];
        if let Some(peer) = endpoint.peer.filter(|_| endpoint.phase == Phase::Open) {
            let notice = self.now() + state.rng.duration(self.swarm.detection_max);
            let error = lost(LossCause::ClosedByPeer, "the peer closed the queue pair");
            state.agenda.plan(notice, Action::Fail(peer, error));
        }
    }

    /// Ends the operations of a closing side that have not completed.
    pub(crate) fn flush(&self, id: EndpointId) {
        let (core, ended) = {
            let mut state = self.state();
            if state.endpoints[id.index()].phase != Phase::Closing {
                return;
            }
            let drain = self.now() + self.swarm.delay(&mut state.rng, self.swarm.latency_max);
            state.agenda.plan(drain, Action::Drain(id));
            let endpoint = &mut state.endpoints[id.index()];
            endpoint.phase = Phase::Flushed;
            endpoint.outbound.cut(|| false);
            (endpoint.core.clone(), endpoint.outbound.end_all())
        };
        self.operations_ended(id, ended);
        self.record(Event::Flushed { endpoint: id });
        core.fail(&FabricError::Closed);
    }

    /// Releases what the operations of an ended side held.
    fn operations_ended(&self, id: EndpointId, ended: Ended) {
        self.release(ended.sources);
        self.retire_leases(id, ended.leases);
        drop(ended.read);
    }

    /// The user has dropped a queue pair. Arrivals that were never taken are dropped with it.
    pub(crate) fn queue_pair_dropped(&self, id: EndpointId) {
        let mut state = self.state();
        let Some(endpoint) = state.endpoints.get_mut(id.index()) else { return };
        endpoint.is_dropped = true;
        let forgotten = forget_arrivals(endpoint);
        drop(state);
        drop(forgotten);
    }

    /// From now on nothing of the peer reaches this side.
    pub(crate) fn drain(&self, id: EndpointId) {
        let (core, meeting) = {
            let mut state = self.state();
            let endpoint = &mut state.endpoints[id.index()];
            if endpoint.phase != Phase::Flushed {
                return;
            }
            endpoint.phase = Phase::Drained;
            // It was never returned to the user.
            endpoint.is_dropped |= endpoint.meet.is_some();
            (endpoint.core.clone(), endpoint.meet.take())
        };
        if let Some(meeting) = meeting {
            let error = cannot_connect("confirming", "the other side's confirmation was lost");
            drop(meeting.send(Err(error)));
        }
        self.record(Event::Drained { endpoint: id });
        let outstanding = core.slots().outstanding();
        if outstanding > 0 {
            let text = format!("{id} is drained, but {outstanding} of its operations have not ended");
            self.violated(Violation::Operation(text));
        }
        core.mark_drained();
        drop(core);
        let forgotten = forget_arrivals(&mut self.state().endpoints[id.index()]);
        drop(forgotten);
    }

    /// A grant of `span` has ended with evidence: checks that no write which can still land targets it.
    pub(crate) fn check_no_write_in_flight(&self, node: NodeId, span: &Span) {
        let found = {
            let state = self.state();
            state.endpoints.iter().enumerate().position(|end| aims_at(&state, end, node, span))
        };
        let block = self.owners().observed(span.block);
        if let Some(reader) = block.and_then(|block| self.reader_of(node, block, &span.range)) {
            let text = format!("a grant of {node} ended while a read of {reader} can still land in it");
            self.violated(Violation::Memory(text));
        }
        if let Some(endpoint) = found {
            let Range { start, end } = span.range;
            let text = format!(
                "a grant of {node} ended ({start}..{end}) while a posted write of {} can still land in it",
                EndpointId(endpoint as u32)
            );
            self.violated(Violation::Memory(text));
        }
    }
}

/// The core of a side that is not used any more, to be dropped without a lock.
fn forget_arrivals(endpoint: &mut Endpoint) -> Option<Arc<QueuePairCore>> {
    let is_over = matches!(endpoint.phase, Phase::Drained | Phase::Dead);
    let core = &endpoint.core;
    let empty = Arc::new(QueuePairCore::new(core.kind(), core.config(), core.capabilities()));
    (endpoint.is_dropped && is_over).then(|| std::mem::replace(&mut endpoint.core, empty))
}

fn aims_at(state: &State, (number, endpoint): (usize, &Endpoint), node: NodeId, span: &Span) -> bool {
    // The messages of a hostile peer are no evidence; its later writes are refused.
    let is_hostile = state.is_hostile_end(EndpointId(number as u32));
    if is_hostile || state.allowed.refusals || endpoint.outbound.writes.is_empty() {
        return false;
    }
    let Some(peer) = endpoint.peer.map(|peer| &state.endpoints[peer.index()]) else { return false };
    if peer.node != node || !peer.phase.is_reachable() {
        return false;
    }
    let cut = endpoint.outbound.cut;
    endpoint
        .outbound
        .writes
        .iter()
        .any(|write| write.can_still_touch(&peer.domain, (span.block, &span.range), cut))
}

fn name_of(error: &FabricError) -> &'static str {
    match error {
        FabricError::PeerLost { cause: LossCause::ClosedByPeer, .. } => "closed by peer",
        FabricError::PeerLost { .. } => "connection lost",
        FabricError::RemoteRefused { .. } => "remote refused",
        FabricError::PeerMisbehaved { .. } => "peer misbehaved",
        FabricError::ReceiverNotReady { .. } => "receiver not ready",
        FabricError::Device { .. } => "device refused",
        _ => "other",
    }
}
