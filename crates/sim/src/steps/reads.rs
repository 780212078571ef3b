//! The steps of a read: it is aimed, its pieces are sampled at the target, and land at the reader.

use std::ops::Range;

use tensorwire_fabric::{
    FabricError, FabricKind, PeerViolation, QueuePairCore, ReadDestination, ReadPart, RemoteRange,
    WorkRequest,
};
use tensorwire_memory::{
    Buf,
    copy::{CopyReason, copy_bytes},
};

use crate::{
    Violation,
    ids::{BlockNumber, EndpointId, NodeId},
    shared::Shared,
    state::{
        Endpoint, Kind, PieceState, PostedUnder, Read, ReadTarget, Section, Write, cut_into_pieces,
        is_carried, is_unread,
    },
    trace::Event,
};

impl Shared {
    /// The checks that a NIC makes before a read leaves, of all its parts.
    pub(crate) fn aim_read(
        &self,
        id: EndpointId,
        core: &QueuePairCore,
        request: &WorkRequest,
    ) -> Result<Box<Read>, FabricError> {
        let weight = request.weight(core.capabilities().piece_bytes_max);
        let section = |part: ReadPart<'_>| self.aim_section(id, core, part.remote, part.into);
        let sections = request.reads().map(section).collect::<Result<Vec<_>, _>>()?;
        let mut pieces = Vec::new();
        for (part, section) in sections.iter().enumerate() {
            let length = usize::try_from(section.range.length).unwrap_or(usize::MAX);
            pieces.extend(cut_into_pieces(part, length, &self.swarm, &mut self.state().rng));
        }
        Ok(Box::new(Read { weight: usize::try_from(weight).unwrap_or(1), sections, pieces }))
    }

    fn aim_section(
        &self,
        id: EndpointId,
        core: &QueuePairCore,
        remote: &RemoteRange,
        into: &ReadDestination,
    ) -> Result<Section, FabricError> {
        let region = core.remote_regions().aim(into.length(), Some(remote))?;
        let table = self.state().endpoints[id.index()].domain.clone();
        let target = into.target()?;
        table.table.check_local(FabricKind::SIM, target.as_ref().map(|(block, _)| block.id()))?;
        let destination = match target {
            None => None,
            Some((block, target)) => {
                let place = into.offset().and_then(|first| {
                    let length = usize::try_from(into.length()).ok()?;
                    Some((self.observed(block.id())?, first..first.checked_add(length)?))
                });
                let posted_under = match &place {
                    Some((block, range)) => self.owners().posted_under(*block, range),
                    None => PostedUnder::Unchecked,
                };
                Some(ReadTarget { target, place, posted_under })
            }
        };
        let key = region.map_or(0, |region| region.key);
        Ok(Section { range: *remote, key, destination, source: None })
    }

    /// The target executes a random piece of the oldest read that it has not executed.
    pub(crate) fn sample_piece(&self, id: EndpointId) {
        let mut state = self.state();
        let later = self.now() + self.swarm.delay(&mut state.rng, self.swarm.latency_max);
        let Some(peer) = state.peer_of(id) else { return };
        let domain = state.endpoints[peer.index()].domain.clone();
        let random = state.rng.next_u64();
        let outbound = &mut state.endpoints[id.index()].outbound;
        outbound.sample_at = later;
        let Some(Write { number, kind: Kind::Read(read), .. }) =
            outbound.next_sample().and_then(|index| outbound.writes.get(index))
        else {
            return;
        };
        let number = *number;
        let unread = read.count(is_unread) as u64;
        let Some(piece) = read.nth((random % unread.max(1)) as usize, is_unread) else { return };
        let section = &read.sections[read.pieces[piece].part];
        let (range, key, known) = (section.range, section.key, section.source.clone());
        let part = read.pieces[piece].range.clone();
        drop(state);
        let source = match known.map_or_else(|| domain.table.read_source(&range, key), Ok) {
            Ok(source) => source,
            Err(violation) => return self.refuse_read(id, peer, violation),
        };
        self.check_exposed(&source, &part);
        let mut bytes = vec![0; part.len()];
        copy_bytes(&mut bytes, &source[part.clone()], CopyReason::SimPiece);
        self.record(Event::Sampled { endpoint: id, read: number, offset: part.start, length: part.len() });
        let mut state = self.state();
        let read = state.endpoints[id.index()].outbound.read_mut(number);
        let before = read.and_then(|read| read.sampled(piece, bytes, &source));
        drop(state);
        drop((before, source));
    }

    /// S1: the bytes that are read belong to the process that exposed them, also afterwards.
    fn check_exposed(&self, source: &Buf, part: &Range<usize>) {
        let Some(block) = source.block().and_then(|block| self.observed(block.id())) else { return };
        let first = source.offset();
        let checked = self.owners().check_exposed(block, &(first + part.start..first + part.end));
        self.check(checked);
    }

    fn refuse_read(&self, id: EndpointId, peer: EndpointId, violation: PeerViolation) {
        if !self.may_be_refused(id, peer, violation) {
            let text = format!("a read of {id} from {peer}: {violation}");
            self.violated(Violation::Refused(text));
        }
        self.refused_access(id, peer, violation);
    }

    /// Lands a random piece that is on its way back.
    pub(crate) fn return_piece(&self, id: EndpointId) {
        let mut state = self.state();
        let later = self.now() + self.swarm.delay(&mut state.rng, self.swarm.latency_max);
        let random = state.rng.next_u64();
        let outbound = &mut state.endpoints[id.index()].outbound;
        outbound.return_at = later;
        let Some(Write { number, kind: Kind::Read(read), .. }) =
            outbound.next_return().and_then(|index| outbound.writes.get_mut(index))
        else {
            return;
        };
        let number = *number;
        let carried = read.count(is_carried) as u64;
        let Some(piece) = read.nth((random % carried.max(1)) as usize, is_carried) else { return };
        let part = read.pieces[piece].range.clone();
        let PieceState::Carried(bytes) = std::mem::replace(&mut read.pieces[piece].state, PieceState::Landed)
        else {
            return;
        };
        let landing = read.sections[read.pieces[piece].part].destination.as_ref();
        let Some(ReadTarget { target, place, posted_under }) = landing else { return };
        let (target, place, posted_under) = (target.clone(), place.clone(), *posted_under);
        drop(state);
        if let Some((block, whole)) = place {
            let range = whole.start + part.start..whole.start + part.end;
            let checked = self.owners().check_write(block, &range, posted_under);
            self.check(checked);
        }
        if target.write_at(part.start, &bytes, CopyReason::SimPiece).is_err() {
            let text = format!("{id} read {number}: its destination was let go before it completed");
            self.violated(Violation::Memory(text));
        }
        self.record(Event::Returned { endpoint: id, read: number, offset: part.start, length: part.len() });
    }

    /// A side of `node` whose reads may still land in `range` of `block`.
    pub(crate) fn reader_of(
        &self,
        node: NodeId,
        block: BlockNumber,
        range: &Range<usize>,
    ) -> Option<EndpointId> {
        let state = self.state();
        let reads = |end: &Endpoint| {
            end.node == node && end.phase.is_reachable() && end.outbound.reads_into(block, range)
        };
        state.endpoints.iter().position(reads).map(|index| EndpointId(index as u32))
    }
}
