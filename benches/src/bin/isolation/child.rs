//! A process of the measurement: it joins groups, times calls, or floods another one.

use std::{
    io::Write,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use futures::future::try_join_all;
use tensorwire::{
    FabricKind, Worker, WorkerError,
    collective::{Group, GroupError, store::WorkerStore},
    settings::Wait,
};
use tokio::{sync::mpsc, time::Instant};

use crate::Failure;

/// The limit of every wait. Calls with a stopped rank are under way for this time.
const LIMIT: Duration = Duration::from_secs(60);

/// Calls that are under way with a rank that is disturbed.
const CALLS: usize = 8;

/// Lists of requests that a flooding process has under way, and the length of each.
const LISTS: usize = 16;
const LIST: usize = 64;

/// `FABRIC NAME STORE CPU THREADS`.
pub(crate) fn run(role: &str) -> Result<(), Failure> {
    let words: Vec<&str> = role.split(' ').collect();
    let &[fabric, name, store, cpu, threads] = words.as_slice() else {
        return Err(format!("no role: {role}").into());
    };
    crate::pin(cpu.parse()?)?;
    let mut builder = match threads.parse()? {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    builder.worker_threads(threads.parse()?).enable_all().build()?.block_on(async {
        let kind = if fabric == "shm" { FabricKind::SHM } else { FabricKind::TCP };
        let worker = Worker::builder(name).require(kind).wait(Wait::Sleep).start().await?;
        let store = WorkerStore::connect(&worker, store, LIMIT).await?;
        Member { worker, store: Arc::new(store), group: None, refused: Arc::default() }.obey().await
    })
}

struct Member {
    worker: Worker,
    store: Arc<WorkerStore>,
    group: Option<Group>,
    /// Requests that a victim of this process has refused.
    refused: Arc<AtomicU64>,
}

impl Member {
    /// Executes the parent's commands until its stream ends.
    async fn obey(mut self) -> Result<(), Failure> {
        let mut lines = parents_lines();
        while let Some(line) = lines.recv().await {
            match line.split(' ').collect::<Vec<_>>()[..] {
                ["join", name, rank, size] => {
                    self.group = Some(self.joining(name, rank.parse()?, size.parse()?).await?);
                    say("joined")?;
                }
                ["reduce", bytes, calls] => {
                    let [median, mean] = self.times_ns(bytes.parse()?, calls.parse()?).await?;
                    say(&format!("{median} {mean}"))?;
                }
                ["aside", name, calls] => {
                    let (group, calls) = (self.joining(name, 0, 2), calls.parse()?);
                    tokio::spawn(aside(group, calls));
                }
                ["flood", victim] => {
                    self.flood(victim).await?;
                    say("flooding")?;
                }
                ["refused"] => say(&self.refused.load(Ordering::Relaxed).to_string())?,
                _ => return Err(format!("not understood: {line}").into()),
            }
        }
        Ok(())
    }

    fn joining(
        &self,
        name: &str,
        rank: usize,
        size: usize,
    ) -> impl Future<Output = Result<Group, GroupError>> + Send + use<> {
        let builder = Group::builder(self.store.clone(), rank, size).name(name).timeout(LIMIT);
        let worker = self.worker.clone();
        async move { builder.join(&worker).await }
    }

    /// Median and mean of a call.
    async fn times_ns(&self, bytes: usize, calls: u32) -> Result<[u128; 2], Failure> {
        let group = self.group.as_ref().ok_or("in no group")?;
        let mut values = vec![1f32; bytes / size_of::<f32>()];
        let mut times = Vec::new();
        for _ in 0..calls {
            let begun = Instant::now();
            group.all_reduce(&mut values).await?;
            times.push(begun.elapsed().as_nanos());
        }
        times.sort_unstable();
        Ok([times[times.len() / 2], times.iter().sum::<u128>() / u128::from(calls.max(1))])
    }

    /// Requests tensors that the victim does not have, as often as possible, and counts the refused requests.
    async fn flood(&self, victim: &str) -> Result<(), Failure> {
        let peer = self.worker.peer(victim)?;
        let names: Vec<String> = (0..LIST).map(|number| format!("nothing {number}")).collect();
        refused(peer.fetch_many(&names).await)?;
        let refused_count = self.refused.clone();
        tokio::spawn(async move {
            let flooding = (0..LISTS).map(async |_| {
                loop {
                    refused(peer.fetch_many(&names).await)?;
                    refused_count.fetch_add(LIST as u64, Ordering::Relaxed);
                }
            });
            let ended: Result<Vec<()>, WorkerError> = try_join_all(flooding).await;
            eprintln!("the flood has ended: {ended:?}");
        });
        Ok(())
    }
}

/// Accepts only a refusal by the victim itself: other errors cost it no work.
fn refused<T>(answer: Result<T, WorkerError>) -> Result<(), WorkerError> {
    match answer {
        Ok(_) | Err(WorkerError::Remote { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// The first rank of another group, until that group is over.
async fn aside(
    group: impl Future<Output = Result<Group, GroupError>>,
    calls: bool,
) -> Result<(), GroupError> {
    let group = group.await?;
    if calls {
        try_join_all((0..CALLS).map(async |_| group.all_reduce(&mut [0f32; 2]).await)).await?;
    }
    std::future::pending().await
}

fn parents_lines() -> mpsc::UnboundedReceiver<String> {
    let (found, lines) = mpsc::unbounded_channel();
    thread::spawn(move || {
        std::io::stdin().lines().map_while(Result::ok).try_for_each(|line| found.send(line))
    });
    lines
}

fn say(line: &str) -> std::io::Result<()> {
    println!("{line}");
    std::io::stdout().flush()
}
