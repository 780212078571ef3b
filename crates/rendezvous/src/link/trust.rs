//! What a worker takes its peers for.

/// What a worker takes its peers for, who all know the cluster's secret. Each worker decides for itself: nothing of it
/// is agreed with peers, and nothing of it travels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Trust {
    /// Peers write received values to where they stay. A peer that has gone bad can spoil memory that is being received
    /// into: over RDMA all of the receive pool, for as long as it is connected (SECURITY.md).
    #[default]
    Cluster,
    /// Peers may do their worst with what they are lent. Each connection has a protection domain of its own, and its
    /// peer can write two things only: its own message ring, and a pool that nothing else uses, where content bounces.
    /// A value is copied out of that once, and handed out of memory that no peer could ever write. So a peer can spoil
    /// what it sends itself, and nothing else, at any time.
    ///
    /// It costs that copy, twice the memory for values under way, and for each connection the registration of the memory
    /// that is sent from, which over RDMA counts against the limit on locked memory each time. Shared memory is not used: neighbours could read more than they are sent.
    Hostile,
}
