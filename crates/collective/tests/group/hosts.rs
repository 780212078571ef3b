//! Groups on several hosts: shared memory within each, TCP between them.

use std::sync::Arc;

use tensorwire_collective::{Algorithm, Group, GroupError};
use tensorwire_fabric::{Fabric, FabricKind, Runtime, TokioRuntime};
use tensorwire_fabric_shm::ShmFabric;
use tensorwire_fabric_tcp::{TcpConfig, TcpFabric};
use tensorwire_rendezvous::Worker;

use super::{PATIENCE, Ranks, algorithms, joined};
use crate::join_all::join_all;

/// Not divisible by the ranks, and longer than the segment of a network.
const COUNT: usize = 100_003;

/// A worker that shares memory with those on the same host.
async fn worker_on(host: &str, rank: usize) -> Worker {
    let runtime: Arc<dyn Runtime> = Arc::new(TokioRuntime::current().unwrap());
    let within = ShmFabric::new(runtime.clone()).unwrap().with_host(host);
    let between = TcpFabric::new(runtime, TcpConfig::default());
    let fabrics: Vec<Arc<dyn Fabric>> = vec![Arc::new(within), Arc::new(between)];
    let builder = Worker::builder(&format!("rank_{rank}")).local_fabrics(fabrics);
    builder.memory(|memory| memory.block_bytes = 1 << 20).start().await.unwrap()
}

/// A group with a rank for each letter, on the host of that letter.
pub(super) async fn ranks_on(hosts: &str) -> Ranks {
    let workers =
        hosts.chars().enumerate().map(|(rank, host)| async move { worker_on(&host.to_string(), rank).await });
    joined(join_all(workers).await, PATIENCE).await
}

async fn sums(group: Group, algorithm: Option<Algorithm>, count: usize) {
    let (size, rank) = (group.size(), group.rank());
    let mut values: Vec<_> = (0..count).map(|at| (at * size + rank) as i64).collect();
    let call = group.all_reduce(&mut values);
    let call = algorithm.into_iter().fold(call, |call, algorithm| call.algorithm(algorithm));
    call.await.unwrap_or_else(|error| panic!("{algorithm:?} of {count}: {error}"));
    let sum = |at: usize| (0..size).map(|rank| (at * size + rank) as i64).sum::<i64>();
    assert!(values.iter().enumerate().all(|(at, value)| *value == sum(at)), "{algorithm:?} of {count}");
}

#[tokio::test]
async fn ranks_know_who_shares_their_host() {
    let ranks = ranks_on("abacb").await;
    for group in &ranks.groups {
        assert_eq!(group.hosts(), [vec![0, 2], vec![1, 4], vec![3]]);
        assert_eq!(group.default_algorithm(8), Algorithm::Doubling);
        assert_eq!(group.default_algorithm(1 << 20), Algorithm::Hierarchical);
    }
    ranks.shutdown().await;
}

/// What a worker has sent over a fabric.
fn sent_over(worker: &Worker, kind: FabricKind) -> u64 {
    let peers = worker.peers();
    peers.iter().filter(|peer| peer.transport == Some(kind)).map(|peer| peer.fabric.bytes_sent).sum()
}

/// Each host sends the others the minimum, plus the messages of the connections.
#[tokio::test]
async fn two_levels_send_little_over_the_network() {
    for hosts in ["aabb", "abab", "aab", "aaabb", "aabbc"] {
        let ranks = ranks_on(hosts).await;
        ranks.each(async |group| sums(group, None, COUNT).await).await;
        let number = ranks.groups[0].hosts().len() as u64;
        let least = 2 * (number - 1) * 8 * COUNT as u64 / number;
        for on_host in ranks.groups[0].hosts() {
            let sent: u64 =
                on_host.iter().map(|rank| sent_over(&ranks.workers[*rank], FabricKind::TCP)).sum();
            assert!((least - 64..least + least / 10).contains(&sent), "{hosts}: {sent} B, least {least} B");
        }
        ranks.shutdown().await;
    }
}

/// Those of 16 bits are 32 bits long until they are combined. On hosts of one rank they go to the rank that combines them.
#[tokio::test]
async fn floats_that_are_rounded_once_send_little_over_the_network() {
    for (hosts, algorithm, times) in [
        ("aabb", Algorithm::Hierarchical, 3),
        ("aaabb", Algorithm::Hierarchical, 3),
        ("abc", Algorithm::Ring, 2),
        ("abc", Algorithm::HalvingDoubling, 2),
    ] {
        let ranks = ranks_on(hosts).await;
        let run = ranks.each(async |group| {
            let mut values = vec![half::f16::ONE; 4 * COUNT];
            group.all_reduce(&mut values).algorithm(algorithm).await.unwrap();
        });
        run.await;
        let number = ranks.groups[0].hosts().len() as u64;
        let least = times * (number - 1) * 8 * COUNT as u64 / number;
        for on_host in ranks.groups[0].hosts() {
            let sent: u64 =
                on_host.iter().map(|rank| sent_over(&ranks.workers[*rank], FabricKind::TCP)).sum();
            assert!((least - 64..least + least / 10).contains(&sent), "{hosts}: {sent} B, least {least} B");
        }
        ranks.shutdown().await;
    }
}

#[tokio::test]
async fn every_algorithm_but_views_works_across_hosts() {
    let ranks = ranks_on("abbab").await;
    for algorithm in algorithms(&ranks.groups[0]) {
        assert_ne!(algorithm, Algorithm::Views);
        for count in [0, 1, 13, 1000, COUNT] {
            ranks.each(async |group| sums(group, Some(algorithm), count).await).await;
        }
    }
    ranks.shutdown().await;
}

#[tokio::test]
async fn views_across_hosts_are_refused_on_all_ranks() {
    let ranks = ranks_on("aab").await;
    let refused = ranks.each(async |group| {
        let mut values = [1i64; 1000];
        group.all_reduce(&mut values).algorithm(Algorithm::Views).await
    });
    for refused in refused.await {
        assert!(matches!(refused, Err(GroupError::Argument { field: "algorithm", .. })), "{refused:?}");
    }
    ranks.shutdown().await;
}

/// Those of one host have views again.
#[tokio::test]
async fn a_group_of_one_hosts_ranks_is_on_one_host() {
    let ranks = ranks_on("abba").await;
    let derived = ranks.each(async |group| {
        let own = if [0, 3].contains(&group.rank()) { [0, 3] } else { [1, 2] };
        let subgroups = [group.subgroup("outer", &[0, 3]).await, group.subgroup("inner", &[1, 2]).await];
        let own_group = subgroups.into_iter().find_map(|derived| derived.unwrap()).unwrap();
        assert_eq!(own_group.hosts(), [vec![0, 1]], "of {own:?}");
        assert_eq!(own_group.default_algorithm(1 << 20), Algorithm::Views);
        sums(own_group, None, COUNT).await;
    });
    derived.await;
    ranks.shutdown().await;
}
