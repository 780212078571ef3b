//! One-sided reads: their pieces are sampled at the target over time, in any order, come back, and land.

use std::ops::Range;

use memory::{
    Buf, RemoteTarget,
    copy::{CopyReason, copy_bytes},
};
use verbs_reactor::{
    FabricError, FabricKind, PeerViolation, QueuePairCore, ReadDestination, ReadPart, RemoteRange,
    WorkRequest,
};

use crate::{
    Violation,
    endpoint::{Kind, Outbound, Piece, PieceState, Write, cut_into_pieces},
    ids::{BlockNumber, EndpointId, NodeId},
    owners::PostedUnder,
    trace::Event,
    wire::peer_of,
    world::Shared,
};

/// A read, from post until its last byte has landed.
#[derive(Debug)]
pub(crate) struct Read {
    /// Its entries in the send queue.
    pub(crate) weight: usize,
    sections: Vec<Section>,
    /// The pieces of all sections; `part` is the index of the section.
    pieces: Vec<Piece>,
}

/// One range of a read.
#[derive(Debug)]
struct Section {
    range: RemoteRange,
    key: u32,
    /// `None` if it is empty.
    destination: Option<Landing>,
    /// The bytes that the target's check has found. They stay alive and unchanged while they are sampled.
    source: Option<Buf>,
}

/// The destination of a read.
#[derive(Debug)]
struct Landing {
    target: RemoteTarget,
    /// Only where the owner map watches it.
    place: Option<(BlockNumber, Range<usize>)>,
    posted_under: PostedUnder,
}

impl Read {
    /// Whether every byte was sampled, so that the target has executed it.
    pub(crate) fn is_sampled(&self) -> bool {
        !self.pieces.iter().any(|piece| matches!(piece.state, PieceState::Unread))
    }

    pub(crate) fn has_landed(&self) -> bool {
        self.pieces.iter().all(|piece| matches!(piece.state, PieceState::Landed))
    }

    /// Releases the target's bytes. To be dropped without a lock.
    pub(crate) fn take_sources(&mut self) -> impl Iterator<Item = Buf> {
        self.sections.iter_mut().filter_map(|section| section.source.take())
    }

    /// One piece was sampled. Returns the target's bytes if it was the last of its section; to be dropped without a lock.
    fn sampled(&mut self, piece: usize, bytes: Vec<u8>, source: &Buf) -> Option<Buf> {
        let part = self.pieces[piece].part;
        self.pieces[piece].state = PieceState::Carried(bytes);
        let is_through = !self.pieces.iter().any(|piece| piece.part == part && is_unread(&piece.state));
        let keep = (!is_through).then(|| source.clone());
        std::mem::replace(&mut self.sections[part].source, keep)
    }

    /// The `nth` piece for which `matching` holds.
    fn nth(&self, nth: usize, matching: impl Fn(&PieceState) -> bool) -> Option<usize> {
        let found = self.pieces.iter().enumerate().filter(|(_, piece)| matching(&piece.state));
        found.map(|(index, _)| index).nth(nth)
    }

    fn count(&self, matching: impl Fn(&PieceState) -> bool) -> usize {
        self.pieces.iter().filter(|piece| matching(&piece.state)).count()
    }

    fn lands_in(&self, block: BlockNumber, range: &Range<usize>) -> bool {
        let places = self.sections.iter().filter_map(|section| section.destination.as_ref()?.place.as_ref());
        places
            .into_iter()
            .any(|(at, place)| *at == block && place.start < range.end && range.start < place.end)
    }
}

fn is_unread(state: &PieceState) -> bool {
    matches!(state, PieceState::Unread)
}

fn is_carried(state: &PieceState) -> bool {
    matches!(state, PieceState::Carried(_))
}

impl Outbound {
    /// The read that the target executes next, if its next operation is a read.
    pub(crate) fn next_sample(&self) -> Option<usize> {
        let index = self.writes.iter().position(|write| !write.delivered)?;
        let write = self.writes.get(index).filter(|write| !write.completed && write.refused.is_none())?;
        matches!(&write.kind, Kind::Read(read) if !read.is_sampled()).then_some(index)
    }

    /// A read with bytes on their way back.
    pub(crate) fn next_return(&self) -> Option<usize> {
        self.writes.iter().position(|write| {
            let returning = |read: &Read| read.count(is_carried) > 0;
            !write.completed && matches!(&write.kind, Kind::Read(read) if returning(read))
        })
    }

    fn read_mut(&mut self, number: u64) -> Option<&mut Read> {
        match &mut self.by_number(number)?.kind {
            Kind::Read(read) => Some(read),
            _ => None,
        }
    }

    /// Whether bytes of a read may still land in `range` of `block`.
    pub(crate) fn reads_into(&self, block: BlockNumber, range: &Range<usize>) -> bool {
        let open = self.writes.iter().filter(|write| !write.completed && write.refused.is_none());
        open.filter_map(|write| match &write.kind {
            Kind::Read(read) => Some(read),
            _ => None,
        })
        .any(|read| read.lands_in(block, range))
    }
}

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
                Some(Landing { target, place, posted_under })
            }
        };
        let key = region.map_or(0, |region| region.key);
        Ok(Section { range: *remote, key, destination, source: None })
    }

    /// The target executes a random piece of the oldest read that it has not executed.
    pub(crate) fn sample_piece(&self, id: EndpointId) {
        let mut state = self.state();
        let later = self.now() + self.swarm.delay(&mut state.rng, self.swarm.latency_max);
        let Some(peer) = peer_of(&state, id) else { return };
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
        let Some(Landing { target, place, posted_under }) = landing else { return };
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
        let reads = |end: &crate::endpoint::Endpoint| {
            end.node == node && end.phase.is_reachable() && end.outbound.reads_into(block, range)
        };
        state.endpoints.iter().position(reads).map(|index| EndpointId(index as u32))
    }
}
