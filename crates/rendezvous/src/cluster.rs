//! Which workers there are, and where.

use std::collections::BTreeMap;

/// Names and addresses of the workers of a cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterSpec {
    addresses: BTreeMap<String, String>,
}

impl ClusterSpec {
    /// No workers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the worker `name` (`/job:ps/replica:0/task:0`), which listens on `address` (`host:port`).
    #[must_use]
    pub fn worker(mut self, name: impl Into<String>, address: impl Into<String>) -> Self {
        self.addresses.insert(name.into(), address.into());
        self
    }

    /// The address of `name`.
    pub fn address(&self, name: &str) -> Option<&str> {
        self.addresses.get(name).map(String::as_str)
    }

    /// All names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.addresses.keys().map(String::as_str)
    }
}
