//! A store whose text somebody else has written: records and replies that name peers, and answers that never end.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{FutureExt, join};
use tensorwire_collective::{
    Group, GroupError,
    store::{MemoryStore, Store, StoreError},
};
use tensorwire_fabric::{BoxFuture, FabricKind, timeout};
use tensorwire_rendezvous::WorkerError;

use super::{PATIENCE, cut_store::CutStore, store, worker};

const SHORT: Duration = Duration::from_millis(500);

/// Of a worker that does not exist.
fn record(name: &str) -> String {
    format!("tensorwire group 2\n/job:{name}/replica:0/task:0\n127.0.0.1:1\n{:016x}\n{:016x}\n\n", 7, 8)
}

#[tokio::test]
async fn a_record_redirects_no_peer_and_leaves_none_behind() {
    let (store, alone) = (store(), worker("alone", FabricKind::TCP).await);
    alone.set_address("/job:known/replica:0/task:0", "127.0.0.1:2").unwrap();
    store.set("group/a/0/rank 1", format!("{}3\n", record("known")).as_bytes()).await.unwrap();
    store.set("group/a/0/rank 2", format!("{}3\n", record("ghost")).as_bytes()).await.unwrap();
    let joined = Group::builder(store, 0, 3).job("a").timeout(SHORT).join(&alone).await;
    joined.unwrap_err();
    assert_eq!(alone.peer("known").unwrap().address().as_deref(), Some("127.0.0.1:2"));
    let names: Vec<_> = alone.peers().into_iter().map(|peer| peer.name).collect();
    assert_eq!(names, ["/job:known/replica:0/task:0"]);
    assert!(matches!(alone.peer("ghost"), Err(WorkerError::UnknownWorker { .. })));
    alone.shutdown().await;
}

/// As when the rank that serves the store ends because this one cannot be reached.
#[tokio::test]
async fn a_lost_rank_is_named_although_the_store_is_gone_with_it() {
    let (below, second) = (store(), worker("second", FabricKind::TCP).await);
    let run = format!("{:016x}\n{}2\n", 9, record("ghost"));
    below.set("group/run", run.as_bytes()).await.unwrap();
    below.set("group/0000000000000009/0/rank 0", format!("{}2\n", record("ghost")).as_bytes()).await.unwrap();
    let cut = CutStore::new(&below);
    // It reads the run, writes its record, and reads all records.
    cut.cut_after(3);
    let joined = Group::builder(cut, 1, 2).timeout(SHORT).join(&second).await;
    let error = joined.unwrap_err();
    assert!(matches!(error, GroupError::RankLost { rank: 0, .. }), "{error}");
    second.shutdown().await;
}

#[tokio::test]
async fn a_record_with_control_characters_is_refused() {
    let (store, alone) = (store(), worker("alone", FabricKind::TCP).await);
    let hostile = record("ghost\u{1b}[2J");
    store.set("group/a/0/rank 1", format!("{hostile}2\n").as_bytes()).await.unwrap();
    let error = Group::builder(store, 0, 2).job("a").timeout(SHORT).join(&alone).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("group/a/0/rank 1") && !text.contains('\u{1b}'), "{text}");
    alone.shutdown().await;
}

/// The step of the group `group` in the run `a`.
fn step(generation: u64) -> u64 {
    let text = format!("group\na\n{generation}");
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    }) >> 1
}

/// The error of a newcomer that gets this reply, written around its own record. No peer stays.
async fn answered(reply: impl Fn(&str) -> String) -> GroupError {
    let (store, newcomer) = (store(), worker("newcomer", FabricKind::TCP).await);
    let builder = Group::builder(store.clone(), 0, 1).job("a").timeout(SHORT);
    let forging = async {
        let entry = store.wait(&["group/a/waiting/1".to_owned()], SHORT).await.unwrap().remove(0);
        let own = String::from_utf8(entry).unwrap();
        let nonce = own.lines().nth(4).unwrap();
        store.set(&format!("group/a/admitted/{nonce}"), reply(&own).as_bytes()).await.unwrap();
    };
    let (joined, ()) = join!(builder.rejoin(&newcomer), forging);
    let ends = newcomer.runtime().now() + PATIENCE;
    // Attempts to connect end soon.
    while !newcomer.peers().is_empty() {
        assert!(newcomer.runtime().now() < ends, "{} peers are left", newcomer.peers().len());
        newcomer.runtime().sleep(Duration::from_millis(5)).await;
    }
    newcomer.shutdown().await;
    joined.unwrap_err()
}

#[tokio::test]
async fn a_newcomer_among_ghosts_is_in_no_group() {
    for generation in [1, u64::MAX] {
        let error =
            answered(|own| format!("{}\n{generation}\n1\n{}{own}", step(generation), record("ghost"))).await;
        assert!(!matches!(error, GroupError::Argument { .. }), "{error}");
    }
}

#[tokio::test]
async fn thousands_of_members_in_a_reply_do_not_stay_as_peers() {
    let ghosts: String = (0..5_000).map(|ghost| record(&format!("ghost_{ghost}"))).collect();
    answered(|own| format!("{}\n1\n1\n{ghosts}{own}", step(1))).await;
}

#[tokio::test]
async fn a_reply_that_contradicts_the_run_or_has_no_other_rank_is_an_error() {
    let other = |own: &str| format!("{}{own}", record("other"));
    let replies: [&dyn Fn(&str) -> String; 5] = [
        &|own| format!("{}\n1\n1\n{own}", step(1)),
        &|own| format!("{}\n1\n1\n{own}{}", step(1), record("other")),
        &|own| format!("{}\n2\n1\n{}", step(1), other(own)),
        &|own| format!("{}\n0\n1\n{}", step(0), other(own)),
        &|_| format!("{}\n1\n1\n{}{}", step(1), record("other"), record("another")),
    ];
    for reply in replies {
        let error = answered(reply).await;
        assert!(matches!(&error, GroupError::Argument { field: "store", .. }), "{error}");
    }
}

/// A store that always answers the same.
#[derive(Debug)]
struct Endless {
    below: Arc<MemoryStore>,
    answer: Answer,
    requests: AtomicUsize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// All entries of a list are taken.
    Taken,
    /// No newcomer is admitted.
    PassedOver,
    /// Another run has begun.
    OtherRuns,
}

impl Endless {
    fn counted(&self) -> usize {
        self.requests.fetch_add(1, Ordering::Relaxed)
    }
}

impl Store for Endless {
    fn set<'a>(&'a self, key: &'a str, value: &'a [u8]) -> BoxFuture<'a, Result<(), StoreError>> {
        self.counted();
        self.below.set(key, value)
    }

    fn get<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<Vec<Option<Vec<u8>>>, StoreError>> {
        let number = self.counted();
        match self.answer {
            Answer::Taken => std::future::ready(Ok(vec![Some(b"taken".to_vec()); keys.len()])).boxed(),
            Answer::OtherRuns if keys[0].ends_with("/run") => {
                let run = format!("{number:016x}\n{}2\n", record("zero"));
                std::future::ready(Ok(vec![Some(run.into_bytes())])).boxed()
            }
            _ => self.below.get(keys),
        }
    }

    fn wait<'a>(
        &'a self,
        keys: &'a [String],
        limit: Duration,
    ) -> BoxFuture<'a, Result<Vec<Vec<u8>>, StoreError>> {
        let number = self.counted();
        match self.answer {
            Answer::PassedOver => std::future::ready(Ok(vec![b"passed over".to_vec()])).boxed(),
            Answer::OtherRuns if keys[0].ends_with("/run") => {
                let run = format!("{number:016x}\n{}2\n", record("zero"));
                std::future::ready(Ok(vec![run.into_bytes()])).boxed()
            }
            // Not even at the limit.
            Answer::OtherRuns => std::future::pending().boxed(),
            Answer::Taken => self.below.wait(keys, limit),
        }
    }

    fn add<'a>(&'a self, key: &'a str, delta: i64) -> BoxFuture<'a, Result<i64, StoreError>> {
        self.below.add(key, delta)
    }

    fn compare_set<'a>(
        &'a self,
        key: &'a str,
        expected: Option<&'a [u8]>,
        value: &'a [u8],
    ) -> BoxFuture<'a, Result<Option<Vec<u8>>, StoreError>> {
        self.counted();
        self.below.compare_set(key, expected, value)
    }

    fn delete<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<bool, StoreError>> {
        self.below.delete(key)
    }
}

#[tokio::test]
async fn joining_ends_in_time_whatever_the_store_answers() {
    let alone = worker("alone", FabricKind::TCP).await;
    for answer in [Answer::Taken, Answer::PassedOver, Answer::OtherRuns] {
        let endless = Arc::new(Endless { below: store(), answer, requests: AtomicUsize::new(0) });
        let builder = Group::builder(endless.clone(), 1, 2).timeout(SHORT);
        let joining = async {
            match answer {
                Answer::OtherRuns => builder.join(&alone).await,
                _ => builder.job("a").rejoin(&alone).await,
            }
        };
        let joined = timeout(&**alone.runtime(), 10 * SHORT, joining).await;
        joined.unwrap_or_else(|_| panic!("{answer:?}: it goes on")).unwrap_err();
        let requests = endless.requests.load(Ordering::Relaxed);
        assert!(requests < 100, "{answer:?}: {requests} requests");
    }
    alone.shutdown().await;
}
