//! The posting half of a connection: what is posted, what still waits for room, and how far the connection is.

use std::collections::VecDeque;

use crate::SlotKey;

use super::{
    VerbsError,
    message::Message,
    queue_pair::{BATCH, RawQueuePair, Request, Work, Write},
    tag::Tag,
};

/// How far a connection is. It only ever moves down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    /// Takes work.
    Open,
    /// The farewell is posted, behind all work that was; nothing more is.
    Leaving,
    /// The queue pair is in its error state, and everything outstanding is on its way back.
    Down,
    /// Nothing is outstanding, and the queue pair is destroyed.
    Drained,
}

/// A range of a logical write that is not completely posted yet. It is posted in steps: its pieces and, before the
/// last piece of a write that tells the peer, messages that say how many bytes went before.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) key: SlotKey,
    pub(super) local: u64,
    pub(super) local_key: u32,
    pub(super) remote: u64,
    pub(super) remote_key: u32,
    pub(super) length: u64,
    pub(super) immediate: Option<u32>,
    /// Bytes of the logical write's earlier ranges.
    pub(super) earlier: u64,
    /// The logical write ends with this range.
    pub(super) is_last: bool,
    /// Steps posted already.
    pub(super) posted: u64,
}

impl Pending {
    fn pieces(&self, piece_bytes: u32) -> u64 {
        self.length.div_ceil(u64::from(piece_bytes)).max(1)
    }

    /// What the peer is told of the bytes before the last piece.
    fn extents(&self, piece_bytes: u32) -> impl Iterator<Item = Message> {
        let before = self.earlier + (self.pieces(piece_bytes) - 1) * u64::from(piece_bytes);
        let told = if self.immediate.is_some() { before } else { 0 };
        let pieces = u32::try_from(told / u64::from(piece_bytes)).unwrap_or(u32::MAX);
        // Less than a piece.
        let residue = (told % u64::from(piece_bytes)) as u32;
        let extent = (pieces > 0).then_some(Message::Extent(pieces));
        extent.into_iter().chain((residue > 0).then_some(Message::Residue(residue)))
    }

    fn steps(&self, piece_bytes: u32) -> u64 {
        self.pieces(piece_bytes) + self.extents(piece_bytes).count() as u64
    }

    fn step(&self, step: u64, piece_bytes: u32) -> Request {
        let (pieces, steps) = (self.pieces(piece_bytes), self.steps(piece_bytes));
        let last = step + 1 == steps;
        if !last && step + 1 >= pieces {
            // At most two.
            let message = self.extents(piece_bytes).nth((step + 1 - pieces) as usize);
            let message = message.unwrap_or(Message::Extent(0));
            return Request { tag: Tag::Piece(self.key), work: Work::Message(message) };
        }
        let from = if last { pieces - 1 } else { step } * u64::from(piece_bytes);
        let write = Write {
            local: self.local + from,
            local_key: self.local_key,
            length: u32::try_from(self.length - from).unwrap_or(u32::MAX).min(piece_bytes),
            remote: self.remote + from,
            remote_key: self.remote_key,
            immediate: self.immediate.filter(|_| last),
        };
        let tag = if last && self.is_last { Tag::Write(self.key) } else { Tag::Piece(self.key) };
        Request { tag, work: Work::Write(write) }
    }
}

/// Behind the link's lock.
#[derive(Debug)]
pub(super) struct SendSide {
    /// `None` once drained.
    pub(super) queue_pair: Option<RawQueuePair>,
    pub(super) phase: Phase,
    /// Receives posted and not back.
    pub(super) receives: usize,
    /// Writes and signals posted and not back.
    pub(super) sends: usize,
    /// Entries of the send queue that writes may still take.
    room: usize,
    piece_bytes: u32,
    /// In posting order. Bounded by the slots.
    pending: VecDeque<Pending>,
    /// Reused, so that posting allocates nothing.
    batch: Vec<Request>,
    /// Operations whose last piece is posted, with their bytes, in posting order.
    posted: VecDeque<(SlotKey, u64)>,
}

impl SendSide {
    pub(super) fn new(
        queue_pair: RawQueuePair,
        receives: usize,
        send_depth: usize,
        piece_bytes: u32,
    ) -> Self {
        Self {
            queue_pair: Some(queue_pair),
            phase: Phase::Open,
            receives,
            sends: 0,
            room: send_depth,
            piece_bytes,
            pending: VecDeque::new(),
            batch: Vec::with_capacity(BATCH),
            posted: VecDeque::new(),
        }
    }

    pub(super) fn push(&mut self, ranges: impl IntoIterator<Item = Pending>) {
        self.pending.extend(ranges);
    }

    /// Posts what there is room for.
    pub(super) fn pump(&mut self) -> Result<(), VerbsError> {
        let Some(queue_pair) = &self.queue_pair else { return Ok(()) };
        if self.phase != Phase::Open {
            return Ok(());
        }
        while self.room > 0 && !self.pending.is_empty() {
            fill(&mut self.batch, &self.pending, self.room.min(BATCH), self.piece_bytes);
            // SAFETY: each request belongs to a slot, which owns the bytes and completes only when it has
            // come back or the queue pair is destroyed; the bytes' block is registered as long as the domain
            // lives, which the queue pair keeps.
            let result = unsafe { queue_pair.post(&self.batch) };
            let count = result.as_ref().map_or_else(|refused| refused.posted, |()| self.batch.len());
            for _ in 0..count {
                self.room -= 1;
                self.sends += 1;
                advance(&mut self.pending, &mut self.posted, self.piece_bytes);
            }
            result.map_err(|refused| refused.error)?;
        }
        Ok(())
    }

    /// Posts one of the messages that frame the connection; room is reserved for them.
    pub(super) fn signal(&mut self, message: Message) -> Result<(), VerbsError> {
        let Some(queue_pair) = &self.queue_pair else { return Ok(()) };
        let request = Request { tag: Tag::Signal(message.to_bits()), work: Work::Message(message) };
        // SAFETY: a message has no local bytes.
        let result = unsafe { queue_pair.post(&[request]) };
        result.map_err(|refused| refused.error)?;
        self.sends += 1;
        Ok(())
    }

    /// Posts receives in place of `count` consumed ones.
    pub(super) fn replace_receives(&mut self, count: usize) -> Result<(), VerbsError> {
        let Some(queue_pair) = &self.queue_pair else { return Ok(()) };
        if count == 0 || self.phase != Phase::Open {
            return Ok(());
        }
        let result = queue_pair.post_receives(count);
        self.receives += result.as_ref().map_or_else(|refused| refused.posted, |()| count);
        result.map_err(|refused| refused.error)
    }

    /// Counts one work request of the send queue that came back. For the end of an operation, its bytes.
    pub(super) fn returned(&mut self, tag: Tag) -> u64 {
        self.sends = self.sends.saturating_sub(1);
        if !matches!(tag, Tag::Signal(_)) {
            self.room += 1;
        }
        let Tag::Write(key) = tag else { return 0 };
        // Work requests of one queue come back in posting order.
        self.posted.pop_front().filter(|(first, _)| *first == key).map_or(0, |(_, bytes)| bytes)
    }

    /// Nothing is outstanding any more.
    pub(super) fn is_idle(&self) -> bool {
        self.sends == 0 && self.receives == 0
    }

    /// Takes the operations that have not ended, for a queue pair that is destroyed.
    pub(super) fn take_unfinished(&mut self) -> Vec<SlotKey> {
        let posted = self.posted.drain(..).map(|(key, _)| key);
        posted.chain(self.pending.drain(..).map(|write| write.key)).collect()
    }
}

/// Puts the next steps into `batch` in posting order, at most `limit`.
fn fill(batch: &mut Vec<Request>, pending: &VecDeque<Pending>, limit: usize, piece_bytes: u32) {
    batch.clear();
    for write in pending {
        for step in write.posted..write.steps(piece_bytes) {
            if batch.len() == limit {
                return;
            }
            batch.push(write.step(step, piece_bytes));
        }
    }
}

/// Notes that the first step that was pending is posted.
fn advance(pending: &mut VecDeque<Pending>, posted: &mut VecDeque<(SlotKey, u64)>, piece_bytes: u32) {
    let Some(range) = pending.front_mut() else { return };
    range.posted += 1;
    if range.posted < range.steps(piece_bytes) {
        return;
    }
    if let Some(range) = pending.pop_front().filter(|range| range.is_last) {
        posted.push_back((range.key, range.earlier + range.length));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pending(slot: u64, length: u64, immediate: Option<u32>) -> Pending {
        let key = SlotKey::from_bits(slot);
        let (local, remote) = (1000, 5000);
        let keys = (1, 2);
        Pending {
            key,
            local,
            local_key: keys.0,
            remote,
            remote_key: keys.1,
            length,
            immediate,
            earlier: 0,
            is_last: true,
            posted: 0,
        }
    }

    /// Posts everything in batches of `limit`.
    fn all_steps(mut queue: VecDeque<Pending>, limit: usize, piece_bytes: u32) -> Vec<Request> {
        let (mut steps, mut posted) = (Vec::new(), VecDeque::new());
        while !queue.is_empty() {
            let mut batch = Vec::new();
            fill(&mut batch, &queue, limit, piece_bytes);
            assert!(!batch.is_empty() && batch.len() <= limit);
            for _ in &batch {
                advance(&mut queue, &mut posted, piece_bytes);
            }
            steps.extend(batch);
        }
        assert!(posted.iter().map(|&(key, _)| key).is_sorted());
        steps
    }

    fn writes(steps: &[Request]) -> Vec<Write> {
        let write = |request: &Request| match request.work {
            Work::Write(write) => Some(write),
            Work::Message(_) => None,
        };
        steps.iter().filter_map(write).collect()
    }

    #[test]
    fn only_the_last_piece_carries_the_immediate_and_ends_the_operation() {
        for (length, expected) in
            [(99, vec![99]), (100, vec![100]), (101, vec![100, 1]), (250, vec![100, 100, 50])]
        {
            let steps = all_steps([pending(0, length, Some(7))].into(), 16, 100);
            let pieces = writes(&steps);
            assert_eq!(pieces.iter().map(|piece| piece.length).collect::<Vec<_>>(), expected);
            let (last, earlier) = pieces.split_last().unwrap();
            assert_eq!(last.immediate, Some(7));
            assert!(earlier.iter().all(|piece| piece.immediate.is_none()));
            let (last, earlier) = steps.split_last().unwrap();
            assert_eq!(last.tag, Tag::Write(SlotKey::from_bits(0)));
            assert!(earlier.iter().all(|step| step.tag == Tag::Piece(SlotKey::from_bits(0))));
        }
    }

    #[test]
    fn a_split_write_tells_how_many_pieces_went_before() {
        let steps = all_steps([pending(0, 250, Some(7))].into(), 16, 100);
        assert_eq!(steps[2].work, Work::Message(Message::Extent(2)));
        assert_eq!(steps.len(), 4);
        // Nobody waits for the extent of a plain write, and an unsplit one has none.
        assert_eq!(all_steps([pending(0, 250, None)].into(), 16, 100).len(), 3);
        assert_eq!(all_steps([pending(0, 100, Some(7))].into(), 16, 100).len(), 1);
    }

    #[test]
    fn ranges_of_one_write_complete_once_and_tell_all_bytes() {
        let ranges = [
            Pending { is_last: false, ..pending(4, 150, None) },
            Pending { earlier: 150, is_last: false, ..pending(4, 0, None) },
            Pending { earlier: 150, ..pending(4, 220, Some(9)) },
        ];
        let steps = all_steps(ranges.into(), 3, 100);
        let ends = steps.iter().filter(|step| matches!(step.tag, Tag::Write(_))).count();
        assert_eq!((ends, steps.len()), (1, 8));
        let told = |step: &Request| match step.work {
            Work::Message(message) => Some(message),
            Work::Write(_) => None,
        };
        let told: Vec<_> = steps.iter().filter_map(told).collect();
        assert_eq!(told, [Message::Extent(3), Message::Residue(50)]);
        assert_eq!(writes(&steps).iter().map(|write| write.length).sum::<u32>(), 370);
    }

    #[test]
    fn pieces_cover_the_range_in_order_on_both_sides() {
        for immediate in [None, Some(0)] {
            let mut next = 0;
            for piece in writes(&all_steps([pending(0, 1234, immediate)].into(), 3, 100)) {
                assert_eq!((piece.local, piece.remote), (1000 + next, 5000 + next));
                next += u64::from(piece.length);
            }
            assert_eq!(next, 1234);
        }
    }

    #[test]
    fn an_empty_write_is_one_piece() {
        let pieces = writes(&all_steps([pending(3, 0, Some(1))].into(), 16, 100));
        assert_eq!(pieces.len(), 1);
        assert_eq!((pieces[0].length, pieces[0].immediate), (0, Some(1)));
    }

    #[test]
    fn batches_never_reorder_operations() {
        for limit in 1..6 {
            let queue = [pending(0, 150, None), pending(1, 0, Some(1)), pending(2, 320, None)].into();
            let tags: Vec<Tag> = all_steps(queue, limit, 100).iter().map(|step| step.tag).collect();
            let key = SlotKey::from_bits;
            let expected = [
                Tag::Piece(key(0)),
                Tag::Write(key(0)),
                Tag::Write(key(1)),
                Tag::Piece(key(2)),
                Tag::Piece(key(2)),
                Tag::Piece(key(2)),
                Tag::Write(key(2)),
            ];
            assert_eq!(tags, expected);
        }
    }
}
