//! The settings with which a worker joins a group.

use std::{sync::Arc, time::Duration};

use tensorwire_rendezvous::{DuplicatePolicy, Worker};

use super::{CALLS_UNDER_WAY, Group};
use crate::{error::GroupError, pair::RECV_BUFFERS_MAX, schedule::AHEAD, store::Store};

/// The default time limit of joining, and of each call.
const LIMIT: Duration = Duration::from_secs(30);

/// The least [`requests_max`](tensorwire_rendezvous::Flow::requests_max) of a rank's worker. It covers the receives of all receive
/// buffers and of all calls under way. With less, calls could wait for one another: on each of two ranks a call that the other
/// rank waits for would have no room for its receive.
const REQUESTS_MIN: u32 = 256;

/// The most receives that one call has outstanding at a rank: contents, the call itself, and the group's end.
const REQUESTS_OF_CALL: usize = AHEAD + 2;

const _: () = assert!(RECV_BUFFERS_MAX + CALLS_UNDER_WAY * REQUESTS_OF_CALL <= REQUESTS_MIN as usize);

/// Longest name of a group, in bytes.
const NAME_BYTES_MAX: usize = 128;

/// Settings of a group, made by [`Group::builder`].
#[derive(Debug, Clone)]
#[must_use = "nothing is joined until `join` is awaited"]
pub struct GroupBuilder {
    pub(super) store: Arc<dyn Store>,
    pub(super) name: String,
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) job: Option<String>,
    pub(super) limit: Duration,
}

impl Group {
    /// A group of `size` ranks, of which this process is `rank`. The ranks find each other through `store`.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tensorwire::collective::{Group, store::MemoryStore};
    /// use tensorwire::{Worker, settings::DuplicatePolicy};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let worker = Worker::builder("trainer_0").start().await?;
    /// let store = Arc::new(MemoryStore::new(worker.runtime().clone()));
    /// let group = Group::builder(store, 0, 1).name("trainers").join(&worker).await?;
    /// let mut gradient = [1.0f32, 2.0];
    /// group.all_reduce(&mut gradient).await?;
    /// group.close().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn builder(store: Arc<dyn Store>, rank: usize, size: usize) -> GroupBuilder {
        GroupBuilder { store, name: "group".to_owned(), rank, size, job: None, limit: LIMIT }
    }
}

impl GroupBuilder {
    /// The group's name. Groups with different names in one store are independent. Default: `group`.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// The id of this run, as the launcher's job id ([`Launch::job`](crate::launch::Launch::job)). It must be the same on all
    /// ranks, and different from that of any earlier run with this store. Default: rank 0 draws an id and writes it into the
    /// store, where the others read it.
    pub fn job(mut self, job: impl Into<String>) -> Self {
        self.job = Some(job.into());
        self
    }

    /// The time limit of joining, and of each call of the group. Default: 30 seconds.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    pub(super) fn check(&self, worker: &Worker) -> Result<(), GroupError> {
        let refuse = |field, value: String, remedy: &str| {
            Err(GroupError::Argument { field, value, remedy: remedy.to_owned() })
        };
        if self.size == 0 || u32::try_from(self.size).is_err() {
            return refuse("size", self.size.to_string(), "a group has 1 to 2^32 - 1 ranks");
        }
        if self.rank >= self.size {
            return Err(GroupError::no_such_rank("rank", self.rank, self.size));
        }
        check_name(&self.name)?;
        if worker.duplicates() != DuplicatePolicy::Queue {
            let remedy = "a group queues several values under one key: leave the worker's setting at `Queue`";
            return refuse("duplicates", format!("{:?}", worker.duplicates()), remedy);
        }
        let requests_max = worker.requests_max();
        if requests_max < REQUESTS_MIN {
            let remedy = format!("give the workers of all ranks at least {REQUESTS_MIN}");
            return refuse("requests_max", requests_max.to_string(), &remedy);
        }
        if self.limit.is_zero() {
            return refuse("timeout", format!("{:?}", self.limit), "must be more than zero");
        }
        Ok(())
    }
}

/// Checks the name of a group.
pub(crate) fn check_name(name: &str) -> Result<(), GroupError> {
    if !name.is_empty() && name.len() <= NAME_BYTES_MAX && !name.contains(char::is_control) {
        return Ok(());
    }
    Err(GroupError::Argument {
        field: "name",
        value: name.to_owned(),
        remedy: "1 to 128 bytes without control characters".to_owned(),
    })
}
