//! A future that waits in the queue of messages and is not polled delays no other future.

use std::{
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Waker},
};

use futures::FutureExt as _;
use tensorwire_protocol::{Note, NoteChannel, Parameters};

use crate::support::{
    STEP,
    Side::B,
    bytes_of,
    channel::TestChannel,
    pair::{Pair, small},
};

const CHANNEL: u64 = 7;

fn note(text: &[u8]) -> Note {
    Note::of(CHANNEL, 0, &[text]).unwrap()
}

/// One side of a channel of notes.
type Notes = Arc<NoteChannel<TestChannel>>;

/// Two credits on each side, and both sides of a channel of notes.
fn pair() -> (Pair, [Notes; 2]) {
    let pair = Pair::new(Parameters { depth: 4, ..small() });
    let notes = [&pair.a, &pair.b].map(|end| Arc::new(end.connection.open_notes(CHANNEL, 1).unwrap()));
    (pair, notes)
}

/// Sends notes until A has no credit left. Returns how many.
fn use_credits(notes: &Notes) -> usize {
    (0..).take_while(|_| notes.send(note(b"first")).now_or_never().is_some()).count()
}

/// Polls once, by hand. A wake-up of the future does not poll it again.
fn is_pending<F: Future>(future: Pin<&mut F>) -> bool {
    future.poll(&mut Context::from_waker(Waker::noop())).is_pending()
}

/// A task sends one more note. Returns how many notes B has got, in any way, when nothing moves any more.
fn notes_behind(pair: &mut Pair, notes: &Notes) -> u64 {
    let notes = notes.clone();
    let last = pair.tasks.spawn(async move { notes.send(note(b"last")).await.is_ok() });
    pair.run();
    assert_eq!(last.take(), Some(true), "it is delayed by what is not polled");
    pair.counters().1.received.note
}

#[test]
fn a_note_in_line_is_posted_though_its_future_is_not_polled() {
    let (mut pair, [notes, _other]) = pair();
    let used = use_credits(&notes);
    let mut unpolled = pin!(notes.send(note(b"unpolled")));
    assert!(is_pending(unpolled.as_mut()));
    assert_eq!(notes_behind(&mut pair, &notes), used as u64 + 2);
    assert!(!is_pending(unpolled), "it was posted");
}

#[test]
fn a_request_in_line_is_posted_though_its_receive_is_not_polled() {
    let (mut pair, [notes, _other]) = pair();
    use_credits(&notes);
    let (connection, memory) = (pair.a.connection.clone(), pair.a.memory.clone());
    let mut unpolled = pin!(connection.receive(STEP, "k", &memory));
    assert!(is_pending(unpolled.as_mut()));
    notes_behind(&mut pair, &notes);
    assert_eq!(pair.counters().1.received.tensor_request, 1);
}

#[test]
fn a_request_for_described_memory_is_posted_though_its_receive_is_not_polled() {
    let (mut pair, [notes, _other]) = pair();
    let (connection, memory) = (pair.a.connection.clone(), pair.a.memory.clone());
    let mut unpolled = pin!(connection.receive(STEP, "k", &memory));
    assert!(is_pending(unpolled.as_mut()));
    pair.b.source.send(STEP, "k", bytes_of(24), vec![7; 24]);
    pair.run();
    assert_eq!(pair.counters().0.received.meta_data_response, 1);
    use_credits(&notes);
    assert!(is_pending(unpolled.as_mut()), "it has memory now, and waits to ask again");
    notes_behind(&mut pair, &notes);
    assert_eq!(pair.counters().1.received.tensor_re_request, 1);
    assert!(!is_pending(unpolled), "the content has come");
}

#[test]
fn a_message_in_line_whose_future_is_dropped_is_not_posted() {
    let (mut pair, [notes, _other]) = pair();
    let used = use_credits(&notes);
    {
        let mut dropped = pin!(notes.send(note(b"dropped")));
        assert!(is_pending(dropped.as_mut()));
    }
    assert_eq!(notes_behind(&mut pair, &notes), used as u64 + 1);
    assert_eq!(pair.end(B).connection.failure(), None);
}
