//! An authenticated member that breaks a rule of the protocol: its own connection ends, by that rule's name, and
//! nothing else.

use std::{fs, time::Duration};

use tensorwire_fabric::Runtime;
use tensorwire_rendezvous::{PeerLoss, Worker, WorkerError};

use crate::{
    harness::{
        ALWAYS_ASKED, Other, PARENT, PARENT_CPU, bounded, builder, info, is_version, kind, parents_lines,
        role, say, step, tensor,
    },
    rogue::{ROGUE, ROGUE_CPU, Rogue},
};

const BYSTANDER: &str = "/job:bystander/replica:0/task:0";

/// What the rogue does, and words that the error of the transfer with it must have.
const DEEDS: [(&str, &str); 16] = [
    ("malformed", "cannot be decoded"),
    ("endless_record", "cannot be decoded"),
    ("reserved_index", "cannot be decoded"),
    ("reserved_immediate", "reserved immediate"),
    ("content_unasked", "content that no request allowed"),
    ("loan_unasked", "lent memory that no request asked for"),
    ("cancel_ack_unasked", "acknowledged a cancel that was never sent"),
    ("flood", "more requests outstanding than agreed"),
    ("duplicate_request", "used the index of an open request again"),
    ("re_request_unasked", "TENSOR_RE_REQUEST where none was due"),
    ("returned_too_much", "returned more credits or ring bytes"),
    ("unknown_name", "by an undefined number"),
    ("answer_without_ask", "ANSWER without an ASK"),
    ("illegal_frame", "a frame that is illegal now"),
    ("garbage_frame", "broke the control protocol"),
    ("frame_of_nothing", "broke the control protocol"),
];

/// How much the worker's memory may grow over all deeds.
const GROWTH_MAX: u64 = 24 << 20;

async fn child(words: Vec<String>, runtime: std::sync::Arc<dyn Runtime>) {
    let fabric = kind(&words[1]);
    if words[0] == "bystander" {
        return bystander(&words).await;
    }
    let mut rogue = Rogue::join(fabric, &words[2], &words[3], runtime).await;
    say("up");
    rogue.asked().await;
    rogue.commit(&words[0]).await;
    if words[0] == "connects_over_the_cap" {
        say(&rogue.refused_with("data connections of this session").await);
    } else {
        rogue.ended().await;
        say("ended");
    }
    parents_lines().recv().await;
}

/// Fetches without rest until the parent stops it.
async fn bystander(words: &[String]) {
    let worker = builder(BYSTANDER, kind(&words[1])).start().await.unwrap();
    let parent = worker.peer_at(&words[2]).await.unwrap();
    let mut lines = parents_lines();
    let mut said = false;
    while lines.try_recv().is_err() {
        assert!(is_version(parent.fetch(ALWAYS_ASKED).await.unwrap().bytes(), 1));
        if !std::mem::replace(&mut said, true) {
            say("fetching");
        }
    }
    say("well");
}

fn resident_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

struct Suffering<'test> {
    runtime: &'test dyn Runtime,
    worker: &'test Worker,
    test: &'test str,
    fabric: &'test str,
}

impl Suffering<'_> {
    fn start(&self, role: &str) -> Other {
        let asked = self.worker.key(PARENT_CPU, ROGUE_CPU, "never").unwrap();
        Other::start(self.test, &format!("{role} {} {} {asked}", self.fabric, self.worker.address()))
    }

    /// Waits until `done`.
    async fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        let waited = async {
            while !done() {
                self.runtime.sleep(Duration::from_millis(1)).await;
            }
        };
        step(what, waited).await;
    }

    /// One rogue, its deed, and the error of the receive that waits for it.
    async fn one(&self, number: i64, deed: &str, words: &str) {
        let mut rogue = self.start(deed);
        assert_eq!(rogue.hear().await, "up", "{deed}");
        let key = self.worker.key(ROGUE_CPU, PARENT_CPU, "wanted").unwrap();
        let error = step(deed, self.worker.shared_step(number).recv(&key).into_future()).await.unwrap_err();
        let WorkerError::PeerLost { transfer, loss, detail, .. } = &error else { panic!("{deed}: {error}") };
        assert_eq!((transfer.peer.as_str(), *loss), (ROGUE, PeerLoss::Misbehaved), "{deed}: {error}");
        assert!(detail.contains(words), "{deed}: {error}");
        assert_eq!(rogue.hear().await, "ended", "{deed}");
        rogue.kill();
        self.until("the memory's return", || self.worker.receive_memory().used_bytes == 0).await;
        assert_eq!(self.worker.receive_memory().leaked_bytes, 0, "{deed}");
    }
}

fn hostile_members(test: &'static str, fabric: &'static str) {
    if let Some(words) = role() {
        return bounded(Duration::from_secs(120), |runtime| child(words, runtime));
    }
    bounded(Duration::from_secs(240), |runtime| async move {
        let worker = builder(PARENT, kind(fabric)).start().await.unwrap();
        worker.publish(ALWAYS_ASKED, tensor(&worker, 50_000, 1).await).unwrap();
        let suffering = Suffering { runtime: &*runtime, worker: &worker, test, fabric };
        let mut bystander = suffering.start("bystander");
        assert_eq!(bystander.hear().await, "fetching");
        let neighbour = worker.peer(BYSTANDER).unwrap();
        suffering.one(100, DEEDS[0].0, DEEDS[0].1).await;
        let (resident, descriptors) = (resident_bytes(), open_descriptors());
        for (number, (deed, words)) in DEEDS.into_iter().enumerate() {
            let before = info(&worker, &neighbour).fabric.operations;
            suffering.one(number as i64, deed, words).await;
            let gone_on = || info(&worker, &neighbour).fabric.operations > before + 10;
            suffering.until("the other peer's traffic", gone_on).await;
        }
        let grown = resident_bytes().saturating_sub(resident);
        assert!(cfg!(asan) || grown < GROWTH_MAX, "{grown} bytes more are resident");
        suffering.until("the descriptors' close", || open_descriptors() <= descriptors).await;
        // One that only asks for too much is refused, with the reason.
        let mut rogue = suffering.start("connects_over_the_cap");
        assert_eq!(rogue.hear().await, "up");
        let key = worker.key(ROGUE_CPU, PARENT_CPU, "wanted").unwrap();
        let at_step = worker.shared_step(50);
        let told = async {
            let told = rogue.hear().await;
            assert!(told.contains("ResourceExhausted") && told.contains("16 data connections"), "{told}");
            rogue.kill();
        };
        let (lost, ()) =
            step("the last loss", futures::future::join(at_step.recv(&key).into_future(), told)).await;
        assert!(matches!(lost, Err(WorkerError::PeerLost { .. })), "{lost:?}");
        bystander.tell("stop");
        assert_eq!(bystander.hear().await, "well");
        worker.shutdown().await;
    });
}

#[test]
fn d_peer_misbehaves_as_an_authenticated_member_over_shm() {
    hostile_members("hostile::d_peer_misbehaves_as_an_authenticated_member_over_shm", "shm");
}

#[test]
fn d_peer_misbehaves_as_an_authenticated_member_over_tcp() {
    hostile_members("hostile::d_peer_misbehaves_as_an_authenticated_member_over_tcp", "tcp");
}
