//! Receives with a timeout, and the rendezvous by edge name.

use std::time::Duration;

use futures::{FutureExt, future::join};
use tensorwire_protocol::{Code, Status};
use tensorwire_rendezvous::{IntraProcessRendezvous, LocalRendezvous, RecvArgs, SendArgs, SimpleRendezvous};

use crate::family::support::{key, number, read_number, run};

const SHORT: Duration = Duration::from_millis(1);

#[test]
fn s2_3_a_receive_with_a_timeout_ends_in_time() {
    run(async {
        let rendezvous = LocalRendezvous::new();
        let ended = rendezvous.recv_timeout(&key("foo"), RecvArgs::default(), SHORT).await.unwrap_err();
        assert_eq!(ended.code, Code::DeadlineExceeded);
        assert!(ended.message.contains(key("foo").as_str()) && ended.message.contains("1 ms"), "{ended}");
        // The receive is over: a late value is for the next one.
        rendezvous.send(&key("foo"), SendArgs::default(), number(1)).unwrap();
        assert_eq!(rendezvous.waiting_values(), 1);
        let got = rendezvous.recv_timeout(&key("foo"), RecvArgs::default(), Duration::ZERO).await.unwrap();
        assert_eq!(read_number(&got.tensor), 1);
    });
}

#[test]
fn s2_3_a_receive_with_a_timeout_gets_what_comes_in_time() {
    run(async {
        let rendezvous = IntraProcessRendezvous::new();
        let long = Duration::from_secs(20);
        let ended = rendezvous.recv_timeout(&key("foo"), RecvArgs::default(), SHORT).await.unwrap_err();
        assert_eq!(ended.code, Code::DeadlineExceeded);
        let (key, later) = (key("foo"), rendezvous.clone());
        let send = async { later.send(&key, SendArgs::default(), number(1)).unwrap() };
        let (got, ()) = join(rendezvous.recv_timeout(&key, RecvArgs::default(), long), send).await;
        assert_eq!(read_number(&got.unwrap().tensor), 1);
    });
}

#[test]
fn s2_3_a_timeout_needs_a_clock() {
    let (rendezvous, key) = (LocalRendezvous::new(), key("foo"));
    let received = rendezvous.recv_timeout(&key, RecvArgs::default(), SHORT);
    let failed = received.now_or_never().unwrap().unwrap_err();
    assert_eq!(failed.code, Code::FailedPrecondition);
    assert!(failed.message.contains("LocalConfig::runtime"), "{failed}");
}

#[test]
fn s2_8_a_simple_rendezvous_finds_values_by_edge_or_fails() {
    let rendezvous = SimpleRendezvous::new();
    let missing = rendezvous.recv("foo").unwrap_err();
    assert_eq!(missing.code, Code::NotFound);
    assert!(missing.message.contains("`foo`"), "{missing}");
    rendezvous.send("foo", number(1)).unwrap();
    rendezvous.send(key("bar").edge(), number(2)).unwrap();
    for _ in 0..2 {
        assert_eq!(read_number(&rendezvous.recv("foo").unwrap()), 1);
        assert_eq!(read_number(&rendezvous.clone().recv("bar").unwrap()), 2);
    }
    let twice = rendezvous.send("foo", number(3)).unwrap_err();
    assert_eq!((twice.code, twice.message.as_str()), (Code::Aborted, "Duplicated send: foo"));
    rendezvous.abort(&Status::new(Code::Aborted, "over"));
    assert_eq!(rendezvous.recv("foo").unwrap_err().message, "over");
    assert_eq!(rendezvous.send("baz", number(4)).unwrap_err().message, "over");
}
