//! Posting: the checks and refusals of a NIC before anything leaves.

use std::sync::Arc;

use tensorwire_fabric::{
    FabricError, FabricKind, Piece as WorkPiece, QueuePairCore, RemoteRange, RemoteRegion, SlotKey,
    WorkRequest,
};
use tensorwire_memory::{Block, Buf};

use crate::{
    Violation,
    fault::Call,
    ids::EndpointId,
    shared::Shared,
    state::{
        Action, DomainShared, Kind, Part, Phase, PostedUnder, Remote, SourceSpan, Write, cut_into_pieces,
    },
    trace::Event,
};

impl Shared {
    /// Takes a posted operation.
    pub(crate) fn post(&self, id: EndpointId, key: SlotKey, request: &WorkRequest) {
        let Some(core) = self.living_core(id) else { return };
        if let Err(error) = self.may_post(id) {
            return core.complete(key, 0, Err(error));
        }
        let immediate = request.immediate();
        match request {
            WorkRequest::Write { .. } | WorkRequest::WriteVectored { .. } => {}
            WorkRequest::Lend { local, immediate } => {
                if let Err(error) = self.post_loan(id, key, local, *immediate) {
                    core.complete(key, 0, Err(error));
                }
                return;
            }
            // Without segments it moves no bytes, like a write without segments.
            WorkRequest::ReadVectored { segments } if segments.is_empty() => {}
            WorkRequest::Read { .. } | WorkRequest::ReadVectored { .. } => {
                return self.post_read(id, key, &core, request);
            }
            _ => return core.complete(key, 0, Err(request.unsupported(FabricKind::SIM))),
        }
        let (parts, lengths, refused) = match self.aim(id, &core, request) {
            Ok((parts, lengths)) => (parts, lengths, None),
            Err(error) => (Vec::new(), Vec::new(), Some(error)),
        };
        let length = lengths.iter().map(|length| *length as u64).sum();
        let mut state = self.state();
        let number = state.endpoints[id.index()].outbound.next_number;
        let cut = |(part, length)| cut_into_pieces(part, length, &self.swarm, &mut state.rng);
        let pieces: Vec<_> = lengths.into_iter().enumerate().flat_map(cut).collect();
        drop(state);
        self.record(Event::Posted { endpoint: id, write: number, length, immediate: immediate.map(|i| i.0) });
        if parts.len() > 1 {
            self.record(Event::Parted { endpoint: id, write: number, parts: parts.len() });
        }
        let write =
            Write { immediate, parts, pieces, refused, ..Write::new(number, key, length, Kind::Write) };
        self.queue(id, write);
    }

    fn post_read(&self, id: EndpointId, key: SlotKey, core: &QueuePairCore, request: &WorkRequest) {
        let read = match self.aim_read(id, core, request) {
            Ok(read) => read,
            Err(error) => return core.complete(key, 0, Err(error)),
        };
        let (number, length) = (self.state().endpoints[id.index()].outbound.next_number, request.length());
        self.record(Event::Asked { endpoint: id, read: number, length });
        self.queue(id, Write::new(number, key, length, Kind::Read(read)));
    }

    /// Puts a write into the send queue, which must have room for it.
    pub(crate) fn queue(&self, id: EndpointId, write: Write) {
        let mut state = self.state();
        let endpoint = &mut state.endpoints[id.index()];
        let depth = endpoint.config().send_depth as usize;
        let outbound = &mut endpoint.outbound;
        outbound.next_number += 1;
        outbound.unread += write.pieces.len();
        outbound.writes.push_back(write);
        let posted: usize = outbound.writes.iter().map(Write::weight).sum();
        drop(state);
        if posted == depth {
            self.record(Event::SendQueueFull { endpoint: id });
        }
        if posted > depth {
            let text = format!("{posted} work requests are posted on {id}, whose send queue is {depth} deep");
            self.violated(Violation::Overrun(text));
        }
    }

    fn living_core(&self, id: EndpointId) -> Option<Arc<QueuePairCore>> {
        let state = self.state();
        let endpoint = state.endpoints.get(id.index()).filter(|end| state.is_alive(end.node))?;
        Some(endpoint.core.clone())
    }

    /// Whether the queue pair is in a state that takes work requests, and the call does not fail on purpose.
    fn may_post(&self, id: EndpointId) -> Result<(), FabricError> {
        let (node, phase, peer) = {
            let state = self.state();
            let endpoint = &state.endpoints[id.index()];
            (endpoint.node, endpoint.phase, endpoint.peer)
        };
        match phase {
            Phase::Open => {}
            Phase::Prepared | Phase::Meeting => {
                self.violated(Violation::Overrun(format!("a post on {id}, which is not connected")));
                return Err(FabricError::Closed);
            }
            // Flushed: the queue pair went into its error state between the caller's check and the post.
            Phase::Failed | Phase::Closing | Phase::Flushed | Phase::Drained | Phase::Dead => {
                return Err(FabricError::Closed);
            }
        }
        let attempt = self.attempt(node, Call::Post);
        if let Err(error) = &attempt {
            let mut state = self.state();
            self.cut_outbound(&mut state, id);
            state.agenda.plan(self.now(), Action::Fail(id, error.clone()));
            if let Some(peer) = peer {
                self.plan_loss(&mut state, peer);
            }
        }
        attempt
    }

    /// The checks that a NIC makes before a write leaves: local keys, remote regions, lengths. Returns the parts with
    /// their lengths; their sources count as posted from here on.
    fn aim(
        &self,
        id: EndpointId,
        core: &QueuePairCore,
        request: &WorkRequest,
    ) -> Result<(Vec<Part>, Vec<usize>), FabricError> {
        let (domain, peer_domain) = {
            let state = self.state();
            let endpoint = &state.endpoints[id.index()];
            let peer = endpoint.peer.map(|peer| state.endpoints[peer.index()].domain.clone());
            (endpoint.domain.clone(), peer)
        };
        let mut regions = Vec::new();
        for (local, remote) in ranges(request) {
            domain.table.check_local(FabricKind::SIM, local.block().map(Block::id))?;
            regions.push(core.remote_regions().aim(local.len() as u64, remote)?);
        }
        let limit = core.capabilities().piece_bytes_max;
        let work: Vec<WorkPiece> = request.pieces(limit).collect();
        let part = |piece: &WorkPiece| Part {
            source: self.post_source(&piece.local),
            remote: self.remote(piece.remote, &regions, peer_domain.as_deref()),
        };
        Ok((work.iter().map(part).collect(), work.iter().map(|piece| piece.local.len()).collect()))
    }

    fn remote(
        &self,
        range: Option<RemoteRange>,
        regions: &[Option<RemoteRegion>],
        domain: Option<&DomainShared>,
    ) -> Option<Remote> {
        let range = range?;
        let region = regions.iter().flatten().find(|region| region.region == range.region)?;
        let posted_under = self.posted_under(domain, &range);
        Some(Remote { range, key: region.key, posted_under, target: None })
    }

    /// Counts the source as posted, where it is watched.
    pub(crate) fn post_source(&self, local: &Buf) -> Option<SourceSpan> {
        let block = self.observed(local.block()?.id())?;
        let range = local.offset()..local.offset() + local.len();
        let posted = self.owners().post(block, &range);
        self.check(posted);
        Some(SourceSpan { block, range })
    }

    fn posted_under(&self, domain: Option<&DomainShared>, range: &RemoteRange) -> PostedUnder {
        let length = usize::try_from(range.length).unwrap_or(usize::MAX);
        let place = domain.and_then(|domain| domain.place(range, &(0..length)));
        let owners = self.owners();
        match place.and_then(|(block, place)| Some((owners.observed(block)?, place))) {
            Some((block, place)) => owners.posted_under(block, &place),
            None => PostedUnder::Unchecked,
        }
    }
}

/// The local and remote ranges of a write, as its user gave them.
fn ranges(request: &WorkRequest) -> Vec<(&Buf, Option<&RemoteRange>)> {
    match request {
        WorkRequest::Write { local, remote, .. } => vec![(local, remote.as_ref())],
        WorkRequest::WriteVectored { segments, .. } => {
            segments.iter().map(|segment| (&segment.local, Some(&segment.remote))).collect()
        }
        _ => Vec::new(),
    }
}
