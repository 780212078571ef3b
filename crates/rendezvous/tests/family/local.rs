//! The current set of unit tests, on a local rendezvous.

use std::thread;

use futures::{FutureExt, poll};
use tensorwire_protocol::{Code, Key, Status};
use tensorwire_rendezvous::{LocalRendezvous, RecvArgs, SendArgs};

use crate::family::support::{CPU, GPU, key, key_between, plain, read, run, text, threads, wait};

#[test]
fn s2_9_01_key() {
    let example = key_between(CPU, GPU, "var0");
    let text = "/job:mnist/replica:1/task:2/CPU:0;0000000000001ed2;\
                /job:mnist/replica:1/task:2/device:GPU:0;var0;0:0";
    assert_eq!(example.as_str(), text);
    assert_eq!(Key::parse(text).unwrap().incarnation(), 7890);
    for bad in ["foo;bar;baz", &format!("{CPU};{GPU}"), "k;k"] {
        assert_eq!(Key::parse(bad).unwrap_err().to_string(), format!("Invalid  rendezvous key: {bad}"));
    }
}

#[test]
fn s2_9_02_send_recv() {
    let rendezvous = LocalRendezvous::new();
    let (send, recv) = plain();
    rendezvous.send(&key("foo"), send, text("hello")).unwrap();
    let got = rendezvous.recv(&key("foo"), recv).now_or_never().unwrap().unwrap();
    assert_eq!((read(&got.tensor).as_str(), got.tensor.is_dead()), ("hello", false));
}

#[test]
fn s2_9_03_recv_send() {
    let (rendezvous, runtime) = (LocalRendezvous::new(), threads());
    let mut received = rendezvous.recv(&key("foo"), RecvArgs::default());
    assert!(wait(&runtime, async { poll!(&mut received) }).is_pending());
    thread::scope(|scope| {
        scope.spawn(|| rendezvous.send(&key("foo"), SendArgs::default(), text("hello")).unwrap());
        assert_eq!(read(&wait(&runtime, received).unwrap().tensor), "hello");
    });
}

#[test]
fn s2_9_04_ping_pong() {
    let (rendezvous, runtime) = (LocalRendezvous::new(), threads());
    thread::scope(|scope| {
        scope.spawn(|| {
            let (send, recv) = plain();
            let got = wait(&runtime, rendezvous.recv(&key("foo"), recv)).unwrap();
            rendezvous.send(&key("bar"), send, got.tensor).unwrap();
        });
        let (send, recv) = plain();
        rendezvous.send(&key("foo"), send, text("secret msg")).unwrap();
        let got = wait(&runtime, rendezvous.recv(&key("bar"), recv)).unwrap();
        assert_eq!(read(&got.tensor), "secret msg");
    });
}

#[test]
fn s2_9_11_recv_abort() {
    let runtime = threads();
    for round in 0..200 {
        let rendezvous = LocalRendezvous::new();
        thread::scope(|scope| {
            let aborter = scope.spawn(|| rendezvous.abort(&Status::new(Code::Aborted, "")));
            if round % 2 == 0 {
                thread::yield_now();
            }
            let ended = wait(&runtime, rendezvous.recv(&key("foo"), RecvArgs::default()));
            assert_eq!(ended.unwrap_err().code, Code::Aborted);
            aborter.join().unwrap();
        });
    }
}

#[test]
fn s2_9_12_recv_sleep_abort() {
    let (rendezvous, runtime) = (LocalRendezvous::new(), threads());
    let mut received = rendezvous.recv(&key("foo"), RecvArgs::default());
    assert!(wait(&runtime, async { poll!(&mut received) }).is_pending());
    thread::scope(|scope| {
        scope.spawn(|| rendezvous.abort(&Status::new(Code::Aborted, "asleep")));
        assert_eq!(wait(&runtime, received).unwrap_err(), Status::new(Code::Aborted, "asleep"));
    });
}

#[test]
fn s2_9_13_abort_then_recv_or_send() {
    let rendezvous = LocalRendezvous::new();
    rendezvous.abort(&Status::new(Code::Aborted, "first"));
    let (send, recv) = plain();
    let refused = rendezvous.send(&key("foo"), send, text("hello")).unwrap_err();
    let failed = rendezvous.recv(&key("foo"), recv).now_or_never().unwrap().unwrap_err();
    assert_eq!((refused.code, failed.code), (Code::Aborted, Code::Aborted));
}

#[test]
fn s2_3_the_first_status_stays_and_buffered_values_are_dropped() {
    let rendezvous = LocalRendezvous::new();
    let (send, recv) = plain();
    rendezvous.send(&key("foo"), send, text("lost")).unwrap();
    let waiting = rendezvous.recv(&key("bar"), recv.clone());
    rendezvous.abort(&Status::new(Code::DataLoss, "first"));
    rendezvous.abort(&Status::new(Code::Aborted, "second"));
    let first = Status::new(Code::DataLoss, "first");
    assert_eq!(waiting.now_or_never().unwrap().unwrap_err(), first);
    assert_eq!(rendezvous.recv(&key("foo"), recv).now_or_never().unwrap().unwrap_err(), first);
    assert_eq!((rendezvous.aborted(), rendezvous.waiting_values()), (Some(first), 0));
}

#[test]
fn s2_3_a_send_delivers_to_the_oldest_receive_before_it_returns() {
    run(async {
        let rendezvous = LocalRendezvous::new();
        let [mut first, mut second] =
            std::array::from_fn(|_| rendezvous.recv(&key("foo"), RecvArgs::default()));
        assert!(poll!(&mut second).is_pending() && poll!(&mut first).is_pending());
        for value in ["one", "two"] {
            rendezvous.send(&key("foo"), SendArgs::default(), text(value)).unwrap();
        }
        assert_eq!(read(&second.now_or_never().unwrap().unwrap().tensor), "two");
        assert_eq!(read(&first.now_or_never().unwrap().unwrap().tensor), "one");
    });
}

#[test]
fn s2_4_keys_are_compared_whole() {
    let rendezvous = LocalRendezvous::new();
    rendezvous.send(&key("foo"), SendArgs::default(), text("foo")).unwrap();
    for other in [key("fo"), key("foo0"), key("foo").with_incarnation(1), key_between(CPU, GPU, "foo")] {
        assert!(rendezvous.recv(&other, RecvArgs::default()).now_or_never().is_none(), "{other}");
    }
}
