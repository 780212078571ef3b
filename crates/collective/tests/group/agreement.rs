//! Agreement without the store, with ranks that die meanwhile, and among ranks that see different parts of the group.

use std::{
    collections::BTreeMap,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::join;
use tensorwire_collective::{Group, GroupError};
use tensorwire_fabric::{FabricKind, timeout};
use tensorwire_rendezvous::Worker;

use super::{PATIENCE, cut_store::CutStore, over_fabrics, shrinking::sum_of_ranks, store, worker};
use crate::join_all::join_all;

over_fabrics! {
    more_than_half_go_on_without_the_store,
    half_go_on_with_the_store_alone,
    a_part_that_reaches_the_store_and_one_that_does_not_agree,
    too_few_get_an_error,
    ranks_that_lead_may_die_at_any_moment,
    a_rank_that_was_away_for_two_generations_is_left_out,
    a_shrink_that_is_given_up_goes_on_where_it_was,
    no_generation_has_two_groups,
}

const LIMIT: Duration = Duration::from_secs(20);

/// How long a test waits for ranks that do not come. Enough for a busy machine to join in.
const SHORT: Duration = Duration::from_secs(3);

/// A rank that can be cut off from the store.
struct Rank {
    worker: Worker,
    store: Arc<CutStore>,
    group: Group,
}

impl Rank {
    async fn die(self) {
        drop(self.group);
        self.worker.shutdown().await;
    }
}

async fn ranks(fabric: FabricKind, size: usize, limit: Duration) -> Vec<Rank> {
    let store = store();
    let joining = (0..size).map(async |rank| {
        let (worker, store) = (worker(format!("rank_{rank}"), fabric).await, CutStore::new(&store));
        let builder = Group::builder(store.clone(), rank, size).timeout(limit);
        let group = builder.join(&worker).await.unwrap();
        Rank { worker, store, group }
    });
    join_all(joining).await
}

async fn end(ranks: Vec<Rank>) {
    join_all(ranks.into_iter().map(Rank::die)).await;
}

/// All of `ranks` shrink to a group of just them, which works.
async fn shrink(ranks: &mut [Rank]) {
    let size = ranks.len();
    let expected: usize = (0..size).sum();
    let shrunk = ranks.iter_mut().enumerate().map(async |(at, rank)| {
        rank.group = rank.group.shrink().await.unwrap();
        assert_eq!((rank.group.rank(), rank.group.size()), (at, size));
        assert_eq!(sum_of_ranks(&rank.group).await, expected as i32);
    });
    join_all(shrunk).await;
}

async fn more_than_half_go_on_without_the_store(fabric: FabricKind) {
    for size in 2..=7 {
        let mut ranks = ranks(fabric, size, LIMIT).await;
        ranks.iter().for_each(|rank| rank.store.cut_after(0));
        // The ranks of the new group can go on without the store, too.
        while (ranks.len() - 1) / 2 > 0 {
            let lost = (ranks.len() - 1) / 2;
            let first = size % 2 * (ranks.len() - lost);
            join_all(ranks.drain(first..first + lost).map(Rank::die)).await;
            shrink(&mut ranks).await;
        }
        assert!(ranks.len() <= 2);
        end(ranks).await;
    }
}

async fn half_go_on_with_the_store_alone(fabric: FabricKind) {
    for size in [2, 4, 6] {
        let mut ranks = ranks(fabric, size, LIMIT).await;
        join_all(ranks.drain(size / 2..).map(Rank::die)).await;
        shrink(&mut ranks).await;
        assert_eq!(ranks[0].group.generation(), 1);
        end(ranks).await;
    }
}

async fn a_part_that_reaches_the_store_and_one_that_does_not_agree(fabric: FabricKind) {
    for size in 2..=5 {
        for cut in 1..size {
            let mut ranks = ranks(fabric, size, LIMIT).await;
            ranks[..cut].iter().for_each(|rank| rank.store.cut_after(0));
            if size > 2 {
                ranks.pop().unwrap().die().await;
            }
            shrink(&mut ranks).await;
            end(ranks).await;
        }
    }
}

async fn too_few_get_an_error(fabric: FabricKind) {
    // Half of the ranks without the store, and then fewer with it.
    let mut cases = Vec::new();
    for (size, left, is_cut) in [(2, 1, true), (4, 2, true), (3, 1, true), (3, 1, false), (6, 2, false)] {
        cases.push((ranks(fabric, size, SHORT).await, left, is_cut));
    }
    join_all(cases.into_iter().map(|(ranks, left, is_cut)| too_few(ranks, left, is_cut))).await;
}

async fn too_few(mut ranks: Vec<Rank>, left: usize, is_cut: bool) {
    let size = ranks.len();
    join_all(ranks.drain(left..).map(Rank::die)).await;
    let runtime = ranks[0].worker.runtime().clone();
    let begun = runtime.now();
    let errors = ranks.iter().map(async |rank| {
        rank.store.cut_after(if is_cut { 0 } else { usize::MAX });
        rank.group.shrink().await.unwrap_err()
    });
    let is_stores = join_all(errors).await.into_iter().map(|error| match &error {
        GroupError::NoMajority { size: of, come, store, .. } => {
            assert_eq!((*of, come.len()), (size, left), "{error}");
            store.is_some()
        }
        other => panic!("{other}"),
    });
    let is_stores = is_stores.collect::<Vec<_>>();
    assert_eq!(is_stores.contains(&true), is_cut && 2 * left == size, "{is_stores:?}");
    let took = runtime.now() - begun;
    assert!(took < 5 * SHORT, "{took:?}");
    end(ranks).await;
}

/// Ends after its future was polled this many times.
struct Polled<F> {
    future: Pin<Box<F>>,
    left: usize,
}

fn polled<F: Future>(future: F, left: usize) -> Polled<F> {
    Polled { future: Box::pin(future), left }
}

impl<F: Future> Future for Polled<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        self.left -= 1;
        let polled = self.future.as_mut().poll(context).map(Some);
        if polled.is_pending() && self.left == 0 {
            context.waker().wake_by_ref();
        }
        polled
    }
}

/// Shrinks until the group works. If a rank is lost while the ranks join, some have joined already.
async fn go_on(rank: &mut Rank) {
    loop {
        rank.group = rank.group.shrink().await.unwrap();
        if rank.group.all_reduce(&mut [1u8; 8]).await.is_ok() {
            return;
        }
    }
}

/// Kills the leader, and the next leader, each after this many polls of its shrink.
async fn ranks_that_lead_may_die_at_any_moment(fabric: FabricKind) {
    for polls in (0..14).chain([16, 20, 25, 30, 40]) {
        let mut ranks = ranks(fabric, 5, LIMIT).await;
        ranks.iter().for_each(|rank| rank.store.cut_after(0));
        let mut left = ranks.split_off(2);
        let dying = ranks.into_iter().enumerate().map(async |(at, rank)| {
            let shrunk = polled(rank.group.shrink(), polls + 3 * at).await;
            drop(shrunk);
            rank.die().await;
        });
        join!(join_all(dying), join_all(left.iter_mut().map(go_on)));
        let [three, rest @ ..] = &left[..] else { panic!() };
        assert_eq!(three.group.size(), 3, "after {polls} steps");
        assert!(rest.iter().all(|rank| rank.group.generation() == three.group.generation()));
        end(left).await;
    }
}

async fn a_rank_that_was_away_for_two_generations_is_left_out(fabric: FabricKind) {
    let mut ranks = ranks(fabric, 5, SHORT).await;
    ranks.iter().for_each(|rank| rank.store.cut_after(0));
    let away = ranks.pop().unwrap();
    shrink(&mut ranks).await;
    ranks.remove(0).die().await;
    shrink(&mut ranks).await;
    assert_eq!(ranks[0].group.generation(), 2);
    let late = away.group.shrink().await.unwrap_err();
    assert!(matches!(late, GroupError::LeftOut { rank: 4, .. }), "{late}");
    ranks.push(away);
    end(ranks).await;
}

async fn a_shrink_that_is_given_up_goes_on_where_it_was(fabric: FabricKind) {
    for polls in [0, 1, 2, 4, 6, 8, 10, 12, 16, 24] {
        let mut ranks = ranks(fabric, 3, LIMIT).await;
        ranks.iter().for_each(|rank| rank.store.cut_after(0));
        let shrinking = ranks.iter_mut().enumerate().map(async |(at, rank)| {
            if at == 1
                && let Some(shrunk) = polled(rank.group.shrink(), polls).await
            {
                rank.group = shrunk.unwrap();
            }
            go_on(rank).await;
        });
        join_all(shrinking).await;
        assert!(ranks.iter().all(|rank| rank.group.size() == 3), "given up after {polls} steps");
        end(ranks).await;
    }
}

/// Numbers from a seed: SplitMix64.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % end as u64) as usize
    }
}

/// The groups of a rank: generations with their members.
type Groups = Vec<(u64, Vec<String>)>;

/// A rank that comes late, gives up and begins again, loses the store, dies, or none of these.
async fn random_life(rank: Rank, seed: u64) -> Groups {
    let mut numbers = Numbers(seed);
    if numbers.below(2) == 0 {
        rank.store.cut_after(numbers.below(6));
    }
    rank.worker.runtime().sleep(Duration::from_millis(numbers.below(120) as u64)).await;
    let (mut groups, mut group) = (Groups::new(), rank.group.clone());
    for _ in 0..2 + numbers.below(2) {
        let polls = if numbers.below(2) == 0 { numbers.below(40) } else { usize::MAX };
        match polled(group.shrink(), polls).await {
            Some(Ok(shrunk)) => {
                groups.push((shrunk.generation(), shrunk.members().map(str::to_owned).collect()));
                group = shrunk;
            }
            None if numbers.below(3) > 0 => {}
            None | Some(Err(_)) => break,
        }
    }
    drop(group);
    rank.die().await;
    groups
}

async fn no_generation_has_two_groups(fabric: FabricKind) {
    for seeds in [0..4, 4..8, 8..12] {
        // One after the other, because each must join within its limit.
        let mut worlds = Vec::new();
        for seed in seeds {
            worlds.push((ranks(fabric, 2 + Numbers(seed).below(6), SHORT).await, seed));
        }
        join_all(worlds.into_iter().map(|(ranks, seed)| one_world(ranks, seed))).await;
    }
}

async fn one_world(ranks: Vec<Rank>, seed: u64) {
    let runtime = ranks[0].worker.runtime().clone();
    let lives = ranks.into_iter().enumerate().map(|(at, rank)| random_life(rank, seed * 1000 + at as u64));
    let lives = timeout(&*runtime, PATIENCE, join_all(lives)).await.expect("each call ends in time");
    let mut generations = BTreeMap::new();
    for (generation, members) in lives.into_iter().flatten() {
        let first = generations.entry(generation).or_insert_with(|| members.clone());
        assert_eq!(*first, members, "generation {generation} of seed {seed}");
    }
}
