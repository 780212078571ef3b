//! The roles of a child process: it serves a store, or is a rank that makes the calls that its parent requests.

use std::{io::Write, sync::Arc, thread, time::Duration};

use futures::future::join_all;
use rustix::process::{Signal, set_parent_process_death_signal};
use tensorwire_collective::{
    Group, GroupBuilder, GroupError,
    launch::Launch,
    store::{MemoryStore, Store, WorkerStore},
};
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{Worker, WorkerError};
use tokio::{sync::mpsc, task::JoinHandle};

use crate::{
    descriptors, pairs,
    rdma::{End, over_at},
};

/// How many rounds of a loop are reported: as many as a parent reads.
pub(crate) const ROUNDS: u64 = 10;

/// Elements of a call in the rank's other group.
const ASIDE: usize = 10;

/// How many lists of requests a flooding rank has in progress, and how long each is.
const LISTS: usize = 16;
const LIST: usize = 64;

/// What the rank with this original number adds to a sum.
pub(crate) fn share(rank: usize) -> usize {
    1 << rank
}

/// Runs a child to its end. It ends with its parent: by a signal, or because its input ends.
pub(crate) fn run(role: &str) {
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let words: Vec<&str> = role.split(' ').collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        match words[..] {
            ["store", address] => serve(address).await,
            ["crowded", fabric, left] => descriptors::run(fabric_of(fabric), left.parse().unwrap()).await,
            ["rank", ref words @ ..] => Rank::start(words, false).await.obey().await,
            ["newcomer", ref words @ ..] => Rank::start(words, true).await.obey().await,
            _ => panic!("no role of these tests: {role}"),
        }
    });
}

pub(crate) fn say(line: &str) {
    println!("@@ {}", line.replace('\n', " "));
    std::io::stdout().flush().unwrap();
}

/// The parent's lines, read without blocking the runtime.
fn parents_lines() -> mpsc::UnboundedReceiver<String> {
    let (found, lines) = mpsc::unbounded_channel();
    thread::spawn(move || {
        std::io::stdin().lines().map_while(Result::ok).try_for_each(|line| found.send(line.trim().to_owned()))
    });
    lines
}

fn fabric_of(word: &str) -> FabricKind {
    match word {
        "shm" => FabricKind::SHM,
        "tcp" => FabricKind::TCP,
        "verbs" => FabricKind::VERBS,
        other => panic!("no fabric of these tests: {other}"),
    }
}

async fn serve(address: &str) {
    let worker = Worker::client().bind(address).require(FabricKind::TCP).start().await.unwrap();
    let store = MemoryStore::new(worker.runtime().clone());
    store.serve(&worker).unwrap();
    say(worker.address());
    parents_lines().recv().await;
}

/// The address of a store that the rank serves.
pub(crate) const OWN_STORE: &str = "own";

/// Precedes the address of a store that rank 0 serves as launched ranks do.
pub(crate) const LAUNCHED: &str = "launched:";

struct Rank {
    worker: Worker,
    builder: GroupBuilder,
    group: Option<Group>,
    /// Another group of two, in which it is the first rank.
    aside: Option<Group>,
    /// A call in that group.
    reducing: Option<JoinHandle<Result<(), GroupError>>>,
    limit: Duration,
    share: usize,
}

impl Rank {
    async fn start(words: &[&str], is_newcomer: bool) -> Self {
        let [fabric, address, job, rank, size, limit, liveness] = *words else { panic!("{words:?}") };
        let (rank, size): (usize, usize) = (rank.parse().unwrap(), size.parse().unwrap());
        let milliseconds = |word: &str| Duration::from_millis(word.parse().unwrap());
        let limit = milliseconds(limit);
        let fabric = fabric_of(fabric);
        // Over verbs, ranks take turns at the devices.
        let end = if rank.is_multiple_of(2) { End::Left } else { End::Right };
        let launch = address.strip_prefix(LAUNCHED).map(|url| {
            let (local_rank, local_size, is_on_one_machine, job) = (None, None, None, None);
            let (store, by) = (Some(url.parse().unwrap()), "Tensorwire");
            Launch { rank, size, local_rank, local_size, is_on_one_machine, job, store, by }
        });
        let name = format!("{job}_{rank}");
        let builder = launch.as_ref().map_or_else(|| Worker::builder(&name), |launch| launch.worker(&name));
        let started = over_at(builder, fabric, end).liveness(milliseconds(liveness)).start().await;
        let worker = started.unwrap_or_else(|error| unstarted(&error));
        let store: Arc<dyn Store> = match (address, launch) {
            (OWN_STORE, _) => {
                let store = MemoryStore::new(worker.runtime().clone());
                store.serve(&worker).unwrap();
                say(worker.address());
                Arc::new(store)
            }
            (_, Some(launch)) => {
                launch.open_store(limit, &worker).await.unwrap_or_else(|error| unstarted(&error))
            }
            (address, None) => Arc::new(WorkerStore::connect(&worker, address, limit).await.unwrap()),
        };
        say("waiting");
        let builder = Group::builder(store, rank, size).name("tests").timeout(limit);
        let joining = builder.clone();
        let joined = if is_newcomer { joining.rejoin(&worker).await } else { joining.join(&worker).await };
        let group = report_group("joined", joined);
        Self { worker, builder, group, aside: None, reducing: None, limit, share: share(rank) }
    }

    /// Does what the parent requests, until the parent ends it or ends.
    async fn obey(mut self) {
        let mut lines = parents_lines();
        while let Some(line) = lines.recv().await {
            match line.split(' ').collect::<Vec<_>>()[..] {
                ["loop", length] => self.reduce(length.parse().unwrap(), u64::MAX).await,
                ["join", "aside", address] => self.join_aside(address).await,
                ["reduce", "aside"] => self.reduce_aside(),
                ["end", "aside"] => self.end_aside().await,
                ["flood", victim] => self.flood(victim).await,
                ["reduce", length] => self.reduce(length.parse().unwrap(), 1).await,
                ["pair", what, length] => {
                    pairs::run(self.group.as_ref().unwrap(), what, length.parse().unwrap()).await;
                }
                ["shrink"] => {
                    let shrunk = self.group.as_ref().unwrap().shrink().await;
                    self.group = report_group("shrunk to", shrunk).or(self.group);
                }
                ["admit"] => {
                    let group = self.group.as_ref().unwrap();
                    while group.waiting().await.unwrap() == 0 {
                        self.worker.runtime().sleep(Duration::from_millis(10)).await;
                    }
                    let grown = group.admit().await;
                    self.group = report_group("grown to", grown).or(self.group);
                }
                ["rejoin"] => {
                    self.group = None;
                    self.group = report_group("joined", self.builder.clone().rejoin(&self.worker).await);
                }
                ["close"] => {
                    self.group.take().unwrap().close().await.unwrap();
                    say("closed");
                }
                ["end"] => break,
                _ => panic!("no command of these tests: {line}"),
            }
        }
        drop((self.group, self.aside));
        self.worker.shutdown().await;
        say("ended");
    }

    async fn join_aside(&mut self, address: &str) {
        let store = WorkerStore::connect(&self.worker, address, self.limit).await.unwrap();
        let group = Group::builder(Arc::new(store), 0, 2).name("tests").timeout(self.limit);
        self.aside = report_group("joined", group.join(&self.worker).await);
    }

    /// Begins a call in the other group, which is polled while this rank makes other calls.
    fn reduce_aside(&mut self) {
        let group = self.aside.clone().unwrap();
        self.reducing = Some(tokio::spawn(async move { group.all_reduce(&mut [0f32; ASIDE]).await }));
    }

    async fn end_aside(&mut self) {
        match self.reducing.take().unwrap().await.unwrap() {
            Ok(()) => say("done"),
            Err(error) => say(&failed(&error)),
        }
    }

    /// Requests tensors that the victim does not have, as often as possible, until this process is killed.
    async fn flood(&self, victim: &str) {
        let peer = self.worker.peer(victim).unwrap();
        let names: Vec<String> = (0..LIST).map(|number| format!("nothing {number}")).collect();
        // Only rejections by the victim itself were work for it.
        let is_refused = async || matches!(peer.fetch_many(&names).await, Err(WorkerError::Remote { .. }));
        assert!(is_refused().await);
        say("flooding");
        join_all((0..LISTS).map(async |_| while is_refused().await {})).await;
        say("no longer flooding");
    }

    /// Adds up the ranks' values again and again, and reports the sums and the error at the end.
    async fn reduce(&self, length: usize, rounds: u64) {
        let group = self.group.as_ref().unwrap();
        let mut values = vec![0f32; length];
        for round in 1..=rounds {
            values.fill(self.share as f32);
            if let Err(error) = group.all_reduce(&mut values).await {
                return say(&failed(&error));
            }
            assert!(values.iter().all(|value| *value == values[0]), "round {round}: elements differ");
            if round <= ROUNDS {
                say(&format!("round {round}: {}", values[0]));
            }
        }
    }
}

/// Reports why this rank cannot start.
fn unstarted(error: &dyn std::error::Error) -> ! {
    say(&format!("failed Start: {error}"));
    std::process::exit(0)
}

/// Reports a group, or the error.
fn report_group(what: &str, group: Result<Group, GroupError>) -> Option<Group> {
    match &group {
        Ok(group) => say(&format!("{what} {} of {}", group.rank(), group.size())),
        Err(error) => say(&failed(error)),
    }
    group.ok()
}

/// The kind of an error and its text.
pub(crate) fn failed(error: &GroupError) -> String {
    let kind = match error {
        GroupError::Store(_) => "Store",
        GroupError::Missing { .. } => "Missing",
        GroupError::RankTaken { .. } => "RankTaken",
        GroupError::OtherRun { .. } => "OtherRun",
        GroupError::LeftOut { .. } => "LeftOut",
        GroupError::NoMajority { .. } => "NoMajority",
        GroupError::TimedOut { .. } => "TimedOut",
        GroupError::Left { .. } => "Left",
        GroupError::Mismatch { .. } => "Mismatch",
        GroupError::RankLost { .. } => "RankLost",
        GroupError::Over { .. } => "Over",
        GroupError::Aborted { .. } => "Aborted",
        GroupError::Worker(_) => "Worker",
        _ => "another error",
    };
    format!("failed {kind}: {error}")
}
