//! Peers that are killed at any moment of a transfer.

use std::{env, time::Duration};

use rustix::process::Signal;
use tensorwire_fabric::Runtime;
use tensorwire_rendezvous::{Peer, Worker, WorkerError};

use crate::harness::{
    ALWAYS_ASKED, Other, PARENT, bounded, builder, info, is_version, kind, parents_lines, role, say, step,
    tensor,
};

/// Of each transfer, in bytes.
const LARGE: usize = 64 << 20;

/// Of what the other peer fetches, in bytes.
const SMALL: usize = 64 << 10;

const VICTIM: &str = "/job:victim/replica:0/task:0";
const BYSTANDER: &str = "/job:bystander/replica:0/task:0";

/// Rounds of each fabric: `TENSORWIRE_KILL_ROUNDS`, or as many as every change can wait for.
fn rounds() -> u64 {
    env::var("TENSORWIRE_KILL_ROUNDS")
        .map_or(40, |text| text.parse().expect("TENSORWIRE_KILL_ROUNDS is a number"))
}

/// Publishes, and fetches what the parent has published, again and again, until it is killed.
async fn victim(words: Vec<String>) {
    let (fabric, address, version) = (kind(&words[1]), &words[2], words[3].parse().unwrap());
    let worker = builder(VICTIM, fabric).start().await.unwrap();
    if version % 2 == 0 {
        worker.publish("large", tensor(&worker, LARGE, version).await).unwrap();
        say(worker.address());
        parents_lines().recv().await;
        return;
    }
    let parent = worker.peer_at(address).await.unwrap();
    say(worker.address());
    loop {
        let got = parent.fetch("large").await.unwrap();
        assert!(is_version(got.bytes(), 0), "wrong bytes before the kill");
    }
}

/// Fetches small tensors until the parent stops it; then reports how many arrived.
async fn bystander(words: Vec<String>) {
    let worker = builder(BYSTANDER, kind(&words[1])).start().await.unwrap();
    let parent = worker.peer_at(&words[2]).await.unwrap();
    let mut lines = parents_lines();
    let mut fetched = 0u64;
    while lines.try_recv().is_err() {
        let got = parent.fetch(ALWAYS_ASKED).await.unwrap();
        assert!(is_version(got.bytes(), 7));
        fetched += 1;
        if fetched == 1 {
            say("fetching");
        }
    }
    say(&fetched.to_string());
}

async fn child(words: Vec<String>) {
    match words[0].as_str() {
        "victim" => victim(words).await,
        _ => bystander(words).await,
    }
}

/// A moment within `span`, another one in each round.
fn moment(round: u64, span: Duration) -> Duration {
    let mixed = round.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
    span.mul_f64((mixed % 1_000) as f64 / 1_000.0)
}

struct Killing<'test> {
    runtime: &'test dyn Runtime,
    worker: &'test Worker,
    test: &'test str,
    fabric: &'test str,
    /// Kills come within this time of a fetch's start. It shrinks with each kill that came too late and grows with each
    /// that cut a fetch short, so that about half of them do on any machine, however fast and however busy it is.
    span: Duration,
}

impl Killing<'_> {
    /// One round; true if a fetch here was cut short. In odd rounds the victim fetches instead.
    async fn round(&mut self, round: u64) -> bool {
        let role = format!("victim {} {} {round}", self.fabric, self.worker.address());
        let mut victim = Other::start(self.test, &role);
        let address = victim.hear().await;
        if round % 2 == 1 {
            // It fetches from here.
            self.runtime.sleep(moment(round, self.span)).await;
            victim.kill();
            return false;
        }
        let peer = self.worker.peer_at(&address).await.unwrap();
        let fetched = async { peer.fetch("large").await };
        let killed = async {
            self.runtime.sleep(moment(round, self.span)).await;
            victim.signal(Signal::KILL);
        };
        let (fetched, ()) = step("a fetch from a killed peer", futures::future::join(fetched, killed)).await;
        self.span = self.span.mul_f64(if fetched.is_ok() { 0.8 } else { 1.25 });
        match fetched {
            Ok(tensor) => {
                assert!(is_version(tensor.bytes(), round), "round {round}: wrong bytes");
            }
            Err(error) => {
                let lost =
                    matches!(&error, WorkerError::PeerLost { transfer, .. } if transfer.peer == VICTIM);
                let before = matches!(&error, WorkerError::NoFabric { .. } | WorkerError::Control(_));
                assert!(lost || before, "round {round}: {error}");
                return true;
            }
        }
        false
    }

    /// The other peer's traffic does, however short of processors both are.
    async fn goes_on_with(&self, other: &Peer) {
        let operations = || info(self.worker, other).fabric.operations;
        let before = operations();
        let more = async {
            while operations() == before {
                self.runtime.sleep(Duration::from_millis(1)).await;
            }
        };
        step("the other peer's traffic", more).await;
    }

    /// No memory stays in use for dead peers.
    async fn memory_is_back(&self) {
        let back = async {
            while self.worker.receive_memory().used_bytes > 0 {
                self.runtime.sleep(Duration::from_millis(1)).await;
            }
        };
        step("the return of the receive memory", back).await;
        assert_eq!(self.worker.receive_memory().leaked_bytes, 0);
    }
}

fn kill_at_random(test: &'static str, fabric: &'static str) {
    if let Some(words) = role() {
        return bounded(Duration::from_secs(600), |_| child(words));
    }
    bounded(Duration::from_secs(900), |runtime| async move {
        let worker = builder(PARENT, kind(fabric)).start().await.unwrap();
        worker.publish("large", tensor(&worker, LARGE, 0).await).unwrap();
        worker.publish(ALWAYS_ASKED, tensor(&worker, SMALL, 7).await).unwrap();
        let mut bystander = Other::start(test, &format!("bystander {fabric} {}", worker.address()));
        assert_eq!(bystander.hear().await, "fetching");
        let neighbour = worker.peer(BYSTANDER).unwrap();
        let span = Duration::from_millis(40);
        let mut killing = Killing { runtime: &*runtime, worker: &worker, test, fabric, span };
        let mut cut = 0;
        for round in 0..rounds() {
            cut += u64::from(killing.round(round).await);
            killing.memory_is_back().await;
            killing.goes_on_with(&neighbour).await;
        }
        assert!(cut > rounds() / 8, "only {cut} of {} kills came before a fetch's end", rounds().div_ceil(2));
        bystander.tell("stop");
        assert!(bystander.hear().await.parse::<u64>().unwrap() > rounds());
        worker.withdraw("large");
        worker.withdraw(ALWAYS_ASKED);
        worker.shutdown().await;
        assert_eq!(worker.pool().stats().used_bytes, 0, "values are kept for dead peers");
    });
}

#[test]
fn d_peer_sigkill_at_any_moment_of_a_transfer_over_shm() {
    kill_at_random("crash::d_peer_sigkill_at_any_moment_of_a_transfer_over_shm", "shm");
}

#[test]
fn d_peer_sigkill_at_any_moment_of_a_transfer_over_tcp() {
    kill_at_random("crash::d_peer_sigkill_at_any_moment_of_a_transfer_over_tcp", "tcp");
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn d_peer_sigkill_at_any_moment_of_a_transfer_over_verbs() {
    kill_at_random("crash::d_peer_sigkill_at_any_moment_of_a_transfer_over_verbs", "verbs");
}
