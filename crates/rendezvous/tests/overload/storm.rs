//! A thousand peers of one worker, all at once, and all again each time it comes back.

use std::time::Duration;

use futures::future::join_all;
use tensorwire_fabric::{FabricKind, Runtime, TokioRuntime};
use tensorwire_rendezvous::Worker;

use crate::{
    harness::{Other, bounded, kind, parents_lines, role, say, step},
    stage::{SERVER, builder, fetch, held, one_honest_visit, publish, raise_descriptor_limit, size, until},
};

/// Workers of one process.
const OF_A_PROCESS: usize = 250;

/// How much the server's process may grow: in all, and for each peer that is connected.
const GROWTH_MAX: u64 = 48 << 20;
const PEER_BYTES_MAX: u64 = 512 << 10;

/// How often the server lives. A thousand peers of twelve lives took 13.5 MiB more at the third, and then no more than 7.
fn lives() -> u8 {
    size("TENSORWIRE_LIVES", 4).try_into().unwrap()
}

/// How much more memory the process may hold when all are connected to the last life than when all were to the one before.
/// Between lives the figure means little: how much the allocator gives back then differed by 70 MiB from run to run.
const LAST_GROWTH_MAX: u64 = 8 << 20;
const LAST_PEER_BYTES_MAX: u64 = 8 << 10;

/// Descriptors of one connected peer: its session, and the sockets and bells of its data connection.
const PEER_DESCRIPTORS_MAX: usize = 6;

/// Fetches until it succeeds: how often it did not.
async fn fetch_at_last(client: &Worker, address: &str, fill: u8) -> usize {
    let runtime = TokioRuntime::current().unwrap();
    let mut failures = 0;
    while let Err(error) = fetch(client, address, fill).await {
        failures += 1;
        assert!(failures < 2000, "{}: {error}", client.name());
        runtime.sleep(Duration::from_millis(20 + (runtime.random() % 80))).await;
    }
    failures
}

/// The peers of one process: connect, and connect again or leave when the parent sends that.
async fn peers(words: Vec<String>) {
    raise_descriptor_limit();
    let (fabric, address) = (kind(&words[1]), &words[2]);
    let (first, count): (usize, usize) = (words[3].parse().unwrap(), words[4].parse().unwrap());
    let mut workers = Vec::new();
    for number in first..first + count {
        let name = format!("/job:peer/replica:0/task:{number}");
        workers.push(builder(&name, fabric).start().await.unwrap());
    }
    say("ready");
    let mut told = parents_lines();
    for fill in 1..=lives() {
        assert_eq!(told.recv().await.as_deref(), Some("go"));
        let failures: usize =
            join_all(workers.iter().map(|worker| fetch_at_last(worker, address, fill))).await.iter().sum();
        say(&format!("fetched {failures}"));
    }
    assert_eq!(told.recv().await.as_deref(), Some("leave"));
    join_all(workers.iter().map(Worker::shutdown)).await;
    say("left");
    told.recv().await;
}

/// The next line of each of them; `take` may fail the test.
async fn hear_all(others: &mut [Other], mut take: impl FnMut(String)) {
    for other in others {
        take(other.hear().await);
    }
}

/// A life of the server, whose address they know: all peers come at once, and stay.
async fn a_life(server: &Worker, fill: u8, others: &mut [Other], count: usize) {
    publish(server, fill);
    let mut failures = Vec::new();
    others.iter_mut().for_each(|other| other.tell("go"));
    hear_all(others, |said| failures.push(said)).await;
    println!("{count} peers, life {fill}: {failures:?}");
    assert_eq!(server.peers().iter().filter(|peer| peer.transport.is_some()).count(), count);
}

async fn storm(test: &'static str, fabric: &'static str, count: usize) {
    raise_descriptor_limit();
    let mut server = builder(SERVER, kind(fabric)).start().await.unwrap();
    publish(&server, 1);
    let address = server.address().to_owned();
    one_honest_visit(&address, kind(fabric)).await;
    let firsts: Vec<usize> = (0..count).step_by(OF_A_PROCESS).collect();
    let start = |first: &usize| {
        let of_it = OF_A_PROCESS.min(count - first);
        Other::start(test, &format!("peers {fabric} {address} {first} {of_it}"))
    };
    let mut others: Vec<Other> = firsts.iter().map(start).collect();
    hear_all(&mut others, |said| assert_eq!(said, "ready")).await;
    let before = held();
    a_life(&server, 1, &mut others, count).await;
    before.assert_at_most(
        GROWTH_MAX + count as u64 * PEER_BYTES_MAX,
        count * PEER_DESCRIPTORS_MAX + 16,
        "all are connected",
    );
    let mut one_before = before.clone();
    for life in 2..=lives() {
        one_before = held();
        step("the server's end", server.shutdown()).await;
        drop(server);
        // At the same address: all of them come at once.
        server = builder(SERVER, kind(fabric)).bind(&address).start().await.unwrap();
        a_life(&server, life, &mut others, count).await;
    }
    let growth = LAST_GROWTH_MAX + count as u64 * LAST_PEER_BYTES_MAX;
    one_before.assert_at_most(growth, 16, "all are connected to the last life");
    others.iter_mut().for_each(|other| other.tell("leave"));
    hear_all(&mut others, |said| assert_eq!(said, "left")).await;
    until("the last session's end", || server.peers().iter().all(|peer| peer.transport.is_none())).await;
    before.until_closed("the last descriptor's close").await;
    until("the memory's return", || server.receive_memory().used_bytes == 0).await;
    assert_eq!(server.receive_memory().leaked_bytes, 0);
    server.shutdown().await;
}

fn storm_over(test: &'static str, fabric: &'static str) {
    if let Some(words) = role() {
        return bounded(Duration::from_secs(400), |_| peers(words));
    }
    let _turn = crate::stage::alone();
    let count = size("TENSORWIRE_PEERS", 30);
    bounded(Duration::from_secs(500), |_| storm(test, fabric, count));
}

#[test]
fn s4_peers_that_all_connect_at_once_are_served_and_again_after_a_restart_over_tcp() {
    storm_over(
        "storm::s4_peers_that_all_connect_at_once_are_served_and_again_after_a_restart_over_tcp",
        FabricKind::TCP.name(),
    );
}

#[test]
fn s4_peers_that_all_connect_at_once_are_served_and_again_after_a_restart_over_shm() {
    storm_over(
        "storm::s4_peers_that_all_connect_at_once_are_served_and_again_after_a_restart_over_shm",
        FabricKind::SHM.name(),
    );
}
