//! Clients of a store on networks that lose packets. Hosts are network namespaces.

use std::{future::Future, sync::Arc, time::Duration};

use tensorwire_collective::store::{Store, StoreError, TcpStore};
use tensorwire_fabric::{Runtime, TokioRuntime, timeout};

use crate::namespaces::{TWOFOLD, within};

const LIMIT: Duration = Duration::from_secs(10);

fn bounded<F: Future<Output = ()>>(body: impl FnOnce(Arc<dyn Runtime>) -> F) {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio.block_on(async {
        let runtime = TokioRuntime::current().unwrap();
        timeout(&runtime.clone(), LIMIT * 3, body(Arc::new(runtime))).await.unwrap();
    });
}

/// Serves a store at `address`, and connects to it at `HOST` with its port.
async fn served_and_reached(address: &str, host: &str, runtime: &Arc<dyn Runtime>) -> TcpStore {
    let (served, bound) = TcpStore::serve(address, runtime.clone()).await.unwrap();
    served.set("key", b"value").await.unwrap();
    let reached = TcpStore::connect(&format!("{host}:{}", bound.port()), LIMIT / 2, runtime.clone()).await;
    let reached = reached.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(reached.get(&["key".to_owned()]).await.unwrap(), [Some(b"value".to_vec())]);
    served
}

#[test]
fn an_address_of_a_store_that_swallows_packets_costs_a_moment_and_errors_name_all_addresses() {
    const TEST: &str =
        "networks::an_address_of_a_store_that_swallows_packets_costs_a_moment_and_errors_name_all_addresses";
    within(TEST, TWOFOLD, None, || {
        bounded(|runtime| async move {
            let _served = served_and_reached("127.0.0.1:0", "twofold", &runtime).await;
            let error = TcpStore::connect("twofold:9", LIMIT / 10, runtime).await.unwrap_err().to_string();
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
        bounded(|runtime| async move {
            let address = "127.0.0.1:40000";
            let mut early = Box::pin(TcpStore::connect(address, LIMIT, runtime.clone()));
            let still = timeout(&*runtime, LIMIT / 100, early.as_mut()).await;
            assert!(still.is_err(), "{still:?}");
            let (served, _) = TcpStore::serve(address, runtime.clone()).await.unwrap();
            served.set("key", b"value").await.unwrap();
            let connected: Result<_, StoreError> = early.await;
            assert_eq!(connected.unwrap().get(&["key".to_owned()]).await.unwrap(), [Some(b"value".to_vec())]);
        });
    });
}

#[test]
fn the_zone_of_a_link_local_address_leads_to_the_store() {
    const TEST: &str = "networks::the_zone_of_a_link_local_address_leads_to_the_store";
    let set_up = "ip link add link0 type veth peer name link1; ip link set link0 up; ip address add fe80::1/64 dev link0 nodad";
    within(TEST, set_up, None, || {
        bounded(|runtime| async move {
            served_and_reached("[fe80::1%link0]:0", "[fe80::1%link0]", &runtime).await;
        });
    });
}
