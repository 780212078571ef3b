//! Many keys and many values in random order on several threads.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};

use futures::future::join_all;
use tensorwire_rendezvous::{LocalRendezvous, RecvArgs, SendArgs};

use crate::family::support::{Numbers, key, number, read_number, threads, wait};

const THREADS: u64 = 16;

/// Sends and receives `keys` keys in random order on 16 threads: each receive gets its own value.
fn keys_in_random_order(rendezvous: &LocalRendezvous, keys: u32) {
    let runtime = threads();
    let mut operations: Vec<_> = (0..keys).flat_map(|key| [(key, true), (key, false)]).collect();
    Numbers(5).shuffle(&mut operations);
    let operations = Mutex::new(operations);
    let receives = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (operations, receives, rendezvous) = (&operations, &receives, &rendezvous);
            scope.spawn(move || {
                let mut numbers = Numbers(thread);
                while let Some((edge, is_send)) = take(operations) {
                    numbers.pause();
                    let key = key(&format!("edge {edge}"));
                    if is_send {
                        rendezvous.send(&key, SendArgs::default(), number(edge)).unwrap();
                    } else {
                        let receive = rendezvous.recv(&key, RecvArgs::default());
                        receives.lock().unwrap().push((edge, receive));
                    }
                }
            });
        }
    });
    let receives = receives.into_inner().unwrap().into_iter();
    let got = wait(&runtime, join_all(receives.map(|(edge, receive)| async move { (edge, receive.await) })));
    assert_eq!(got.len(), keys as usize);
    for (edge, delivered) in got {
        assert_eq!(read_number(&delivered.unwrap().tensor), edge);
    }
    assert_eq!(rendezvous.waiting_values(), 0);
}

/// Half of the threads send `keys` keys in random order, the others receive them in another, each blocking.
pub(crate) fn keys_in_random_order_blocking(rendezvous: &LocalRendezvous, keys: u32) {
    let runtime = threads();
    let [sends, receives] = [3, 4].map(|seed| {
        let mut edges: Vec<_> = (0..keys).collect();
        Numbers(seed).shuffle(&mut edges);
        Mutex::new(edges)
    });
    let received = AtomicU32::new(0);
    thread::scope(|scope| {
        for thread in 0..THREADS / 2 {
            let (sends, receives, received, runtime) = (&sends, &receives, &received, &runtime);
            scope.spawn(move || {
                let mut numbers = Numbers(thread);
                while let Some(edge) = take(sends) {
                    numbers.pause();
                    let key = key(&format!("edge {edge}"));
                    rendezvous.send(&key, SendArgs::default(), number(edge)).unwrap();
                }
            });
            scope.spawn(move || {
                while let Some(edge) = take(receives) {
                    let key = key(&format!("edge {edge}"));
                    let got = wait(runtime, rendezvous.recv(&key, RecvArgs::default())).unwrap();
                    assert_eq!(read_number(&got.tensor), edge);
                    received.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!((received.into_inner(), rendezvous.waiting_values()), (keys, 0));
}

fn take<T>(items: &Mutex<Vec<T>>) -> Option<T> {
    items.lock().unwrap().pop()
}

#[test]
fn s2_9_09_random_send_recv() {
    keys_in_random_order(&LocalRendezvous::new(), 100);
}

#[test]
fn s2_9_10_multi_sends() {
    const VALUES: u32 = 100;
    let (rendezvous, runtime) = (LocalRendezvous::new(), threads());
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut numbers = Numbers(1);
            for value in 0..VALUES {
                rendezvous.send(&key("foo"), SendArgs::default(), number(value)).unwrap();
                numbers.pause();
            }
        });
        let mut numbers = Numbers(2);
        for value in 0..VALUES {
            let got = wait(&runtime, rendezvous.recv(&key("foo"), RecvArgs::default())).unwrap();
            assert_eq!(read_number(&got.tensor), value);
            numbers.pause();
        }
    });
}

#[test]
fn s2_3_several_senders_and_receivers_of_one_key_lose_and_double_nothing() {
    const EACH: u32 = 500;
    let (rendezvous, runtime) = (LocalRendezvous::new(), threads());
    let mut got: Vec<u32> = thread::scope(|scope| {
        let receivers: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let receive = || wait(&runtime, rendezvous.recv(&key("foo"), RecvArgs::default()));
                    (0..EACH).map(|_| read_number(&receive().unwrap().tensor)).collect::<Vec<_>>()
                })
            })
            .collect();
        for sender in 0..4 {
            let rendezvous = &rendezvous;
            scope.spawn(move || {
                for value in sender * EACH..(sender + 1) * EACH {
                    rendezvous.send(&key("foo"), SendArgs::default(), number(value)).unwrap();
                }
            });
        }
        receivers.into_iter().flat_map(|receiver| receiver.join().unwrap()).collect()
    });
    got.sort_unstable();
    assert_eq!(got, (0..4 * EACH).collect::<Vec<_>>());
}
