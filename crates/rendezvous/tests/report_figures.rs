//! The figures of reports are those of the metrics.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::single_range_in_vec_init)] // a slice of a tensor of one dimension

use std::{collections::BTreeMap, time::Duration};

use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{Tensor, Worker, WorkerError, report::Traffic};

use crate::bounded::bounded;

const SERVER: &str = "/job:ps/replica:0/task:0";
const CLIENT: &str = "/job:worker/replica:0/task:0";

/// The counters of transfers and connections with each peer, summed over transports and kinds.
fn counted(snapshotter: &Snapshotter) -> BTreeMap<(String, String), u64> {
    let mut sums = BTreeMap::new();
    for (key, _, _, value) in snapshotter.snapshot().into_vec() {
        let labels: BTreeMap<_, _> = key.key().labels().map(|label| (label.key(), label.value())).collect();
        let (Some(peer), DebugValue::Counter(value)) = (labels.get("peer"), value) else { continue };
        let direction = labels.get("direction").copied().unwrap_or_default();
        let figure = format!("{} {direction}", key.key().name());
        *sums.entry(((*peer).to_owned(), figure)).or_default() += value;
    }
    sums
}

fn assert_agrees(peer: &str, traffic: &Traffic, counted: &BTreeMap<(String, String), u64>) {
    let figures = [
        ("tensorwire_transfers_total received", traffic.values_received),
        ("tensorwire_bytes_total received", traffic.bytes_received),
        ("tensorwire_transfers_total sent", traffic.values_sent),
        ("tensorwire_bytes_total sent", traffic.bytes_sent),
        ("tensorwire_errors_total ", traffic.errors),
        ("tensorwire_connects_total ", traffic.connects),
        ("tensorwire_reconnects_total ", traffic.reconnects),
        ("tensorwire_losses_total ", traffic.losses),
    ];
    for (figure, reported) in figures {
        let at = (peer.to_owned(), figure.to_owned());
        let recorded = counted.get(&at).copied().unwrap_or_default();
        assert_eq!(reported, recorded, "{figure} of {peer}: report and recorder");
    }
}

/// Fetches, a slice, a set, values of a step, a call, and a fetch that fails.
async fn transfers(server: &Worker, client: &Worker) {
    let tensor =
        |length: usize| Tensor::from_values(server.pool(), &[length as u64], &vec![1_u8; length]).unwrap();
    let peer = client.peer_at(server.address()).await.unwrap();
    server.publish("short", tensor(4096)).unwrap();
    server.publish("long", tensor(300_000)).unwrap();
    for _ in 0..37 {
        peer.fetch("short").await.unwrap();
    }
    peer.fetch_many(["short", "long"]).await.unwrap();
    peer.fetch_slice("long", &[7..1007]).await.unwrap();
    server.set("policy").commit(1, [("w", tensor(5000))]).await.unwrap();
    peer.set("policy").fetch().await.unwrap();
    let handling =
        server.handle("echo", |call| async move { Ok::<_, WorkerError>(call.arguments().to_vec()) }).unwrap();
    peer.call("echo", [tensor(64)]).await.unwrap();
    drop(handling);
    let step = server.shared_step(5);
    step.to(&server.peer(CLIENT).unwrap()).send("edge", tensor(9000)).unwrap();
    client.shared_step(5).from(&peer).recv("edge").await.unwrap();
    assert!(peer.fetch("nothing").await.is_err());
}

#[test]
fn reports_and_metrics_agree_exactly_on_the_same_transfers() {
    if !crate::is_child("report_figures::reports_and_metrics_agree_exactly_on_the_same_transfers") {
        return;
    }
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    // For all threads: sessions are served on one of their own.
    recorder.install().unwrap();
    bounded(Duration::from_secs(60), async {
        for kind in [FabricKind::TCP, FabricKind::SHM] {
            let start = |name| Worker::builder(name).require(kind).timeout(Duration::from_secs(20)).start();
            let (server, client) = (start(SERVER).await.unwrap(), start(CLIENT).await.unwrap());
            transfers(&server, &client).await;
            let (at_server, at_client) = (server.report(), client.report());
            // What was counted since the last call.
            let counted = counted(&snapshotter);
            assert_agrees(CLIENT, &at_server.peers[0].traffic, &counted);
            assert_agrees(SERVER, &at_client.peers[0].traffic, &counted);
            assert_eq!(at_server.total, Some(at_server.peers[0].traffic));
            let received = at_client.total.unwrap();
            assert!(received.values_received >= 41 && received.errors == 1, "{received:?}");
            client.shutdown().await;
            server.shutdown().await;
            let _ = snapshotter.snapshot();
        }
    });
}
