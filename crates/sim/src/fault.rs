//! What a scenario can inject.

use std::time::Duration;

use tensorwire_fabric::FabricKind;

use crate::ids::NodeId;

/// A fault that a scenario injects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The node's process dies: its tasks are dropped, its queue pairs and sessions end, peers see it after a random,
    /// bounded time. Its packets, and packets to it, may arrive much later.
    Crash(NodeId),
    /// The queue pairs between two nodes break; both stay alive.
    LoseLink(NodeId, NodeId),
    /// The control sessions between two nodes break; both stay alive.
    LoseControl(NodeId, NodeId),
    /// The node's process is stopped between two of its steps (SIGSTOP). The seed decides whether its NIC continues, as
    /// over verbs, or stops with the process, as over shm and tcp.
    Freeze(NodeId),
    /// The node's process is stopped for this time.
    Pause(NodeId, Duration),
    /// A stopped process goes on (SIGCONT).
    Thaw(NodeId),
    /// The node's tasks run late, most of the time, until [`Handle::heal`](crate::Handle::heal).
    Slow(NodeId),
    /// The next queue pair between two nodes is half-open: one side is connected, the other sees after a while that
    /// connecting failed.
    HalfOpen(NodeId, NodeId),
    /// The device of one of the node's fabrics fails: its queue pairs end, their peers notice later, and no new ones
    /// can be made.
    LoseDevice(NodeId, FabricKind),
    /// The device is back: new queue pairs can be made.
    RestoreDevice(NodeId, FabricKind),
    /// The end of all faults: see [`Handle::heal`](crate::Handle::heal).
    Heal,
}

/// A call that can be made to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Call {
    /// Registering a block with a domain (ENOMEM: the memlock limit, or the device's table).
    Register,
    /// Making one side of a connection.
    Prepare,
    /// Posting an operation: it fails, and its connection with it.
    Post,
    /// Taking a buffer from a pool that has room (ENOMEM: no memory for a block).
    Allocate,
}

impl Call {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Register => "register memory",
            Self::Prepare => "make a queue pair",
            Self::Post => "post a work request",
            Self::Allocate => "allocate memory",
        }
    }
}
