//! Short values beside long ones, over one connection between workers of one process.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{cell::RefCell, time::Duration};

use futures::{future::join_all, join};
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{Peer, Tensor, Worker};

use crate::{
    fabrics::{assert_moves_over, over},
    two::Two,
};

/// More than the socket's buffers take.
const LONG: usize = 32 << 20;

const SHORT: usize = 100_000;

fn content(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at % 251) as u8).collect()
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(test);
}

async fn two(kind: FabricKind, piece_bytes: u32) -> Two {
    let two =
        Two::of(|name| over(Worker::builder(name), kind).flow(|flow| flow.piece_bytes = piece_bytes)).await;
    for (name, length) in [("long", LONG), ("short", SHORT)] {
        let bytes = Tensor::from_values(two.server.pool(), &[length as u64], &content(length)).unwrap();
        two.server.publish(name, bytes).unwrap();
    }
    two
}

/// Fetches the value, and notes its name.
async fn fetch<'a>(peer: &Peer, name: &'a str, came: &RefCell<Vec<&'a str>>) {
    let fetched = peer.fetch(name).timeout(Duration::from_secs(60)).await.unwrap();
    came.borrow_mut().push(name);
    assert!(fetched.bytes() == content(fetched.bytes().len()), "{name}");
}

#[test]
fn a_short_value_does_not_wait_for_a_long_one() {
    run(async {
        let two = two(FabricKind::TCP, 256 << 10).await;
        let came = RefCell::default();
        join!(fetch(&two.peer, "long", &came), fetch(&two.peer, "short", &came));
        assert_eq!(came.into_inner(), ["short", "long"]);
        assert_moves_over(&two.client, FabricKind::TCP);
        two.end().await;
    });
}

#[test]
fn pieces_of_any_length_make_the_whole() {
    for kind in [FabricKind::TCP, FabricKind::SHM] {
        for piece_bytes in [4096, 5003, SHORT as u32 / 2, SHORT as u32 - 1, SHORT as u32, 1 << 30] {
            run(async {
                let two = two(kind, piece_bytes).await;
                let came = RefCell::default();
                let (peer, came) = (&two.peer, &came);
                join!(fetch(peer, "short", came), fetch(peer, "short", came), fetch(peer, "short", came));
                two.end().await;
            });
        }
    }
}

/// Two long contents once kept a turn each and waited for another.
#[test]
fn a_long_value_that_nobody_wants_any_more_holds_up_nothing() {
    run(async {
        let two = two(FabricKind::TCP, 256 << 10).await;
        let (peer, came) = (&two.peer, &RefCell::default());
        for _ in 0..4 {
            let (long, short) = (fetch(peer, "long", came), fetch(peer, "short", came));
            tokio::select! { () = long => {}, () = short => {} }
        }
        join!(fetch(peer, "long", came), fetch(peer, "long", came), fetch(peer, "short", came));
        two.end().await;
    });
}

/// Contents of two pieces have one that is written ahead. Those pieces, of contents without end, once filled the send queue, which ended
/// the connection.
#[test]
fn pieces_need_no_room_in_the_send_queue_that_others_need() {
    const VALUES: usize = 100;
    run(async {
        let builder = |name: &str| {
            over(Worker::builder(name), FabricKind::TCP).flow(|flow| {
                (flow.depth, flow.contents_max, flow.requests_max) = (4, 1, VALUES as u32);
                flow.piece_bytes = SHORT as u32 - 1;
            })
        };
        let two = Two::of(builder).await;
        let bytes = Tensor::from_values(two.server.pool(), &[SHORT as u64], &content(SHORT)).unwrap();
        two.server.publish("short", bytes).unwrap();
        let came = &RefCell::default();
        fetch(&two.peer, "short", came).await;
        join_all((0..VALUES).map(|_| fetch(&two.peer, "short", came))).await;
        two.end().await;
    });
}
