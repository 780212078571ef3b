//! The ways that are measured.

use std::{fmt, str::FromStr};

use tensorwire::{FabricKind, Sharing, Worker, WorkerBuilder};

use crate::options::RoleName;

/// A way for parameters and gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Transport {
    /// Tensorwire as it is used by default.
    Auto,
    /// The same, with parameters and gradients as read-only views of the other's memory where that is possible.
    Views,
    /// Tensorwire over shared memory.
    Shm,
    /// Tensorwire over TCP.
    Tcp,
    /// Tensorwire over gRPC, its last fallback.
    Fallback,
    /// A service written with tonic: one unary call for each tensor, all at once.
    Grpc,
}

impl Transport {
    pub(crate) const ALL: [Self; 6] =
        [Self::Auto, Self::Views, Self::Shm, Self::Tcp, Self::Fallback, Self::Grpc];

    /// Those that are tensorwire's.
    pub(crate) fn ours() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|transport| *transport != Self::Grpc)
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Views => "views",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Fallback => "fallback",
            Self::Grpc => "grpc",
        }
    }

    /// A worker for this way: each has one of its own in each process.
    pub(crate) fn builder(self, role: RoleName) -> WorkerBuilder {
        let builder = Worker::builder(&self.worker_name(role));
        match self {
            Self::Auto | Self::Grpc => builder,
            Self::Views => builder.sharing(Sharing::View),
            Self::Shm => builder.require(FabricKind::Shm),
            Self::Tcp => builder.require(FabricKind::Tcp),
            Self::Fallback => builder.require(FabricKind::Grpc),
        }
    }

    pub(crate) fn worker_name(self, role: RoleName) -> String {
        format!("/job:{}_{}/replica:0/task:{}", role.job(), self.name(), role.index())
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Transport {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|transport| transport.name() == text).ok_or(())
    }
}
