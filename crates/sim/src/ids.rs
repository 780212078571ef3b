//! Ids of the objects of a world: small numbers in order of creation, equal in every run of a seed.

use std::fmt;

macro_rules! id {
    ($(#[$meta:meta])* $name:ident, $prefix:literal, $number:ty) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub(crate) $number);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(self, f)
            }
        }
    };
}

id!(
    /// One incarnation of a process. A restart at the same address is a new node.
    NodeId,
    "node",
    u32
);
id!(
    /// One side of a queue pair.
    EndpointId,
    "ep",
    u32
);
id!(
    /// One side of a control session.
    SessionId,
    "session",
    u32
);
id!(
    /// A spawned task.
    TaskId,
    "task",
    u64
);
id!(
    /// An operation of the ledger.
    OperationId,
    "op",
    u64
);
id!(
    /// A memory block, in the order in which the world saw them.
    BlockNumber,
    "block",
    u32
);
id!(
    /// A lease of memory that a peer views.
    LeaseId,
    "lease",
    u64
);
id!(
    /// A grant, in the order in which the world saw them.
    GrantNumber,
    "grant",
    u32
);

impl NodeId {
    /// The harness itself: runs the scenario and never crashes.
    pub const OPERATOR: Self = Self(0);

    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

impl EndpointId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

impl SessionId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}
