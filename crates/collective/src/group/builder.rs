//! The settings with which a worker joins a group.

use std::{sync::Arc, time::Duration};

use super::Group;
use crate::{error::GroupError, store::Store};

/// The default time limit of joining, and of each call.
const LIMIT: Duration = Duration::from_secs(30);

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
    /// use tensorwire_collective::{Group, store::MemoryStore};
    /// use tensorwire_rendezvous::Worker;
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

    pub(super) fn check(&self) -> Result<(), GroupError> {
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
        if self.limit.is_zero() {
            return refuse("timeout", format!("{:?}", self.limit), "must be more than zero");
        }
        Ok(())
    }
}

/// Checks the name of a group.
pub(super) fn check_name(name: &str) -> Result<(), GroupError> {
    if !name.is_empty() && name.len() <= NAME_BYTES_MAX && !name.contains(char::is_control) {
        return Ok(());
    }
    Err(GroupError::Argument {
        field: "name",
        value: name.to_owned(),
        remedy: "1 to 128 bytes without control characters".to_owned(),
    })
}
