//! Notes that have come and were not taken.

use super::*;

fn note(lane: u16, byte: u8) -> Note {
    Note { channel: 7, lane, bytes: EagerContent::from_slice(&[byte]) }
}

#[test]
fn notes_of_a_lane_are_taken_in_order_and_lanes_are_apart() {
    let mut notes = NoteChannels::default();
    assert!(notes.open(7, 2) && !notes.open(7, 1), "a channel is open once");
    for (lane, byte) in [(1, 1), (0, 2), (1, 3)] {
        assert!(notes.arrived(note(lane, byte)).unwrap().is_some());
    }
    let mut taken = |lane| notes.take((7, lane)).map(|bytes| bytes[0]);
    assert_eq!([taken(1), taken(0), taken(1), taken(1)], [Some(1), Some(2), Some(3), None]);
}

#[test]
fn notes_of_a_channel_that_is_not_open_are_ignored_and_of_no_lane_refused() {
    let mut notes = NoteChannels::default();
    assert!(notes.arrived(note(0, 1)).unwrap().is_none());
    notes.open(7, 1);
    assert_eq!(notes.arrived(note(1, 1)).unwrap_err(), PeerMisbehaved::NoteUnfit);
    drop(notes.close(7));
    assert!(notes.arrived(note(1, 1)).unwrap().is_none());
    assert!(notes.take((7, 0)).is_none());
}

#[test]
fn a_lane_holds_a_bounded_number_of_notes() {
    let mut notes = NoteChannels::default();
    notes.open(7, 2);
    for _ in 0..NOTES_UNTAKEN_MAX {
        notes.arrived(note(0, 1)).unwrap();
    }
    assert_eq!(notes.arrived(note(0, 1)).unwrap_err(), PeerMisbehaved::NoteUnfit);
    assert!(notes.arrived(note(1, 1)).is_ok(), "the other lane has room");
}

#[test]
fn a_note_for_every_lane_comes_behind_those_of_each() {
    let mut notes = NoteChannels::default();
    notes.open(7, 3);
    notes.arrived(note(1, 1)).unwrap();
    assert!(notes.wait((7, 0), Waker::noop()).is_none() && notes.wait((7, 2), Waker::noop()).is_none());
    let woken = notes.arrived(note(NOTE_EVERY_LANE, 2)).unwrap();
    assert_eq!(woken.map(|woken| woken.len()), Some(2));
    let mut taken = |lane| notes.take((7, lane)).map(|bytes| bytes[0]);
    assert_eq!([taken(0), taken(1), taken(1), taken(2)], [Some(2), Some(1), Some(2), Some(2)]);
    for _ in 0..NOTES_UNTAKEN_MAX {
        notes.arrived(note(2, 1)).unwrap();
    }
    notes.wait((7, 1), Waker::noop());
    assert_eq!(notes.arrived(note(NOTE_EVERY_LANE, 1)).unwrap_err(), PeerMisbehaved::NoteUnfit);
    assert_eq!(notes.wakers().count(), 1, "who waits is still known, to be woken by the connection's end");
}

#[test]
fn a_task_that_waits_is_woken_by_the_next_note_once() {
    let mut notes = NoteChannels::default();
    notes.open(7, 1);
    assert!(notes.wait((7, 0), Waker::noop()).is_none());
    assert_eq!(notes.arrived(note(0, 1)).unwrap().map(|woken| woken.len()), Some(1));
    assert_eq!(notes.arrived(note(0, 2)).unwrap().map(|woken| woken.len()), Some(0));
    notes.wait((7, 0), Waker::noop());
    assert_eq!(notes.wakers().count(), 1);
}
