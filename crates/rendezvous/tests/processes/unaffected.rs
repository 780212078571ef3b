//! What a stopped peer costs the others: nothing but their own processor's time, which it uses less of.

use std::{sync::Arc, time::Duration};

use futures::{FutureExt, StreamExt, future::join_all, stream::FuturesUnordered};
use rustix::process::Signal;
use tensorwire_fabric::Runtime;
use tensorwire_protocol::Key;
use tensorwire_rendezvous::Peer;

use crate::{
    crowd::number,
    harness::{Other, bounded, builder, is_version, kind, parents_lines, role, say, tensor},
    rdma::patient,
};

const SERVER: &str = "/job:server/replica:0/task:0";
const CLIENT: &str = "/job:client/replica:0/task:0";
const STOPPED: &str = "/job:stopped/replica:0/task:0";

/// Of what is fetched, in bytes.
const BYTES: usize = 256 << 10;

/// Far longer than a round: the stopped one is not lost meanwhile.
const LIVENESS: Duration = Duration::from_secs(60);

/// Of one round, and the time before it in which things settle.
const ROUND: Duration = Duration::from_millis(250);
const SETTLE: Duration = Duration::from_millis(30);

/// What is outstanding at the peer that is stopped or idle: receives of values that it never sends, and values sent to it
/// that it never receives.
const OUTSTANDING: usize = 64;

fn device(worker: &str) -> String {
    format!("{worker}/device:CPU:0")
}

/// Publishes, and is there.
async fn server(words: &[String]) {
    let worker = builder(SERVER, kind(&words[1])).liveness(LIVENESS).start().await.unwrap();
    worker.publish("x", tensor(&worker, BYTES, 1).await).unwrap();
    say(worker.address());
    parents_lines().recv().await;
}

/// Idle: it asks for nothing.
async fn idle(words: &[String]) {
    let worker = builder(STOPPED, kind(&words[1])).liveness(LIVENESS).start().await.unwrap();
    worker.publish("x", tensor(&worker, BYTES, 1).await).unwrap();
    say(worker.address());
    parents_lines().recv().await;
}

/// Fetches from the server for one round at each of the parent's lines, and reports how often; with much outstanding at
/// the other peer.
async fn client(words: &[String], runtime: Arc<dyn Runtime>) {
    let worker =
        builder(CLIENT, kind(&words[1])).timeout(LIVENESS * 60).liveness(LIVENESS).start().await.unwrap();
    let server = worker.peer_at(&words[2]).await.unwrap();
    let other = worker.peer_at(&words[3]).await.unwrap();
    other.fetch("x").await.unwrap();
    let never =
        (0..OUTSTANDING).map(|number| worker.key(&device(STOPPED), &device(CLIENT), &number.to_string()));
    let never: Vec<Key> = never.map(Result::unwrap).collect();
    let at_step = worker.shared_step(1);
    for number in 0..OUTSTANDING {
        let key = worker.key(&device(CLIENT), &device(STOPPED), &number.to_string()).unwrap();
        at_step.send(&key, tensor(&worker, BYTES, 2).await).unwrap();
    }
    let mut outstanding: FuturesUnordered<_> =
        never.iter().map(|key| at_step.recv(key).into_future()).collect();
    assert!(outstanding.next().now_or_never().is_none());
    let mut lines = parents_lines();
    say("ready");
    while lines.recv().await.is_some() {
        say(&fetches(&server, &*runtime).await.to_string());
    }
}

/// How many fetches fit into a round.
async fn fetches(server: &Peer, runtime: &dyn Runtime) -> u64 {
    let (mut count, began) = (0, runtime.now());
    while runtime.now() - began < ROUND {
        let got = join_all([server.fetch("x").into_future(), server.fetch("x").into_future()]).await;
        for tensor in got {
            assert!(is_version(tensor.unwrap().bytes(), 1));
            count += 1;
        }
    }
    count
}

fn median(of: &mut [f64]) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

/// `TENSORWIRE_STOP_PAIRS` pairs of rounds: with the other peer idle, and with it stopped.
fn pairs() -> u64 {
    number("TENSORWIRE_STOP_PAIRS").unwrap_or(41)
}

async fn measured(test: &'static str, fabric: &'static str, runtime: Arc<dyn Runtime>) {
    let (mut server, mut other) =
        (Other::start(test, &format!("server {fabric}")), Other::start(test, &format!("idle {fabric}")));
    let (serves, rests) = (server.hear().await, other.hear().await);
    let mut client = Other::start(test, &format!("client {fabric} {serves} {rests}"));
    assert_eq!(client.hear().await, "ready");
    let (mut ratios, mut rates) = (Vec::new(), Vec::new());
    for pair in 0..pairs() {
        let mut counts = [0.0; 2];
        // Which of the two comes first takes turns.
        for place in [pair % 2, (pair + 1) % 2] {
            let is_stopped = place == 1;
            if is_stopped {
                other.signal(Signal::STOP);
            }
            runtime.sleep(SETTLE).await;
            client.tell("round");
            counts[place as usize] = client.hear().await.parse().unwrap();
            if is_stopped {
                other.signal(Signal::CONT);
            }
        }
        rates.push(counts[0]);
        ratios.push(counts[1] / counts[0]);
    }
    let (ratio, rate) = (median(&mut ratios), median(&mut rates));
    println!(
        "{fabric}: {rate} fetches of {BYTES} bytes in {ROUND:?} beside an idle peer; beside a stopped one {:.1} % of it \
         (median of {} pairs; quartiles {:.1} and {:.1} %)",
        100.0 * ratio,
        ratios.len(),
        100.0 * ratios[ratios.len() / 4],
        100.0 * ratios[ratios.len() * 3 / 4]
    );
    assert!(ratio > 0.9, "a stopped peer takes {:.1} % of the others' throughput", 100.0 * (1.0 - ratio));
}

fn unaffected(test: &'static str, fabric: &'static str) {
    let limit = Duration::from_secs(60) + patient(ROUND + SETTLE) * 4 * pairs() as u32;
    if let Some(words) = role() {
        return bounded(limit, |runtime| async move {
            match words[0].as_str() {
                "server" => server(&words).await,
                "client" => client(&words, runtime).await,
                _ => idle(&words).await,
            }
        });
    }
    bounded(limit, |runtime| measured(test, fabric, runtime));
}

#[test]
#[ignore = "a measurement: .ci/long makes it"]
fn s6_a_stopped_peer_takes_less_than_a_tenth_of_the_others_throughput_over_shm() {
    unaffected(
        "unaffected::s6_a_stopped_peer_takes_less_than_a_tenth_of_the_others_throughput_over_shm",
        "shm",
    );
}

#[test]
#[ignore = "a measurement: .ci/long makes it"]
fn s6_a_stopped_peer_takes_less_than_a_tenth_of_the_others_throughput_over_tcp() {
    unaffected(
        "unaffected::s6_a_stopped_peer_takes_less_than_a_tenth_of_the_others_throughput_over_tcp",
        "tcp",
    );
}
