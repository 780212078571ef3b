use std::{task::Waker, thread};

use futures::{
    FutureExt as _,
    future::{join, join_all},
};
use tensorwire_fabric::{FabricKind, Wait};

use super::*;
use crate::{
    connection::fast_boxes::tests::{Meanwhile, two_and_meanwhile},
    error::Lost,
    worker::Worker,
};

const CHANNEL: u64 = 7;
const LANES: u16 = fast_boxes::LANES as u16;

/// A note that fits into no box.
const LONG: [u8; 200] = [1; 200];

#[test]
fn one_task_sends_all_wake_ups_that_have_no_room() {
    let wakes = WakesInLine::default();
    assert!(wakes.add() && !wakes.add());
    let count = wakes.count();
    assert!(!wakes.add(), "it came when the message may have been posted");
    assert!(wakes.are_left_after(count));
    let count = wakes.count();
    assert!(!wakes.are_left_after(count));
    assert!(wakes.add(), "the task has ended");
}

/// Two workers that know each other, and never look long.
async fn met() -> ([Worker; 2], [Peer; 2]) {
    let start = |name| Worker::builder(name).require(FabricKind::TCP).wait(Wait::Sleep).start();
    let (one, other) = join(start("/job:a/replica:0/task:0"), start("/job:b/replica:0/task:0")).await;
    let (one, other) = (one.unwrap(), other.unwrap());
    let peer = one.peer_at(other.address()).await.unwrap();
    peer.connect().await.unwrap();
    let back = other.peer(one.name()).unwrap();
    ([one, other], [peer, back])
}

/// Both sides of a channel whose boxes lie in this process.
async fn boxed([one, other]: &[Peer; 2]) -> ([Notes; 2], Meanwhile) {
    let (one, other) = join(one.notes(CHANNEL, LANES), other.notes(CHANNEL, LANES)).await;
    let (boxes, meanwhile) = two_and_meanwhile();
    let mut both = [one.unwrap(), other.unwrap()];
    let open = boxes.map(|boxes| boxes.open(CHANNEL, LANES).unwrap());
    open.iter().for_each(|boxes| assert!(!boxes.peek(0)));
    both.iter_mut().zip(open).for_each(|(notes, boxes)| notes.boxes = Some(boxes));
    (both, meanwhile)
}

/// What follows a note in a box before its receiver's next step.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Then {
    /// The wake-up, if the receiver has said that it sleeps.
    WakeUp,
    /// Another note of the lane, by message.
    Message,
    /// The connection's end.
    End,
}

/// The receiver looks once, and a note is put after `after` of its steps. False if there were no more of them.
async fn is_found(then: Then, after: usize) -> bool {
    let (workers, peers) = met().await;
    let ([takes, sends], meanwhile) = boxed(&peers).await;
    let connection = takes.connection.clone();
    meanwhile.plan(after, move || {
        let send = |lane, text: &[u8]| sends.send(lane, &[text]).now_or_never().unwrap().unwrap();
        send(0, b"note");
        match then {
            Then::WakeUp => {}
            Then::Message => send(0, &LONG),
            Then::End => connection.fail(&Lost::gone("the cable")),
        }
        if then != Then::End {
            // Comes when all before it has come.
            send(1, &LONG);
        }
        let context = Context::from_waker(Waker::noop());
        while connection.protocol.poll_note(CHANNEL, 1, &context).is_pending() {
            thread::yield_now();
        }
    });
    let context = Context::from_waker(Waker::noop());
    let polled = takes.poll_recv(0, &context);
    let is_left = meanwhile.is_left();
    if is_left {
        assert!(polled.is_pending());
    } else {
        let Poll::Ready(Ok(note)) = polled else { panic!("{then:?} after {after} steps: {polled:?}") };
        assert_eq!(note[..], *b"note", "{then:?} after {after} steps");
    }
    if !is_left && then == Then::Message {
        assert_eq!(takes.recv(0).await.unwrap()[..], LONG);
    }
    join_all(workers.iter().map(Worker::shutdown)).await;
    !is_left
}

/// The peer puts a note between any two steps of its receiver.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_note_that_is_put_between_two_looks_is_found_first() {
    for then in [Then::WakeUp, Then::Message, Then::End] {
        let mut steps = 0;
        while is_found(then, steps).await {
            steps += 1;
        }
        assert!(steps >= 6, "it looks, says that it sleeps, and looks again: {steps}");
    }
}

#[tokio::test]
async fn after_a_send_that_was_given_up_the_lane_goes_by_messages() {
    let (workers, peers) = met().await;
    let ([sends, _takes], _) = boxed(&peers).await;
    let has_room = |lane| sends.send(lane, &[&LONG]).now_or_never().is_some();
    let lane = (1..LANES).cycle().find(|lane| !has_room(*lane));
    assert!(lane.is_some() && sends.exchange(0).is_some());
    assert!(!has_room(0) && sends.exchange(0).is_none(), "nobody knows whether the peer counts it");
    join_all(workers.iter().map(Worker::shutdown)).await;
}
