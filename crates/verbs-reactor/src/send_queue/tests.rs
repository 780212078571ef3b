//! Tests of the bookkeeping of a send queue, with a model of the device.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::doorbell::{BATCH, Direction, LocalRange, Transfer};

const LIMITS: RequestLimits = RequestLimits { piece_bytes: 100, ranges: 4, read_ranges: 2 };

fn pending(slot: u64, length: u64, immediate: Option<u32>) -> Pending {
    Pending {
        key: SlotKey::from_bits(slot),
        direction: Direction::Write,
        local: LocalRange { address: 1000, length, key: 1 },
        gathered: Vec::new(),
        remote: 5000,
        remote_key: 2,
        length,
        immediate,
        earlier: 0,
        is_last: true,
        posted: 0,
    }
}

/// A posted request with its ranges.
type Posted = (Request, Vec<LocalRange>);

/// Posts everything into a queue of this depth whose requests complete at once.
fn all_steps(pending: impl IntoIterator<Item = Pending>, depth: usize) -> Vec<Posted> {
    let mut queue = SendQueue::new(depth, LIMITS);
    queue.push(pending);
    let mut steps = Vec::new();
    while queue.fill() {
        assert!(queue.doorbell().len() <= depth.min(BATCH));
        steps.extend(posted(queue.doorbell()));
        queue.accept(queue.doorbell().len());
        queue.returned(queue.next_sequence() - 1, SendStatus::Done, &mut Vec::new());
        assert_eq!(queue.room, depth);
    }
    assert!(queue.pending.is_empty() && queue.posted.is_empty());
    steps
}

fn posted(doorbell: &Doorbell) -> Vec<Posted> {
    let mut ranges = doorbell.ranges().iter().copied();
    doorbell.requests().map(|(request, count)| (*request, ranges.by_ref().take(count).collect())).collect()
}

fn transfers(steps: &[Posted]) -> Vec<Transfer> {
    let transfer = |(request, _): &Posted| match request.work {
        Work::Transfer(transfer) => Some(transfer),
        Work::Message(_) => None,
    };
    steps.iter().filter_map(transfer).collect()
}

fn messages(steps: &[Posted]) -> Vec<Message> {
    let message = |(request, _): &Posted| match request.work {
        Work::Message(message) => Some(message),
        Work::Transfer(_) => None,
    };
    steps.iter().filter_map(message).collect()
}

fn ends(steps: &[Posted]) -> Vec<(u64, u64)> {
    let end = |(request, _): &Posted| match request.part {
        Part::End { key, bytes } => Some((key.to_bits(), bytes)),
        Part::Piece | Part::Signal(_) => None,
    };
    steps.iter().filter_map(end).collect()
}

#[test]
fn only_the_last_piece_carries_the_immediate_and_ends_the_operation() {
    for (length, expected) in
        [(99, vec![99]), (100, vec![100]), (101, vec![100, 1]), (250, vec![100, 100, 50])]
    {
        let steps = all_steps([pending(0, length, Some(7))], 16);
        let pieces = transfers(&steps);
        assert_eq!(pieces.iter().map(|piece| piece.length).collect::<Vec<_>>(), expected);
        let (last, earlier) = pieces.split_last().unwrap();
        assert_eq!(last.immediate, Some(7));
        assert!(earlier.iter().all(|piece| piece.immediate.is_none()));
        let (last, earlier) = steps.split_last().unwrap();
        assert_eq!(last.0.part, Part::End { key: SlotKey::from_bits(0), bytes: length });
        assert!(earlier.iter().all(|(step, _)| step.part == Part::Piece));
    }
}

#[test]
fn a_split_write_tells_how_many_pieces_went_before() {
    let steps = all_steps([pending(0, 250, Some(7))], 16);
    assert_eq!(steps[2].0.work, Work::Message(Message::Extent(2)));
    assert_eq!(steps.len(), 4);
    // A plain write needs no extent, and an unsplit write has none.
    assert_eq!(all_steps([pending(0, 250, None)], 16).len(), 3);
    assert_eq!(all_steps([pending(0, 100, Some(7))], 16).len(), 1);
}

#[test]
fn ranges_of_one_write_complete_once_and_tell_all_bytes() {
    let ranges = [
        Pending { is_last: false, ..pending(4, 150, None) },
        Pending { earlier: 150, is_last: false, ..pending(4, 0, None) },
        Pending { earlier: 150, ..pending(4, 220, Some(9)) },
    ];
    let steps = all_steps(ranges, 3);
    assert_eq!((ends(&steps), steps.len()), (vec![(4, 370)], 8));
    assert_eq!(messages(&steps), [Message::Extent(3), Message::Residue(50)]);
    assert_eq!(transfers(&steps).iter().map(|write| write.length).sum::<u64>(), 370);
}

#[test]
fn pieces_cover_the_range_in_order_on_both_sides() {
    for direction in [Direction::Write, Direction::Read] {
        let mut next = 0;
        for (step, ranges) in all_steps([Pending { direction, ..pending(0, 1234, None) }], 3) {
            let Work::Transfer(piece) = step.work else { panic!("a plain operation sends no message") };
            let [range] = ranges[..] else { panic!("{} ranges", ranges.len()) };
            assert_eq!((range.address, range.length), (1000 + next, piece.length));
            assert_eq!((piece.remote, piece.direction), (5000 + next, direction));
            next += piece.length;
        }
        assert_eq!(next, 1234);
    }
}

#[test]
fn an_empty_write_is_one_piece_without_ranges() {
    let steps = all_steps([pending(3, 0, Some(1))], 16);
    assert_eq!((steps.len(), transfers(&steps)[0].length, transfers(&steps)[0].immediate), (1, 0, Some(1)));
    assert!(steps[0].1.is_empty());
}

#[test]
fn batches_never_reorder_operations() {
    for depth in 1..6 {
        let queue = [pending(0, 150, None), pending(1, 0, Some(1)), pending(2, 320, None)];
        let steps = all_steps(queue, depth);
        assert_eq!(ends(&steps), [(0, 150), (1, 0), (2, 320)]);
        assert_eq!(
            transfers(&steps).iter().map(|t| t.length).collect::<Vec<_>>(),
            [100, 50, 0, 100, 100, 100, 20]
        );
    }
}

/// Parts of one write: number of bytes and remote address.
fn parts(given: &[(u64, u64)]) -> Vec<Pending> {
    parts_of(Direction::Write, given)
}

/// Parts of one operation: number of bytes and remote address.
fn parts_of(direction: Direction, parts: &[(u64, u64)]) -> Vec<Pending> {
    let mut ranges: Vec<Pending> = Vec::new();
    let mut earlier = 0;
    for (index, &(length, remote)) in parts.iter().enumerate() {
        let local = LocalRange { address: 10_000 * index as u64, length, key: 1 };
        let is_last = index + 1 == parts.len();
        let immediate = (is_last && direction == Direction::Write).then_some(5);
        let blank = pending(0, length, None);
        let next = Pending { direction, local, remote, earlier, is_last, immediate, ..blank };
        earlier += length;
        let refused = match ranges.last_mut() {
            Some(last) => last.gather(next, &LIMITS),
            None => Some(next),
        };
        ranges.extend(refused);
    }
    ranges
}

#[test]
fn adjacent_ranges_are_one_request() {
    let steps = all_steps(parts(&[(10, 500), (20, 510), (30, 530)]), 16);
    let [(request, ranges)] = &steps[..] else { panic!("{} requests", steps.len()) };
    assert_eq!(ranges.iter().map(|range| range.length).collect::<Vec<_>>(), [10, 20, 30]);
    assert_eq!(ranges.iter().map(|range| range.address).collect::<Vec<_>>(), [0, 10_000, 20_000]);
    let Work::Transfer(write) = request.work else { panic!("not a write") };
    assert_eq!((write.length, write.remote, write.immediate), (60, 500, Some(5)));
    assert_eq!(ends(&steps), [(0, 60)]);
}

#[test]
fn reads_that_are_adjacent_there_are_one_request_as_far_as_the_device_scatters() {
    let given = [(10, 500), (20, 510), (30, 530), (0, 1), (60, 560), (250, 620), (7, 0)];
    let steps = all_steps(parts_of(Direction::Read, &given), 16);
    let shape = |(request, ranges): &Posted| {
        let Work::Transfer(read) = request.work else { panic!("a read sends no message") };
        assert_eq!(read.direction, Direction::Read);
        assert_eq!(ranges.iter().map(|range| range.length).sum::<u64>(), read.length);
        (read.remote, read.length, ranges.len())
    };
    let shapes: Vec<_> = steps.iter().map(shape).collect();
    let pieces = [(620, 100, 1), (720, 100, 1), (820, 50, 1)];
    let expected = [&[(500, 30, 2), (530, 90, 2)][..], &pieces, &[(0, 7, 1)]].concat();
    assert_eq!(shapes, expected);
    assert_eq!(ends(&steps), [(0, 377)]);
}

#[test]
fn a_region_at_the_end_of_all_addresses_is_left_to_the_device() {
    let mut last = parts(&[(150, u64::MAX - 10)]);
    assert!(last[0].gather(pending(0, 10, None), &LIMITS).is_some());
    assert_eq!(
        transfers(&all_steps(last, 16)).iter().map(|write| write.remote).collect::<Vec<_>>(),
        [u64::MAX - 10, 89]
    );
}

#[test]
fn ranges_that_do_not_go_together_are_requests_of_their_own() {
    let lengths = |given: &[(u64, u64)]| {
        transfers(&all_steps(parts(given), 16)).iter().map(|write| write.length).collect::<Vec<_>>()
    };
    assert_eq!(lengths(&[(10, 500), (10, 511)]), [10, 10], "a gap");
    assert_eq!(lengths(&[(10, 500), (10, 490)]), [10, 10], "downwards");
    assert_eq!(lengths(&[(60, 500), (40, 560), (1, 600)]), [100, 1], "a piece");
    assert_eq!(lengths(&[(60, 500), (41, 560)]), [60, 41], "more than a piece");
    assert_eq!(lengths(&[(150, 500), (10, 650)]), [100, 50, 10], "more than a piece already");
    assert_eq!(
        lengths(&[(1, 0), (1, 1), (1, 2), (1, 3), (1, 4)]),
        [4, 1],
        "as many ranges as a request takes"
    );
    assert_eq!(lengths(&[(10, 500), (0, 700), (10, 510)]), [20], "nothing is adjacent to everything");
    assert_eq!(lengths(&[(0, 3), (10, 500)]), [10]);
    assert_eq!(lengths(&[(0, 3), (0, 9)]), [0]);
    let mut foreign = parts(&[(10, 500)]);
    let other = Pending { remote: 510, remote_key: 3, ..pending(0, 10, None) };
    assert!(foreign[0].gather(other, &LIMITS).is_some(), "another region");
}

#[test]
fn a_completion_ends_what_went_before_it() {
    let mut queue = SendQueue::new(8, LIMITS);
    queue.push([pending(1, 10, None), pending(2, 10, None), pending(3, 250, None)]);
    assert!(queue.fill());
    queue.accept(5);
    assert_eq!((queue.room, queue.outstanding()), (3, 5));
    let mut ended = Vec::new();
    queue.returned(3, SendStatus::Done, &mut ended);
    let operation = |slot, bytes, is_done| Ended::Operation { key: SlotKey::from_bits(slot), bytes, is_done };
    assert_eq!(ended, [operation(1, 10, true), operation(2, 10, true)]);
    assert_eq!((queue.room, queue.outstanding()), (7, 1));
    // Numbers that are not outstanding are ignored.
    for sequence in [0, 3, 5, u64::MAX] {
        queue.returned(sequence, SendStatus::Done, &mut ended);
    }
    assert_eq!((ended.len(), queue.room), (2, 7));
    queue.returned(4, SendStatus::Failed, &mut ended);
    assert_eq!((ended.last(), queue.room), (Some(&operation(3, 250, false)), 8));
}

#[test]
fn what_a_failure_says_about_requests_before_it() {
    for (status, before) in
        [(SendStatus::Failed, true), (SendStatus::Flushed, false), (SendStatus::Done, true)]
    {
        let mut queue = SendQueue::new(8, LIMITS);
        queue.push([pending(1, 10, None), pending(2, 10, None)]);
        assert!(queue.fill());
        queue.accept(2);
        let mut ended = Vec::new();
        queue.returned(1, status, &mut ended);
        let done: Vec<bool> =
            ended.iter().map(|ended| matches!(ended, Ended::Operation { is_done: true, .. })).collect();
        assert_eq!(done, [before, status == SendStatus::Done], "{status:?}");
    }
}

/// A device that follows the rules of a reliable connection: requests end in order, only signalled ones complete, and from
/// the first failure on all of them do.
#[derive(Debug, Default)]
struct Device {
    /// Requests with their numbers, and whether each is signalled.
    queue: VecDeque<(u64, bool)>,
    failed: bool,
}

impl Device {
    /// Takes the first `count` requests.
    fn post(&mut self, first: u64, doorbell: &Doorbell, count: usize) {
        let signaled = doorbell.requests().map(|(request, _)| request.is_signaled);
        self.queue.extend((first..).zip(signaled).take(count));
    }

    /// Executes up to `count` requests. The last of them fails if `fails`.
    fn work(&mut self, count: usize, fails: bool) -> Vec<(u64, SendStatus)> {
        let mut completions = Vec::new();
        for step in 0..count {
            let Some((sequence, is_signaled)) = self.queue.pop_front() else { break };
            let status = match self.failed {
                true => SendStatus::Flushed,
                false if fails && step + 1 == count => SendStatus::Failed,
                false => SendStatus::Done,
            };
            self.failed |= status != SendStatus::Done;
            if is_signaled || status != SendStatus::Done {
                completions.push((sequence, status));
            }
        }
        completions
    }
}

#[derive(Debug, Clone)]
enum Act {
    /// Submits an operation of these parts.
    Submit(Vec<(u64, bool)>, Option<u32>),
    /// Posts as much as there is room for; a device that fails may accept only some.
    Pump,
    /// The device executes this many requests.
    Work(usize),
    /// The device executes this many requests, and the last of them fails.
    Fail(usize),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let parts = prop::collection::vec((0_u64..300, any::<bool>()), 1..6);
    let act = prop_oneof![
        4 => (parts, prop::option::of(any::<u32>())).prop_map(|(parts, immediate)| Act::Submit(parts, immediate)),
        4 => Just(Act::Pump),
        4 => (1_usize..20).prop_map(Act::Work),
        1 => (1_usize..20).prop_map(Act::Fail),
    ];
    prop::collection::vec(act, 1..60)
}

/// A send queue with its device, and the result of each operation.
struct Rig {
    depth: usize,
    queue: SendQueue,
    device: Device,
    /// Bytes of each operation, by slot.
    submitted: Vec<u64>,
    /// For each operation that has ended, whether it was done.
    ended: Vec<Option<bool>>,
}

impl Rig {
    fn new(depth: usize) -> Self {
        let queue = SendQueue::new(depth, LIMITS);
        Self { depth, queue, device: Device::default(), submitted: Vec::new(), ended: Vec::new() }
    }

    fn submit(&mut self, given: &[(u64, bool)], immediate: Option<u32>) {
        let mut remote = 0;
        let mut placed = Vec::new();
        for &(length, is_adjacent) in given {
            remote += if is_adjacent { 0 } else { 1000 };
            placed.push((length, remote));
            remote += length;
        }
        let key = SlotKey::from_bits(self.submitted.len() as u64);
        let of_operation =
            |range: Pending| Pending { key, immediate: range.immediate.and(immediate), ..range };
        self.queue.push(parts(&placed).into_iter().map(of_operation));
        self.submitted.push(given.iter().map(|(length, _)| length).sum());
        self.ended.push(None);
    }

    fn pump(&mut self) {
        while self.queue.fill() {
            let (first, count) = (self.queue.next_sequence(), self.queue.doorbell().len());
            let last = self.queue.doorbell().requests().next_back().unwrap();
            assert!(last.0.is_signaled, "nothing would say that it is over");
            self.device.post(first, self.queue.doorbell(), count);
            self.queue.accept(count);
            assert!(self.queue.outstanding() + self.queue.room == self.depth);
        }
    }

    fn work(&mut self, count: usize, fails: bool) {
        for (sequence, status) in self.device.work(count, fails) {
            let mut ended = Vec::new();
            self.queue.returned(sequence, status, &mut ended);
            for ended in ended {
                self.end(ended);
            }
            assert!(self.queue.outstanding() + self.queue.room == self.depth);
        }
    }

    fn end(&mut self, ended: Ended) {
        let Ended::Operation { key, bytes, is_done } = ended else { panic!("no signal was posted") };
        let slot = key.to_bits() as usize;
        assert_eq!(self.ended[slot].replace(is_done), None, "operation {slot} ended twice");
        assert_eq!(bytes, self.submitted[slot]);
    }

    fn finish(mut self) {
        let is_at_work = |rig: &Self| !(rig.queue.pending.is_empty() && rig.device.queue.is_empty());
        while is_at_work(&self) && !self.device.failed {
            self.pump();
            assert!(!self.device.queue.is_empty(), "it waits for room that nobody gives");
            self.work(1, false);
        }
        self.work(usize::MAX, false);
        assert_eq!(self.queue.outstanding(), 0);
        assert_eq!(self.queue.room, self.depth, "not all room came back");
        for key in self.queue.take_unfinished() {
            let slot = key.to_bits() as usize;
            assert_eq!(self.ended[slot].replace(false), None, "operation {slot} ended twice");
        }
        assert!(self.ended.iter().all(Option::is_some), "an operation never ended");
        let done = self.ended.iter().take_while(|&&done| done == Some(true)).count();
        assert!(self.ended[done..].iter().all(|&done| done == Some(false)), "done behind one that failed");
        assert!(self.device.failed || done == self.submitted.len());
    }
}

proptest! {
    #[test]
    fn every_operation_ends_once_and_all_room_comes_back(depth in 1_usize..40, acts in acts()) {
        let mut rig = Rig::new(depth);
        for act in acts {
            match act {
                Act::Submit(parts, immediate) => rig.submit(&parts, immediate),
                Act::Pump if !rig.device.failed => rig.pump(),
                Act::Pump => {}
                Act::Work(count) => rig.work(count, false),
                Act::Fail(count) => rig.work(count, true),
            }
        }
        rig.finish();
    }
}
