//! The collectives as functions: each value arrives complete at the right ranks, for every length.

use std::time::Duration;

use tensorwire_collective::Group;
use tensorwire_fabric::{FabricKind, Runtime as _, TokioRuntime};
use tensorwire_rendezvous::Tensor;

use super::{COUNTS, FEW_COUNTS, SIZES, input, part, sum, tensor, value, values};
use crate::group::{over_fabrics_and_verbs, possible, ranks};

over_fabrics_and_verbs! {
    allgather,
    allgatherv,
    alltoall,
    alltoallv,
    barrier_new_default,
    broadcast,
    gather,
    gatherv,
    reduce,
    reduce_scatter,
    scatter,
    pairwise_exchange,
    empty_then_non_empty,
    unbound_no_errors,
}

/// Elements of rank `rank` if ranks have different numbers of them, some none.
fn uneven(rank: usize, count: usize) -> usize {
    (rank % 3) * count
}

/// What every rank receives of all ranks. `count` gives the number of elements of each.
async fn gathered(
    fabric: FabricKind,
    sizes: impl IntoIterator<Item = usize>,
    count: fn(usize, usize) -> usize,
) {
    for size in possible(fabric, sizes) {
        let ranks = ranks(fabric, size).await;
        for each in FEW_COUNTS {
            let of = |rank: usize| input(count(rank, each), rank, size);
            let got = ranks.each(async |group| {
                let gathered = group.all_gather(tensor(&group, &of(group.rank()))).await.unwrap();
                gathered.iter().map(values).collect::<Vec<_>>()
            });
            let expected: Vec<_> = (0..size).map(of).collect();
            assert!(got.await.iter().all(|got| *got == expected), "{size} ranks, {each} elements");
        }
        ranks.shutdown().await;
    }
}

async fn allgather(fabric: FabricKind) {
    gathered(fabric, SIZES, |_, count| count).await;
}

async fn allgatherv(fabric: FabricKind) {
    gathered(fabric, SIZES, uneven).await;
}

/// What each rank receives of each other. `count` gives the number of elements from one rank to another.
async fn transposed(
    fabric: FabricKind,
    sizes: impl IntoIterator<Item = usize>,
    count: fn(usize, usize) -> usize,
) {
    for size in possible(fabric, sizes) {
        let ranks = ranks(fabric, size).await;
        for each in FEW_COUNTS {
            let of = |from: usize, to: usize| input(count(from + to, each), from * size + to, size * size);
            let got = ranks.each(async |group| {
                let given = (0..size).map(|to| tensor(&group, &of(group.rank(), to))).collect();
                let got = group.all_to_all(given).await.unwrap();
                got.iter().map(values).collect::<Vec<_>>()
            });
            for (rank, got) in got.await.into_iter().enumerate() {
                assert!(
                    got == (0..size).map(|from| of(from, rank)).collect::<Vec<_>>(),
                    "{size} ranks, {each}"
                );
            }
        }
        ranks.shutdown().await;
    }
}

async fn alltoall(fabric: FabricKind) {
    transposed(fabric, [1, 2, 3, 5, 8], |_, count| count).await;
}

async fn alltoallv(fabric: FabricKind) {
    transposed(fabric, [1, 2, 3, 5, 8], uneven).await;
}

/// Each rank in turn is late, and no rank goes on before it.
async fn barrier_new_default(fabric: FabricKind) {
    const LATE: Duration = Duration::from_millis(10);
    let clock = &TokioRuntime::current().unwrap();
    for size in possible(fabric, [2, 3, 4, 5, 8, 13, 16]) {
        let ranks = ranks(fabric, size).await;
        for late in 0..size {
            // When each rank came, and when it went on.
            let times = ranks.each(async |group| {
                if group.rank() == late {
                    group.worker().runtime().sleep(LATE).await;
                }
                let came = clock.now();
                group.barrier().await.unwrap();
                (came, clock.now())
            });
            let times = times.await;
            let (came, _) = times[late];
            for (rank, (_, went_on)) in times.iter().enumerate() {
                assert!(*went_on >= came, "rank {rank} went on before {late} had come");
            }
        }
        ranks.shutdown().await;
    }
}

async fn broadcast(fabric: FabricKind) {
    for size in possible(fabric, SIZES) {
        let ranks = ranks(fabric, size).await;
        for root in [0, size / 2, size - 1] {
            for count in FEW_COUNTS {
                let sent = input(count, root, size);
                let got = ranks.each(async |group| {
                    let given = (group.rank() == root).then(|| tensor(&group, &sent));
                    values(&group.broadcast(root, given).await.unwrap())
                });
                assert!(got.await.iter().all(|got| *got == sent), "{size} ranks, root {root}, {count}");
            }
        }
        ranks.shutdown().await;
    }
}

/// What each root receives of all ranks.
async fn gathered_at_root(
    fabric: FabricKind,
    sizes: impl IntoIterator<Item = usize>,
    count: fn(usize, usize) -> usize,
) {
    for size in possible(fabric, sizes) {
        let ranks = ranks(fabric, size).await;
        for (root, each) in (0..size).flat_map(|root| [0, 1, 1000].map(|each| (root, each))) {
            let of = |rank: usize| input(count(rank, each), rank, size);
            let got = ranks.each(async |group| {
                let gathered = group.gather(root, tensor(&group, &of(group.rank()))).await.unwrap();
                gathered.map(|gathered| gathered.iter().map(values).collect::<Vec<_>>())
            });
            for (rank, got) in got.await.into_iter().enumerate() {
                let expected = (rank == root).then(|| (0..size).map(of).collect());
                assert!(got == expected, "rank {rank} of {size}, root {root}, {each} elements");
            }
        }
        ranks.shutdown().await;
    }
}

async fn gather(fabric: FabricKind) {
    gathered_at_root(fabric, [1, 2, 3, 5, 8], |_, count| count).await;
}

async fn gatherv(fabric: FabricKind) {
    gathered_at_root(fabric, [1, 2, 3, 5, 8], uneven).await;
}

async fn reduce(fabric: FabricKind) {
    for size in possible(fabric, SIZES) {
        let ranks = ranks(fabric, size).await;
        for root in [0, size / 2, size - 1] {
            for count in COUNTS {
                let got = ranks.each(async |group| {
                    let mut values = input(count, group.rank(), size);
                    group.reduce(root, &mut values).await.unwrap();
                    values
                });
                assert!(got.await[root] == sum(count, size), "{size} ranks, root {root}, {count} elements");
            }
        }
        ranks.shutdown().await;
    }
}

/// Equal parts, uneven ones, and all for one rank.
async fn reduce_scatter(fabric: FabricKind) {
    for size in possible(fabric, SIZES) {
        let ranks = ranks(fabric, size).await;
        for each in [0, 1, 13, 1000] {
            let shapes: [fn(usize, usize) -> usize; 3] =
                [|_, each| each, uneven, |rank, each| if rank == 0 { each } else { 0 }];
            for shape in shapes {
                let counts: Vec<usize> = (0..size).map(|rank| shape(rank, each)).collect();
                let count = counts.iter().sum();
                let got = ranks.each(async |group| part(group, &counts).await);
                assert!(got.await.concat() == sum(count, size), "{counts:?}");
            }
        }
        ranks.shutdown().await;
    }
}

async fn scatter(fabric: FabricKind) {
    for size in possible(fabric, [1, 2, 3, 5, 8]) {
        let ranks = ranks(fabric, size).await;
        for (root, each) in (0..size).flat_map(|root| [0, 1, 1000].map(|each| (root, each))) {
            let of = |rank: usize| input(uneven(rank, each), rank, size);
            let got = ranks.each(async |group| {
                let given = (0..size).map(|rank| tensor(&group, &of(rank))).collect();
                let given = (group.rank() == root).then_some(given);
                values(&group.scatter(root, given).await.unwrap())
            });
            for (rank, got) in got.await.into_iter().enumerate() {
                assert!(got == of(rank), "rank {rank} of {size}, root {root}, {each} elements");
            }
        }
        ranks.shutdown().await;
    }
}

/// In step `step`, ranks whose numbers differ in that bit exchange values, and no others.
async fn pairwise_exchange(fabric: FabricKind) {
    for size in possible(fabric, [2, 4, 8]) {
        let ranks = ranks(fabric, size).await;
        for (step, count) in (0..size.ilog2()).flat_map(|step| [1, 1000].map(|count| (step, count))) {
            let partner = |rank: usize| rank ^ (1 << step);
            let got = ranks.each(async |group| {
                let given = |to: usize| if to == partner(group.rank()) { count } else { 0 };
                let given =
                    (0..size).map(|to| tensor(&group, &input(given(to), group.rank(), size))).collect();
                let got: Vec<Tensor> = group.all_to_all(given).await.unwrap();
                values(&got[partner(group.rank())])
            });
            for (rank, got) in got.await.into_iter().enumerate() {
                assert!(got == input(count, partner(rank), size), "rank {rank} of {size}, step {step}");
            }
        }
        ranks.shutdown().await;
    }
}

/// Empty and other values follow each other in every lane, in order.
async fn empty_then_non_empty(fabric: FabricKind) {
    const ROUNDS: usize = 80;
    let of = |round: usize, rank: usize| {
        let count = [0, 1000, 0, 0, 1, 5000][(round + round / 16 + rank) % 6];
        (0..count).map(|at| value(at, rank, 1000) + round as i64).collect::<Vec<_>>()
    };
    let ranks = ranks(fabric, 3).await;
    let rounds = async |group: Group| {
        for round in 0..ROUNDS {
            let own = tensor(&group, &of(round, group.rank()));
            let got: Vec<_> = group.all_gather(own).await.unwrap().iter().map(values).collect();
            assert!(got == [of(round, 0), of(round, 1), of(round, 2)], "round {round}");
            let mut values = of(round, 0);
            group.all_reduce(&mut values).await.unwrap();
            assert!(
                values == of(round, 0).iter().map(|value| 3 * value).collect::<Vec<_>>(),
                "round {round}"
            );
        }
    };
    ranks.each(rounds).await;
    ranks.shutdown().await;
}

/// Received tensors stay valid after the group and its workers are dropped.
async fn unbound_no_errors(fabric: FabricKind) {
    let ranks = ranks(fabric, 3).await;
    let gathered = ranks
        .each(async |group| group.all_gather(tensor(&group, &input(1000, group.rank(), 3))).await.unwrap())
        .await;
    ranks.each(async |group| group.close().await.unwrap()).await;
    ranks.shutdown().await;
    for (at, tensor) in gathered.iter().flat_map(|gathered| gathered.iter().enumerate()) {
        assert!(values(tensor) == input(1000, at, 3));
    }
}
