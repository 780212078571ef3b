//! Queries at a steady rate, and what came of each.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{MissedTickBehavior, interval, timeout},
};

use crate::{model::Answer, run::http};

/// A query and its answer.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    /// When it was sent.
    pub(crate) sent: Instant,
    /// When it was answered, or given up.
    pub(crate) ended: Instant,
    /// Who answered with which version; `None` if nobody did.
    pub(crate) answer: Option<(usize, u64)>,
    /// The first service that was asked did not answer.
    pub(crate) went_on: bool,
}

impl Sample {
    pub(crate) fn version(&self) -> u64 {
        self.answer.map_or(0, |(_, version)| version)
    }
}

/// Queries that go on until this is dropped.
pub(crate) struct Load {
    samples: Arc<Mutex<Vec<Sample>>>,
    count: watch::Receiver<usize>,
    task: JoinHandle<()>,
}

impl Load {
    /// Sends the queries in turn to the services at `addresses`; one that does not answer is asked at the next address.
    pub(crate) fn start(addresses: Arc<[String]>, queries: Arc<[String]>, each: Duration) -> Self {
        let samples: Arc<Mutex<Vec<Sample>>> = Arc::default();
        let (counted, count) = watch::channel(0);
        let all = samples.clone();
        let task = tokio::spawn(async move {
            let mut ticks = interval(each);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            for number in 0.. {
                ticks.tick().await;
                let (addresses, queries) = (addresses.clone(), queries.clone());
                let (all, counted) = (all.clone(), counted.clone());
                tokio::spawn(async move {
                    let path = queries.get(number % queries.len().max(1)).map_or("/search", |path| path);
                    let sample = query(&addresses, number, path).await;
                    lock(&all).push(sample);
                    counted.send_modify(|count| *count += 1);
                });
            }
        });
        Self { samples, count, task }
    }

    /// The first query answered from now on that fulfils `is_met`; an error that names `what` after `limit`.
    pub(crate) async fn wait_for(
        &self,
        what: &str,
        limit: Duration,
        is_met: impl Fn(&Sample) -> bool,
    ) -> Result<Sample> {
        let (from, mut count) = (lock(&self.samples).len(), self.count.clone());
        let found = async {
            loop {
                count.borrow_and_update();
                let found = lock(&self.samples).iter().skip(from).find(|sample| is_met(sample)).cloned();
                if let Some(sample) = found {
                    return Ok(sample);
                }
                count.changed().await.context("the queries have ended")?;
            }
        };
        timeout(limit, found).await.with_context(|| format!("waited {limit:?} for {what}"))?
    }

    /// All queries that were sent from `begin` to `end`.
    pub(crate) fn between(&self, begin: Instant, end: Instant) -> Vec<Sample> {
        let samples = lock(&self.samples);
        samples.iter().filter(|sample| (begin..end).contains(&sample.sent)).cloned().collect()
    }

    /// The newest version that any query was answered with.
    pub(crate) fn newest(&self) -> u64 {
        lock(&self.samples).iter().map(Sample::version).max().unwrap_or(0)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn query(addresses: &[String], number: usize, path: &str) -> Sample {
    let sent = Instant::now();
    for turn in 0..addresses.len() {
        let service = (number + turn) % addresses.len();
        let Some(address) = addresses.get(service) else { continue };
        if let Ok(answer) = http::get::<Answer>(address, path).await {
            return Sample {
                sent,
                ended: Instant::now(),
                answer: Some((service, answer.version)),
                went_on: turn > 0,
            };
        }
    }
    Sample { sent, ended: Instant::now(), answer: None, went_on: true }
}

fn lock(samples: &Mutex<Vec<Sample>>) -> MutexGuard<'_, Vec<Sample>> {
    samples.lock().unwrap_or_else(PoisonError::into_inner)
}
