//! What is wrong with a cluster's specification.

use tensorwire_protocol::text::escaped;

/// A cluster that contradicts itself, or a worker that is not in it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// A name given twice.
    #[error(
        "cluster: `{name}` is given twice, at {first} and at {second}: every worker needs a name of its own"
    )]
    DuplicateName {
        /// The name.
        name: String,
        /// Its address.
        first: String,
        /// The address given later.
        second: String,
    },
    /// An address given twice.
    #[error(
        "cluster: address `{address}` is that of {first} and of {second}: every worker needs an address of its own"
    )]
    DuplicateAddress {
        /// The address.
        address: String,
        /// One worker.
        first: String,
        /// The other.
        second: String,
    },
    /// A name that is no worker's.
    #[error("cluster: `{}` is no worker's name: {remedy}", escaped(name))]
    BadName {
        /// The name.
        name: String,
        /// What to write.
        remedy: String,
    },
    /// Text that is no address.
    #[error("cluster: {} = `{}`: {problem}", escaped(field), escaped(address))]
    BadAddress {
        /// Where it stands.
        field: String,
        /// The text.
        address: String,
        /// What is wrong with it, and how to write it.
        problem: String,
    },
    /// A job without a single address.
    #[error("cluster: job `{job}` has no hosts: give at least one HOST:PORT, with commas between several")]
    NoHosts {
        /// The job.
        job: String,
    },
    /// A job that is not in the cluster.
    #[error("job `{job}` is not in the cluster: use one of {}, or add its hosts", listed(known))]
    UnknownJob {
        /// The job.
        job: String,
        /// Those that are.
        known: Vec<String>,
    },
    /// A task that its job does not have.
    #[error(
        "task {index} of job `{job}` is not in the cluster: use one of {}, or add its host",
        listed(known)
    )]
    IndexOutOfRange {
        /// The job.
        job: String,
        /// The number.
        index: String,
        /// Those that the job has.
        known: Vec<u32>,
    },
    /// The environment variable that should describe the cluster does not.
    #[error("TF_CONFIG: {field} = `{value}`: {remedy}")]
    TfConfig {
        /// The part of it.
        field: String,
        /// What it says; cut if long.
        value: String,
        /// What to do.
        remedy: String,
    },
}

impl ClusterError {
    pub(super) fn address(field: String, address: &str, problem: &str) -> Self {
        Self::BadAddress { field, address: address.to_owned(), problem: problem.to_owned() }
    }
}

fn listed<T: ToString>(known: &[T]) -> String {
    if known.is_empty() {
        return "none, for there are none".to_owned();
    }
    known.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}
