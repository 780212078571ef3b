//! Which fabric.

use std::{fmt, str::FromStr};

/// Names a kind of fabric, in settings, logs and on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FabricKind {
    /// RDMA through libibverbs.
    Verbs,
    /// Shared memory on one host.
    Shm,
    /// TCP.
    Tcp,
    /// The simulator's fabric.
    Sim,
    /// Calls on the control plane's own connections: the last resort, with copies at the receiver.
    Grpc,
}

impl FabricKind {
    const ALL: [Self; 5] = [Self::Verbs, Self::Shm, Self::Tcp, Self::Sim, Self::Grpc];

    /// The lower-case name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Verbs => "verbs",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Sim => "sim",
            Self::Grpc => "grpc",
        }
    }
}

impl fmt::Display for FabricKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is no fabric's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("fabric `{0}` is unknown: use one of verbs, shm, tcp, grpc")]
pub struct UnknownFabric(pub String);

impl FromStr for FabricKind {
    type Err = UnknownFabric;

    fn from_str(text: &str) -> Result<Self, UnknownFabric> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| UnknownFabric(text.to_owned()))
    }
}
