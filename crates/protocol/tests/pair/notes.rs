//! Notes: short messages that no request asks for.

use std::{future::poll_fn, sync::Arc};

use futures::FutureExt as _;
use tensorwire_protocol::{
    ChannelError, EagerContent, Message, Note, NoteChannel, Parameters, PeerMisbehaved,
    limits::NOTES_UNTAKEN_MAX,
};

use crate::support::{
    Side::{self, A, B},
    channel::TestChannel,
    lone::Lone,
    pair::{Pair, original, small},
    tasks::Handle,
};

const CHANNEL: u64 = 7;

/// One side of a channel of notes.
pub(super) type Notes = Arc<NoteChannel<TestChannel>>;

/// Opens a channel of as many lanes at one side.
pub(super) fn open_at(pair: &mut Pair, side: Side, lanes: u16) -> Notes {
    Arc::new(pair.end(side).connection.open_notes(CHANNEL, lanes).expect("it is not open"))
}

pub(super) fn open(pair: &mut Pair) -> [Notes; 2] {
    Side::BOTH.map(|side| open_at(pair, side, 2))
}

pub(super) fn note(notes: &Notes, lane: u16, text: &[u8]) -> Note {
    notes.note(lane, &[text]).unwrap()
}

/// Sends a note if that waits for nothing.
pub(super) fn send_now(notes: &Notes, lane: u16, text: &[u8]) -> Option<Result<(), ChannelError>> {
    notes.send(note(notes, lane, text)).now_or_never()
}

fn send(pair: &mut Pair, notes: &Notes, lane: u16, text: &[u8]) -> Handle<bool> {
    let (notes, note) = (notes.clone(), note(notes, lane, text));
    pair.tasks.spawn(async move { notes.send(note).await.is_ok() })
}

pub(super) async fn next_of(notes: &Notes, lane: u16) -> Result<EagerContent, ChannelError> {
    poll_fn(|context| notes.poll_next(lane, context, true)).await
}

fn next(pair: &mut Pair, notes: &Notes, lane: u16) -> Handle<Option<EagerContent>> {
    let notes = notes.clone();
    pair.tasks.spawn(async move { next_of(&notes, lane).await.ok() })
}

fn is_there(handle: &Handle<Option<EagerContent>>, text: &[u8]) -> bool {
    handle.take().flatten().is_some_and(|note| note[..] == *text)
}

#[test]
fn a_note_takes_one_message_whether_it_is_awaited_or_not() {
    for parameters in [small(), original()] {
        let mut pair = Pair::new(parameters);
        let [a, b] = open(&mut pair);
        let awaited = next(&mut pair, &b, 1);
        pair.tasks.run();
        for (lane, text) in [(1, b"first"), (0, b"other"), (1, b"later")] {
            send(&mut pair, &a, lane, text);
        }
        pair.run();
        assert!(is_there(&awaited, b"first"));
        let (later, other) = (next(&mut pair, &b, 1), next(&mut pair, &b, 0));
        pair.run();
        assert!(is_there(&later, b"later") && is_there(&other, b"other"));
        let (a, b) = pair.counters();
        assert_eq!((a.sent.note, a.sent.total(), b.received.note, b.sent.total()), (3, 3, 3, 0));
        pair.assert_clean();
    }
}

#[test]
fn notes_wait_for_credits_in_the_order_of_their_tasks() {
    let mut pair = Pair::new(Parameters { depth: 4, ..small() });
    let [a, b] = open(&mut pair);
    let sent: Vec<_> = (0..20u8).map(|at| send(&mut pair, &a, 0, &[at])).collect();
    let taken = pair.tasks.spawn(async move {
        let mut taken = Vec::new();
        while taken.len() < 20 {
            taken.extend(next_of(&b, 0).await.ok());
        }
        taken
    });
    pair.run();
    assert!(sent.iter().all(|sent| sent.take() == Some(true)));
    assert!(taken.take().is_some_and(|taken| taken.iter().map(|note| note[0]).eq(0..20)));
    pair.assert_clean();
}

#[test]
fn a_note_that_is_not_sent_in_its_first_poll_and_given_up_is_never_sent() {
    let mut pair = Pair::new(Parameters { depth: 4, ..small() });
    let [a, _b] = open(&mut pair);
    let sent = (0..4).map_while(|at| send_now(&a, 0, &[at])).count();
    assert_eq!(sent, 2, "two of four receives are reserved");
    pair.run();
    assert_eq!(send_now(&a, 0, &[9]), Some(Ok(())));
    pair.run();
    assert_eq!(pair.counters().1.received.note, 3);
    pair.assert_clean();
}

#[test]
fn notes_of_a_closed_channel_are_ignored() {
    let mut pair = Pair::new(small());
    pair.run();
    let a = open_at(&mut pair, A, 2);
    send(&mut pair, &a, 0, b"early");
    pair.run();
    assert_eq!(pair.counters().1.ignored, 1);
    let b = open_at(&mut pair, B, 2);
    assert!(pair.b.connection.open_notes(CHANNEL, 2).is_none(), "it is open");
    send(&mut pair, &a, 0, b"untaken");
    pair.run();
    drop(b);
    send(&mut pair, &a, 0, b"late");
    pair.run();
    assert_eq!(pair.counters().1.ignored, 2);
    pair.assert_clean();
}

#[test]
fn a_task_that_waits_for_a_note_is_told_the_end() {
    let mut pair = Pair::new(small());
    let [a, _b] = open(&mut pair);
    let waiting = next(&mut pair, &a, 0);
    pair.tasks.run();
    pair.a.connection.fail("it is over");
    pair.tasks.run();
    assert_eq!(waiting.take(), Some(None));
    assert!(send_now(&a, 0, b"late").is_some_and(|sent| sent.is_err()));
}

#[test]
fn a_note_that_is_too_long_or_has_no_bytes_is_none() {
    assert!(Note::of(CHANNEL, 0, &[&[0; 4096], &[]]).is_some());
    assert!(Note::of(CHANNEL, 0, &[&[0; 4096], &[0]]).is_none());
    assert!(Note::of(CHANNEL, 0, &[&[], &[]]).is_none());
}

#[test]
fn d_note_unfit() {
    let note = |lane, text: &[u8]| Message::Note(Note::of(CHANNEL, lane, &[text]).unwrap());
    let mut lone = Lone::new(small());
    let _notes = lone.connection.open_notes(CHANNEL, 1);
    assert_eq!(lone.message(&note(1, b"no such lane")), Err(PeerMisbehaved::NoteUnfit));
    lone.assert_over(PeerMisbehaved::NoteUnfit);

    let mut lone = Lone::new(small());
    let _notes = lone.connection.open_notes(CHANNEL, 1);
    for _ in 0..NOTES_UNTAKEN_MAX {
        assert_eq!(lone.message(&note(0, b"untaken")), Ok(None));
    }
    assert_eq!(lone.message(&note(0, b"one more")), Err(PeerMisbehaved::NoteUnfit));
    lone.assert_over(PeerMisbehaved::NoteUnfit);
}
