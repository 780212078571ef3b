//! Short values beside long ones, over one connection between workers of one process.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::cell::RefCell;

use futures::{future::join_all, join};
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{Flow, Peer, Tensor};

use crate::{
    fabrics::assert_moves_over,
    sets::{on, run},
    two::Two,
};

/// Name and length. Longer than the socket's buffers.
const LONG: (&str, usize) = ("long", 32 << 20);

const SHORT: (&str, usize) = ("short", 100_000);

fn content(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at % 251) as u8).collect()
}

/// Two workers, of which the server has published the values.
async fn two(kind: FabricKind, values: &[(&str, usize)], flow: impl Fn(&mut Flow)) -> Two {
    let two = Two::of(|name| on(kind, name).flow(&flow)).await;
    for &(name, length) in values {
        let bytes = Tensor::from_values(two.server.pool(), &[length as u64], &content(length)).unwrap();
        two.server.publish(name, bytes).unwrap();
    }
    two
}

/// Pieces of this length.
fn pieces(bytes: usize) -> impl Fn(&mut Flow) {
    move |flow| flow.piece_bytes = bytes as u32
}

/// Fetches the value, and notes its name.
async fn fetch(peer: &Peer, (name, length): (&'static str, usize), came: &RefCell<Vec<&'static str>>) {
    let fetched = peer.fetch(name).await.unwrap();
    came.borrow_mut().push(name);
    assert!(fetched.bytes() == content(length), "{name}");
}

#[test]
fn a_short_value_does_not_wait_for_a_long_one() {
    run(async {
        let two = two(FabricKind::TCP, &[LONG, SHORT], pieces(256 << 10)).await;
        let came = RefCell::default();
        join!(fetch(&two.peer, LONG, &came), fetch(&two.peer, SHORT, &came));
        assert_eq!(came.into_inner(), ["short", "long"]);
        assert_moves_over(&two.client, FabricKind::TCP);
        two.end().await;
    });
}

#[test]
fn pieces_of_any_length_make_the_whole() {
    for kind in [FabricKind::TCP, FabricKind::SHM] {
        for piece_bytes in [4096, 5003, SHORT.1 / 2, SHORT.1 - 1, SHORT.1, 1 << 30] {
            run(async {
                let two = two(kind, &[SHORT], pieces(piece_bytes)).await;
                let came = RefCell::default();
                let (peer, came) = (&two.peer, &came);
                join!(fetch(peer, SHORT, came), fetch(peer, SHORT, came), fetch(peer, SHORT, came));
                two.end().await;
            });
        }
    }
}

/// Two long contents once kept a turn each and waited for another.
#[test]
fn a_long_value_that_nobody_wants_any_more_holds_up_nothing() {
    run(async {
        let two = two(FabricKind::TCP, &[LONG, SHORT], pieces(256 << 10)).await;
        let (peer, came) = (&two.peer, &RefCell::default());
        for _ in 0..4 {
            let (long, short) = (fetch(peer, LONG, came), fetch(peer, SHORT, came));
            tokio::select! { () = long => {}, () = short => {} }
        }
        join!(fetch(peer, LONG, came), fetch(peer, LONG, came), fetch(peer, SHORT, came));
        two.end().await;
    });
}

/// Contents of two pieces have one that is written ahead. Those pieces, of contents without end, once filled the send queue, which ended
/// the connection.
#[test]
fn pieces_need_no_room_in_the_send_queue_that_others_need() {
    const VALUES: usize = 100;
    run(async {
        let flow = |flow: &mut Flow| {
            (flow.depth, flow.contents_max, flow.requests_max) = (4, 1, VALUES as u32);
            flow.piece_bytes = SHORT.1 as u32 - 1;
        };
        let two = two(FabricKind::TCP, &[SHORT], flow).await;
        let came = &RefCell::default();
        fetch(&two.peer, SHORT, came).await;
        join_all((0..VALUES).map(|_| fetch(&two.peer, SHORT, came))).await;
        two.end().await;
    });
}
