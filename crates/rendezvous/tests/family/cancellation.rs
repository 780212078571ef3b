//! Receives that a token ends, and TensorFlow's current tests of them.

use std::thread;

use futures::{FutureExt, future::join_all, poll};
use tensorwire_protocol::{Code, Status};
use tensorwire_rendezvous::{CancellationToken, LocalRendezvous, RecvArgs, SendArgs};

use crate::family::support::{key, number, plain, read, read_number, run, text, threads, until, wait};

const CANCELLED: &str = "[_Derived_]RecvAsync is cancelled.";

fn is_cancelled(status: &Status) -> bool {
    status.code == Code::Cancelled && status.message == CANCELLED && status.is_derived()
}

#[test]
fn s2_9_05_cancel_before_recv() {
    let (rendezvous, token) = (LocalRendezvous::new(), CancellationToken::new());
    token.cancel();
    let ended = rendezvous.recv(&key("foo"), until(&token)).now_or_never().expect("at once");
    assert!(is_cancelled(&ended.unwrap_err()));
}

#[test]
fn s2_9_06_cancel_after_recv() {
    let (rendezvous, runtime, token) = (LocalRendezvous::new(), threads(), CancellationToken::new());
    let mut received = rendezvous.recv(&key("foo"), until(&token));
    assert!(wait(&runtime, async { poll!(&mut received) }).is_pending());
    thread::scope(|scope| {
        scope.spawn(|| token.cancel());
        assert!(is_cancelled(&wait(&runtime, received).unwrap_err()));
    });
    // It left the line: the next value is the next receive's.
    rendezvous.send(&key("foo"), SendArgs::default(), number(1)).unwrap();
    let next = rendezvous.recv(&key("foo"), RecvArgs::default()).now_or_never().unwrap().unwrap();
    assert_eq!(read_number(&next.tensor), 1);
}

#[test]
fn s2_9_07_cancel_empty_queue() {
    let (rendezvous, token) = (LocalRendezvous::new(), CancellationToken::new());
    rendezvous.send(&key("foo"), SendArgs::default(), text("hello")).unwrap();
    let received = rendezvous.recv(&key("foo"), until(&token));
    token.cancel();
    assert_eq!(read(&received.now_or_never().unwrap().unwrap().tensor), "hello");
    // The token is not even looked at.
    rendezvous.send(&key("foo"), SendArgs::default(), text("again")).unwrap();
    let received = rendezvous.recv(&key("foo"), until(&token));
    assert_eq!(read(&received.now_or_never().unwrap().unwrap().tensor), "again");
}

#[test]
fn s2_9_08_cancel_multiple() {
    run(async {
        let (rendezvous, token) = (LocalRendezvous::new(), CancellationToken::new());
        let plain = || rendezvous.recv(&key("foo"), RecvArgs::default());
        let cancellable = || rendezvous.recv(&key("foo"), until(&token));
        let receives = [plain(), cancellable(), plain(), cancellable()];
        token.cancel();
        // None of them has looked since.
        for value in [1, 3] {
            rendezvous.send(&key("foo"), SendArgs::default(), number(value)).unwrap();
        }
        let ended: Vec<_> = join_all(receives).await;
        let got = |place: usize| read_number(&ended[place].as_ref().unwrap().tensor);
        assert_eq!((got(0), got(2)), (1, 3));
        assert!([1, 3].iter().all(|&place: &usize| is_cancelled(ended[place].as_ref().unwrap_err())));
        assert_eq!(rendezvous.waiting_values(), 0);
    });
}

#[test]
fn s2_5_a_value_that_came_first_wins_over_the_token() {
    run(async {
        let (rendezvous, token) = (LocalRendezvous::new(), CancellationToken::new());
        let mut received = rendezvous.recv(&key("foo"), until(&token));
        assert!(poll!(&mut received).is_pending());
        rendezvous.send(&key("foo"), SendArgs::default(), number(5)).unwrap();
        token.cancel();
        assert_eq!(read_number(&received.await.unwrap().tensor), 5);
    });
}

#[test]
fn s2_5_a_cancelled_receive_does_not_end_others() {
    run(async {
        let (rendezvous, one, other) =
            (LocalRendezvous::new(), CancellationToken::new(), CancellationToken::new());
        let mut first = rendezvous.recv(&key("foo"), until(&one));
        let mut second = rendezvous.recv(&key("foo"), until(&other));
        let mut elsewhere = rendezvous.recv(&key("bar"), until(&other));
        assert!(poll!(&mut first).is_pending() && poll!(&mut second).is_pending());
        one.cancel();
        assert!(is_cancelled(&first.await.unwrap_err()));
        assert!(poll!(&mut second).is_pending() && poll!(&mut elsewhere).is_pending());
        other.cancel();
        assert!(is_cancelled(&second.await.unwrap_err()) && is_cancelled(&elsewhere.await.unwrap_err()));
    });
}

#[test]
fn s2_5_an_abort_ends_cancellable_receives_with_its_own_status() {
    run(async {
        let (rendezvous, token) = (LocalRendezvous::new(), CancellationToken::new());
        let received = rendezvous.recv(&key("foo"), until(&token));
        rendezvous.abort(&Status::new(Code::Internal, "cause"));
        token.cancel();
        let ended = received.await.unwrap_err();
        assert_eq!(ended, Status::new(Code::Internal, "cause"));
        let derived = Status::new(Code::Cancelled, "RecvAsync is cancelled.").derived();
        assert_eq!(Status::root_cause([derived, ended.clone()]), Some(ended));
    });
}

#[test]
fn s2_5_cancel_and_send_race_and_nothing_is_lost_or_doubled() {
    let runtime = threads();
    let (mut cancelled, mut given) = (0, 0);
    for round in 0..2000 {
        let (rendezvous, token) = (LocalRendezvous::new(), CancellationToken::new());
        let mut received = rendezvous.recv(&key("foo"), until(&token));
        let (send, recv) = plain();
        assert!(wait(&runtime, async { poll!(&mut received) }).is_pending());
        let ended = thread::scope(|scope| {
            scope.spawn(|| token.cancel());
            if round % 2 == 0 {
                thread::yield_now();
            }
            rendezvous.send(&key("foo"), send, number(7)).unwrap();
            wait(&runtime, received)
        });
        let left = rendezvous.recv(&key("foo"), recv).now_or_never();
        match ended {
            Ok(delivered) => {
                assert!(read_number(&delivered.tensor) == 7 && left.is_none());
                given += 1;
            }
            Err(status) => {
                assert!(is_cancelled(&status));
                assert_eq!(read_number(&left.expect("it stays").unwrap().tensor), 7);
                cancelled += 1;
            }
        }
    }
    assert_eq!(cancelled + given, 2000);
}
