//! [`ClusterSpec`]: the names and addresses of the workers of a cluster.

mod error;
mod tf_config;

use std::collections::BTreeMap;

use tensorwire_fabric::FabricKind;
use tensorwire_protocol::DeviceName;

use crate::control::host_and_port;

pub use self::{
    error::ClusterError,
    tf_config::{TF_CONFIG, TfConfig},
};
use crate::control::name::{sought, task_name, worker_name};

/// Names and addresses of the workers of a cluster.
///
/// Workers are grouped in jobs, and numbered within their job: task 1 of job `ps` is the worker
/// `/job:ps/replica:0/task:1`. Errors (a name or address given twice, an invalid address) are reported by
/// [`check`](Self::check), which [`WorkerBuilder::start`](crate::WorkerBuilder::start) calls. So a specification can be
/// written as one expression.
///
/// ```
/// use tensorwire::settings::ClusterSpec;
///
/// let cluster = ClusterSpec::new()
///     .hosts("ps", "10.0.0.1:2222,10.0.0.2:2222")
///     .hosts("worker", "10.0.0.3:2222");
/// cluster.check()?;
/// assert_eq!(cluster.task_address("ps", 1)?, "10.0.0.2:2222");
/// assert_eq!(ClusterSpec::worker_name("ps", 1), "/job:ps/replica:0/task:1");
/// let refused = cluster.hosts("evaluator", "10.0.0.3:2222").check().unwrap_err();
/// assert!(refused.to_string().contains("10.0.0.3:2222"));
/// # Ok::<(), tensorwire::settings::ClusterError>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterSpec {
    addresses: BTreeMap<String, String>,
    /// The fabric of the protocol, if there is one.
    fabric: Option<FabricKind>,
    /// The first error that later calls cannot repair.
    problem: Option<ClusterError>,
}

impl ClusterSpec {
    /// An empty cluster.
    pub fn new() -> Self {
        Self::default()
    }

    /// The name of a task's worker, in replica 0.
    pub fn worker_name(job: &str, task: u32) -> String {
        task_name(job, task)
    }

    /// Adds the worker `name` (`/job:ps/replica:0/task:0`, or its short form `ps`), which listens on `address`
    /// (`host:port`).
    #[must_use]
    pub fn worker(mut self, name: impl Into<String>, address: impl Into<String>) -> Self {
        let (name, address) = (sought(&name.into()), normalise(&address.into()));
        if let Some(first) = self.addresses.get(&name) {
            let problem = ClusterError::DuplicateName { name, first: first.clone(), second: address };
            self.problem.get_or_insert(problem);
            return self;
        }
        self.addresses.insert(name, address);
        self
    }

    /// Adds the tasks of `job`, in the form of flags like `--ps-hosts`: addresses separated by commas, task 0 first.
    #[must_use]
    pub fn hosts(self, job: &str, hosts: &str) -> Self {
        let hosts: Vec<&str> = hosts.split(',').map(str::trim).filter(|host| !host.is_empty()).collect();
        if !hosts.is_empty() {
            return self.tasks_at(job, hosts);
        }
        self.with_problem(ClusterError::NoHosts { job: job.to_owned() })
    }

    /// Adds the tasks of `job` with these addresses, task 0 first.
    #[must_use]
    pub fn tasks_at<A: Into<String>>(self, job: &str, addresses: impl IntoIterator<Item = A>) -> Self {
        (0..).zip(addresses).fold(self, |spec, (task, address)| spec.task(job, task, address))
    }

    /// Adds one task of `job`. The numbers of a job's tasks may have gaps.
    #[must_use]
    pub fn task(self, job: &str, task: u32, address: impl Into<String>) -> Self {
        self.worker(Self::worker_name(job, task), address)
    }

    /// The protocol of the cluster's servers, in TensorFlow's words: `grpc+verbs` requires RDMA, and `grpc` uses only
    /// TCP. It has the effect of [`WorkerBuilder::require`](crate::WorkerBuilder::require), unless the builder names
    /// fabrics itself. Default: none, so each pair of workers uses the first of the builder's fabrics that both have.
    ///
    /// ```
    /// use tensorwire::settings::ClusterSpec;
    ///
    /// let cluster = ClusterSpec::new().hosts("ps", "10.0.0.1:2222");
    /// cluster.clone().protocol("grpc+verbs").check()?;
    /// let refused = cluster.protocol("grpc+mpi").check().unwrap_err();
    /// assert!(refused.to_string().contains("write `grpc+verbs`"));
    /// # Ok::<(), tensorwire::settings::ClusterError>(())
    /// ```
    #[must_use]
    pub fn protocol(mut self, protocol: &str) -> Self {
        match fabric_of(protocol) {
            Ok(kind) => {
                self.fabric = Some(kind);
                self
            }
            Err(remedy) => {
                let (value, remedy) = (protocol.to_owned(), remedy.to_owned());
                self.with_problem(ClusterError::UnknownProtocol { value, remedy })
            }
        }
    }

    /// The fabric that the [protocol](Self::protocol) requires.
    pub(crate) fn fabric(&self) -> Option<FabricKind> {
        self.fabric
    }

    fn with_problem(mut self, problem: ClusterError) -> Self {
        self.problem.get_or_insert(problem);
        self
    }

    /// Checks that every name is a worker name, that every address is a `host:port`, and that no name or address is
    /// given twice.
    ///
    /// # Errors
    /// [`ClusterError`] names the first error, and what to do.
    pub fn check(&self) -> Result<(), ClusterError> {
        if let Some(problem) = &self.problem {
            return Err(problem.clone());
        }
        let mut owners: BTreeMap<&str, &str> = BTreeMap::new();
        for (name, address) in &self.addresses {
            worker_name(name).map_err(|remedy| ClusterError::BadName { name: name.clone(), remedy })?;
            check_address(address)
                .map_err(|problem| ClusterError::address(format!("address of {name}"), address, problem))?;
            if let Some(first) = owners.insert(address, name) {
                let (first, second) = (first.to_owned(), name.clone());
                return Err(ClusterError::DuplicateAddress { address: address.clone(), first, second });
            }
        }
        Ok(())
    }

    /// The address of the worker `name`.
    pub fn address(&self, name: &str) -> Option<&str> {
        self.addresses.get(&sought(name)).map(String::as_str)
    }

    /// All workers' names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.addresses.keys().map(String::as_str)
    }

    /// All jobs, sorted.
    pub fn jobs(&self) -> Vec<String> {
        let mut jobs: Vec<String> = self.parsed().filter_map(|(name, _)| name.job).collect();
        jobs.sort_unstable();
        jobs.dedup();
        jobs
    }

    /// The tasks of `job`, in the order of their numbers, with their addresses.
    ///
    /// # Errors
    /// [`ClusterError::UnknownJob`].
    pub fn job(&self, job: &str) -> Result<Vec<(u32, &str)>, ClusterError> {
        let of_job = self.parsed().filter(|(name, _)| name.job.as_deref() == Some(job));
        let mut tasks: Vec<_> = of_job.filter_map(|(name, address)| Some((name.task?, address))).collect();
        if tasks.is_empty() {
            return Err(ClusterError::UnknownJob { job: job.to_owned(), known: self.jobs() });
        }
        tasks.sort_unstable();
        Ok(tasks)
    }

    /// The names of the workers of `job`, in the order of their numbers.
    ///
    /// # Errors
    /// [`ClusterError::UnknownJob`].
    pub fn tasks(&self, job: &str) -> Result<Vec<String>, ClusterError> {
        Ok(self.job(job)?.into_iter().map(|(task, _)| Self::worker_name(job, task)).collect())
    }

    /// The address of one task.
    ///
    /// # Errors
    /// [`ClusterError::UnknownJob`], [`ClusterError::IndexOutOfRange`].
    pub fn task_address(&self, job: &str, task: u32) -> Result<&str, ClusterError> {
        let tasks = self.job(job)?;
        let found = tasks.iter().find(|(number, _)| *number == task);
        found.map(|(_, address)| *address).ok_or_else(|| ClusterError::IndexOutOfRange {
            job: job.to_owned(),
            index: task.to_string(),
            known: tasks.iter().map(|(number, _)| *number).collect(),
        })
    }

    /// The workers of replica 0 with valid names.
    fn parsed(&self) -> impl Iterator<Item = (DeviceName, &str)> {
        let parsed = self.addresses.iter().map(|(name, address)| (name.parse::<DeviceName>(), address));
        parsed
            .filter_map(|(name, address)| Some((name.ok()?, address.as_str())))
            .filter(|(name, _)| name.replica == Some(0))
    }
}

/// The fabric that a protocol of TensorFlow names. The error is the remedy.
fn fabric_of(protocol: &str) -> Result<FabricKind, &'static str> {
    match protocol {
        "grpc" => Ok(FabricKind::TCP),
        "grpc+verbs" => Ok(FabricKind::VERBS),
        _ => Err(
            "write `grpc+verbs` for RDMA or `grpc` for TCP, or leave it out to use the fastest fabric of each pair",
        ),
    }
}

/// The normal form of an address, without scheme and surrounding space.
pub(crate) fn normalise(address: &str) -> String {
    let address = address.trim();
    let schemes = ["http://", "grpc://"];
    let bare = schemes.iter().find_map(|scheme| address.strip_prefix(scheme)).unwrap_or(address);
    bare.trim_end_matches('/').to_owned()
}

/// Checks that `address` can be dialled.
pub(crate) fn check_address(address: &str) -> Result<(), &'static str> {
    match host_and_port(address)? {
        (_, 0) => Err("its port is not a number from 1 to 65535"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
