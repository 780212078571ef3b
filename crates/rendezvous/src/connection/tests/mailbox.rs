//! Two sides in one process, whose boards are words of it.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use tensorwire_fabric::{BOARD_WORDS, Board};
use tensorwire_protocol::{EagerContent, Mailbox as _, Note, limits::NOTE_BYTES_MAX};

use crate::connection::mailbox::{BOXES, FIRST_BYTES, LANES, Mailbox};

/// What a side writes.
type Words = Arc<[AtomicU64]>;

#[derive(Debug)]
struct Side {
    own: Words,
    peer: Words,
}

impl Board for Side {
    fn publish(&self, at: usize, words: &[u64]) {
        for (index, word) in words.iter().enumerate().rev() {
            self.own[(at + index) % BOARD_WORDS].store(*word, Ordering::SeqCst);
        }
    }

    fn announce(&self, at: usize, word: u64) {
        self.publish(at, &[word]);
    }

    fn peer(&self, at: usize) -> u64 {
        self.peer[at % BOARD_WORDS].load(Ordering::SeqCst)
    }

    fn peer_after_own(&self, at: usize) -> u64 {
        self.peer(at)
    }
}

fn words() -> Words {
    (0..BOARD_WORDS).map(|_| AtomicU64::new(0)).collect()
}

fn board(own: &Words, peer: &Words) -> Arc<dyn Board> {
    Arc::new(Side { own: own.clone(), peer: peer.clone() })
}

fn two_after(notes: u64) -> [Mailbox; 2] {
    let (one, other) = (words(), words());
    [board(&one, &other), board(&other, &one)].map(|board| Mailbox::starting_at(board, BOXES, notes))
}

fn two() -> [Mailbox; 2] {
    let (one, other) = (words(), words());
    [board(&one, &other), board(&other, &one)].map(Mailbox::new)
}

fn note(lane: u16, text: &[u8]) -> Note {
    Note { channel: 7, lane, bytes: EagerContent::from_slice(text) }
}

/// Puts a note in two parts.
fn put(mailbox: &Mailbox, note: &Note, messages: u64) -> bool {
    let (first, rest) = note.bytes.split_at(note.bytes.len() / 3);
    mailbox.put((note.channel, note.lane), &[first, rest], messages)
}

#[test]
fn a_note_of_any_length_that_fits_comes_as_it_was_put() {
    let [one, other] = two();
    for length in (1..=FIRST_BYTES + 200).chain([1_064, 2_088, NOTE_BYTES_MAX - 1, NOTE_BYTES_MAX]) {
        for lane in [0, LANES as u16 - 1] {
            let text: Vec<u8> = (1..=length).map(|byte| byte as u8).collect();
            let note = Note { channel: u64::MAX - u64::from(lane), ..note(lane, &text) };
            assert!(put(&one, &note, 0) && other.has_next(0));
            assert_eq!(other.take(0), Some(note));
            assert!(!other.has_next(0) && other.take(0).is_none());
        }
    }
    for unfit in
        [note(0, &[0; NOTE_BYTES_MAX + 1]), note(0, b""), note(LANES as u16, b"1"), note(u16::MAX, b"1")]
    {
        assert!(!put(&one, &unfit, 0), "{unfit:?}");
    }
    assert!(!other.has_next(0));
}

#[test]
fn a_note_waits_until_there_is_room_for_all_its_boxes() {
    let [one, other] = two();
    let long = note(2, &[9; NOTE_BYTES_MAX]);
    let notes = (0..).take_while(|_| put(&one, &long, 0)).count() as u64;
    assert_eq!(notes, BOXES / 35, "each has 14 words in its first box, and 15 in each further one");
    assert!(put(&one, &note(3, b"short"), 0) && !put(&one, &long, 0));
    assert_eq!(other.take(0), Some(long.clone()));
    assert!(put(&one, &long, 0));
    assert!((1..notes).all(|_| other.take(0).as_ref() == Some(&long)));
    assert_eq!([other.take(0), other.take(0)], [Some(note(3, b"short")), Some(long)], "in the order of puts");
}

/// The words of contents may be like the first words of boxes.
#[test]
fn a_content_is_no_note() {
    let [one, other] = two();
    for number in 1..1_000u64 {
        let words: Vec<u64> = (0..100).map(|ahead| (number + ahead) << 32 | 5).collect();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let note = note(0, &bytes);
        assert!(put(&one, &note, 0));
        assert_eq!(other.take(0), Some(note));
        assert!(other.take(0).is_none());
    }
}

#[test]
fn a_box_is_not_filled_again_before_its_note_was_taken() {
    let [one, other] = two();
    for number in 0..BOXES {
        assert!(put(&one, &note(0, &number.to_le_bytes()), 0));
    }
    for round in 0..3 * BOXES {
        assert!(!put(&one, &note(0, b"no room"), 0));
        assert_eq!(other.take(0), Some(note(0, &round.to_le_bytes())));
        assert!(put(&one, &note(0, &(BOXES + round).to_le_bytes()), 0));
    }
}

#[test]
fn a_note_is_taken_after_as_many_messages_as_it_follows() {
    let [one, other] = two();
    for messages in [0, 1, 4_000_000_000] {
        assert!(put(&one, &note(1, b"1"), messages));
        for early_or_late in [messages.wrapping_sub(1), messages + 1] {
            assert!(!other.has_next(early_or_late) && other.take(early_or_late).is_none());
        }
        assert_eq!(other.take(messages), Some(note(1, b"1")));
    }
}

#[test]
fn numbers_go_on_behind_the_last() {
    for notes in [(1 << 32) - 3, (1 << 40) - 3] {
        let [one, other] = two_after(notes);
        for round in 0..6 {
            assert!(put(&one, &note(0, &[round]), 0) && put(&other, &note(1, &[round]), 0));
            assert_eq!([other.take(0), one.take(0)], [Some(note(0, &[round])), Some(note(1, &[round]))]);
        }
    }
}

#[test]
fn a_peer_that_says_it_has_taken_none_or_too_many_gets_no_more() {
    for says in [0, BOXES + 1, u64::MAX] {
        let (own, peer) = (words(), words());
        let ours = Mailbox::new(board(&own, &peer));
        assert!((0..BOXES).all(|_| put(&ours, &note(0, b"1"), 0)));
        peer[16].store(says, Ordering::SeqCst);
        assert!(!put(&ours, &note(0, b"one more"), 0), "{says}");
    }
}

#[test]
fn a_parked_lane_is_woken_once_for_each_time_that_it_is_parked() {
    let [one, other] = two();
    assert!(!one.must_wake(0) && !one.is_parked(0));
    for _ in 0..3 {
        other.park(3);
        assert!(one.is_parked(3) && !one.is_parked(2));
        assert_eq!([0, 2, 3, 3].map(|lane| one.must_wake(lane)), [false, false, true, false]);
        assert!(!one.is_parked(3));
    }
    other.park(LANES as u16);
    assert!(!one.must_wake(LANES as u16) && !one.is_parked(u16::MAX));
}

/// The peer's words, by the layout of a mailbox.
#[test]
fn a_hostile_board_gives_bounded_notes_and_refuses_its_own_only() {
    let (own, peer) = (words(), words());
    let ours = Mailbox::new(board(&own, &peer));
    let mut seed = 1u64;
    let mut random = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 20) ^ (seed << 40)
    };
    let (mut found, mut sent) = (0, 0);
    for round in 0..20_000u32 {
        (0..32 + 16 * 4).for_each(|at| peer[at].store(random(), Ordering::SeqCst));
        if round % 2 == 0 {
            let number = own[16].load(Ordering::SeqCst) + 1;
            let at = 32 + 16 * (number % 128);
            peer[at as usize].store(number << 32 | random() & 0xfff, Ordering::SeqCst);
        }
        if let Some(note) = ours.take(0) {
            found += 1;
            assert!(note.bytes.len() <= NOTE_BYTES_MAX && usize::from(note.lane) < LANES);
        }
        sent += u64::from(put(&ours, &note(0, b"mine"), 0));
        let newest = (0..128).map(|number| own[32 + 16 * number].load(Ordering::SeqCst) >> 32).max();
        assert_eq!(newest, Some(sent), "what was not put is not there");
        ours.park(0);
        let _any = (ours.must_wake(0), ours.is_parked(1));
    }
    assert!(found >= 10_000 && sent >= BOXES, "{found}, {sent}");
}
