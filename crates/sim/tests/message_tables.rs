//! The cost of each kind of transfer on the simulator, under many seeds, by whole workers.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../rendezvous/tests/tables/mod.rs"]
mod tables;

use tables::{RECEIVER, SENDER, Two};
use tensorwire_protocol::{Mode, Validation};
use tensorwire_rendezvous::Worker;
use tensorwire_sim::{Handle, Node, World};

use crate::common::builder;

const SEEDS: u64 = 30;

async fn worker(node: &Node, name: &str, (mode, validation): (Mode, Validation)) -> Worker {
    builder(node, name).flow(|flow| flow.mode = mode).validation(validation).start().await.unwrap()
}

async fn scenario(handle: Handle, mode: Mode, validation: Validation) {
    let (sender_node, receiver_node) =
        (handle.start_node("sender:1").unwrap(), handle.start_node("receiver:1").unwrap());
    let (sender, receiver) = (
        worker(&sender_node, SENDER, (mode, validation)).await,
        worker(&receiver_node, RECEIVER, (mode, Validation::Off)).await,
    );
    receiver.peer_at("sender:1").await.unwrap();
    let two = Two { sender, receiver, runtime: handle.runtime(), mode, validation };
    two.all_cases().await;
    two.receiver.shutdown().await;
    two.sender.shutdown().await;
}

fn on_seeds(mode: Mode, validation: Validation) {
    for seed in 0..SEEDS {
        let world = World::new(seed);
        world.replayed_by("message_tables");
        world.run(scenario(world.handle(), mode, validation)).unwrap();
        world.finish().unwrap();
    }
}

#[test]
fn s3_6_every_case_costs_what_the_original_does() {
    on_seeds(Mode::Original, Validation::Off);
}

#[test]
fn s3_6_every_case_costs_what_the_table_says() {
    on_seeds(Mode::default(), Validation::Off);
}

#[test]
fn s3_11_every_validated_case_costs_what_the_original_does() {
    on_seeds(Mode::Original, Validation::Crc32c);
}

#[test]
fn s3_11_every_validated_case_costs_what_the_table_says() {
    on_seeds(Mode::default(), Validation::Xxh3);
}
