//! No leaks: the numbers of descriptors and tasks return to their earlier values. The test has a process of its own,
//! because it counts the descriptors of the whole process.

use std::{sync::Arc, time::Duration};

use futures::future::join;
use tensorwire_fabric::{
    ConnectParams, Domain, Fabric, Immediate, QueuePair, QueuePairConfig, Role, Runtime, TokioRuntime,
    timeout,
};
use tensorwire_fabric_tcp::{TcpConfig, TcpFabric};

use crate::process::{alone, is_child};

const LIMIT: Duration = Duration::from_secs(20);
const DEPTHS: QueuePairConfig = QueuePairConfig { send_depth: 16, receive_depth: 16 };

/// Descriptors of this process and tasks of this runtime.
fn census() -> (usize, usize) {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
    (descriptors, tokio::runtime::Handle::current().metrics().num_alive_tasks())
}

async fn returns_to(runtime: &dyn Runtime, before: (usize, usize), after: &str) {
    let settled = async {
        while census() != before {
            tokio::task::yield_now().await;
        }
    };
    if timeout(runtime, LIMIT, settled).await.is_err() {
        panic!("{after}: {:?} descriptors and tasks are left of {before:?}", census());
    }
}

async fn connect(domain: &Arc<dyn Domain>) -> (QueuePair, QueuePair) {
    let (dialer, acceptor) = (domain.prepare(DEPTHS).unwrap(), domain.prepare(DEPTHS).unwrap());
    let params = |peer, role| ConnectParams { peer, role, peer_address: None, limit: LIMIT };
    let dial = params(acceptor.connection_data(), Role::Dialer);
    let accept = params(dialer.connection_data(), Role::Acceptor);
    let (dialed, accepted) = join(dialer.connect(dial), acceptor.connect(accept)).await;
    let runtime = TokioRuntime::current().unwrap();
    (dialed.unwrap().spawn(&runtime), accepted.unwrap().spawn(&runtime))
}

async fn nothing_is_left_of(runtime: Arc<dyn Runtime>) {
    let empty = census();
    let domain = TcpFabric::new(runtime.clone(), TcpConfig::default()).open_domain().unwrap();
    drop(domain.prepare(DEPTHS).unwrap());
    let listening = census();
    assert_eq!(listening.1, empty.1 + 1, "the listener is a task");
    // tokio's accept must leave nothing else open.
    for _ in 0..20 {
        let (left, right) = connect(&domain).await;
        join(left.close(), right.close()).await;
    }
    returns_to(&*runtime, listening, "closed connections").await;
    for _ in 0..20 {
        let (left, right) = connect(&domain).await;
        left.notify(Immediate(1)).await.unwrap();
        drop(left);
        while right.next_arrival().await.is_ok() {}
        // A failed queue pair that is not dropped holds a descriptor, but no task.
        returns_to(&*runtime, (listening.0 + 1, listening.1), "a failed connection").await;
    }
    returns_to(&*runtime, listening, "dropped connections").await;
    for _ in 0..20 {
        let prepared = domain.prepare(DEPTHS).unwrap();
        let peer = domain.prepare(DEPTHS).unwrap().connection_data();
        let (role, limit) = (Role::Acceptor, Duration::from_millis(1));
        let params = ConnectParams { peer, role, peer_address: None, limit };
        prepared.connect(params).await.unwrap_err();
    }
    returns_to(&*runtime, listening, "connections that never came").await;
    drop(domain);
    returns_to(&*runtime, (listening.0 - 1, empty.1), "the domain").await;
}

#[test]
fn descriptors_and_tasks_return_to_where_they_were() {
    if !is_child() {
        let path = "tcp::leaks::descriptors_and_tasks_return_to_where_they_were";
        return alone(path, |_| Box::pin(async {}));
    }
    let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    tokio.block_on(async {
        let runtime: Arc<dyn Runtime> = Arc::new(TokioRuntime::current().unwrap());
        timeout(&*runtime, 3 * LIMIT, nothing_is_left_of(runtime.clone())).await.expect("a bounded test");
    });
}
