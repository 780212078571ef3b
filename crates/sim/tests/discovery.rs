//! Discovery while workers crash and restart, sessions break, and the answers of the name change.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    collections::BTreeMap,
    pin::pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::future::{Either, join_all, select};
use tensorwire_fabric::{BoxFuture, Runtime, timeout};
use tensorwire_rendezvous::{
    Worker,
    control::{ControlError, ControlPlane, ControlSession, Secret},
    discovery::Discovered,
};
use tensorwire_sim::{Fault, Handle, Node, Rng, World};

use crate::common::builder;

const SERVERS: usize = 4;
const TURNS: usize = 40;

/// The addresses of the name; `None` if it does not resolve.
type Answer = Arc<Mutex<Option<Vec<String>>>>;

#[derive(Debug)]
struct Named(Arc<dyn ControlPlane>, Answer);

impl ControlPlane for Named {
    fn local_address(&self) -> String {
        self.0.local_address()
    }

    fn dial(&self, address: &str) -> BoxFuture<'static, Result<ControlSession, ControlError>> {
        self.0.dial(address)
    }

    fn resolve(&self, name: &str) -> BoxFuture<'static, Result<Vec<String>, ControlError>> {
        let answer = self.1.lock().unwrap().clone();
        let detail = "the test says so".to_owned();
        let answer = answer.ok_or(ControlError::Unreachable { address: name.to_owned(), detail });
        Box::pin(std::future::ready(answer))
    }

    fn accept(&self) -> BoxFuture<'_, Result<ControlSession, ControlError>> {
        self.0.accept()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.0.close()
    }

    fn ambient_secret(&self, address: &str) -> BoxFuture<'static, Result<Option<Secret>, ControlError>> {
        self.0.ambient_secret(address)
    }
}

fn address(server: usize) -> String {
    format!("server{server}:1")
}

async fn start(handle: &Handle, server: usize) -> (Node, Worker) {
    let node = handle.start_node(&address(server)).unwrap();
    let worker = builder(&node, &format!("/job:server/replica:0/task:{server}")).start().await.unwrap();
    (node, worker)
}

/// What happens to the servers and their name. Returns all servers, which run and are listed.
async fn changes(handle: &Handle, client: &Node, answer: &Answer) -> Vec<Worker> {
    let mut rng = Rng::new(handle.seed()).fork(11);
    let mut servers: Vec<Option<(Node, Worker)>> = Vec::new();
    for server in 0..SERVERS {
        servers.push(Some(start(handle, server).await));
    }
    for _ in 0..TURNS {
        let server = rng.below(SERVERS);
        match (rng.below(6), servers[server].take()) {
            (0, Some((node, _worker))) => node.crash(),
            (1, Some((node, worker))) => {
                worker.shutdown().await;
                node.crash();
            }
            (_, None) => servers[server] = Some(start(handle, server).await),
            (2, Some((node, worker))) => {
                handle.inject(Fault::LoseControl(node.id(), client.id()));
                servers[server] = Some((node, worker));
            }
            (3, kept) => {
                servers[server] = kept;
                *answer.lock().unwrap() = None;
            }
            (_, kept) => {
                servers[server] = kept;
                let listed = (0..SERVERS).filter(|_| rng.chance(3, 4)).map(address);
                *answer.lock().unwrap() = Some(listed.chain([client.address().to_owned()]).collect());
            }
        }
        handle.runtime().sleep(rng.duration(Duration::from_secs(3))).await;
    }
    for (server, running) in servers.iter_mut().enumerate() {
        if running.is_none() {
            *running = Some(start(handle, server).await);
        }
    }
    *answer.lock().unwrap() = Some((0..SERVERS).map(address).collect());
    servers.into_iter().map(|running| running.unwrap().1).collect()
}

/// The incarnations of the workers that are found, by name.
type Present = BTreeMap<String, Option<u64>>;

fn note(present: &mut Present, change: Discovered) {
    match change {
        Discovered::Found(peer) => {
            let before = present.insert(peer.name().to_owned(), peer.incarnation());
            assert!(before.is_none(), "{} is found twice", peer.name());
        }
        Discovered::Gone(peer) => {
            assert!(present.remove(peer.name()).is_some(), "{} was not found", peer.name());
        }
        Discovered::Failed { address, .. } => assert_ne!(address, "client:1", "it fails to discover itself"),
        other => panic!("{other:?}"),
    }
}

async fn discovers(handle: Handle) {
    let node = handle.start_node("client:1").unwrap();
    let answer = Answer::default();
    let plane = Arc::new(Named(node.control_plane(), answer.clone()));
    let client = builder(&node, "/job:client/replica:0/task:0").dangerous_control_plane(plane);
    let client = client.start().await.unwrap();
    let mut discovery = client.discover("servers:1").every(Duration::from_secs(1));
    let mut present = Present::new();
    let mut changing = pin!(changes(&handle, &node, &answer));
    let servers = loop {
        match select(discovery.next(), &mut changing).await {
            Either::Left((change, _)) => note(&mut present, change.unwrap().unwrap()),
            Either::Right((servers, _)) => break servers,
        }
    };
    let of = |worker: &Worker| (worker.name().to_owned(), Some(worker.incarnation()));
    let expected: Present = servers.iter().map(of).collect();
    let settled = async {
        while present != expected {
            note(&mut present, discovery.next().await.unwrap().unwrap());
        }
    };
    let limit = Duration::from_secs(120);
    timeout(&*handle.runtime(), limit, settled).await.expect("all servers are found in the end");
    drop(discovery);
    join_all(servers.iter().chain([&client]).map(Worker::shutdown)).await;
}

#[test]
fn d_a_discovery_has_every_worker_once_whatever_happens_to_them_and_to_their_name() {
    for seed in 0..100 {
        let world = World::new(seed);
        world.replayed_by("discovery");
        world.run(discovers(world.handle())).unwrap();
        world.finish().unwrap();
    }
}
