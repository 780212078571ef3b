//! Tensors between processes for async Rust services.
//!
//! A producer publishes a tensor under a name, or sends it under a key; a consumer awaits it, and the bytes
//! land in the consumer's own memory by a one-sided write. On one host they go through shared memory, between
//! hosts by RDMA where both have it, else over TCP; the program is the same.
//!
//! The types that matter are [`Worker`], [`Tensor`] and [`Step`]. A whole example, with both sides in one
//! process:
//!
//! ```
//! use tensorwire::{Tensor, Worker};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), tensorwire::WorkerError> {
//! let server = Worker::builder("/job:ps/replica:0/task:0").start().await?;
//! let weights = Tensor::from_values(server.pool(), &[2, 2], &[1.0f32, 2.0, 3.0, 4.0])?;
//! server.publish("weights", weights)?;
//!
//! let client = Worker::builder("/job:worker/replica:0/task:0").start().await?;
//! let peer = client.peer_at(server.address()).await?;
//! let fetched = peer.fetch("weights").await?;
//! assert_eq!(fetched.values::<f32>()?, &[1.0, 2.0, 3.0, 4.0]);
//!
//! client.shutdown().await;
//! server.shutdown().await;
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//! | feature | default | what it adds |
//! | --- | --- | --- |
//! | `shm` | yes | shared memory, between processes of one host |
//! | `tcp` | yes | tensors over TCP; control sessions use TCP in any case |
//! | `verbs` | yes | RDMA, where libibverbs is installed (found at run time) |
//! | `metrics` | yes | counts for the recorder of the `metrics` crate |
//! | `tls` | no | mutual TLS; needs a C compiler |
//! | `redis` | no | groups whose ranks meet in Redis |
//! | `etcd` | no | groups whose ranks meet in etcd |
//!
//! Where the program was built without a fabric, [`Worker::peers`] shows that, and [`WorkerBuilder::require`] of that fabric is
//! an error.

#![forbid(unsafe_code)]

/// Element types that Rust has not got: 16-bit floats.
pub use half::{bf16, f16};
/// Groups of workers and their collectives.
pub use tensorwire_collective as collective;
pub use tensorwire_memory::{
    Buf, BufMut, HugePages, Joined, Lease, Limit, Mapping, MemoryError, Pool, PoolStats, UserMemory, copy,
};
pub use tensorwire_protocol::{Code, Counters, DataType, DeviceName, Key, Metadata, Mode, Shape, Status};
pub use tensorwire_rendezvous::{
    AllocatorAttributes, AsDelivered, AsTensor, AsVersioned, CancellationToken, ClusterError, ClusterSpec,
    Damage, Delivered, DeviceContext, DuplicatePolicy, Element, Fetch, FetchMany, Fetched, Filled,
    IntoBuffer, IntraProcessRendezvous, KeyEnd, Limits, List, LocalConfig, LocalRendezvous, Memory, Peer,
    PeerInfo, PeerLoss, Published, Receive, ReceiveIntoError, Recv, RecvArgs, RecvMany, RemoteTensor,
    SendArgs, Sharing, SimpleRendezvous, Step, StepFrom, StepTo, TF_CONFIG, Tcp, Tensor, TfConfig,
    TransferName, Trust, Validation, Version, Worker, WorkerBuilder, WorkerError, control,
};
/// Mutual TLS: who a worker is, and what its peers must prove (feature `tls`).
#[cfg(feature = "tls")]
pub mod tls {
    pub use tensorwire_rendezvous::{
        control::TlsNames,
        tls::{CertificateProblem, TlsError, TlsField, TlsIdentity},
    };
}
pub use tensorwire_fabric::{Fabric, FabricError, FabricKind, QueuePairStats, Runtime, TokioRuntime, Wait};
#[cfg(feature = "verbs")]
pub use tensorwire_verbs_reactor::{Mtu, OnDemandPaging, Rdma, SettingError};

/// The programs in the book, compiled with the documentation's tests.
#[cfg(doctest)]
mod book {
    #[doc = include_str!("../../../docs/src/guide.md")]
    mod guide {}
    #[doc = include_str!("../../../docs/src/introduction.md")]
    mod introduction {}
    #[doc = include_str!("../../../docs/src/concepts.md")]
    mod concepts {}
    #[doc = include_str!("../../../docs/src/checksums.md")]
    mod checksums {}
    #[doc = include_str!("../../../docs/src/groups.md")]
    mod groups {}
    #[doc = include_str!("../../../docs/src/stores.md")]
    mod stores {}
    #[doc = include_str!("../../../docs/src/launchers.md")]
    mod launchers {}
    #[doc = include_str!("../../../docs/src/errors.md")]
    mod errors {}
    #[cfg(feature = "metrics")]
    #[doc = include_str!("../../../docs/src/metrics.md")]
    mod metrics {}
    #[cfg(feature = "tls")]
    #[doc = include_str!("../../../docs/src/security.md")]
    mod security {}
    #[doc = include_str!("../../../README.md")]
    mod readme {}
}
