//! The errors of cluster specifications.

use tensorwire_protocol::text::escaped;

/// An invalid cluster, or a worker that is not in it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// A name is given twice.
    #[error("cluster: `{name}` is given twice, at {first} and at {second}: every worker needs its own name")]
    DuplicateName {
        /// The name.
        name: String,
        /// Its address.
        first: String,
        /// The address given later.
        second: String,
    },
    /// An address is given twice.
    #[error(
        "cluster: address `{address}` is given to {first} and to {second}: every worker needs its own address"
    )]
    DuplicateAddress {
        /// The address.
        address: String,
        /// One worker.
        first: String,
        /// The other.
        second: String,
    },
    /// Text that is not a worker name.
    #[error("cluster: `{}` is not a worker name: {remedy}", escaped(name))]
    BadName {
        /// The name.
        name: String,
        /// What to write.
        remedy: String,
    },
    /// Text that is not an address.
    #[error("cluster: {} = `{}`: {problem}", escaped(field), escaped(address))]
    BadAddress {
        /// The field that contains it.
        field: String,
        /// The text.
        address: String,
        /// What is wrong, and how to write it.
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
        /// The jobs of the cluster.
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
        /// The numbers of the job's tasks.
        known: Vec<u32>,
    },
    /// A protocol that no fabric corresponds to.
    #[error("cluster: protocol = `{}`: {remedy}", escaped(value))]
    UnknownProtocol {
        /// The protocol.
        value: String,
        /// What to write.
        remedy: String,
    },
    /// The environment variable does not describe a cluster.
    #[error("TF_CONFIG: {field} = `{value}`: {remedy}")]
    TfConfig {
        /// The part of the variable.
        field: String,
        /// The value, cut if it is long.
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
        return "none (there are none)".to_owned();
    }
    known.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}
