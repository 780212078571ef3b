//! The rules of boards in a world.

use std::{sync::Arc, time::Duration};

use futures::future::join;
use tensorwire_fabric::{
    Board, ConnectParams, Fabric, FabricKind, QueuePair, QueuePairConfig, Role, Runtime,
};
use tensorwire_sim::{Handle, Node, World};

const LIMIT: Duration = Duration::from_secs(10);

const DEPTHS: QueuePairConfig = QueuePairConfig { send_depth: 4, receive_depth: 4 };

/// A connection of `kind` between two processes.
async fn connected(handle: &Handle, kind: FabricKind) -> ([Node; 2], [QueuePair; 2]) {
    let nodes = ["left:1", "right:1"].map(|address| handle.start_node(address).unwrap());
    let prepared =
        nodes.each_ref().map(|node| node.fabric_as(kind).open_domain().unwrap().prepare(DEPTHS).unwrap());
    let [left, right] = prepared;
    let params = |peer, role| ConnectParams { peer, role, peer_address: None, limit: LIMIT };
    let dial = params(right.connection_data(), Role::Dialer);
    let accept = params(left.connection_data(), Role::Acceptor);
    let (left, right) = join(left.connect(dial), right.connect(accept)).await;
    let [one, other] = &nodes;
    let pairs = [left.unwrap().spawn(&*one.runtime()), right.unwrap().spawn(&*other.runtime())];
    (nodes, pairs)
}

fn boards(pairs: &[QueuePair; 2]) -> [Arc<dyn Board>; 2] {
    pairs.each_ref().map(|pair| pair.shared_memory().unwrap().board().unwrap())
}

/// Whether the world of `seed` shows a word that was only stored the first time that the peer reads.
fn shows_at_once(seed: u64) -> bool {
    let world = World::new(seed);
    let handle = world.handle();
    world
        .run(async move {
            let (_nodes, pairs) = connected(&handle, FabricKind::SHM).await;
            let [one, other] = boards(&pairs);
            assert_eq!((one.peer(8), other.peer(8)), (0, 0));
            one.publish(8, &[1, 2]);
            one.publish(16, &[3]);
            let at_once = other.peer(16) == 3;
            assert!(!at_once || (other.peer(8), other.peer(9)) == (1, 2), "stores come in order");
            one.announce(24, 4);
            assert_eq!([8, 9, 16, 24].map(|at| other.peer(at)), [1, 2, 3, 4]);
            other.publish(8, &[5]);
            assert_eq!((other.peer_after_own(24), one.peer(8), one.peer(8 + 4096)), (4, 5, 5));
            at_once
        })
        .unwrap()
}

#[test]
fn words_become_visible_in_order_and_at_the_latest_when_their_side_looks() {
    let at_once = (0..64).filter(|seed| shows_at_once(*seed)).count();
    assert!((1..64).contains(&at_once), "{at_once} of 64");
}

#[test]
fn words_of_the_dead_stay_and_their_destructors_store_nothing() {
    let world = World::new(1);
    let handle = world.handle();
    world
        .run(async move {
            let (nodes, pairs) = connected(&handle, FabricKind::SHM).await;
            let [one, other] = boards(&pairs);
            one.announce(0, 1);
            nodes[0].crash();
            one.announce(0, 2);
            assert_eq!(other.peer(0), 1);
            drop(pairs);
            handle.runtime().sleep(LIMIT).await;
            assert_eq!(other.peer_after_own(0), 1, "the connection is over");
        })
        .unwrap();
}

#[test]
fn other_kinds_have_no_boards() {
    let world = World::new(1);
    let handle = world.handle();
    world
        .run(async move {
            let (_nodes, pairs) = connected(&handle, FabricKind::SIM).await;
            assert!(pairs.iter().all(|pair| pair.shared_memory().unwrap().board().is_none()));
        })
        .unwrap();
}
