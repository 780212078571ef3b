//! Notes in the mailbox of two workers of one host, beside notes by message.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

use futures::FutureExt as _;
use tensorwire_protocol::{
    ChannelError, EagerContent, Mailbox as _, Parameters, PutNote,
    limits::{NOTE_EVERY_LANE, NOTES_UNTAKEN_MAX},
};

use super::notes::{Notes, next_of, note, open, open_at, send_now};
use crate::support::{
    Side::{self, A, B},
    channel::TestChannel,
    looks,
    mailbox::{BYTES_MAX, Meanwhile, NOTES, TestMailbox},
    pair::{Pair, small},
};

/// Longer than what fits into the mailbox.
const LONG: [u8; BYTES_MAX + 1] = [1; BYTES_MAX + 1];

fn two() -> Pair {
    Pair::with_mailboxes(small())
}

fn mailbox(pair: &mut Pair, side: Side) -> TestMailbox {
    pair.end(side).connection.channel().mailbox.clone().unwrap()
}

/// Sends a note, which takes no message if it fits into the mailbox.
fn sends(notes: &Notes, lane: u16, text: &[u8]) {
    assert_eq!(send_now(notes, lane, text), Some(Ok(())));
}

/// The next note of a lane that has come.
fn taken(notes: &Notes, lane: u16) -> Option<EagerContent> {
    next_of(notes, lane).now_or_never().map(Result::unwrap)
}

fn put<'a>(notes: &'a Notes, lane: u16, text: &[u8]) -> Option<PutNote<'a, TestChannel>> {
    notes.put(lane, &[text])
}

fn messages(pair: &Pair) -> (u64, u64) {
    let (a, b) = pair.counters();
    (a.sent.total(), b.sent.total())
}

/// Whether its task was woken since this was last asked.
#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Woken {
    fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

fn poll(notes: &Notes, lane: u16, task: &Arc<Woken>) -> Poll<Result<EagerContent, ChannelError>> {
    notes.poll_next(lane, &Context::from_waker(&Waker::from(task.clone())), true)
}

#[test]
fn a_short_note_takes_no_message_and_a_long_one_or_one_without_room_takes_one() {
    let mut pair = two();
    let [a, b] = open(&mut pair);
    sends(&a, 0, b"short");
    assert_eq!(messages(&pair), (0, 0));
    assert_eq!(taken(&b, 0).unwrap()[..], *b"short");
    sends(&a, 1, &LONG);
    assert_eq!(messages(&pair), (1, 0));
    (0..=NOTES as u8).for_each(|at| sends(&a, 0, &[at]));
    assert_eq!(messages(&pair), (2, 0), "the mailbox is full");
    pair.run();
    assert_eq!(taken(&b, 1).unwrap()[..], LONG);
    assert!((0..=NOTES as u8).all(|at| taken(&b, 0).unwrap()[..] == [at]));
    assert!(taken(&b, 0).is_none());
    pair.assert_clean();
}

/// What is sent in either way, and whether it is delivered before the receiver takes what has come.
#[test]
fn notes_keep_their_order_however_they_travel() {
    for delivers in 0..1 << 8 {
        let mut pair = two();
        let [a, b] = open(&mut pair);
        let mut received = Vec::new();
        let texts: [&[u8]; 8] = [b"1", &LONG, b"2", b"3", &LONG, &LONG, b"4", b"5"];
        for (at, text) in texts.into_iter().enumerate() {
            sends(&a, 0, text);
            if delivers & 1 << at != 0 {
                pair.run();
            }
            received.extend(taken(&b, 0));
        }
        pair.run();
        received.extend(std::iter::from_fn(|| taken(&b, 0)));
        assert_eq!(received, texts.map(EagerContent::from_slice), "{delivers:b}");
        pair.assert_clean();
    }
}

#[test]
fn a_note_for_every_lane_comes_after_those_that_were_put_in_each_and_before_later_ones() {
    let mut pair = two();
    let [a, b] = open(&mut pair);
    (0..2).for_each(|lane| sends(&a, lane, b"before"));
    sends(&a, NOTE_EVERY_LANE, b"every");
    (0..2).for_each(|lane| sends(&a, lane, b"later"));
    assert_eq!(messages(&pair), (1, 0));
    pair.run();
    for lane in [1, 0] {
        let taken = [(); 3].map(|()| taken(&b, lane).unwrap());
        assert_eq!(taken.each_ref().map(|note| &note[..]), [&b"before"[..], b"every", b"later"]);
    }
    pair.assert_clean();
}

#[test]
fn a_note_does_not_overtake_a_message_that_waits_and_is_put_once_that_is_given_up() {
    let mut pair = Pair::with_mailboxes(Parameters { depth: 4, ..small() });
    let [a, b] = open(&mut pair);
    let mut sent = 0;
    while send_now(&a, 0, &LONG).is_some() {
        sent += 1;
    }
    assert!(put(&a, 0, b"1").is_some(), "nothing waits: the message without room was given up");
    let mut waits = Box::pin(a.send(note(&a, 0, &LONG)));
    assert!(waits.as_mut().now_or_never().is_none());
    assert!(put(&a, 0, b"early").is_none() && put(&a, 1, b"early").is_none());
    pair.run();
    assert!(put(&a, 0, b"2").is_some(), "the message was posted, although nothing polls its future");
    drop(waits);
    pair.run();
    let received: Vec<_> = std::iter::from_fn(|| taken(&b, 0)).collect();
    let lengths = received.iter().map(|note| note.len());
    assert!(lengths.eq((0..sent).map(|_| LONG.len()).chain([1, LONG.len(), 1])), "{received:?}");
    pair.assert_clean();
}

#[test]
fn a_message_that_the_peer_ignores_counts_for_those_behind_it() {
    let mut pair = two();
    pair.run();
    let a = open_at(&mut pair, A, 2);
    sends(&a, 0, &LONG);
    sends(&a, 0, b"early");
    pair.run();
    let b = open_at(&mut pair, B, 2);
    assert_eq!((taken(&b, 0), pair.counters().1.ignored), (None, 2), "it was sent to no opening");
    sends(&a, 0, b"1");
    sends(&a, 0, &LONG);
    sends(&a, 0, b"2");
    pair.run();
    let received = [(); 3].map(|()| taken(&b, 0).unwrap().len());
    assert_eq!(received, [1, LONG.len(), 1]);
    pair.assert_clean();
}

#[test]
fn what_was_put_for_an_earlier_opening_does_not_come_to_a_later_one() {
    let mut pair = two();
    let [a, b] = open(&mut pair);
    let other = pair.b.connection.open_notes(8, 1).unwrap();
    sends(&a, 0, b"untaken");
    drop(b);
    sends(&a, 0, b"closed");
    let b = open_at(&mut pair, B, 2);
    sends(&a, 0, b"open");
    assert_eq!(taken(&b, 0).unwrap()[..], *b"open");
    assert!(taken(&b, 0).is_none() && taken(&Arc::new(other), 0).is_none());
    pair.assert_clean();
}

#[test]
fn more_notes_than_a_lane_may_hold_end_the_connection_in_the_mailbox_too() {
    let mut pair = two();
    let [a, b] = open(&mut pair);
    for _ in 0..NOTES_UNTAKEN_MAX {
        sends(&a, 0, b"untaken");
        assert!(taken(&b, 1).is_none());
    }
    assert_eq!(pair.b.connection.failure(), None);
    sends(&a, 0, b"one more");
    let task = Arc::<Woken>::default();
    let Poll::Ready(Err(error)) = poll(&b, 1, &task) else { panic!("the rule is broken") };
    assert!(error.0.contains("no lane or no room"), "{error}");
    assert!(pair.b.connection.failure().is_some());
}

#[test]
fn a_note_in_a_lane_that_the_channel_has_not_ends_the_connection() {
    let mut pair = two();
    let (a, b) = (open_at(&mut pair, A, 3), open_at(&mut pair, B, 2));
    sends(&a, 2, b"no such lane");
    assert!(next_of(&b, 0).now_or_never().is_some_and(|next| next.is_err()));
    assert!(pair.b.connection.failure().is_some());
}

#[test]
fn a_note_that_was_put_lets_its_side_look_for_the_peers_without_a_lock() {
    let mut pair = two();
    let [a, b] = open(&mut pair);
    let put_here = put(&a, 0, b"1").unwrap();
    assert!(!put_here.has_next());
    sends(&b, 1, b"another lane");
    sends(&b, 0, b"2");
    assert!(put_here.has_next() && put_here.has_next());
    assert_eq!(taken(&a, 0).unwrap()[..], *b"2");
    assert!(!put_here.has_next());
    drop(put_here);
    assert_eq!(taken(&a, 1).unwrap()[..], *b"another lane");
    assert_eq!(taken(&b, 0).unwrap()[..], *b"1");
    assert_eq!(messages(&pair), (0, 0));
    pair.assert_clean();
}

#[test]
fn a_note_that_follows_a_message_is_found_by_a_note_that_was_put_after_that() {
    let mut pair = two();
    let [a, b] = open(&mut pair);
    let put_here = put(&a, 0, b"1").unwrap();
    sends(&b, 1, &LONG);
    pair.run();
    sends(&b, 0, b"2");
    assert!(!put_here.has_next(), "it follows a message that came later");
    let later = put(&a, 0, b"3").unwrap();
    assert!(later.has_next());
    drop((put_here, later));
    assert!(taken(&a, 1).is_some());
    assert_eq!(taken(&a, 0).unwrap()[..], *b"2");
    pair.assert_clean();
}

#[test]
fn a_side_that_sleeps_is_woken_once_for_each_sleep_when_the_note_that_was_put_is_dropped() {
    let mut pair = two();
    let [a, b] = open(&mut pair);
    let task = Arc::<Woken>::default();
    for round in 1..=3 {
        assert!(poll(&b, 0, &task).is_pending() && poll(&b, 0, &task).is_pending());
        let first = put(&a, 0, b"1").unwrap();
        let second = put(&a, 0, b"2").unwrap();
        assert!(first.seems_asleep() && put(&a, 1, b"awake").is_some_and(|put| !put.seems_asleep()));
        pair.run();
        assert!(!task.take(), "not before it is dropped");
        drop((first, second));
        pair.run();
        assert!(task.take());
        assert_eq!(messages(&pair), (round, 0));
        assert!(taken(&b, 1).is_some() && taken(&b, 0).is_some() && taken(&b, 0).is_some());
        assert!(put(&a, 0, b"3").is_some_and(|put| !put.seems_asleep()));
        assert_eq!(taken(&b, 0).unwrap()[..], *b"3");
    }
    pair.assert_clean();
}

#[test]
fn a_task_that_sleeps_because_its_note_follows_a_message_is_woken_by_that_message() {
    let mut pair = two();
    let [a, b] = open(&mut pair);
    let task = Arc::<Woken>::default();
    sends(&a, 1, &LONG);
    sends(&a, 0, b"behind");
    assert!(poll(&b, 0, &task).is_pending());
    pair.run();
    assert!(task.take() && poll(&b, 0, &task).is_ready());
    pair.assert_clean();
}

/// Both channels have the same lane, which is parked once for both.
#[test]
fn a_wake_up_for_one_channel_leaves_those_awake_that_wait_in_another() {
    let mut pair = two();
    let [a, b] = open(&mut pair);
    let others = [A, B].map(|side| Arc::new(pair.end(side).connection.open_notes(8, 1).unwrap()));
    let tasks = [(); 2].map(|()| Arc::<Woken>::default());
    assert!(poll(&b, 0, &tasks[0]).is_pending() && poll(&others[1], 0, &tasks[1]).is_pending());
    sends(&a, 0, b"1");
    pair.run();
    assert_eq!(tasks.each_ref().map(|task| task.take()), [true, false]);
    sends(&others[0], 0, b"2");
    pair.run();
    assert_eq!(tasks.each_ref().map(|task| task.take()), [false, true]);
    assert!(poll(&b, 0, &tasks[0]).is_ready() && poll(&others[1], 0, &tasks[1]).is_ready());
    pair.assert_clean();
}

#[test]
fn wake_ups_without_room_are_sent_once_when_there_is_room() {
    let mut pair = Pair::with_mailboxes(Parameters { depth: 4, ..small() });
    let [a, b] = open(&mut pair);
    let tasks = [(); 2].map(|()| Arc::<Woken>::default());
    let parks = || (0..2).for_each(|lane| assert!(poll(&b, lane, &tasks[usize::from(lane)]).is_pending()));
    parks();
    pair.run();
    let mut sent = 0;
    while send_now(&a, 0, &LONG).is_some() {
        sent += 1;
    }
    // Each of these is to be woken for, and no message has room.
    let peers = mailbox(&mut pair, B);
    for round in 0..2 {
        (0..2).for_each(|lane| sends(&a, lane, &[round]));
        (0..2).for_each(|lane| peers.park(lane));
    }
    assert_eq!(pair.counters().0.sent.note, sent);
    pair.run();
    assert_eq!(pair.counters().0.sent.note, sent + 2, "one for each lane");
    assert!(tasks.iter().all(|task| task.take()));
    let received: Vec<_> = std::iter::from_fn(|| taken(&b, 0)).map(|note| note.len()).collect();
    assert!(received.into_iter().eq((0..sent).map(|_| LONG.len()).chain([1, 1])));
    pair.assert_clean();
}

#[test]
fn what_was_put_before_the_end_comes_before_it_and_nothing_after() {
    let mut pair = two();
    let [a, b] = open(&mut pair);
    sends(&a, 0, b"before");
    pair.b.connection.fail("it is over");
    sends(&a, 0, b"after");
    let later = pair.b.connection.open_notes(8, 1);
    assert_eq!(taken(&b, 0).unwrap()[..], *b"before");
    assert!(next_of(&b, 0).now_or_never().is_some_and(|next| next.is_err()));
    assert!(later.is_some() && put(&b, 0, b"late").is_none());
    assert!(send_now(&b, 0, b"late").is_some_and(|sent| sent.is_err()));
}

#[test]
fn a_poll_that_may_not_look_never_looks() {
    let mut pair = two();
    let [_a, b] = open(&mut pair);
    looks::allow();
    let context = Context::from_waker(Waker::noop());
    assert!(b.poll_next(0, &context, false).is_pending());
    assert_eq!(looks::counted(), 0);
    assert!(b.poll_next(0, &context, true).is_pending());
    assert_eq!(looks::counted(), 1);
}

/// What follows a note in the mailbox before its receiver's next access to that.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Then {
    /// The wake-up, if the receiver has parked the lane.
    WakeUp,
    /// Another note of the lane, by message.
    Message,
    /// The connection's end, after the poll.
    End,
}

/// The receiver polls once, and a note is put after `after` of its accesses. False if there were no more of them.
fn is_found(then: Then, after: usize) -> bool {
    let mut pair = two();
    let [a, b] = open(&mut pair);
    let meanwhile: Meanwhile = mailbox(&mut pair, B).meanwhile;
    meanwhile.plan(after, move || {
        sends(&a, 0, b"note");
        if then == Then::Message {
            sends(&a, 0, &LONG);
        }
    });
    let task = Arc::<Woken>::default();
    let mut polled = poll(&b, 0, &task);
    let is_left = meanwhile.is_left();
    if then == Then::End {
        pair.b.connection.fail("the cable");
    }
    pair.run();
    if is_left {
        assert!(polled.is_pending());
        return false;
    }
    if polled.is_pending() {
        assert!(task.take(), "{then:?} after {after} accesses");
        polled = poll(&b, 0, &task);
    }
    let Poll::Ready(Ok(note)) = polled else { panic!("{then:?} after {after} accesses: {polled:?}") };
    assert_eq!(note[..], *b"note", "{then:?} after {after} accesses");
    match (then, poll(&b, 0, &task)) {
        (Then::Message, Poll::Ready(Ok(note))) => assert_eq!(note[..], LONG),
        (Then::End, Poll::Ready(Err(_))) | (Then::WakeUp, Poll::Pending) => {}
        (_, polled) => panic!("{then:?} after {after} accesses: {polled:?}"),
    }
    true
}

/// The peer puts a note between any two accesses of its receiver.
#[test]
fn a_note_that_is_put_between_two_accesses_is_found_or_its_receiver_is_woken() {
    for then in [Then::WakeUp, Then::Message, Then::End] {
        let mut accesses = 0;
        while is_found(then, accesses) {
            accesses += 1;
        }
        assert_eq!(accesses, 6, "it looks, parks the lane, and looks again");
    }
}
