//! A peer that requests tensors that do not exist, as often as it can.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    pin::pin,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use futures::future::{Either, join, join3, select};
use tensorwire_fabric::Runtime;
use tensorwire_protocol::Code;
use tensorwire_rendezvous::{Peer, Tensor, Worker, WorkerError};
use tensorwire_sim::{Handle, World};

use crate::common::builder;
use crate::join_all::join_all;

/// How long it sends requests.
const FLOOD: Duration = Duration::from_millis(300);

/// Maximum number of its outstanding requests: the setting's default.
const OUTSTANDING: u64 = 256;

/// Requests that are refused at once, and in a second after that.
const AT_ONCE: u64 = 1024;
const A_SECOND: u64 = 5000;

/// An honest peer's fetches meanwhile.
const FETCHES: u32 = 40;

/// Longest shutdown: no shutdown waits for refusals.
const END: Duration = Duration::from_secs(1);

async fn worker(handle: &Handle, name: &str) -> Worker {
    builder(&handle.start_node(&format!("{name}:1")).unwrap(), name).start().await.unwrap()
}

/// Has one request refused after the other.
async fn flood(peer: &Peer, refused: &AtomicU64) {
    loop {
        match peer.fetch("nothing").await {
            Err(WorkerError::Remote { status, .. }) if status.code == Code::NotFound => {
                refused.fetch_add(1, Ordering::Relaxed);
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Requests that were refused, and how long the peer asked.
async fn flooded(handle: &Handle) -> (u64, Duration) {
    let [server, flooder, honest] =
        [worker(handle, "server").await, worker(handle, "flooder").await, worker(handle, "honest").await];
    server.publish("x", Tensor::from_values(server.pool(), &[1], &[7u32]).unwrap()).unwrap();
    let to_flood = flooder.peer_at("server:1").await.unwrap();
    let to_fetch = honest.peer_at("server:1").await.unwrap();
    let (refused, began) = (AtomicU64::new(0), handle.now());
    {
        let flooding = pin!(join_all((0..OUTSTANDING).map(|_| flood(&to_flood, &refused))));
        let fetching = async {
            for _ in 0..FETCHES {
                assert_eq!(to_fetch.fetch("x").await.unwrap().values::<u32>().unwrap(), [7]);
            }
        };
        let others = pin!(join(handle.runtime().sleep(FLOOD), fetching));
        let Either::Right(_) = select(flooding, others).await else { panic!("the flood has ended") };
    }
    let (refused, asked) = (refused.into_inner(), handle.now() - began);
    let began = handle.now();
    join3(server.shutdown(), flooder.shutdown(), honest.shutdown()).await;
    let took = handle.now() - began;
    assert!(took < END, "{took:?}");
    (refused, asked)
}

#[test]
fn s6_a_peer_that_asks_for_what_is_not_there_is_refused_at_a_pace_and_others_are_served() {
    let mut has_waited = false;
    for seed in 0..10 {
        let world = World::new(seed);
        world.replayed_by("refusals");
        let (refused, asked) = world.run(flooded(&world.handle())).unwrap();
        let most = AT_ONCE + (asked.as_secs_f64() * A_SECOND as f64) as u64;
        assert!(refused <= most, "{refused} in {asked:?}, at most {most}");
        has_waited |= refused > AT_ONCE;
        world.finish().unwrap();
    }
    assert!(has_waited, "no seed asks often enough");
}
