//! Second sends and receives of one key, and TensorFlow's older tests of them.

use std::thread;

use futures::{FutureExt, future::join_all, poll};
use tensorwire_protocol::Code;
use tensorwire_rendezvous::{
    CancellationToken, DuplicatePolicy, LocalConfig, LocalRendezvous, Receive, RecvArgs, SendArgs,
};

use crate::family::support::{Numbers, key, number, read_number, run, threads, until, wait};

fn with(duplicates: DuplicatePolicy) -> LocalRendezvous {
    LocalRendezvous::with_config(LocalConfig { duplicates, ..LocalConfig::default() })
}

fn send(rendezvous: &LocalRendezvous, value: u32) -> Result<(), String> {
    let sent = rendezvous.send(&key("foo"), SendArgs::default(), number(value));
    sent.map_err(|status| {
        assert_eq!(status.code, Code::Aborted);
        status.message
    })
}

fn receive(rendezvous: &LocalRendezvous) -> Receive {
    rendezvous.recv(&key("foo"), RecvArgs::default())
}

fn now(receive: Receive) -> Option<Result<u32, String>> {
    let ended = receive.now_or_never()?;
    Some(ended.map(|got| read_number(&got.tensor)).map_err(|status| {
        assert_eq!(status.code, Code::Aborted);
        status.message
    }))
}

fn duplicated(what: &str) -> String {
    format!("Duplicated {what}: {}", key("foo"))
}

#[test]
fn s2_9_a01_a_second_send_is_aborted() {
    let rendezvous = with(DuplicatePolicy::Report);
    send(&rendezvous, 1).unwrap();
    assert_eq!(send(&rendezvous, 2), Err(duplicated("send")));
    assert_eq!(now(receive(&rendezvous)), Some(Ok(1)));
    // Its key was used: also now.
    assert_eq!(send(&rendezvous, 3), Err(duplicated("send")));
}

#[test]
fn s2_9_a02_duplicate_waiter_recv() {
    let (rendezvous, runtime) = (with(DuplicatePolicy::Report), threads());
    let mut first = receive(&rendezvous);
    assert!(wait(&runtime, async { poll!(&mut first) }).is_pending());
    assert_eq!(now(receive(&rendezvous)), Some(Err(duplicated("recv"))));
    thread::scope(|scope| {
        scope.spawn(|| send(&rendezvous, 1).unwrap());
        assert_eq!(read_number(&wait(&runtime, first).unwrap().tensor), 1);
    });
    assert_eq!(send(&rendezvous, 2), Err(duplicated("send")));
}

#[test]
fn s2_9_a03_duplicate_serial_recv() {
    let rendezvous = with(DuplicatePolicy::Report);
    send(&rendezvous, 1).unwrap();
    assert_eq!(now(receive(&rendezvous)), Some(Ok(1)));
    assert_eq!(now(receive(&rendezvous)), Some(Err(duplicated("recv"))));
}

#[test]
fn s2_9_a04_random_send_recv_of_1000_keys() {
    crate::family::random::keys_in_random_order_blocking(&with(DuplicatePolicy::Report), 1000);
}

#[test]
fn s2_4_a_receive_that_was_given_up_is_no_first_one() {
    run(async {
        let (rendezvous, token) = (with(DuplicatePolicy::Report), CancellationToken::new());
        drop(receive(&rendezvous));
        let cancelled = rendezvous.recv(&key("foo"), until(&token));
        token.cancel();
        // The cancelled one is still there, but wants nothing.
        let waiting = receive(&rendezvous);
        assert_eq!(cancelled.await.unwrap_err().code, Code::Cancelled);
        send(&rendezvous, 1).unwrap();
        // Given up with the value in hand: it is there again, and still the only one.
        drop(waiting);
        assert_eq!(send(&rendezvous, 2), Err(duplicated("send")));
        assert_eq!(now(receive(&rendezvous)), Some(Ok(1)));
        assert_eq!(
            (now(receive(&rendezvous)), rendezvous.waiting_values()),
            (Some(Err(duplicated("recv"))), 0)
        );
    });
}

#[test]
fn s2_4_other_keys_are_not_duplicates() {
    let rendezvous = with(DuplicatePolicy::Report);
    for edge in ["a", "b", "c"] {
        rendezvous.send(&key(edge), SendArgs::default(), number(1)).unwrap();
        assert!(rendezvous.recv(&key(edge), RecvArgs::default()).now_or_never().unwrap().is_ok());
    }
}

#[test]
fn s2_4_queues_take_any_number_of_both() {
    let rendezvous = with(DuplicatePolicy::Queue);
    let waiting: Vec<_> = (0..3).map(|_| receive(&rendezvous)).collect();
    for value in 0..6 {
        send(&rendezvous, value).unwrap();
    }
    assert_eq!(rendezvous.waiting_values(), 3);
    let later = (3..6).map(|_| receive(&rendezvous));
    let all: Vec<_> = waiting.into_iter().chain(later).map(now).collect();
    assert_eq!(all, (0..6).map(|value| Some(Ok(value))).collect::<Vec<_>>());
}

#[test]
fn s2_4_tolerated_receives_get_the_same_value_any_number_of_times() {
    let rendezvous = with(DuplicatePolicy::Tolerate);
    let waiting: Vec<_> = (0..3).map(|_| receive(&rendezvous)).collect();
    let given_up = receive(&rendezvous);
    send(&rendezvous, 7).unwrap();
    drop(given_up);
    assert!(waiting.into_iter().all(|receive| now(receive) == Some(Ok(7))));
    assert!((0..3).all(|_| now(receive(&rendezvous)) == Some(Ok(7))));
    assert_eq!(send(&rendezvous, 8), Err(duplicated("send")));
    assert_eq!(rendezvous.waiting_values(), 1);
}

#[test]
fn s2_4_a_second_tolerated_receive_waits_for_the_value() {
    let (rendezvous, runtime) = (with(DuplicatePolicy::Tolerate), threads());
    let mut waiting = [receive(&rendezvous), receive(&rendezvous)];
    for receive in &mut waiting {
        assert!(wait(&runtime, async { poll!(receive) }).is_pending());
    }
    thread::scope(|scope| {
        scope.spawn(|| send(&rendezvous, 7).unwrap());
        let got = wait(&runtime, join_all(waiting));
        assert!(got.into_iter().all(|got| read_number(&got.unwrap().tensor) == 7));
    });
}

#[test]
fn s2_4_values_above_the_cap_are_refused_and_kept_ones_count() {
    for (duplicates, room_after) in [(DuplicatePolicy::Queue, true), (DuplicatePolicy::Tolerate, false)] {
        let config = LocalConfig { duplicates, values_max: 2, ..LocalConfig::default() };
        let rendezvous = LocalRendezvous::with_config(config);
        let send = |edge| rendezvous.send(&key(edge), SendArgs::default(), number(1));
        send("a").unwrap();
        send("b").unwrap();
        let refused = send("c").unwrap_err();
        assert_eq!(refused.code, Code::ResourceExhausted);
        assert!(refused.message.contains("values_max is 2"), "{refused}");
        assert!(rendezvous.recv(&key("a"), RecvArgs::default()).now_or_never().unwrap().is_ok());
        assert_eq!(send("c").is_ok(), room_after);
    }
}

#[test]
fn s2_4_random_operations_lose_and_double_nothing() {
    let (rendezvous, mut numbers) = (with(DuplicatePolicy::Queue), Numbers(11));
    let (mut receives, mut sent, mut got) = (Vec::new(), 0, Vec::new());
    for _ in 0..20_000 {
        match numbers.below(4) {
            0 => {
                send(&rendezvous, sent).unwrap();
                sent += 1;
            }
            1 => receives.push(receive(&rendezvous)),
            2 if !receives.is_empty() => {
                drop(receives.remove(numbers.below(receives.len() as u64) as usize));
            }
            _ if !receives.is_empty() => {
                let outstanding = sent as usize - got.len();
                let oldest = now(receives.remove(0));
                assert_eq!(oldest.is_some(), outstanding > 0, "the oldest is served first");
                got.extend(oldest.map(Result::unwrap));
            }
            _ => {}
        }
        let outstanding = sent as usize - got.len();
        assert_eq!(rendezvous.waiting_values(), outstanding.saturating_sub(receives.len()));
    }
    drop(receives);
    while let Some(next) = now(receive(&rendezvous)) {
        got.push(next.unwrap());
    }
    got.sort_unstable();
    assert_eq!(got, (0..sent).collect::<Vec<_>>());
    assert!(sent > 4000);
}
