//! A sharded set of which a publisher, or a follower, is killed in the middle of a fetch.
//!
//! `TENSORWIRE_KILL_ROUNDS=200` kills as many.

use std::{ops::Range, pin::pin, slice, time::Duration};

use futures::future::join_all;
use tensorwire_fabric::{Runtime, TokioRuntime};
use tensorwire_memory::Pool;
use tensorwire_rendezvous::{
    Tensor, Worker, WorkerError,
    sets::{Layout, Shard, ShardedSet, Snapshot},
};

use crate::harness::{Other, PARENT, bounded, builder, kind, memory_returns, parents_lines, role, say, step};
use crate::rdma::patient;

const SET: &str = "policy";
/// Tensors of a version. One at a time is requested from each publisher, which makes a fetch long.
const TENSORS: u64 = 600;
/// Elements of each, of which each publisher has an equal part.
const ELEMENTS: u64 = 24_000;
const PUBLISHERS: u64 = 2;
const LIVENESS: Duration = Duration::from_secs(1);
/// What the detection of a loss may take beside that on a busy machine.
const SLACK: Duration = Duration::from_secs(10);

/// Kills of each fabric: `TENSORWIRE_KILL_ROUNDS`, or as many as every change can wait for.
fn rounds() -> u64 {
    let rounds = std::env::var("TENSORWIRE_KILL_ROUNDS").ok();
    rounds.map_or(2, |text| text.parse().expect("TENSORWIRE_KILL_ROUNDS is a number"))
}

/// Of a test, and of its processes.
fn limit() -> Duration {
    Duration::from_secs(60) + Duration::from_secs(15) * rounds() as u32
}

fn publisher_name(number: u64) -> String {
    format!("/job:publisher/replica:0/task:{number}")
}

fn name_of(tensor: u64) -> String {
    format!("layer{tensor}")
}

/// The elements of a part of a tensor. In each version all of them differ.
fn elements(version: u64, tensor: u64, range: Range<u64>) -> impl Iterator<Item = u16> {
    range.map(move |at| (version * 251 + tensor * 7 + at) as u16)
}

fn range_of(publisher: u64) -> Range<u64> {
    ELEMENTS * publisher / PUBLISHERS..ELEMENTS * (publisher + 1) / PUBLISHERS
}

async fn commit(worker: &Worker, publisher: u64, version: u64) {
    let range = range_of(publisher);
    let shard = |tensor| {
        let values: Vec<_> = elements(version, tensor, range.clone()).collect();
        let part = Tensor::from_values(worker.pool(), &[values.len() as u64], &values).unwrap();
        (name_of(tensor), part.shard(0, ELEMENTS, slice::from_ref(&range)))
    };
    let shards: Vec<(String, Shard)> = (0..TENSORS).map(shard).collect();
    worker.set(SET).commit(version, shards).await.unwrap();
}

/// Checks that each content is that of the snapshot's version. Of the first tensor there is the part `first`.
fn check(snapshot: &Snapshot, first: Range<u64>) {
    assert_eq!(snapshot.len() as u64, TENSORS);
    for tensor in 0..TENSORS {
        let range = if tensor == 0 { first.clone() } else { 0..ELEMENTS };
        let values = snapshot.get(&name_of(tensor)).unwrap().values::<u16>().unwrap();
        let is_right = values.into_iter().eq(elements(snapshot.version(), tensor, range));
        assert!(is_right, "version {}, tensor {tensor}", snapshot.version());
    }
}

fn check_version(snapshot: &Snapshot, version: u64) {
    assert_eq!(snapshot.version(), version);
    check(snapshot, 0..ELEMENTS);
}

async fn set_of(worker: &Worker, addresses: &[String]) -> ShardedSet {
    let peers = addresses.iter().map(|address| worker.peer_at(address));
    let peers = join_all(peers).await;
    ShardedSet::new(peers.into_iter().map(|peer| peer.unwrap().set(SET)))
}

/// Over shared memory, with views of whole versions.
const LENT: &str = "lent";

async fn start(name: &str, fabric: &str, bind: &str) -> Worker {
    let builder = builder(name, kind(if fabric == LENT { "shm" } else { fabric }));
    // Without views pieces are moved one by one.
    let builder = match fabric {
        "shm" => builder.memory(|memory| memory.viewed_bytes_per_peer_max = Some(0)),
        _ => builder,
    };
    let builder = builder.bind(bind).liveness(LIVENESS);
    builder.flow(|flow| flow.requests_max = 1).start().await.unwrap()
}

/// Answers that are some of those to the requests of a fetch from one publisher. If the version is lent, they are the head, the manifest
/// and the loan, and what is left is to copy.
fn some(fabric: &str) -> u64 {
    if fabric == LENT { 3 } else { TENSORS / 5 }
}

/// Polls a fetch until the publisher with this number has given `some` answers.
async fn in_the_middle<T>(
    worker: &Worker,
    (publisher, some): (u64, u64),
    mut fetch: std::pin::Pin<&mut impl Future<Output = T>>,
) {
    let name = publisher_name(publisher);
    let arrivals = || {
        let peer = worker.peers().into_iter().find(|peer| peer.name == name);
        peer.map_or(0, |peer| peer.fabric.arrivals)
    };
    let before = arrivals();
    let moved = async {
        while arrivals() < before + some {
            assert!(futures::poll!(&mut fetch).is_pending(), "the fetch is over before the kill");
            tokio::task::yield_now().await;
        }
    };
    step("part of a fetch", moved).await;
}

/// Commits the versions that the parent names, until it is killed.
async fn publisher(words: &[String]) {
    let number = words[3].parse().unwrap();
    let worker = start(&publisher_name(number), &words[1], &words[2]).await;
    say(worker.address());
    let mut lines = parents_lines();
    while let Some(version) = lines.recv().await {
        commit(&worker, number, version.parse().unwrap()).await;
        say("committed");
    }
}

/// Publishers in processes of their own.
struct Publishers {
    test: &'static str,
    fabric: &'static str,
    lives: Vec<Option<Other>>,
    addresses: Vec<String>,
}

impl Publishers {
    async fn start(test: &'static str, fabric: &'static str) -> Self {
        let lives = (0..PUBLISHERS).map(|_| None).collect();
        let mut publishers =
            Self { test, fabric, lives, addresses: vec!["127.0.0.1:0".to_owned(); PUBLISHERS as usize] };
        for number in 0..PUBLISHERS {
            publishers.start_one(number).await;
        }
        publishers
    }

    /// At its former address.
    async fn start_one(&mut self, number: u64) {
        let address = &mut self.addresses[number as usize];
        let mut life = Other::start(self.test, &format!("publisher {} {address} {number}", self.fabric));
        *address = life.hear().await;
        self.lives[number as usize] = Some(life);
    }

    async fn commit(&mut self, number: u64, version: u64) {
        let life = self.lives[number as usize].as_mut().unwrap();
        life.tell(&version.to_string());
        assert_eq!(life.hear().await, "committed");
    }

    async fn commit_all(&mut self, version: u64) {
        for number in 0..PUBLISHERS {
            self.commit(number, version).await;
        }
    }

    fn kill(&mut self, number: u64) {
        self.lives[number as usize].take().unwrap().kill();
    }

    /// A publisher that was killed is restarted, and commits what makes a version complete again. Returns that version.
    async fn restart(&mut self, number: u64, round: u64, missing: u64) -> u64 {
        self.start_one(number).await;
        match round % 3 {
            // Another version is the next complete one.
            1 => {
                self.commit_all(missing + 1).await;
                return missing + 1;
            }
            // First the one that the follower has.
            2 => self.commit(number, missing - 1).await,
            _ => {}
        }
        self.commit(number, missing).await;
        missing
    }
}

/// Whether the version lacks exactly the part of this publisher.
fn lacks(error: &WorkerError, version: u64, publisher: u64) -> bool {
    matches!(error, WorkerError::Incomplete { set, version: Some(missing), parts }
        if set == SET && *missing == version && *parts == [publisher_name(publisher)])
}

fn publisher_killed(test: &'static str, fabric: &'static str) {
    if let Some(words) = role() {
        return bounded(limit(), |_| async move { publisher(&words).await });
    }
    bounded(limit(), |runtime| async move {
        let worker = start(PARENT, fabric, "127.0.0.1:0").await;
        let mut publishers = Publishers::start(test, fabric).await;
        let set = set_of(&worker, &publishers.addresses).await;
        let mut versions = set.follow();
        let mut version = 1;
        publishers.commit_all(version).await;
        check(&step("a version", versions.next()).await.unwrap().unwrap().apply(), 0..ELEMENTS);
        for round in 0..rounds() {
            let (missing, victim) = (version + 1, round % PUBLISHERS);
            publishers.commit_all(missing).await;
            let error = if round % 2 == 1 {
                let mut fetch = pin!(set.fetch());
                in_the_middle(&worker, (victim, some(fabric)), fetch.as_mut()).await;
                publishers.kill(victim);
                let began = runtime.now();
                let error = step("a fetch of a lost part", fetch).await.unwrap_err();
                assert!(runtime.now() - began < LIVENESS + patient(SLACK), "{error}");
                error
            } else {
                let mut next = versions.next();
                in_the_middle(&worker, (victim, some(fabric)), pin!(&mut next)).await;
                publishers.kill(victim);
                let began = runtime.now();
                let error = step("a version of a lost part", next).await.unwrap().unwrap_err();
                assert!(runtime.now() - began < LIVENESS + patient(SLACK), "{error}");
                error
            };
            assert!(lacks(&error, missing, victim), "round {round}: {error}");
            let current = versions.current().unwrap();
            assert_eq!(current.version(), version, "the last complete version stays");
            check(&current, 0..ELEMENTS);
            drop(current);
            version = publishers.restart(victim, round, missing).await;
            let next = loop {
                match step("the version after a restart", versions.next()).await.unwrap() {
                    Ok(staged) => break staged.apply(),
                    // The restart may take longer than the patience of the stream.
                    Err(error) => assert!(lacks(&error, missing, victim), "round {round}: {error}"),
                }
            };
            assert_eq!(next.version(), version);
            check(&next, 0..ELEMENTS);
        }
        drop(versions);
        worker.shutdown().await;
        memory_returns(&worker).await;
    });
}

#[test]
fn d_publisher_of_a_part_killed_in_mid_fetch_over_tcp() {
    publisher_killed("shards::d_publisher_of_a_part_killed_in_mid_fetch_over_tcp", "tcp");
}

#[test]
fn d_publisher_of_a_part_killed_in_mid_fetch_over_shm() {
    publisher_killed("shards::d_publisher_of_a_part_killed_in_mid_fetch_over_shm", "shm");
}

/// A publisher that is killed at some moment, also while its version is lent: then its memory is there until it is copied.
#[test]
fn d_publisher_killed_while_its_part_is_lent() {
    if let Some(words) = role() {
        return bounded(limit(), |_| async move { publisher(&words).await });
    }
    bounded(limit(), |_| async move {
        let worker = start(PARENT, LENT, "127.0.0.1:0").await;
        let mut publishers =
            Publishers::start("shards::d_publisher_killed_while_its_part_is_lent", LENT).await;
        let set = set_of(&worker, &publishers.addresses).await;
        let mut versions = set.follow();
        publishers.commit_all(1).await;
        check(&step("a version", versions.next()).await.unwrap().unwrap().apply(), 0..ELEMENTS);
        for round in 0..2 * rounds() {
            let (version, victim) = (2 * round + 2, round / 3 % PUBLISHERS);
            publishers.commit_all(version).await;
            let mut next = versions.next();
            in_the_middle(&worker, (victim, 1 + round % some(LENT)), pin!(&mut next)).await;
            publishers.kill(victim);
            match step("the version of a publisher that was killed", next).await.unwrap() {
                Ok(staged) => check_version(&staged.apply(), version),
                Err(error) => assert!(lacks(&error, version, victim), "round {round}: {error}"),
            }
            publishers.start_one(victim).await;
            publishers.commit_all(version + 1).await;
            loop {
                match step("the version after a restart", versions.next()).await.unwrap() {
                    Ok(staged) => break check_version(&staged.apply(), version + 1),
                    Err(error) => assert!(lacks(&error, version, victim), "round {round}: {error}"),
                }
            }
        }
        drop(versions);
        worker.shutdown().await;
        memory_returns(&worker).await;
    });
}

/// Follows the set, in which it wants one publisher's part of the first tensor. A victim stops in the middle of the second version, or
/// reports that it is there and goes on; the other follower reports all versions.
async fn follower(words: &[String]) {
    let [role, fabric, name, addresses @ ..] = words else { panic!("{words:?}") };
    let worker = start(name, fabric, "127.0.0.1:0").await;
    let set = set_of(&worker, addresses).await;
    let first = range_of(1);
    let layout = Layout::new().part(&name_of(0), 0, slice::from_ref(&first));
    let mut versions = set.layout(layout).follow();
    for number in 0_u64.. {
        let mut next = versions.next();
        if number == 1 && role != "bystander" {
            in_the_middle(&worker, (0, some(fabric)), pin!(&mut next)).await;
            say("midway");
            if role == "stays" {
                std::future::pending::<()>().await;
            }
        }
        let snapshot = next.await.unwrap().unwrap().apply();
        check(&snapshot, first.clone());
        say(&snapshot.version().to_string());
    }
}

async fn hear_version(follower: &mut Other, version: u64) {
    let version = version.to_string();
    while follower.hear().await != version {}
}

/// Waits until the pools have as many bytes in use as before.
async fn memory_is_back(pools: &[Pool], before: &[u64]) {
    let runtime = TokioRuntime::current().unwrap();
    let used = || pools.iter().map(|pool| pool.stats().used_bytes).collect::<Vec<_>>();
    let back = async {
        while used() != before {
            runtime.sleep(Duration::from_millis(1)).await;
        }
    };
    step(&format!("memory for {before:?} bytes"), back).await;
}

fn follower_killed(test: &'static str, fabric: &'static str) {
    if let Some(words) = role() {
        return bounded(limit(), |_| async move { follower(&words).await });
    }
    bounded(limit(), |_| async move {
        let mut publishers = Vec::new();
        for number in 0..PUBLISHERS {
            publishers.push(start(&publisher_name(number), fabric, "127.0.0.1:0").await);
        }
        let commit_all = async |version| {
            for (number, publisher) in (0..).zip(&publishers) {
                commit(publisher, number, version).await;
            }
        };
        let pools: Vec<_> = publishers.iter().map(|publisher| publisher.pool().clone()).collect();
        let used = || pools.iter().map(|pool| pool.stats().used_bytes).collect::<Vec<_>>();
        commit_all(1).await;
        let of_one = used();
        commit_all(2).await;
        // The newest two.
        let before = used();
        let addresses = publishers.iter().map(Worker::address).collect::<Vec<_>>().join(" ");
        let follow = |role: &str, name: &str| {
            Other::start(test, &format!("{role} {fabric} /job:{name}/replica:0/task:0 {addresses}"))
        };
        let mut bystander = follow("bystander", "bystander");
        hear_version(&mut bystander, 2).await;
        let mut version = 2;
        for round in 0..rounds() {
            let stays = round % 2 == 0;
            let mut victim = follow(if stays { "stays" } else { "goes_on" }, &format!("victim{round}"));
            hear_version(&mut victim, version).await;
            commit_all(version + 1).await;
            assert_eq!(victim.hear().await, "midway");
            version += 3;
            if stays {
                commit_all(version - 1).await;
                commit_all(version).await;
                let held = used();
                let is_held = |(before, (one, held)): (&u64, (&u64, &u64))| *held >= before + one;
                assert!(before.iter().zip(of_one.iter().zip(&held)).all(is_held), "{held:?}, {before:?}");
                victim.kill();
            } else {
                victim.kill();
                commit_all(version - 1).await;
                commit_all(version).await;
            }
            hear_version(&mut bystander, version).await;
            memory_is_back(&pools, &before).await;
        }
        // It may have views.
        bystander.kill();
        for publisher in &publishers {
            publisher.shutdown().await;
        }
        memory_is_back(&pools, &[0; PUBLISHERS as usize]).await;
    });
}

#[test]
fn d_follower_of_a_sharded_set_killed_in_mid_fetch_over_tcp() {
    follower_killed("shards::d_follower_of_a_sharded_set_killed_in_mid_fetch_over_tcp", "tcp");
}

#[test]
fn d_follower_of_a_sharded_set_killed_in_mid_fetch_over_shm() {
    follower_killed("shards::d_follower_of_a_sharded_set_killed_in_mid_fetch_over_shm", "shm");
}

#[test]
fn d_follower_of_a_sharded_set_killed_while_it_copies_what_is_lent() {
    follower_killed("shards::d_follower_of_a_sharded_set_killed_while_it_copies_what_is_lent", LENT);
}
