//! The steps of a write: its pieces are read and land, its immediate is delivered, it completes.

use tensorwire_fabric::{
    Arrival, FabricError, FabricKind, Immediate, PeerViolation, Purpose, QueuePairCore, WorkRequest,
};
use tensorwire_memory::{
    BlockId, Buf, RemoteTarget,
    copy::{CopyReason, copy_bytes},
};

use crate::{
    Violation,
    ids::{BlockNumber, EndpointId, LeaseId},
    shared::Shared,
    state::{Action, DomainShared, Kind, Part, PieceState, PostedUnder, SourceSpan},
    trace::{Event, Fnv},
};

/// The result of checking a landing piece.
type CheckedTarget = Result<(RemoteTarget, Purpose), PeerViolation>;

impl Shared {
    /// Reads one random unread piece of the source, through the slot that must still own it.
    pub(crate) fn read_piece(&self, id: EndpointId) {
        let mut state = self.state();
        let index = state.endpoints[id.index()].outbound.unread;
        let nth = state.rng.below(index);
        let direct = state.rng.chance(self.swarm.direct_of_256, 256);
        let later = self.now() + self.swarm.delay(&mut state.rng, self.swarm.latency_max);
        let endpoint = &mut state.endpoints[id.index()];
        endpoint.outbound.read_at = later;
        let core = endpoint.core.clone();
        let Some((write, piece)) = endpoint.outbound.nth_piece(nth, false) else { return };
        let write = &endpoint.outbound.writes[write];
        let (number, key, immediate) = (write.number, write.key, write.immediate);
        let (part, range) = (write.pieces[piece].part, write.pieces[piece].range.clone());
        let source = write.parts[part].source.clone();
        drop(state);

        let request = core.slots().request(key);
        let Some(local) = request.and_then(|request| local_of(&request, part, &core)) else {
            let text = format!("{id} write {number}: its source was let go before the write completed");
            return self.violated(Violation::Memory(text));
        };
        self.check_source(source.as_ref(), &range);
        let mut bytes = vec![0; range.len()];
        copy_bytes(&mut bytes, &local[range.clone()], CopyReason::SimPiece);
        self.flip_message(id, immediate, &local, (&range, &mut bytes));
        drop(local);
        let event = Event::Read { endpoint: id, write: number, offset: range.start, length: range.len() };
        self.record(event);

        let mut state = self.state();
        let outbound = &mut state.endpoints[id.index()].outbound;
        if let Some(write) = outbound.by_number(number) {
            write.pieces[piece].state = PieceState::Carried(bytes);
            outbound.unread -= 1;
            outbound.carried += 1;
        }
        if direct && state.peer_of(id).is_some_and(|peer| state.endpoints[peer.index()].can_be_reached()) {
            drop(state);
            self.land(id, number, piece);
        }
    }

    /// The number of `block` if its pool is observed, as every pool must be unless the scenario allows others.
    pub(crate) fn observed(&self, block: BlockId) -> Option<BlockNumber> {
        let number = self.owners().observed(block);
        if number.is_none() && !self.state().allowed.unobserved_memory {
            let text = "a pool is not observed: make it with the node's observer".to_owned();
            self.violated(Violation::Scenario(text));
        }
        number
    }

    fn check_source(&self, source: Option<&SourceSpan>, range: &std::ops::Range<usize>) {
        if let Some(SourceSpan { block, range: whole }) = source {
            let part = whole.start + range.start..whole.start + range.end;
            self.check(self.owners().check_read(*block, &part));
        }
    }

    /// Lands one random piece that is under way.
    pub(crate) fn land_piece(&self, id: EndpointId) {
        let mut state = self.state();
        let count = state.endpoints[id.index()].outbound.carried;
        let nth = state.rng.below(count);
        let later = self.now() + self.swarm.delay(&mut state.rng, self.swarm.latency_max);
        let outbound = &mut state.endpoints[id.index()].outbound;
        outbound.land_at = later;
        let Some((write, piece)) = outbound.nth_piece(nth, true) else { return };
        let number = outbound.writes[write].number;
        drop(state);
        self.land(id, number, piece);
    }

    fn land(&self, id: EndpointId, number: u64, piece: usize) {
        let mut state = self.state();
        let strict = !state.allowed.refusals;
        let Some(peer) = state.peer_of(id) else { return };
        let is_hostile = state.has_hostile_end(id, peer);
        let kept_to = state.kept_to(id, peer).cloned();
        let domain = state.endpoints[peer.index()].domain.clone();
        let outbound = &mut state.endpoints[id.index()].outbound;
        outbound.carried -= 1;
        let Some(write) = outbound.by_number(number) else { return };
        let state_before = std::mem::replace(&mut write.pieces[piece].state, PieceState::Landed);
        let (part, range) = (write.pieces[piece].part, write.pieces[piece].range.clone());
        let landing = target_of(&domain, &mut write.parts[..=part]);
        let remote = write.parts[part].remote.as_ref();
        let (PieceState::Carried(mut bytes), Some(remote)) = (state_before, remote) else { return };
        let posted_under = if strict { remote.posted_under } else { PostedUnder::Unchecked };
        let place = domain.place(&remote.range, &range);
        if let Ok((_, purpose)) = &landing {
            self.flip_payload(&mut state, id, *purpose, &mut bytes);
        }
        drop(state);

        let landing = landing.and_then(|landing| {
            let allowed = place.as_ref().is_none_or(|place| self.is_within(kept_to.as_ref(), place));
            if allowed { Ok(landing) } else { Err(PeerViolation::NotGranted) }
        });
        let observed = place.and_then(|(block, place)| Some((self.observed(block)?, place)));
        if landing.is_ok()
            && !is_hostile
            && let Some((block, place)) = &observed
        {
            let checked = self.owners().check_write(*block, place, posted_under);
            self.check(checked);
        }
        match write_piece(landing, range.start, &bytes) {
            Ok(purpose) => {
                if is_hostile && let Some((block, place)) = &observed {
                    self.check_hostile_write(*block, place);
                }
                let content = if purpose == Purpose::Messages { Fnv::of(&bytes) } else { 0 };
                let (offset, length) = (range.start, range.len());
                self.record(Event::Landed { endpoint: id, write: number, offset, length, content });
            }
            Err(violation) => self.refuse(id, peer, violation),
        }
    }

    /// The target refused an access: the connection is over for both, nothing more of it lands.
    fn refuse(&self, requester: EndpointId, target: EndpointId, reason: PeerViolation) {
        if !self.may_be_refused(requester, target, reason) {
            let text = format!("a write of {requester} to {target}: {reason}");
            self.violated(match reason {
                PeerViolation::NotGranted => Violation::Memory(text),
                _ => Violation::Refused(text),
            });
        }
        self.refused_access(requester, target, reason);
    }

    /// Whether a refusal is no finding, because the scenario or a hostile node causes it on purpose.
    pub(crate) fn may_be_refused(
        &self,
        requester: EndpointId,
        target: EndpointId,
        reason: PeerViolation,
    ) -> bool {
        let (allowed, is_hostile) = {
            let state = self.state();
            (state.allowed.refusals, state.has_hostile_end(requester, target))
        };
        if is_hostile {
            self.record(Event::HostileRefused { endpoint: target, why: name_of(reason) });
        }
        allowed || is_hostile
    }

    /// Fails both sides because the target has refused an access.
    pub(crate) fn refused_access(&self, requester: EndpointId, target: EndpointId, reason: PeerViolation) {
        let kind = FabricKind::SIM;
        let misbehaved = FabricError::PeerMisbehaved { kind, violation: reason };
        self.break_both(requester, FabricError::RemoteRefused { kind, reason }, target, &misbehaved);
    }

    /// Ends a connection because of an access of `requester`: the target sees that at once, the requester later, after the
    /// completions of what was delivered before.
    fn break_both(
        &self,
        requester: EndpointId,
        later_seen: FabricError,
        target: EndpointId,
        seen: &FabricError,
    ) {
        let mut state = self.state();
        let later = self.now() + state.rng.duration(self.swarm.detection_max);
        state.endpoints[requester.index()].outbound.cut(|| true);
        state.agenda.plan(later, Action::Fail(requester, later_seen));
        drop(state);
        self.fail_endpoint(target, seen);
    }

    /// Delivers the immediate of the next write to the target, in posting order.
    pub(crate) fn deliver(&self, id: EndpointId) {
        let mut state = self.state();
        let later = self.now() + self.swarm.delay(&mut state.rng, self.swarm.latency_max);
        let Some(peer) = state.peer_of(id) else { return };
        let core = state.endpoints[peer.index()].core.clone();
        let depth = state.endpoints[peer.index()].config().receive_depth;
        let outbound = &mut state.endpoints[id.index()].outbound;
        outbound.deliver_at = later;
        let Some(index) = outbound.next_delivery() else { return };
        let write = &mut outbound.writes[index];
        write.delivered = true;
        let (number, length, immediate) = (write.number, write.length, write.immediate);
        let silent = write.refused.is_some() || !matches!(write.kind, Kind::Write | Kind::Loan { .. });
        let lease = match write.kind {
            Kind::Loan { lease, .. } => Some(lease),
            Kind::Write | Kind::Read(_) => None,
        };
        outbound.retire();
        drop(state);
        if silent {
            return;
        }
        self.record(Event::Delivered { endpoint: id, write: number, immediate: immediate.map(|i| i.0) });
        let Some(arrival) = self.arrival(&core, length, immediate, lease) else { return };
        // The process takes it when one of its tasks is polled.
        if let Err(error) = core.queue_arrival(arrival) {
            let (allowed, is_hostile) = {
                let state = self.state();
                (state.allowed.receiver_not_ready, state.has_hostile_end(id, peer))
            };
            if is_hostile {
                self.record(Event::NoReceive { endpoint: peer });
            } else if !allowed {
                let text = format!("{peer} has no receive (depth {depth}) for write {number} of {id}");
                self.violated(Violation::ReceiverNotReady(text));
            }
            if lease.is_some() {
                self.loan_not_taken(id, number);
            }
            self.break_both(id, error.clone(), peer, &error);
        }
    }

    /// A loan found no receive: the peer does not have it.
    fn loan_not_taken(&self, id: EndpointId, number: u64) {
        if let Some(loan) = self.state().endpoints[id.index()].outbound.by_number(number) {
            loan.delivered = false;
            loan.lose();
        }
    }

    /// The arrival at the target of a write or a loan.
    fn arrival(
        &self,
        core: &QueuePairCore,
        length: u64,
        immediate: Option<Immediate>,
        lease: Option<LeaseId>,
    ) -> Option<Arrival> {
        if let Some(lease) = lease {
            let buffer = self.view(lease)?;
            return Some(Arrival::Loan { immediate: immediate?, buffer });
        }
        core.count_received(length);
        Some(Arrival::Immediate { immediate: immediate?, length })
    }

    /// Completes the oldest outstanding write.
    pub(crate) fn complete(&self, id: EndpointId) {
        let mut state = self.state();
        let later = self.now() + self.swarm.delay(&mut state.rng, self.swarm.latency_max);
        let endpoint = &mut state.endpoints[id.index()];
        endpoint.outbound.complete_at = later;
        let Some(index) = endpoint.outbound.next_completion(endpoint.completes_after_reading) else { return };
        let core = endpoint.core.clone();
        let write = &mut endpoint.outbound.writes[index];
        write.completed = true;
        let (number, key, length) = (write.number, write.key, write.length);
        let (sources, result) = (write.take_sources(), write.refused.clone().map_or(Ok(()), Err));
        endpoint.outbound.retire();
        drop(state);
        self.release(sources);
        self.record(Event::Completed { endpoint: id, write: number, ok: result.is_ok() });
        core.complete(key, length, result);
    }

    /// The writes that read `sources` have ended.
    pub(crate) fn release(&self, sources: impl IntoIterator<Item = SourceSpan>) {
        for SourceSpan { block, range } in sources {
            let released = self.owners().unpost(block, &range);
            self.check(released);
        }
    }
}

/// The target of the last of `parts`. A NIC executes work requests in order: the earlier ones are checked first.
fn target_of(domain: &DomainShared, parts: &mut [Part]) -> CheckedTarget {
    let mut last = Err(PeerViolation::Malformed);
    for part in parts {
        let Some(remote) = part.remote.as_mut() else { continue };
        let found = match &remote.target {
            Some(target) => (target.clone(), domain.purpose(remote.range.region)),
            None => domain.table.write_target(&remote.range, remote.key)?,
        };
        remote.target = Some(found.0.clone());
        last = Ok(found);
    }
    last
}

/// The local bytes of one part of a posted write.
fn local_of(request: &WorkRequest, part: usize, core: &QueuePairCore) -> Option<Buf> {
    request.pieces(core.capabilities().piece_bytes_max).nth(part).map(|piece| piece.local)
}

fn write_piece(landing: CheckedTarget, offset: usize, bytes: &[u8]) -> Result<Purpose, PeerViolation> {
    let (target, purpose) = landing?;
    match target.write_at(offset, bytes, CopyReason::SimPiece) {
        Ok(()) => Ok(purpose),
        Err(_) => Err(PeerViolation::NotGranted),
    }
}

fn name_of(violation: PeerViolation) -> &'static str {
    match violation {
        PeerViolation::UnknownRegion => "hostile: unknown region",
        PeerViolation::WrongKey => "hostile: wrong key",
        PeerViolation::OutOfBounds => "hostile: out of bounds",
        PeerViolation::NoRight => "hostile: no right",
        PeerViolation::NotGranted => "hostile: not granted",
        PeerViolation::NotExposed => "hostile: not exposed",
        _ => "hostile: other refusal",
    }
}
