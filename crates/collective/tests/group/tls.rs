//! Groups of workers with TLS: a group joins, combines and closes, and a worker with a certificate of others cannot join.

use std::{sync::OnceLock, time::Duration};

use tensorwire_collective::{Algorithm, Group, GroupError};
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{
    Worker,
    tls::test_certificates::{Authority, Wanted},
};

use super::{PATIENCE, joined, over_fabrics, store, tensor, values};
use crate::join_all::join_all;

over_fabrics! {
    a_group_of_workers_with_tls_joins_and_makes_every_kind_of_call,
    a_worker_with_a_certificate_of_others_joins_no_group,
    a_worker_without_tls_joins_no_group_that_has_it,
}

/// The CA that the ranks trust.
fn authority() -> &'static Authority {
    static AUTHORITY: OnceLock<Authority> = OnceLock::new();
    AUTHORITY.get_or_init(|| Authority::new().unwrap())
}

/// A worker whose certificate names it.
async fn worker(rank: usize, fabric: FabricKind, authority: &Authority) -> Worker {
    let name = format!("/job:rank-{rank}/replica:0/task:0");
    let identity = authority.issue(&Wanted::worker(&name)).unwrap().identity().unwrap();
    Worker::builder(&name).require(fabric).tls(identity).start().await.unwrap()
}

async fn a_group_of_workers_with_tls_joins_and_makes_every_kind_of_call(fabric: FabricKind) {
    let workers = join_all((0..3).map(async |rank| worker(rank, fabric, authority()).await)).await;
    let ranks = joined(workers, PATIENCE).await;
    let done = ranks.each(async |group| {
        for count in [1, 1_000, 300_000] {
            let mut own = vec![1i64 + group.rank() as i64; count];
            group.all_reduce(&mut own).await.unwrap();
            group.all_reduce(&mut own).algorithm(Algorithm::Ring).await.unwrap();
            assert!(own.iter().all(|sum| *sum == 18), "{count}");
        }
        let all = group.all_gather(tensor(&group, &[group.rank() as i32; 5_000])).await.unwrap();
        assert_eq!(all.iter().map(|one| values(one)[4_999]).collect::<Vec<_>>(), [0, 1, 2]);
        let derived = group.derive("more").await.unwrap();
        derived.barrier().await.unwrap();
        let sent = derived.send((group.rank() + 1) % 3, 1, tensor(&group, &[7])).unwrap();
        assert_eq!(values(&derived.recv(.., 1).await.unwrap().tensor), [7]);
        sent.await.unwrap();
        derived.close().await.unwrap();
    });
    done.await;
    ranks.shutdown().await;
}

/// Two workers that join a group of two. Both get an error, none a group.
async fn refused(workers: [Worker; 2]) -> [GroupError; 2] {
    let store = store();
    let join = async |rank: usize| {
        let builder = Group::builder(store.clone(), rank, 2).name("tests").timeout(Duration::from_secs(3));
        builder.join(&workers[rank]).await.unwrap_err()
    };
    let (one, other) = futures::join!(join(0), join(1));
    for worker in &workers {
        assert!(worker.peers().iter().all(|peer| peer.transport.is_none()), "{:?}", worker.peers());
    }
    join_all(workers.iter().map(Worker::shutdown)).await;
    [one, other]
}

async fn a_worker_with_a_certificate_of_others_joins_no_group(fabric: FabricKind) {
    let foreign = Authority::new().unwrap();
    let errors = refused([worker(0, fabric, authority()).await, worker(1, fabric, &foreign).await]).await;
    assert!(errors.iter().any(|error| error.to_string().contains("certificate")), "{errors:?}");
}

async fn a_worker_without_tls_joins_no_group_that_has_it(fabric: FabricKind) {
    let plain = Worker::builder("rank-1").require(fabric).start().await.unwrap();
    let errors = refused([worker(0, fabric, authority()).await, plain]).await;
    assert!(errors.iter().any(|error| error.to_string().contains("TLS")), "{errors:?}");
}
