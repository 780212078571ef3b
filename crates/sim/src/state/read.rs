//! A read: its pieces are sampled at the target over time, in any order, come back, and land.

use std::ops::Range;

use tensorwire_fabric::RemoteRange;
use tensorwire_memory::{Buf, RemoteTarget};

use super::{
    owners::PostedUnder,
    pieces::{Piece, PieceState},
};
use crate::ids::BlockNumber;

/// A read, from post until its last byte has landed.
#[derive(Debug)]
pub(crate) struct Read {
    /// Its entries in the send queue.
    pub(crate) weight: usize,
    pub(crate) sections: Vec<Section>,
    /// The pieces of all sections; `part` is the index of the section.
    pub(crate) pieces: Vec<Piece>,
}

/// One range of a read.
#[derive(Debug)]
pub(crate) struct Section {
    pub(crate) range: RemoteRange,
    pub(crate) key: u32,
    /// `None` if it is empty.
    pub(crate) destination: Option<ReadTarget>,
    /// The source bytes, once the target has checked the range. They stay alive and unchanged while they are sampled.
    pub(crate) source: Option<Buf>,
}

/// The destination of a read.
#[derive(Debug)]
pub(crate) struct ReadTarget {
    pub(crate) target: RemoteTarget,
    /// Only where the owner map watches it.
    pub(crate) place: Option<(BlockNumber, Range<usize>)>,
    pub(crate) posted_under: PostedUnder,
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
    pub(crate) fn sampled(&mut self, piece: usize, bytes: Vec<u8>, source: &Buf) -> Option<Buf> {
        let part = self.pieces[piece].part;
        self.pieces[piece].state = PieceState::Carried(bytes);
        let is_through = !self.pieces.iter().any(|piece| piece.part == part && is_unread(&piece.state));
        let keep = (!is_through).then(|| source.clone());
        std::mem::replace(&mut self.sections[part].source, keep)
    }

    /// The `nth` piece for which `matching` holds.
    pub(crate) fn nth(&self, nth: usize, matching: impl Fn(&PieceState) -> bool) -> Option<usize> {
        let found = self.pieces.iter().enumerate().filter(|(_, piece)| matching(&piece.state));
        found.map(|(index, _)| index).nth(nth)
    }

    pub(crate) fn count(&self, matching: impl Fn(&PieceState) -> bool) -> usize {
        self.pieces.iter().filter(|piece| matching(&piece.state)).count()
    }

    pub(crate) fn lands_in(&self, block: BlockNumber, range: &Range<usize>) -> bool {
        let places = self.sections.iter().filter_map(|section| section.destination.as_ref()?.place.as_ref());
        places
            .into_iter()
            .any(|(at, place)| *at == block && place.start < range.end && range.start < place.end)
    }
}

pub(crate) fn is_unread(state: &PieceState) -> bool {
    matches!(state, PieceState::Unread)
}

pub(crate) fn is_carried(state: &PieceState) -> bool {
    matches!(state, PieceState::Carried(_))
}
