//! The pieces in which operations move their bytes.

use std::ops::Range;

use crate::{Rng, Swarm};

/// Bytes that are read in one step and land in one step.
#[derive(Debug)]
pub(crate) struct Piece {
    /// Which part of the write.
    pub(crate) part: usize,
    /// Bytes of that part.
    pub(crate) range: Range<usize>,
    pub(crate) state: PieceState,
}

#[derive(Debug)]
pub(crate) enum PieceState {
    Unread,
    /// Read, not yet written at the target.
    Carried(Vec<u8>),
    Landed,
}

/// Cuts the `length` bytes of a part into pieces at random positions.
pub(crate) fn cut_into_pieces(part: usize, length: usize, swarm: &Swarm, rng: &mut Rng) -> Vec<Piece> {
    let mut cuts = vec![0, length];
    if swarm.tiny_pieces {
        cuts.extend(1..length.min(swarm.pieces_max));
    } else {
        let inner = rng.below(swarm.pieces_max);
        cuts.extend((0..inner).map(|_| rng.below(length + 1)));
    }
    cuts.sort_unstable();
    cuts.dedup();
    let ranges = cuts.windows(2).map(|ends| ends[0]..ends[1]);
    ranges.map(|range| Piece { part, range, state: PieceState::Unread }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_write_once_and_stay_few() {
        let mut rng = Rng::new(1);
        for length in [0, 1, 2, 63, 64, 10_000] {
            for tiny_pieces in [false, true] {
                let swarm = Swarm { pieces_max: 16, tiny_pieces, ..Swarm::calm() };
                let pieces = cut_into_pieces(0, length, &swarm, &mut rng);
                let end = pieces.iter().fold(0, |end, piece| {
                    assert_eq!(piece.range.start, end);
                    assert!(!piece.range.is_empty());
                    piece.range.end
                });
                assert_eq!(end, length);
                assert!(pieces.len() <= 17);
            }
        }
    }
}
