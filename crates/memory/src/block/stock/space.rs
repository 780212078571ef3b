//! Free and used pieces of blocks: two-level size classes, constant time per call.
//!
//! Every block is cut into pieces that know their neighbours, so that a piece that becomes free merges with those
//! beside it. Free pieces are in lists by size class: one class per size up to 8 units, then eight per doubling. A
//! request is rounded up to the next class, whose pieces all fit it, and served from the smallest class that has one.
//! Only if no such class has a piece, the first few pieces of the request's own class are tried, which may or may not
//! fit.

use std::ops::Range;

use crate::{ALIGNMENT, Block};

/// Names a piece that is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PieceId(u32);

/// Log2 of the classes per doubling.
const STEPS_LOG2: u32 = 3;
const STEPS: u64 = 1 << STEPS_LOG2;
const CLASSES: usize = ((u64::BITS - STEPS_LOG2 + 1) << STEPS_LOG2) as usize;
const NONE: u32 = u32::MAX;
/// Pieces of the request's own class that are tried: the search stays bounded.
const TRIED_MAX: usize = 8;

/// A piece of a block. Lengths and positions are in units of [`ALIGNMENT`].
#[derive(Debug, Clone, Copy)]
struct Piece {
    block: u32,
    start: u64,
    length: u64,
    /// Neighbours in the block.
    before: u32,
    after: u32,
    /// Neighbours in the class's list; meaningful while free.
    previous: u32,
    next: u32,
    is_free: bool,
}

/// Some blocks, and their free pieces.
#[derive(Debug)]
pub(crate) struct Space {
    blocks: Vec<Block>,
    pieces: Vec<Piece>,
    /// Unused indices of `pieces`.
    vacant: Vec<u32>,
    /// First free piece of each class.
    heads: Box<[u32; CLASSES]>,
    /// One bit per class that has a free piece.
    filled: [u64; CLASSES.div_ceil(64)],
}

impl Default for Space {
    fn default() -> Self {
        Self {
            blocks: Vec::new(),
            pieces: Vec::new(),
            vacant: Vec::new(),
            heads: Box::new([NONE; CLASSES]),
            filled: [0; CLASSES.div_ceil(64)],
        }
    }
}

/// A piece that was cut off.
#[derive(Debug)]
pub(crate) struct Cut {
    pub(crate) block: Block,
    pub(crate) piece: PieceId,
    /// Bytes inside the block.
    pub(crate) range: Range<usize>,
}

impl Space {
    /// The blocks, oldest first.
    pub(crate) fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Adds a block, all of it free.
    pub(crate) fn add(&mut self, block: Block) {
        let length = (block.length() / ALIGNMENT) as u64;
        let number = self.blocks.len() as u32;
        self.blocks.push(block);
        let unlinked = Piece {
            block: number,
            start: 0,
            length,
            before: NONE,
            after: NONE,
            previous: NONE,
            next: NONE,
            is_free: true,
        };
        let id = self.insert(unlinked);
        self.link(id);
    }

    /// Takes `bytes`, a multiple of [`ALIGNMENT`] greater than 0.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<Cut> {
        let units = (bytes / ALIGNMENT) as u64;
        let id = self.find(units)?;
        self.unlink(id);
        let piece = self.pieces[id as usize];
        if piece.length > units {
            self.split(id, units);
        }
        let block = self.blocks[piece.block as usize].clone();
        let start = piece.start as usize * ALIGNMENT;
        Some(Cut { block, piece: PieceId(id), range: start..start + bytes })
    }

    /// Gives a piece back and merges it with free neighbours.
    pub(crate) fn put(&mut self, PieceId(mut id): PieceId) {
        let Piece { before, after, .. } = self.pieces[id as usize];
        if self.is_free(after) {
            self.unlink(after);
            self.merge(id, after);
        }
        if self.is_free(before) {
            self.unlink(before);
            self.merge(before, id);
            id = before;
        }
        self.link(id);
    }

    fn is_free(&self, id: u32) -> bool {
        id != NONE && self.pieces[id as usize].is_free
    }

    fn insert(&mut self, piece: Piece) -> u32 {
        if let Some(id) = self.vacant.pop() {
            self.pieces[id as usize] = piece;
            return id;
        }
        self.pieces.push(piece);
        self.pieces.len() as u32 - 1
    }

    /// Cuts the first `units` off; the rest becomes a free piece.
    fn split(&mut self, id: u32, units: u64) {
        let piece = self.pieces[id as usize];
        let (mut start, length) = (piece.start + units, piece.length - units);
        if tensorwire_testpoints::planted!("a piece overlaps the piece that it was split from") && units > 64
        {
            start -= 1;
        }
        let rest = self.insert(Piece { start, length, before: id, after: piece.after, ..piece });
        if piece.after != NONE {
            self.pieces[piece.after as usize].before = rest;
        }
        let piece = &mut self.pieces[id as usize];
        (piece.length, piece.after) = (units, rest);
        self.link(rest);
    }

    /// Appends `second` to `first`; neither is in a list.
    fn merge(&mut self, first: u32, second: u32) {
        let Piece { length, after, .. } = self.pieces[second as usize];
        let into = &mut self.pieces[first as usize];
        into.length += length;
        into.after = after;
        if after != NONE {
            self.pieces[after as usize].before = first;
        }
        self.vacant.push(second);
    }

    /// Puts a piece at the head of its class's list.
    fn link(&mut self, id: u32) {
        let class = class_of(self.pieces[id as usize].length);
        let head = self.heads[class];
        let piece = &mut self.pieces[id as usize];
        (piece.is_free, piece.previous, piece.next) = (true, NONE, head);
        if head != NONE {
            self.pieces[head as usize].previous = id;
        }
        self.heads[class] = id;
        self.filled[class / 64] |= 1 << (class % 64);
    }

    fn unlink(&mut self, id: u32) {
        let piece = &mut self.pieces[id as usize];
        piece.is_free = false;
        let Piece { length, previous, next, .. } = *piece;
        if next != NONE {
            self.pieces[next as usize].previous = previous;
        }
        if previous != NONE {
            self.pieces[previous as usize].next = next;
            return;
        }
        let class = class_of(length);
        self.heads[class] = next;
        if next == NONE {
            self.filled[class / 64] &= !(1 << (class % 64));
        }
    }

    /// A free piece of at least `units`.
    fn find(&self, units: u64) -> Option<u32> {
        match self.first_filled(class_fitting(units)) {
            Some(class) => Some(self.heads[class]),
            None => self.find_in_own_class(units),
        }
    }

    fn find_in_own_class(&self, units: u64) -> Option<u32> {
        let mut id = self.heads[class_of(units)];
        for _ in 0..TRIED_MAX {
            if id == NONE {
                return None;
            }
            let piece = &self.pieces[id as usize];
            if piece.length >= units {
                return Some(id);
            }
            id = piece.next;
        }
        None
    }

    /// The smallest class from `class` on that has a free piece.
    fn first_filled(&self, class: usize) -> Option<usize> {
        let (word, bit) = (class / 64, class % 64);
        let in_first = self.filled.get(word)? & (u64::MAX << bit);
        if in_first != 0 {
            return Some(word * 64 + in_first.trailing_zeros() as usize);
        }
        let later = self.filled.iter().enumerate().skip(word + 1);
        let (word, bits) = later.into_iter().find(|(_, bits)| **bits != 0)?;
        Some(word * 64 + bits.trailing_zeros() as usize)
    }
}

/// The class of a piece of `units`: the last whose smallest piece is not larger.
fn class_of(units: u64) -> usize {
    let Some(doubling) = units.checked_ilog2().and_then(|log| log.checked_sub(STEPS_LOG2)) else {
        return units as usize;
    };
    let step = (units >> doubling) & (STEPS - 1);
    (u64::from(doubling + 1) * STEPS + step) as usize
}

/// The first class whose every piece has at least `units`.
fn class_fitting(units: u64) -> usize {
    let doubling = units.checked_ilog2().map_or(0, |log| log.saturating_sub(STEPS_LOG2));
    class_of(units.saturating_add((1 << doubling) - 1))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn space(blocks: usize) -> Space {
        let mut space = Space::default();
        for _ in 0..blocks {
            space.add(Block::for_tests(64 * ALIGNMENT));
        }
        space
    }

    #[test]
    fn classes_grow_with_sizes_and_waste_at_most_an_eighth() {
        let sizes = (1..5000).chain((13..57).flat_map(|log| [(1 << log) - 1, 1 << log, (1 << log) + 1]));
        let mut last = 0;
        for units in sizes {
            let (own, fitting) = (class_of(units), class_fitting(units));
            assert!(own >= last && fitting >= own && fitting <= own + 1 && fitting < CLASSES, "{units}");
            assert_eq!(
                fitting == own,
                class_of(units - 1) < own,
                "{units}: only a class's smallest fits surely"
            );
            assert!(class_of(units + units.div_ceil(8)) > own, "{units}: the class is wider than an eighth");
            last = own;
        }
    }

    #[test]
    fn a_request_that_fits_only_a_piece_of_its_own_class_gets_it() {
        let mut space = space(1);
        // 61 of 64 units: the class of 60 to 63, of which not every piece would fit.
        let small = space.take(3 * ALIGNMENT).unwrap();
        assert_eq!(space.take(61 * ALIGNMENT).unwrap().range.len(), 61 * ALIGNMENT);
        assert!(space.take(ALIGNMENT).is_none());
        space.put(small.piece);
        assert!(space.take(4 * ALIGNMENT).is_none());
        assert!(space.take(3 * ALIGNMENT).is_some());
    }

    #[test]
    fn the_smallest_hole_that_fits_is_taken() {
        let mut space = space(1);
        let taken: Vec<_> = [8, 1, 3, 1, 4, 47].map(|units| space.take(units * ALIGNMENT).unwrap()).into();
        for hole in [0, 2, 4] {
            space.put(taken[hole].piece);
        }
        assert_eq!(space.take(3 * ALIGNMENT).unwrap().range, taken[2].range);
        assert_eq!(space.take(3 * ALIGNMENT).unwrap().range.start, taken[4].range.start);
        assert_eq!(space.take(5 * ALIGNMENT).unwrap().range.start, taken[0].range.start);
    }

    /// All pieces of a block, found from its first one, tile it; no two free ones are neighbours.
    fn check(space: &Space, taken: &[Cut]) {
        let mut free = 0;
        for (number, block) in space.blocks.iter().enumerate() {
            let live = |id: &usize| !space.vacant.contains(&(*id as u32));
            let mut pieces: Vec<_> =
                (0..space.pieces.len()).filter(live).map(|id| space.pieces[id]).collect();
            pieces.retain(|piece| piece.block as usize == number);
            pieces.sort_by_key(|piece| piece.start);
            let end = pieces.iter().fold(0, |end, piece| {
                assert_eq!(piece.start, end);
                end + piece.length
            });
            assert_eq!(end as usize * ALIGNMENT, block.length());
            assert!(pieces.windows(2).all(|pair| !(pair[0].is_free && pair[1].is_free)));
            free += pieces.iter().filter(|piece| piece.is_free).map(|piece| piece.length).sum::<u64>();
        }
        let used: usize = taken.iter().map(|taken| taken.range.len()).sum();
        let all: usize = space.blocks.iter().map(Block::length).sum();
        assert_eq!(free as usize * ALIGNMENT + used, all);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

        #[test]
        fn pieces_tile_their_blocks_and_merge(ops in prop::collection::vec((any::<bool>(), 1..70usize), 1..120)) {
            let mut space = space(3);
            let mut taken: Vec<Cut> = Vec::new();
            for (is_take, number) in ops {
                if is_take {
                    taken.extend(space.take(number * ALIGNMENT));
                } else if !taken.is_empty() {
                    let gone = taken.swap_remove(number % taken.len());
                    space.put(gone.piece);
                }
                check(&space, &taken);
            }
            taken.drain(..).for_each(|taken| space.put(taken.piece));
            for _ in 0..3 {
                prop_assert!(space.take(64 * ALIGNMENT).is_some(), "the blocks are whole again");
            }
        }
    }
}
