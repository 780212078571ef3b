//! All ranks of a group, from the view of the measuring process, which is rank 0.

use std::{sync::Arc, time::Duration};

use futures::future::try_join_all;
use tensorwire::{
    collective::{GroupError, store::MemoryStore},
    fabric::Runtime,
    settings::Validation,
};
use tensorwire_fabric::timeout;

use super::{
    control::{Order, done},
    error::BenchError,
    fabrics::Opened,
    phase::{Phase, PhaseLength, Watch},
    process::Peer,
    ranks::{Rank, Seat, Values},
    workers::start_worker,
};

/// How long a rank may take to report why its group is over.
const REASON_LIMIT: Duration = Duration::from_secs(1);

/// Joins a group with all other processes, which have opened their fabrics.
pub(super) async fn join(peers: Vec<&mut Peer>, opened: &Opened, values: Values) -> Result<Rank, BenchError> {
    let worker = start_worker("rank_0", opened, Validation::Off).await?;
    let store = MemoryStore::new(worker.runtime().clone());
    store.serve(&worker)?;
    let address = worker.address().to_owned();
    let ranks = 1 + peers.len();
    let seat = |rank| Seat { rank, ranks, store: address.clone() };
    let others = try_join_all(peers.into_iter().enumerate().map(|(at, peer)| async move {
        done(of_rank(at + 1, peer.ask(&Order::Join { seat: seat(at + 1), values }, "joining").await)?)
    }));
    let own = seat(0);
    let (rank, _) = futures::try_join!(Rank::join_with(worker, &own, values, Arc::new(store)), others)?;
    Ok(rank)
}

fn of_rank<T>(rank: usize, result: Result<T, BenchError>) -> Result<T, BenchError> {
    result.map_err(|error| BenchError::Rank { rank, error: Box::new(error) })
}

/// Executes the calls of `plan` on all ranks, and times them on this one.
pub(super) async fn calls(
    mut peers: Vec<&mut Peer>,
    rank: &mut Rank,
    clock: &dyn Runtime,
    plan: PhaseLength,
) -> Result<Phase, BenchError> {
    for (at, peer) in peers.iter_mut().enumerate() {
        of_rank(at + 1, peer.order(&Order::Collectives { count: plan.ops }, "collectives").await)?;
    }
    match own_calls(rank, clock, plan).await {
        // A rank whose own call is stuck reports it before the time of a silent one is over.
        Ok(phase) => answers(peers, clock, rank.limit() + REASON_LIMIT).await.map(|()| phase),
        // The group is over because of another rank, which reports the reason at once.
        Err(BenchError::Group(over))
            if matches!(*over, GroupError::Over { .. } | GroupError::Left { .. }) =>
        {
            match answers(peers, clock, REASON_LIMIT).await {
                Err(reason) if !reason.is_silence() => Err(reason),
                _ => Err(BenchError::Group(over)),
            }
        }
        Err(error) => Err(error),
    }
}

async fn own_calls(rank: &mut Rank, clock: &dyn Runtime, plan: PhaseLength) -> Result<Phase, BenchError> {
    rank.begin().await?;
    let mut watch = Watch::start(clock, plan);
    for _ in 0..plan.ops {
        rank.call().await?;
        watch.tick();
    }
    Ok(watch.stop())
}

/// Awaits the answers of all other ranks. A rank that does not answer within `limit` is named.
async fn answers(peers: Vec<&mut Peer>, clock: &dyn Runtime, limit: Duration) -> Result<(), BenchError> {
    let during = "collectives";
    let answers = peers.into_iter().enumerate().map(|(at, peer)| async move {
        let answered = timeout(clock, limit, peer.answer(during)).await;
        let answer = answered.map_err(|_| BenchError::PeerSilent { during, limit });
        of_rank(at + 1, answer.and_then(|answer| answer).and_then(done))
    });
    try_join_all(answers).await.map(drop)
}
