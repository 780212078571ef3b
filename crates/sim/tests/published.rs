//! Versions of published tensors, and waits for them, on the simulator, under many seeds.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../rendezvous/tests/editions/mod.rs"]
mod editions;

use editions::{CLIENT, REQUESTS, SERVER, Two};
use tensorwire_protocol::{Mode, Validation};
use tensorwire_rendezvous::Worker;
use tensorwire_sim::{Handle, Node, World};

use crate::common::builder;

async fn worker(node: &Node, name: &str, (mode, validation): (Mode, Validation)) -> Worker {
    let builder = builder(node, name).validation(validation).flow(|flow| {
        flow.mode = mode;
        flow.requests_max = REQUESTS;
    });
    builder.start().await.unwrap()
}

async fn scenario(handle: Handle, settings: (Mode, Validation)) {
    let (server_node, client_node) =
        (handle.start_node("server:1").unwrap(), handle.start_node("client:1").unwrap());
    let server = worker(&server_node, SERVER, settings).await;
    let client = worker(&client_node, CLIENT, settings).await;
    let peer = client.peer_at("server:1").await.unwrap();
    let two = Two { server, client, peer };
    two.every_case().await;
    two.the_end().await;
}

#[test]
fn versions_and_waits() {
    for seed in 0..30 {
        let settings = match seed % 3 {
            0 => (Mode::default(), Validation::Off),
            1 => (Mode::Original, Validation::Off),
            _ => (Mode::default(), Validation::Xxh3),
        };
        let world = World::new(seed);
        world.replayed_by("published");
        world.run(scenario(world.handle(), settings)).unwrap();
        world.finish().unwrap();
    }
}
