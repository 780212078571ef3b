//! Two sides in one process, whose boards are words of it.

use std::sync::atomic::{AtomicU64, Ordering};

use super::*;

const CHANNEL: u64 = 7;

/// What a side writes.
type Words = Arc<[AtomicU64]>;

#[derive(Debug)]
struct Side {
    own: Words,
    peer: Words,
    meanwhile: Meanwhile,
}

/// What the peer does between two steps of a side, of which each is a look or a store.
#[derive(Clone, Default)]
pub(crate) struct Meanwhile(Arc<Mutex<Option<Planned>>>);

/// After so many steps, once.
type Planned = (usize, Box<dyn FnOnce() + Send>);

impl Meanwhile {
    pub(crate) fn plan(&self, after: usize, act: impl FnOnce() + Send + 'static) {
        *self.0.lock().unwrap() = Some((after, Box::new(act)));
    }

    /// Whether it was to come after more steps than there were. Then it never comes.
    pub(crate) fn is_left(&self) -> bool {
        self.0.lock().unwrap().take().is_some()
    }

    fn step(&self) {
        let due = match &mut *self.0.lock().unwrap() {
            Some((after @ 1.., _)) => {
                *after -= 1;
                None
            }
            due => due.take(),
        };
        if let Some((_, act)) = due {
            act();
        }
    }
}

impl std::fmt::Debug for Meanwhile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meanwhile").finish_non_exhaustive()
    }
}

impl Board for Side {
    fn publish(&self, at: usize, words: &[u64]) {
        self.meanwhile.step();
        for (index, word) in words.iter().enumerate().rev() {
            self.own[(at + index) % BOARD_WORDS].store(*word, Ordering::SeqCst);
        }
        self.meanwhile.step();
    }

    fn announce(&self, at: usize, word: u64) {
        self.publish(at, &[word]);
    }

    fn peer(&self, at: usize) -> u64 {
        self.meanwhile.step();
        let word = self.peer[at % BOARD_WORDS].load(Ordering::SeqCst);
        self.meanwhile.step();
        word
    }

    fn peer_after_own(&self, at: usize) -> u64 {
        self.peer(at)
    }
}

fn words() -> Words {
    (0..BOARD_WORDS).map(|_| AtomicU64::new(0)).collect()
}

fn alone(own: Words, peer: Words) -> Arc<FastBoxes> {
    FastBoxes::new(Arc::new(Side { own, peer, meanwhile: Meanwhile::default() }))
}

/// Two sides, and what the second does between two steps of the first.
pub(crate) fn two_and_meanwhile() -> ([Arc<FastBoxes>; 2], Meanwhile) {
    let (one, other, meanwhile) = (words(), words(), Meanwhile::default());
    let interrupted = Side { own: one.clone(), peer: other.clone(), meanwhile: meanwhile.clone() };
    ([FastBoxes::new(Arc::new(interrupted)), alone(other, one)], meanwhile)
}

fn two() -> [Arc<FastBoxes>; 2] {
    two_and_meanwhile().0
}

fn opened(boxes: &Arc<FastBoxes>, channel: u64) -> Option<ChannelBoxes> {
    boxes.open(channel, LANES as u16)
}

/// Both sides have opened the channel, and know each other's set.
fn met() -> [ChannelBoxes; 2] {
    let open = two().map(|boxes| opened(&boxes, CHANNEL).unwrap());
    open.iter().for_each(|boxes| assert!(!boxes.peek(0)));
    open
}

fn note(text: &[u8]) -> BoxedNote {
    BoxedNote::of(&[text]).unwrap()
}

/// Whether the note was put into a box, and the peer must be woken.
fn put(boxes: &ChannelBoxes, text: &[u8]) -> Option<bool> {
    put_in(boxes, 0, text)
}

fn put_in(boxes: &ChannelBoxes, lane: u16, text: &[u8]) -> Option<bool> {
    let mut exchange = boxes.exchange(lane)?;
    exchange.put(&mut note(text));
    Some(exchange.settle())
}

fn taken(boxes: &ChannelBoxes) -> Option<Vec<u8>> {
    boxes.take(0, false).map(|note| note.bytes().to_vec())
}

#[test]
fn a_note_of_any_length_that_fits_comes_as_it_was_sent() {
    let [one, other] = met();
    for length in 0..=BYTES_MAX {
        let text: Vec<u8> = (0..length as u8).collect();
        assert_eq!((put(&one, &text), taken(&other)), (Some(false), Some(text.clone())));
        assert_eq!((put(&other, &text), taken(&one)), (Some(false), Some(text)));
    }
    assert!(BoxedNote::of(&[&[0; BYTES_MAX], &[0]]).is_none());
}

#[test]
fn notes_are_alike_that_are_as_long_and_begin_alike() {
    let text = [7; 20];
    for at in 0..text.len() {
        let mut other = text;
        other[at] = 8;
        let alike = (0..=text.len()).filter(|bytes| note(&text).is_like(&note(&other), *bytes));
        assert_eq!(alike.max(), Some(at), "they differ in byte {at}");
    }
    assert!(note(&text).is_like(&note(&text), text.len()));
    assert!(!note(&text).is_like(&note(&text[1..]), 8), "they are not as long");
}

#[test]
fn a_box_is_not_filled_again_before_its_note_was_taken() {
    let [one, other] = met();
    assert_eq!([put(&one, b"1"), put(&one, b"2"), put(&one, b"3")], [Some(false), Some(false), None]);
    assert_eq!(taken(&other).unwrap(), b"1");
    assert_eq!(put(&one, b"3"), None, "nobody has said so yet");
    assert_eq!(taken(&other).unwrap(), b"2");
    assert_eq!([put(&one, b"3"), put(&one, b"4")], [Some(false), Some(false)], "the state says so");
    assert_eq!(
        [taken(&other), taken(&other), taken(&other)],
        [Some(b"3".to_vec()), Some(b"4".to_vec()), None]
    );
}

#[test]
fn notes_keep_their_order_whichever_way_they_travel() {
    let [one, other] = met();
    assert!(put(&one, b"1").is_some());
    let in_line = one.begin_message(0).unwrap();
    assert!(put(&one, b"2").is_none(), "it would overtake the message");
    in_line.sent();
    assert_eq!(taken(&other).unwrap(), b"1");
    assert!(!other.peek(0), "the message is the next");
    other.took_message(0);
    assert!(put(&one, b"3").is_some());
    assert_eq!(taken(&other).unwrap(), b"3");
}

#[test]
fn a_message_for_every_lane_counts_in_each() {
    let [one, other] = met();
    let in_line = one.begin_message(NOTE_EVERY_LANE).unwrap();
    let lanes = 0..LANES as u16;
    assert!(
        lanes.clone().all(|lane| put_in(&one, lane, b"early").is_none()),
        "it would overtake the message"
    );
    in_line.sent();
    for lane in lanes {
        assert!(put_in(&one, lane, b"2").is_some() && !other.peek(lane), "the message is the next");
        other.took_message(lane);
        assert!(other.take(lane, false).is_some());
    }
}

#[test]
fn after_a_message_that_was_given_up_and_may_have_been_sent_all_go_by_messages() {
    let [one, other] = met();
    assert!(put(&one, b"1").is_some());
    drop(one.begin_message(0).unwrap());
    assert_eq!(taken(&other).unwrap(), b"1");
    assert!(put(&other, b"1").is_some(), "the other direction has its own numbers");
    assert!(taken(&one).is_some() && put(&one, b"2").is_none(), "there is room, but its number is not known");
    one.begin_message(NOTE_EVERY_LANE).unwrap().sent();
    (0..LANES as u16).for_each(|lane| other.took_message(lane));
    assert!(put(&one, b"3").is_none());
    let lanes = 0..LANES as u16;
    assert_eq!(lanes.filter(|lane| one.exchange(*lane).is_some()).count(), LANES - 1, "the others count all");
}

#[test]
fn after_a_message_that_the_peer_may_have_ignored_all_of_its_lane_go_by_messages() {
    let [ours, theirs] = two();
    let one = opened(&ours, CHANNEL).unwrap();
    assert!(one.begin_message(0).is_none(), "the peer has not opened the channel");
    let other = opened(&theirs, CHANNEL).unwrap();
    assert!(!other.peek(0) && !one.peek(0));
    assert!(put(&one, b"1").is_none() && one.exchange(1).is_some());
    one.begin_message(0).unwrap().sent();
    assert!(put(&one, b"1").is_none());
    assert!(put(&other, b"1").is_some() && taken(&one).is_some());
}

/// A message has its channel's number alone, so a later opening would count one of an earlier.
#[test]
fn a_channel_that_was_open_before_has_no_boxes() {
    let [ours, theirs] = two();
    let other = opened(&theirs, CHANNEL).unwrap();
    drop(opened(&ours, CHANNEL).unwrap());
    assert!(opened(&ours, CHANNEL).is_none());
    assert!(!other.peek(0) && put(&other, b"1").is_none(), "it goes by message");
}

#[test]
fn a_lane_that_the_channel_has_not_has_no_boxes() {
    let [one, other] = two().map(|boxes| boxes.open(CHANNEL, 2).unwrap());
    assert!(!one.peek(1) && !other.peek(1));
    let lanes = 0..LANES as u16;
    assert_eq!(lanes.filter(|lane| one.exchange(*lane).is_some()).count(), 2);
}

#[test]
fn an_exchange_puts_one_note_and_takes_what_lies_there() {
    let [one, other] = met();
    let mut exchange = one.exchange(0).unwrap();
    assert!(!exchange.take());
    exchange.put(&mut note(b"1"));
    exchange.put(&mut note(b"not sent"));
    drop(exchange);
    let mut exchange = other.exchange(0).unwrap();
    assert!(exchange.take() && !exchange.take());
    drop(exchange);
    assert!(put(&one, b"2").is_some());
    assert_eq!(taken(&other).unwrap(), b"2");
}

#[test]
fn nothing_is_left_in_a_set_that_is_used_again() {
    let [ours, theirs] = two();
    for channel in 0..3 {
        let (one, other) = (opened(&ours, channel).unwrap(), opened(&theirs, channel).unwrap());
        assert!(!one.peek(0) && !other.peek(0), "what lay there was put for another opening");
        assert_eq!([one.own, other.own], [0, 0]);
        assert_eq!((put(&one, b"1"), put(&one, b"2")), (Some(false), Some(false)), "nobody sleeps");
        other.fall_asleep(0);
    }
}

/// The first side finds the set of the second, which closes it after any of the steps of that, and opens others.
#[test]
fn a_set_that_is_closed_meanwhile_is_not_read_when_it_is_another() {
    let mut reused = 0;
    for after in 0.. {
        let ([ours, theirs], meanwhile) = two_and_meanwhile();
        let (one, other) = (opened(&ours, CHANNEL).unwrap(), opened(&theirs, CHANNEL).unwrap());
        let next = Arc::new(OnceLock::new());
        meanwhile.plan(after, {
            let next = next.clone();
            move || {
                drop(other);
                next.set(opened(&theirs, CHANNEL + 1).unwrap()).unwrap();
            }
        });
        let found = one.find_peer();
        if meanwhile.is_left() {
            break;
        }
        let another = next.get().unwrap();
        assert_ne!(found, Some(another.own), "after {after} steps");
        reused += usize::from(another.own == 0);
    }
    assert!(reused > 0, "the set was always read when it was closed");
}

#[test]
fn two_threads_that_find_the_peer_find_the_same_set() {
    let (own, peer) = (words(), words());
    let ours = alone(own.clone(), peer.clone());
    let boxes = opened(&ours, CHANNEL).unwrap();
    for set in 0..SETS {
        peer[set * SET_WORDS + super::CHANNEL].store(CHANNEL, Ordering::SeqCst);
        peer[set * SET_WORDS + OPENING].store(100 + set as u64, Ordering::SeqCst);
    }
    let found = (boxes.find_peer(), boxes.find_peer());
    assert_eq!(found, (Some(0), Some(0)));
    assert_eq!(own[READS].load(Ordering::SeqCst), 100, "and it says so");
}

#[test]
fn a_lane_counts_however_long_its_state_is_not_told() {
    let [one, other] = met();
    for sent in [1 << 24, 1 << 32, 1 << 40] {
        one.lane(0).unwrap().sent = sent;
        assert_eq!(put(&one, b"1"), None, "the peer has taken none");
    }
    drop(other);
}

#[test]
fn after_the_end_no_more_is_taken_than_may_have_lain_there() {
    let [one, other] = met();
    let put_and_take = || (put(&one, b"1").is_some(), other.take(0, true).is_some());
    assert_eq!([put_and_take(), put_and_take(), put_and_take()], [(true, true), (true, true), (true, false)]);
}

#[test]
fn a_sleeper_is_woken_once_for_each_note() {
    let [one, other] = met();
    other.fall_asleep(0);
    assert!(!one.exchange(0).unwrap().settle(), "there is nothing to wake it for");
    assert_eq!([put(&one, b"1"), put(&one, b"2")], [Some(true), Some(false)]);
    assert_eq!(taken(&other).unwrap(), b"1");
    assert!(!one.exchange(0).unwrap().seems_asleep());
    assert_eq!(taken(&other).unwrap(), b"2");
    assert_eq!(put(&one, b"3"), Some(false), "it is awake");
    other.fall_asleep(0);
    assert_eq!(put(&one, b"4"), Some(true), "the third lies there, and it sleeps");
}

#[test]
fn numbers_go_on_behind_the_last() {
    let [one, other] = met();
    for boxes in [&one, &other] {
        let mut lane = boxes.lane(0).unwrap();
        (lane.sent, lane.taken, lane.taken_by_peer) = [(1 << 32) - 3; 3].into();
    }
    for round in 0..6u8 {
        assert!(put(&one, &[round]).is_some() && put(&other, &[round]).is_some());
        assert_eq!([taken(&one), taken(&other)], [Some(vec![round]), Some(vec![round])]);
    }
}

#[test]
fn notes_are_put_for_a_side_that_has_the_channel_open_alone() {
    let [ours, theirs] = two();
    let one = opened(&ours, CHANNEL).unwrap();
    assert!(put(&one, b"early").is_none());
    let other = opened(&theirs, CHANNEL + 1).unwrap();
    assert!(!other.peek(0) && put(&one, b"another channel").is_none());
    let met = opened(&theirs, CHANNEL).unwrap();
    assert!(put(&one, b"not read yet").is_none());
    assert!(!met.peek(0) && put(&one, b"1").is_some());
    drop(met);
    assert!(put(&one, b"closed").is_none());
}

#[test]
fn a_set_is_used_again_when_the_peer_reads_it_no_more() {
    let [ours, theirs] = two();
    let other = opened(&theirs, CHANNEL).unwrap();
    let one = opened(&ours, CHANNEL).unwrap();
    assert!(!other.peek(0) && put(&one, b"last").is_some());
    drop(one);
    let open: Vec<_> = (0..SETS as u64).map(|more| opened(&ours, 100 + more)).collect();
    assert_eq!(open.iter().flatten().count(), SETS - 1, "the first is read");
    assert_eq!(taken(&other).unwrap(), b"last");
    drop((other, open));
    let open: Vec<_> = (0..SETS as u64).map(|more| opened(&ours, 200 + more)).collect();
    assert_eq!(open.iter().flatten().count(), SETS);
    assert!(opened(&ours, 300).is_none());
    drop(open);
    let had_boxes = (1000..10_000).filter_map(|more| opened(&ours, more)).count();
    assert!((CHANNELS_MAX - 20..CHANNELS_MAX).contains(&had_boxes), "{had_boxes}");
}

#[test]
fn a_hostile_board_gives_bounded_notes_and_refuses_its_own_only() {
    let (own, peer) = (words(), words());
    let ours = alone(own, peer.clone());
    let boxes = opened(&ours, CHANNEL).unwrap();
    let mut seed = 1u64;
    let mut random = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        seed >> 20 ^ seed << 40
    };
    peer[super::CHANNEL].store(CHANNEL, Ordering::SeqCst);
    peer[READS].store(boxes.opening, Ordering::SeqCst);
    peer[OPENING].store(u64::MAX, Ordering::SeqCst);
    let mut found = 0;
    for round in 0..20_000u32 {
        // Each word of the first lane, and now and then the number that is awaited, with any length.
        (STATES..BOXES_AT + BOXES * BOX_WORDS).for_each(|at| peer[at].store(random(), Ordering::SeqCst));
        if round % 2 == 0 {
            let number = boxes.lane(0).unwrap().taken + 1;
            peer[box_at(0, 0, number)].store(number, Ordering::SeqCst);
        }
        if let Some(note) = boxes.take(0, false) {
            found += 1;
            assert!(note.bytes().len() <= BYTES_MAX);
        }
        let before = boxes.lane(0).unwrap().sent;
        let sent = put(&boxes, b"mine").is_some();
        assert_eq!(boxes.lane(0).unwrap().sent, before + u64::from(sent));
        boxes.fall_asleep(0);
    }
    assert!(found >= 10_000, "{found}");
    assert!(boxes.exchange(LANES as u16).is_none() && boxes.take(u16::MAX, false).is_none());
}
