//! A page set: its ring, its size, and the places of its words.

use std::{os::fd::AsFd, sync::atomic::Ordering};

use tensorwire_fabric::{BOARD_WORDS, PeerViolation};

use super::super::{
    limits::{CLAIMS_MAX, LEASES_MAX, SLOTS_MAX},
    ring::{Descriptor, OwnPage, PeerPage, Source, page_bytes},
};

/// A descriptor with nothing but an immediate.
fn announcing(immediate: u32) -> Descriptor {
    Descriptor {
        immediate: Some(immediate),
        continues: false,
        is_quiet: false,
        remote: None,
        source: Source::Nothing,
    }
}

#[test]
fn descriptors_are_seen_once_per_lap_and_never_early() {
    let (own, fd) = OwnPage::new(4).unwrap();
    let peer = PeerPage::import(fd.as_fd(), own.slots()).unwrap();
    for position in 0..50_u64 {
        assert_eq!(peer.descriptor(position), Ok(None), "position {position} before it is published");
        let descriptor = announcing(position as u32);
        assert!(!peer.may_have(position));
        own.publish(position, &descriptor.encode());
        assert!(peer.may_have(position));
        assert_eq!(peer.descriptor(position), Ok(Some(descriptor)));
        assert_eq!(peer.descriptor(position + 4), Ok(None), "the next lap of the same slot");
        assert_eq!(peer.descriptor(position + 8), Err(PeerViolation::Malformed), "two laps ahead");
    }
}

#[test]
fn a_ring_has_at_least_its_depth_and_a_power_of_two() {
    for (depth, slots) in [(1, 1), (2, 2), (3, 4), (16, 16), (17, 32), (u32::MAX, SLOTS_MAX)] {
        assert_eq!(OwnPage::new(depth).unwrap().0.slots(), slots);
    }
    // One page of words about the connection, two of slots, and the words of leases, claims and the board, in whole
    // pages.
    let words = 8 * ((LEASES_MAX + CLAIMS_MAX) as usize + BOARD_WORDS);
    assert_eq!(page_bytes(32), 3 * 4096 + words.next_multiple_of(4096));
}

#[test]
fn leases_claims_and_words_of_the_board_have_places_of_their_own() {
    // With eight slots the last word of the board is the last of a page.
    let (own, fd) = OwnPage::new(8).unwrap();
    assert_eq!(page_bytes(8), 4096 + 8 * 256 + 8 * ((LEASES_MAX + CLAIMS_MAX) as usize + BOARD_WORDS));
    let peer = PeerPage::import(fd.as_fd(), own.slots()).unwrap();
    let last = announcing(3);
    own.publish(3, &last.encode());
    own.release(LEASES_MAX - 1, 5);
    own.claim(0, 6);
    own.claim(CLAIMS_MAX - 1, 7);
    for at in 0..BOARD_WORDS {
        own.board(at).store(at as u64 + 100, Ordering::Relaxed);
    }
    let word = |at| peer.board(at).load(Ordering::Relaxed);
    assert!((0..BOARD_WORDS).all(|at| word(at) == at as u64 + 100));
    assert_eq!(word(BOARD_WORDS + 1), 101, "places are modulo the words");
    assert_eq!(peer.descriptor(3), Ok(Some(last)));
    assert_eq!(peer.lease(LEASES_MAX - 1), 5);
    assert_eq!(peer.claims().collect::<Vec<_>>(), [6, 7]);
}
