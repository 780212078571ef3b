//! Notes in the mailbox of two workers of one host, under every interleaving that loom finds.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a failed test

use loom::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};
use tensorwire_protocol::{EagerContent, Mailbox as _, Note};

use crate::{
    board::ShmBoard,
    mailbox::Mailbox,
    model,
    ring::{OwnPage, PeerPage},
    word,
};

const LANE: u16 = 3;

/// The mailboxes of both sides, of `boxes` boxes each.
fn two(boxes: u64) -> [Mailbox; 2] {
    let pages = [OwnPage::new(), OwnPage::new()];
    [[0, 1], [1, 0]].map(|[own, peer]| {
        let board = ShmBoard::new(pages[own].clone().into(), PeerPage(pages[peer].clone()).into());
        Mailbox::starting_at(std::sync::Arc::new(board), boxes, 0)
    })
}

fn note(number: u64) -> Note {
    let bytes = EagerContent::from_slice(&[number.to_le_bytes(), (10 * number).to_le_bytes()].concat());
    Note { channel: 7 + number, lane: LANE, bytes }
}

fn put(mailbox: &Mailbox, number: u64) -> bool {
    let Note { channel, lane, bytes } = note(number);
    mailbox.put((channel, lane), &[&bytes], 0)
}

#[test]
fn a_note_in_the_mailbox_is_found_or_its_receiver_is_woken() {
    model(|| {
        let [sends, takes] = two(2);
        let woken = Arc::new(word());
        let sender = {
            let woken = woken.clone();
            thread::spawn(move || {
                assert!(put(&sends, 1));
                woken.store(u64::from(sends.must_wake(LANE)), Ordering::Release);
            })
        };
        takes.park(LANE);
        let found = takes.take(0);
        sender.join().unwrap();
        assert!(found.is_some() || woken.load(Ordering::Acquire) == 1, "it sleeps, and nobody wakes it");
        assert_eq!(found.or_else(|| takes.take(0)), Some(note(1)), "the note is whole");
    });
}

#[test]
fn no_box_is_filled_again_before_its_note_was_taken() {
    const NOTES: u64 = 4;
    model(|| {
        let [sends, takes] = two(2);
        let sender = thread::spawn(move || {
            for number in 1..=NOTES {
                while !put(&sends, number) {
                    thread::yield_now();
                }
            }
        });
        for number in 1..=NOTES {
            let found = loop {
                match takes.take(0) {
                    Some(found) => break found,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(found, note(number));
        }
        sender.join().unwrap();
    });
}

#[test]
fn a_note_of_several_boxes_is_whole_and_takes_them_all() {
    const BYTES: usize = 200;
    let long = |byte: u8| Note { channel: 7, lane: LANE, bytes: EagerContent::from_elem(byte, BYTES) };
    model(move || {
        let [sends, takes] = two(2);
        let sender = thread::spawn(move || {
            assert!(sends.put((7, LANE), &[&[1; BYTES]], 0));
            let mut has_room = sends.put((7, LANE), &[&[2; BYTES]], 0);
            while !has_room {
                thread::yield_now();
                has_room = sends.put((7, LANE), &[&[2; BYTES]], 0);
            }
        });
        for byte in 1..=2 {
            let found = loop {
                match takes.take(0) {
                    Some(found) => break found,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(found, long(byte));
        }
        sender.join().unwrap();
    });
}

/// What a receiver of `notes` notes does, as the protocol: it parks the lane, looks, and sleeps until the next wake-up. If one is lost,
/// loom's limit of steps ends the model.
fn take_asleep(takes: &Mailbox, notes: u64, wakes: &AtomicU64) -> Vec<Note> {
    let mut found = Vec::new();
    loop {
        let seen = wakes.load(Ordering::Acquire);
        takes.park(LANE);
        found.extend(std::iter::from_fn(|| takes.take(0)));
        if found.len() as u64 == notes {
            return found;
        }
        while wakes.load(Ordering::Acquire) == seen {
            thread::yield_now();
        }
    }
}

#[test]
fn a_second_park_of_a_lane_is_woken_again() {
    model(|| {
        let [sends, takes] = two(2);
        let wakes = Arc::new(word());
        let sender = {
            let wakes = wakes.clone();
            thread::spawn(move || {
                for number in 1..=2 {
                    assert!(put(&sends, number));
                    wakes.fetch_add(u64::from(sends.must_wake(LANE)), Ordering::AcqRel);
                }
            })
        };
        assert_eq!(take_asleep(&takes, 2, &wakes), [note(1), note(2)]);
        sender.join().unwrap();
        assert!(wakes.load(Ordering::Acquire) <= 2, "woken more often than there were notes");
    });
}

/// They put with the connection locked, and look at the lane without the lock.
#[test]
fn two_senders_wake_a_receiver_for_the_notes_of_both() {
    model(|| {
        let [sends, takes] = two(2);
        let sends = Arc::new((Mutex::new(0), sends));
        let wakes = Arc::new(word());
        let senders = [1, 2].map(|number| {
            let (sends, wakes) = (sends.clone(), wakes.clone());
            thread::spawn(move || {
                let locked = sends.0.lock().unwrap();
                assert!(put(&sends.1, number));
                drop(locked);
                wakes.fetch_add(u64::from(sends.1.must_wake(LANE)), Ordering::AcqRel);
            })
        });
        let found = take_asleep(&takes, 2, &wakes);
        senders.into_iter().for_each(|sender| sender.join().unwrap());
        assert!(found == [note(1), note(2)] || found == [note(2), note(1)]);
    });
}
