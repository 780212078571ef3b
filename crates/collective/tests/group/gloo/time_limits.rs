//! One rank alone calls a collective with a short limit: the error names in time the ranks for which it waited.

use std::time::Duration;

use tensorwire_collective::{Collective, Group, GroupError};
use tensorwire_fabric::FabricKind;

use super::tensor;
use crate::{
    group::{over_fabrics_and_verbs, ranks},
    rdma::patient,
};

over_fabrics_and_verbs! {
    allgather_test_timeout,
    allreduce_test_timeout,
    alltoall_test_timeout,
    barrier_test_timeout,
    broadcast_test_timeout,
    gather_test_timeout,
    reduce_test_timeout,
    reduce_scatter_test_timeout,
    scatter_test_timeout,
    close_test_timeout,
    derive_test_timeout,
    unbound_timeout_override,
}

/// The limit of the call.
const LIMIT: Duration = Duration::from_millis(10);

/// What rank 1 of three gets when it calls alone, within the limit that it set.
async fn alone<T>(fabric: FabricKind, call: impl AsyncFn(Group) -> Result<T, GroupError>) {
    let ranks = ranks(fabric, 3).await;
    let group = ranks.groups[1].clone();
    let runtime = group.worker().runtime().clone();
    let began = runtime.now();
    let Err(error) = call(group).await else { panic!("nobody else has called") };
    let took = runtime.now() - began;
    assert!(took >= LIMIT && took < patient(Duration::from_secs(5)), "{took:?}");
    let GroupError::TimedOut { limit, waiting_for, silent, .. } = &error else { panic!("{error}") };
    assert_eq!((*limit, waiting_for == silent), (LIMIT, true), "{error}");
    assert!(!silent.is_empty() && silent.iter().all(|rank| [0, 2].contains(rank)), "{error}");
    assert!(error.to_string().contains("was not complete after 10ms"), "{error}");
    ranks.shutdown().await;
}

async fn limited<T: Send + 'static>(call: Collective<T>) -> Result<T, GroupError> {
    call.timeout(LIMIT).await
}

async fn allgather_test_timeout(fabric: FabricKind) {
    alone(fabric, async |group| limited(group.all_gather(tensor(&group, &[1]))).await).await;
}

async fn allreduce_test_timeout(fabric: FabricKind) {
    for count in [0, 1, 100_000] {
        alone(fabric, async |group| group.all_reduce(&mut vec![1.0f32; count]).timeout(LIMIT).await).await;
    }
}

async fn alltoall_test_timeout(fabric: FabricKind) {
    alone(fabric, async |group| {
        limited(group.all_to_all([0; 3].map(|value| tensor(&group, &[value])).into())).await
    })
    .await;
}

async fn barrier_test_timeout(fabric: FabricKind) {
    alone(fabric, async |group| limited(group.barrier()).await).await;
}

async fn broadcast_test_timeout(fabric: FabricKind) {
    alone(fabric, async |group| limited(group.broadcast(0, None)).await).await;
    // The root waits too, until it has compared the call of the other ranks.
    alone(fabric, async |group| limited(group.broadcast(1, Some(tensor(&group, &[1])))).await).await;
}

async fn gather_test_timeout(fabric: FabricKind) {
    for root in 0..3 {
        alone(fabric, async |group| limited(group.gather(root, tensor(&group, &[1]))).await).await;
    }
}

async fn reduce_test_timeout(fabric: FabricKind) {
    for root in 0..3 {
        alone(fabric, async |group| group.reduce(root, &mut [1u8; 100]).timeout(LIMIT).await).await;
    }
}

async fn reduce_scatter_test_timeout(fabric: FabricKind) {
    alone(fabric, async |group| group.reduce_scatter(&mut [1u8; 9], &[2, 3, 4]).timeout(LIMIT).await).await;
}

async fn scatter_test_timeout(fabric: FabricKind) {
    alone(fabric, async |group| limited(group.scatter(0, None)).await).await;
    alone(fabric, async |group| {
        limited(group.scatter(1, Some([0; 3].map(|value| tensor(&group, &[value])).into()))).await
    })
    .await;
}

async fn close_test_timeout(fabric: FabricKind) {
    alone(fabric, async |group| limited(group.close()).await).await;
}

async fn derive_test_timeout(fabric: FabricKind) {
    alone(fabric, async |group| limited(group.derive("derived")).await).await;
}

/// A call's own limit counts, also if it is longer than the group's.
async fn unbound_timeout_override(fabric: FabricKind) {
    let ranks = crate::group::ranks_within(fabric, 2, patient(Duration::from_secs(1))).await;
    let long = patient(Duration::from_millis(1500));
    let late = ranks.each(async |group| {
        if group.rank() == 1 {
            group.worker().runtime().sleep(long).await;
        }
        group.barrier().timeout(long * 20).await
    });
    late.await.into_iter().for_each(|ended| ended.unwrap());
    ranks.shutdown().await;
}
