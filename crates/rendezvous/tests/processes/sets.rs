//! A set whose publisher is killed again and again while two processes follow it, of which one is stopped.
//!
//! `TENSORWIRE_SET_VERSIONS=10000` follows as many versions, and kills the publisher 50 times.

use std::time::Duration;

use rustix::process::Signal;
use tensorwire_rendezvous::{
    Tensor, Worker, WorkerError,
    sets::{Follow, Policy, Snapshot},
};

use crate::harness::{Other, PARENT, bounded, builder, kind, parents_lines, role, say};

const CHILD: &str = "/job:child/replica:0/task:0";
const SET: &str = "policy";
/// Elements of the larger tensor.
const ELEMENTS: u64 = 40_000;
/// Versions that are followed, and how often the publisher is killed meanwhile.
const FOLLOWED: u64 = 60;
const KILLS: u64 = 12;
const KILLS_OF_MANY: u64 = 50;
/// Versions that one life of the publisher commits at most.
const VERSIONS: u64 = 100_000;

/// The larger tensor of a version: in each version another element has changed.
fn elements(version: u64) -> Vec<u16> {
    let mut elements: Vec<u16> = (0..ELEMENTS).map(|at| at as u16).collect();
    // Only the last changes are still there.
    let changes = version.saturating_sub(ELEMENTS)..=version;
    changes.for_each(|version| elements[(version * 97 % ELEMENTS) as usize] = version as u16);
    elements
}

fn tensors(worker: &Worker, version: u64, elements: &[u16]) -> Vec<(String, Tensor)> {
    let of = |values: &[u16]| Tensor::from_values(worker.pool(), &[values.len() as u64], values).unwrap();
    let other = vec![version as u16; 1 + version as usize % 5000];
    vec![
        ("w".to_owned(), of(elements)),
        ("v".to_owned(), of(&other)),
        (format!("n{}", version % 3), of(&[3])),
    ]
}

/// Checks that each content is that of the snapshot's version.
fn check(snapshot: &Snapshot) {
    let version = snapshot.version();
    let of = |name: &str| snapshot.get(name).unwrap().values::<u16>().unwrap();
    assert_eq!(of("w"), elements(version), "version {version}");
    assert_eq!(of("v"), vec![version as u16; 1 + version as usize % 5000], "version {version}");
    assert_eq!((of(&format!("n{}", version % 3)), snapshot.len()), (vec![3], 3), "version {version}");
}

/// Commits versions from a number on, until it is killed.
async fn publisher(words: Vec<String>) {
    let worker = builder(CHILD, kind(&words[1])).bind(&words[2]).start().await.unwrap();
    let from = words[3].parse::<u64>().unwrap();
    say(worker.address());
    let mut elements = elements(from);
    for version in from..from + VERSIONS {
        elements[(version * 97 % ELEMENTS) as usize] = version as u16;
        worker.set(SET).commit(version, tensors(&worker, version, &elements)).await.unwrap();
        worker.runtime().sleep(Duration::from_micros(200)).await;
    }
}

/// Follows the set, and accepts each restart.
async fn follower(words: Vec<String>) {
    let worker = builder("/job:child/replica:0/task:1", kind(&words[1])).start().await.unwrap();
    let mut versions = worker.set_address(CHILD, &words[2]).unwrap().set(SET).follow(Policy::Latest);
    let mut lines = parents_lines();
    say("follows");
    loop {
        tokio::select! {
            _ = lines.recv() => return,
            next = versions.next() => match next.unwrap() {
                Ok(staged) => check(&staged.apply()),
                Err(WorkerError::WentBack { .. }) => versions.accept_restart(),
                Err(error) => panic!("{error}"),
            },
        }
    }
}

/// The next version, which is whole and above the one before.
async fn next(versions: &mut Follow, floor: &mut u64) -> Snapshot {
    loop {
        match versions.next().await.unwrap() {
            Ok(staged) => {
                let snapshot = staged.apply();
                check(&snapshot);
                assert!(snapshot.version() > *floor, "{}, then {}", *floor, snapshot.version());
                *floor = snapshot.version();
                return snapshot;
            }
            Err(WorkerError::WentBack { held, offered, .. }) => {
                assert!(held == *floor && offered < held);
                if held % 2 == 0 {
                    versions.accept_restart();
                    *floor = 0;
                }
            }
            Err(error) => panic!("{error}"),
        }
    }
}

fn killed_while_followed(test: &'static str, fabric: &'static str) {
    let many = std::env::var("TENSORWIRE_SET_VERSIONS").ok().map(|count| count.parse::<u64>().unwrap());
    let (followed, kills) = many.map_or((FOLLOWED, KILLS), |many| (many, KILLS_OF_MANY));
    let limit = Duration::from_secs(140 + followed / 20);
    if let Some(words) = role() {
        return bounded(limit + Duration::from_secs(10), |_| async {
            match &*words[0] {
                "publisher" => publisher(words).await,
                _ => follower(words).await,
            }
        });
    }
    bounded(limit, |runtime| async move {
        let worker = builder(PARENT, kind(fabric)).start().await.unwrap();
        let mut life = Other::start(test, &format!("publisher {fabric} 127.0.0.1:0 1"));
        let address = life.hear().await;
        let mut versions = worker.peer_at(&address).await.unwrap().set(SET).follow(Policy::Latest);
        let mut other = Other::start(test, &format!("follower {fabric} {address}"));
        assert_eq!(other.hear().await, "follows");
        let mut floor = 0;
        for kill in 0..kills {
            for _ in 0..followed / kills {
                next(&mut versions, &mut floor).await;
            }
            if kill == kills / 2 {
                // From now on it neither follows nor lets anything go, and slows nobody down.
                other.signal(Signal::STOP);
            }
            runtime.sleep(Duration::from_micros(kill * 1733 % 7000)).await;
            life.kill();
            // Below, or above.
            let from = if kill % 2 == 0 { floor / 2 + 1 } else { floor + 50 };
            life = Other::start(test, &format!("publisher {fabric} {address} {from}"));
            assert_eq!(life.hear().await, address);
        }
        next(&mut versions, &mut floor).await;
        other.signal(Signal::CONT);
        other.tell("end");
        drop(versions);
        worker.shutdown().await;
        assert!(worker.receive_memory().used_bytes == 0, "{:?}", worker.receive_memory());
    });
}

#[test]
fn d_publisher_of_a_set_killed_while_it_is_followed_over_tcp() {
    killed_while_followed("sets::d_publisher_of_a_set_killed_while_it_is_followed_over_tcp", "tcp");
}

#[test]
fn d_publisher_of_a_set_killed_while_it_is_followed_over_shm() {
    killed_while_followed("sets::d_publisher_of_a_set_killed_while_it_is_followed_over_shm", "shm");
}
