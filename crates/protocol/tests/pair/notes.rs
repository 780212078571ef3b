//! Notes: short messages that no request asks for.

use tensorwire_protocol::{
    EagerContent, Message, Note, Parameters, PeerMisbehaved, limits::NOTES_UNTAKEN_MAX,
};

use crate::support::{
    Side::{self, A, B},
    lone::Lone,
    pair::{Pair, original, small},
    tasks::Handle,
};

const CHANNEL: u64 = 7;

fn note(lane: u16, text: &[u8]) -> Message {
    Note::of(CHANNEL, lane, &[text]).unwrap()
}

fn open(pair: &mut Pair) {
    for side in Side::BOTH {
        assert!(pair.end(side).connection.open_notes(CHANNEL, 2));
    }
}

fn send(pair: &mut Pair, side: Side, note: Message) -> Handle<bool> {
    let connection = pair.end(side).connection.clone();
    pair.tasks.spawn(async move { connection.send_note(note).await.is_ok() })
}

fn next(pair: &mut Pair, side: Side, lane: u16) -> Handle<Option<EagerContent>> {
    let connection = pair.end(side).connection.clone();
    pair.tasks.spawn(async move { connection.next_note(CHANNEL, lane).await.ok() })
}

fn is_there(handle: &Handle<Option<EagerContent>>, text: &[u8]) -> bool {
    handle.take().flatten().is_some_and(|note| note[..] == *text)
}

#[test]
fn a_note_takes_one_message_whether_it_is_awaited_or_not() {
    for parameters in [small(), original()] {
        let mut pair = Pair::new(parameters);
        open(&mut pair);
        let awaited = next(&mut pair, B, 1);
        pair.tasks.run();
        for (lane, text) in [(1, b"first"), (0, b"other"), (1, b"later")] {
            send(&mut pair, A, note(lane, text));
        }
        pair.run();
        assert!(is_there(&awaited, b"first"));
        let (later, other) = (next(&mut pair, B, 1), next(&mut pair, B, 0));
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
    open(&mut pair);
    let sent: Vec<_> = (0..20u8).map(|at| send(&mut pair, A, note(0, &[at]))).collect();
    let connection = pair.b.connection.clone();
    let taken = pair.tasks.spawn(async move {
        let mut taken = Vec::new();
        while taken.len() < 20 {
            taken.extend(connection.next_note(CHANNEL, 0).await.ok());
        }
        taken
    });
    pair.run();
    assert!(sent.iter().all(|sent| sent.take() == Some(true)));
    assert!(taken.take().is_some_and(|taken| taken.iter().map(|note| note[0]).eq(0..20)));
    pair.assert_clean();
}

#[test]
fn a_note_now_is_sent_at_once_or_not_at_all() {
    let mut pair = Pair::new(Parameters { depth: 4, ..small() });
    open(&mut pair);
    let connection = pair.a.connection.clone();
    let sent = (0..4).map_while(|at| connection.send_note_now(&note(0, &[at]))).count();
    assert_eq!(sent, 2, "two of four receives are reserved");
    pair.run();
    assert!(connection.send_note_now(&note(0, &[9])).is_some_and(|sent| sent.is_ok()));
    pair.run();
    assert_eq!(pair.counters().1.received.note, 3);
    pair.assert_clean();
}

#[test]
fn notes_of_a_closed_channel_are_ignored() {
    let mut pair = Pair::new(small());
    pair.run();
    send(&mut pair, A, note(0, b"early"));
    pair.run();
    assert_eq!(pair.counters().1.ignored, 1);
    open(&mut pair);
    send(&mut pair, A, note(0, b"untaken"));
    pair.run();
    pair.b.connection.close_notes(CHANNEL);
    send(&mut pair, A, note(0, b"late"));
    pair.run();
    assert_eq!(pair.counters().1.ignored, 2);
    pair.assert_clean();
}

#[test]
fn a_task_that_waits_for_a_note_is_told_the_end() {
    let mut pair = Pair::new(small());
    open(&mut pair);
    let waiting = next(&mut pair, A, 0);
    pair.tasks.run();
    pair.a.connection.fail("it is over");
    pair.tasks.run();
    assert_eq!(waiting.take(), Some(None));
    assert!(pair.a.connection.send_note_now(&note(0, b"late")).is_some_and(|sent| sent.is_err()));
}

#[test]
fn a_note_that_is_too_long_is_none() {
    assert!(Note::of(CHANNEL, 0, &[&[0; 4096], &[]]).is_some());
    assert!(Note::of(CHANNEL, 0, &[&[0; 4096], &[0]]).is_none());
}

#[test]
fn d_note_unfit() {
    let mut lone = Lone::new(small());
    lone.connection.open_notes(CHANNEL, 1);
    assert_eq!(lone.message(&note(1, b"no such lane")), Err(PeerMisbehaved::NoteUnfit));
    lone.assert_over(PeerMisbehaved::NoteUnfit);

    let mut lone = Lone::new(small());
    lone.connection.open_notes(CHANNEL, 1);
    for _ in 0..NOTES_UNTAKEN_MAX {
        assert_eq!(lone.message(&note(0, b"untaken")), Ok(None));
    }
    assert_eq!(lone.message(&note(0, b"one more")), Err(PeerMisbehaved::NoteUnfit));
    lone.assert_over(PeerMisbehaved::NoteUnfit);
}
