//! Notes between two workers of one host: notes in the mailbox and notes by message arrive in order, whatever happens
//! between two stores, while channels are opened again and again.
//!
//! `SIM_SEEDS=2000` runs as many seeds, `SIM_SEED=7` runs one.

use std::{sync::Arc, time::Duration};

use futures::future::join;
use tensorwire_fabric::{BoxFuture, FabricKind, Runtime};
use tensorwire_rendezvous::{Notes, Peer, Worker};
use tensorwire_sim::{Handle, Node, Rng, Violation};

use crate::{common::builder, figures::every_seed_twice, join_all::join_all};

/// Seeds that run if `SIM_SEEDS` is not set.
const SEEDS: u64 = 100;

/// Channels that are open at a time, and how often each is opened.
const CHANNELS: u64 = 3;
const OPENINGS: usize = 4;
const LANES: u16 = 3;

/// Bytes of a note: in one box of the mailbox, in two, and in so many that few have room, and the next goes by message.
const LENGTHS: [usize; 4] = [2, 60, 113, Notes::BYTES_MAX];

async fn worker(node: &Node, kind: FabricKind) -> Worker {
    let builder = builder(node, &format!("/job:{}/replica:0/task:0", &node.address()[..4]));
    let started = builder.local_fabrics(vec![node.fabric_as(kind)]).start();
    node.run("start", started).await.unwrap().unwrap()
}

/// One side of an opening: it sends and takes `count` notes in each lane. In the last lane, the side that does not
/// begin answers each note, so that no later note reveals one that was missed.
struct Side {
    handle: Handle,
    node: Node,
    notes: Notes,
    count: u8,
    begins: bool,
}

impl Side {
    async fn live(self, mut rng: Rng) {
        let side = Arc::new(self);
        let mut tasks = Vec::new();
        // Each is a task of its own, so that a wake-up of one polls no other.
        let mut run = |task: BoxFuture<'static, ()>| tasks.push(side.node.run("lane", task));
        for lane in 0..LANES - 1 {
            run(Box::pin(side.clone().send_all(lane, rng.fork(2 * u64::from(lane)))));
            run(Box::pin(side.clone().take_all(lane, rng.fork(2 * u64::from(lane) + 1))));
        }
        run(Box::pin(side.clone().take_turns(LANES - 1, rng.fork(2 * u64::from(LANES - 1)))));
        join_all(tasks).await;
        side.pause(&mut rng).await;
    }

    async fn send_all(self: Arc<Self>, lane: u16, mut rng: Rng) {
        for number in 0..self.count {
            self.send(lane, number, &mut rng).await;
        }
    }

    async fn take_all(self: Arc<Self>, lane: u16, mut rng: Rng) {
        for number in 0..self.count {
            self.take(lane, number, &mut rng).await;
        }
    }

    async fn take_turns(self: Arc<Self>, lane: u16, mut rng: Rng) {
        for number in 0..self.count {
            if self.begins {
                self.send(lane, number, &mut rng).await;
            }
            self.take(lane, number, &mut rng).await;
            if !self.begins {
                self.send(lane, number, &mut rng).await;
            }
        }
    }

    async fn send(&self, lane: u16, number: u8, rng: &mut Rng) {
        self.pause(rng).await;
        let rest = vec![number; rng.pick(LENGTHS) - 2];
        self.notes.send(lane, &[&[lane as u8, number], &rest]).await.unwrap();
    }

    async fn take(&self, lane: u16, number: u8, rng: &mut Rng) {
        self.pause(rng).await;
        let note = self.notes.recv(lane).await.unwrap();
        let is_right = note[..2] == [lane as u8, number] && note[2..].iter().all(|byte| *byte == number);
        if !is_right || !LENGTHS.contains(&note.len()) {
            self.handle.fail(Violation::Data(format!("note {number} of lane {lane}: {:?}", &note[..])));
        }
    }

    async fn pause(&self, rng: &mut Rng) {
        if rng.chance(1, 4) {
            self.node.runtime().sleep(rng.duration(Duration::from_micros(100))).await;
        }
    }
}

async fn channel(handle: &Handle, nodes: &[Node; 2], peers: &[Peer; 2], channel: u64, mut rng: Rng) {
    for _ in 0..OPENINGS {
        let [one, other] = peers;
        let (one, other) = join(one.notes(channel, LANES), other.notes(channel, LANES)).await;
        let count = rng.pick([0, 1, 7]);
        let lives = nodes.iter().zip([one, other]).map(|(node, notes)| {
            let (handle, begins) = (handle.clone(), node.address() == "left:1");
            let side = Side { handle, node: node.clone(), notes: notes.unwrap(), count, begins };
            node.run("side", side.live(rng.fork(u64::from(begins))))
        });
        join_all(lives.collect::<Vec<_>>()).await;
    }
}

async fn scenario(handle: Handle) {
    let mut rng = Rng::new(handle.seed()).fork(92);
    let kind = rng.pick([FabricKind::SHM, FabricKind::SHM, FabricKind::SHM, FabricKind::SIM]);
    handle.take_chances();
    let nodes = ["left:1", "rite:1"].map(|address| handle.start_node(address).unwrap());
    let (left, right) = join(worker(&nodes[0], kind), worker(&nodes[1], kind)).await;
    let peer = left.peer_at("rite:1").await.unwrap();
    peer.connect().await.unwrap();
    let peers = [peer, right.peer(left.name()).unwrap()];
    let channels = (0..CHANNELS).map(|number| channel(&handle, &nodes, &peers, number, rng.fork(number)));
    join_all(channels.collect::<Vec<_>>()).await;
    for (node, worker) in nodes.iter().zip([left, right]) {
        node.run("shutdown", async move { worker.shutdown().await }).await.unwrap();
    }
}

#[test]
fn notes_come_in_order_twice() {
    every_seed_twice("notes", SEEDS, scenario);
}
