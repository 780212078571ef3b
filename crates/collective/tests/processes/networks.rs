//! Clients of a store on networks that lose packets. Hosts are network namespaces.

use std::{future::Future, time::Duration};

use tensorwire_collective::store::{MemoryStore, Store, StoreError, WorkerStore};
use tensorwire_fabric::{FabricKind, TokioRuntime, timeout};
use tensorwire_rendezvous::{Worker, WorkerBuilder, control::Secret};

use crate::namespaces::{TWOFOLD, within};

const LIMIT: Duration = Duration::from_secs(10);

fn bounded<F: Future<Output = ()>>(body: F) {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio.block_on(async {
        timeout(&TokioRuntime::current().unwrap(), LIMIT * 3, body).await.unwrap();
    });
}

fn builder() -> WorkerBuilder {
    let secret = Secret::new(*b"a secret of all the ranks").unwrap();
    Worker::client().require(FabricKind::TCP).secret(secret)
}

/// A store with a value, and the worker that serves it at `address`.
async fn serve(address: &str) -> (MemoryStore, Worker) {
    let worker = builder().bind(address).start().await.unwrap();
    let store = MemoryStore::new(worker.runtime().clone());
    store.set("key", b"value").await.unwrap();
    store.serve(&worker).unwrap();
    (store, worker)
}

async fn connect(address: &str, limit: Duration) -> Result<WorkerStore, StoreError> {
    connect_with(builder(), address, limit).await
}

async fn connect_with(
    builder: WorkerBuilder,
    address: &str,
    limit: Duration,
) -> Result<WorkerStore, StoreError> {
    let connected = WorkerStore::connect(&builder.start().await.unwrap(), address, limit).await?;
    assert_eq!(connected.get(&["key".to_owned()]).await.unwrap(), [Some(b"value".to_vec())]);
    Ok(connected)
}

/// Serves a store at `address`, and connects to it at `HOST` with its port.
async fn served_and_reached(address: &str, host: &str) -> (MemoryStore, Worker) {
    let served = serve(address).await;
    let port = served.1.address().rsplit_once(':').unwrap().1;
    let reached = connect(&format!("{host}:{port}"), LIMIT / 2).await;
    reached.unwrap_or_else(|error| panic!("{error}"));
    served
}

#[test]
fn an_address_of_a_store_that_swallows_packets_costs_a_moment_and_errors_name_all_addresses() {
    const TEST: &str =
        "networks::an_address_of_a_store_that_swallows_packets_costs_a_moment_and_errors_name_all_addresses";
    within(TEST, TWOFOLD, None, || {
        bounded(async {
            let _served = served_and_reached("127.0.0.1:0", "twofold").await;
            // A dial takes up to ten seconds, and its error names the addresses.
            let error = connect("twofold:9", LIMIT + LIMIT / 5).await.unwrap_err().to_string();
            for reason in ["[2001:db8::2]:9: no answer", "127.0.0.1:9: connection refused"] {
                assert!(error.contains(reason), "no `{reason}`: {error}");
            }
        });
    });
}

#[test]
fn a_client_that_comes_before_its_store_is_not_connected_to_itself() {
    const TEST: &str = "networks::a_client_that_comes_before_its_store_is_not_connected_to_itself";
    // The system tries the first port first.
    let ports = "echo 40000 40001 >/proc/sys/net/ipv4/ip_local_port_range";
    within(TEST, ports, None, || {
        bounded(async {
            let address = "127.0.0.1:40000";
            // Its own worker takes none of the two ports.
            let mut early = Box::pin(connect_with(builder().bind("127.0.0.1:9000"), address, LIMIT));
            let still = timeout(&TokioRuntime::current().unwrap(), LIMIT / 100, early.as_mut()).await;
            assert!(still.is_err(), "{still:?}");
            let _served = serve(address).await;
            early.await.unwrap();
        });
    });
}

#[test]
fn the_zone_of_a_link_local_address_leads_to_the_store() {
    const TEST: &str = "networks::the_zone_of_a_link_local_address_leads_to_the_store";
    let set_up = "ip link add link0 type veth peer name link1; ip link set link0 up; ip address add fe80::1/64 dev link0 nodad";
    within(TEST, set_up, None, || {
        bounded(async {
            served_and_reached("[fe80::1%link0]:0", "[fe80::1%link0]").await;
        });
    });
}
