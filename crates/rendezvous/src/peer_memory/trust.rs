//! How far a worker trusts its peers.

/// How far a worker trusts its peers, which all know the cluster's secret. It is a setting of each worker; peers need
/// not have the same, and it is not sent to them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Trust {
    /// Peers write received values directly into the receive pool. A misbehaving peer can corrupt memory that is being
    /// received into; over RDMA, it can corrupt all of the receive pool while it is connected (SECURITY.md).
    #[default]
    Cluster,
    /// Peers may misbehave. Each connection has a separate protection domain, in which its peer can write two things
    /// only: its own message ring, and a bounce pool that nothing else uses. Each value is copied once from the bounce
    /// pool into memory that no peer can ever write. So a peer can corrupt only what it sends itself.
    ///
    /// This costs the copy and twice the memory for values in flight. Each connection registers the memory that is sent
    /// from, and over RDMA each registration counts towards the limit of locked memory. Shared memory is not used,
    /// because peers could read more than they are sent.
    Hostile,
}
