//! Each setting of a connection, read back from the device's driver. Soft-RoCE does not store the service level, and
//! has one partition key: for these two the tests check the attributes that are passed to the queue pair, or use an
//! index without a key.

use super::*;
use tensorwire_fabric::{TokioRuntime, Wait};

use crate::{Mtu, Rdma, queue_pair::receiving, sys};

#[path = "../../../fabric/tests/rdma_devices/mod.rs"]
mod rdma_devices;

const DEPTHS: QueuePairConfig = QueuePairConfig { send_depth: 16, receive_depth: 16 };

fn domain(settings: &Rdma) -> VerbsDomain {
    let runtime = Arc::new(TokioRuntime::current().unwrap());
    VerbsDomain::new(Adapter::open(runtime, settings).unwrap(), Spinner::new(Wait::default())).unwrap()
}

fn prepared(settings: &Rdma) -> VerbsPrepared {
    let domain = domain(settings);
    domain.prepare_on(&domain.adapter.opened().unwrap(), DEPTHS).unwrap()
}

/// The attributes of a connected queue pair with `settings`, read back from the driver.
fn connected(settings: &Rdma) -> sys::ibv_qp_attr {
    let rdma_devices::Ends { left, right } = rdma_devices::ends();
    let ours = prepared(&Rdma { device: left, ..settings.clone() });
    let theirs = prepared(&Rdma { device: right, ..Rdma::default() });
    let (queue_pair, _completions) = ours.ends.take().unwrap();
    ours.attach(&queue_pair, &theirs.connection_data()).unwrap();
    queue_pair.attributes()
}

#[tokio::test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
async fn the_timeout_reaches_the_queue_pair() {
    let got = connected(&Rdma { timeout: Some(18), ..Rdma::default() });
    assert_eq!(got.timeout, 18);
}

#[tokio::test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
async fn the_retry_counts_reach_the_queue_pair() {
    let got = connected(&Rdma { retry_count: Some(3), receiver_retry_count: Some(2), ..Rdma::default() });
    assert_eq!((got.retry_cnt, got.rnr_retry), (3, 2));
}

#[tokio::test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
async fn the_traffic_class_reaches_the_queue_pair() {
    let got = connected(&Rdma { traffic_class: Some(0x68), ..Rdma::default() });
    assert_eq!((got.ah_attr.is_global, got.ah_attr.grh.traffic_class), (1, 0x68));
}

#[tokio::test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
async fn the_gid_index_port_and_packet_size_reach_the_queue_pair() {
    let chosen = domain(&Rdma { device: rdma_devices::ends().left, ..Rdma::default() }).adapter;
    let (index, port) = (Some(chosen.source.index), Some(chosen.port.number));
    let got = connected(&Rdma { gid_index: index, port, mtu: Some(Mtu::Bytes512), ..Rdma::default() });
    assert_eq!(Some(got.ah_attr.grh.sgid_index), index);
    assert_eq!(Some(got.ah_attr.port_num), port);
    assert_eq!(Mtu::from_code(got.path_mtu), Some(Mtu::Bytes512));
}

#[tokio::test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
async fn the_partition_key_index_reaches_the_queue_pair() {
    let domain = domain(&Rdma { device: rdma_devices::ends().left, ..Rdma::default() });
    let opened = domain.adapter.opened().unwrap();
    let way = Way::new(
        &Rdma { pkey_index: Some(1), ..Rdma::default() },
        &opened.port,
        &opened.source,
        opened.reads_started(),
    );
    let made = domain.make_ends(&opened, &way, (16, 64)).unwrap();
    let (queue_pair, _completions) = made.ends.take().unwrap();
    assert_eq!(queue_pair.attributes().pkey_index, 1);
}

#[tokio::test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
async fn the_service_level_is_asked_of_the_queue_pair() {
    let ours =
        prepared(&Rdma { device: rdma_devices::ends().left, service_level: Some(5), ..Rdma::default() });
    assert_eq!(ours.here.service_level, 5);
    assert_eq!(receiving(&ours.here, &ours.way, &ours.here).ah_attr.sl, 5);
}
