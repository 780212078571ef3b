//! What a recorder of metrics and a subscriber of spans see of transfers.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    future::Future,
    sync::{Arc, Mutex},
    time::Duration,
};

use crate::{bounded::bounded, spans::Spans};
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tensorwire_fabric::FabricKind;
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{Tensor, Worker};
use tracing::Subscriber;
use tracing_subscriber::{
    Layer,
    layer::{Context, SubscriberExt as _},
};

const SERVER: &str = "/job:ps/replica:0/task:0";
const CLIENT: &str = "/job:worker/replica:0/task:0";
const BYTES: usize = 12_000;

/// Too long for a catalogue, so that both sides take part in each fetch over shared memory, too.
fn weights() -> String {
    format!("weights {}", "-".repeat(112))
}

fn run<F: Future<Output = ()>>(test: F) {
    bounded(Duration::from_secs(60), test);
}

fn filled(worker: &Worker, bytes: usize) -> Tensor {
    let mut buffer = worker.pool().try_alloc(bytes).unwrap();
    buffer.fill(7);
    Tensor::new(buffer, DataType::U8, &[bytes as u64]).unwrap()
}

/// Two workers, a published tensor of 12,000 bytes and one sent value of 100.
async fn transfers(kind: FabricKind) -> (Worker, Worker) {
    let start = |name| Worker::builder(name).require(kind).timeout(Duration::from_secs(20)).start();
    let (server, client) = (start(SERVER).await.unwrap(), start(CLIENT).await.unwrap());
    let peer = client.peer_at(server.address()).await.unwrap();
    server.publish(&weights(), filled(&server, BYTES)).unwrap();
    for _ in 0..3 {
        peer.fetch(&weights()).await.unwrap();
    }
    let device = |worker: &str| format!("{worker}/device:CPU:0");
    let key = |worker: &Worker| worker.key(&device(SERVER), &device(CLIENT), "edge").unwrap();
    let sending = server.shared_step(5);
    sending.send(&key(&server), filled(&server, 100)).unwrap();
    client.shared_step(5).recv(&key(&client)).await.unwrap();
    assert!(peer.fetch("nothing").await.is_err());
    (server, client)
}

/// Every figure by name and labels, in one line each.
fn figures(snapshotter: &Snapshotter) -> BTreeMap<String, u64> {
    let snapshot = snapshotter.snapshot().into_vec().into_iter();
    let named = snapshot.map(|(key, unit, help, value)| {
        let mut name = key.key().name().to_owned();
        assert!(unit.is_some() && help.is_some_and(|help| !help.is_empty()), "{name} has no unit or no HELP");
        key.key().labels().for_each(|label| write!(name, " {}={}", label.key(), label.value()).unwrap());
        let value = match value {
            DebugValue::Counter(value) => value,
            DebugValue::Gauge(value) => value.0 as u64,
            // How many times there are; each is of this test.
            DebugValue::Histogram(times) => {
                assert!(times.iter().all(|time| (0.0..60.0).contains(&time.0)), "{name}: {times:?}");
                times.len() as u64
            }
        };
        (name, value)
    });
    named.collect()
}

#[test]
fn a_recorder_sees_transfers_errors_connects_and_pools() {
    if !crate::is_child("observed::a_recorder_sees_transfers_errors_connects_and_pools") {
        return;
    }
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    // For all threads: sessions are served on one of their own.
    recorder.install().unwrap();
    for kind in [FabricKind::SHM, FabricKind::TCP] {
        run(async {
            let (server, client) = transfers(kind).await;
            server.record_metrics();
            client.record_metrics();
            client.shutdown().await;
            server.shutdown().await;
        });
    }
    let found = figures(&snapshotter);
    for kind in [FabricKind::SHM, FabricKind::TCP] {
        let at = |name: &str| found.get(name).copied().unwrap_or_else(|| panic!("{name} not in {found:#?}"));
        let bytes = 3 * BYTES as u64 + 100;
        for (direction, peer) in [("received", SERVER), ("sent", CLIENT)] {
            let labels = format!("direction={direction} peer={peer} transport={kind}");
            assert_eq!(at(&format!("tensorwire_transfers_total {labels}")), 4);
            assert_eq!(at(&format!("tensorwire_bytes_total {labels}")), bytes);
        }
        assert_eq!(at(&format!("tensorwire_errors_total kind=remote peer={SERVER} transport={kind}")), 1);
        for peer in [SERVER, CLIENT] {
            assert_eq!(at(&format!("tensorwire_connects_total peer={peer} transport={kind}")), 1);
        }
        // A goodbye is no loss, at the side that sends it neither.
        for (goodbye, peer) in [("goodbye", CLIENT), ("shut_down_here", SERVER)] {
            assert_eq!(
                at(&format!("tensorwire_closes_total kind={goodbye} peer={peer} transport={kind}")),
                1
            );
        }
        assert!(found.keys().all(|name| !name.starts_with("tensorwire_losses_total")), "{found:#?}");
        // Over both kinds; those that failed have no time.
        for (operation, times) in [("fetch", 6), ("recv", 2), ("fetch_many", 0), ("recv_many", 0)] {
            assert_eq!(at(&format!("tensorwire_receive_seconds operation={operation}")), times);
        }
        assert!(found.keys().all(|name| !name.starts_with("tensorwire_reconnects_total")), "{found:#?}");
        assert!(at(&format!("tensorwire_pool_used_bytes worker={SERVER} pool=source")) >= BYTES as u64);
        assert_eq!(at(&format!("tensorwire_pool_leaked_bytes worker={CLIENT} pool=receive")), 0);
        assert_eq!(at(&format!("tensorwire_peers_connected worker={CLIENT}")), 1);
        assert!(at("tensorwire_copies_total reason=eager") >= 2);
        // Every name is in the book.
        let book = include_str!("../../../docs/src/metrics.md");
        for name in found.keys().filter_map(|name| name.split(' ').next()) {
            assert!(book.contains(&format!("`{name}`")), "{name} is not in docs/src/metrics.md");
        }
    }
}

#[test]
fn a_subscriber_sees_a_span_of_each_transfer_at_both_ends() {
    let _turn = crate::turn();
    for kind in [FabricKind::SHM, FabricKind::TCP] {
        let spans = Spans::default();
        tracing::subscriber::with_default(spans.subscriber(), || {
            run(async {
                let (server, client) = transfers(kind).await;
                client.shutdown().await;
                server.shutdown().await;
            });
        });
        let of = |name: &str, key: &str| {
            let named = spans.named(name).into_iter();
            named.filter(|fields| fields["key"].contains(key)).collect::<Vec<_>>()
        };
        for (name, peer) in [("receive", SERVER), ("send", CLIENT)] {
            let published = of(name, "weights");
            assert_eq!(published.len(), 3, "{name} over {kind}: {spans:?}");
            for fields in published {
                let found = ["peer", "transport", "bytes"].map(|field| fields[field].as_str());
                assert_eq!(found, [peer, kind.name(), "12000"]);
                assert!(!fields.contains_key("step"));
            }
            let sent = of(name, ";edge;");
            assert_eq!((sent.len(), sent[0]["step"].as_str(), sent[0]["bytes"].as_str()), (1, "5", "100"));
            // What failed has no bytes.
            assert!(!of(name, "nothing")[0].contains_key("bytes"));
        }
    }
}

/// Targets and modules of events.
#[derive(Default, Clone)]
struct Noted(Arc<Mutex<Vec<(String, String)>>>);

impl<S: Subscriber> Layer<S> for Noted {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let noted = (metadata.target().to_owned(), metadata.module_path().unwrap_or_default().to_owned());
        self.0.lock().unwrap().push(noted);
    }
}

#[test]
fn the_log_has_targets_that_users_can_name() {
    let _turn = crate::turn();
    let noted = Noted::default();
    let subscriber = tracing_subscriber::registry().with(noted.clone());
    tracing::subscriber::with_default(subscriber, || {
        run(async {
            let (server, client) = transfers(FabricKind::SHM).await;
            client.shutdown().await;
            server.shutdown().await;
        });
    });
    let noted = noted.0.lock().unwrap();
    for (crate_name, target) in
        [("tensorwire_rendezvous", "tensorwire::worker"), ("tensorwire_fabric", "tensorwire::fabric")]
    {
        let of_crate = noted.iter().filter(|(_, module)| module.starts_with(crate_name));
        let targets: std::collections::BTreeSet<_> = of_crate.map(|(target, _)| target.as_str()).collect();
        assert_eq!(targets.into_iter().collect::<Vec<_>>(), [target], "{crate_name}");
    }
}
