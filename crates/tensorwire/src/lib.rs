//! Tensors between processes for async Rust services.
//!
//! A producer publishes a tensor under a name, or sends it under a key; a consumer awaits it, and the bytes land in the
//! consumer's own memory by a one-sided write. On one host they go through shared memory, between hosts by RDMA if both
//! have it, otherwise over TCP; the program is the same.
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
//! # Groups
//! Workers that train together join a [`Group`](collective::Group) and call its collectives:
//!
//! ```no_run
//! use std::time::Duration;
//! use tensorwire::collective::{Group, Reduction, launch::Launch};
//!
//! # async fn train() -> Result<(), Box<dyn std::error::Error>> {
//! let launch = Launch::from_env()?; // torchrun, mpirun, srun, Kubernetes, or TENSORWIRE_RANK and TENSORWIRE_SIZE
//! let worker = launch.worker(&format!("rank_{}", launch.rank)).start().await?;
//! let store = launch.open_store(Duration::from_secs(30), &worker).await?;
//! let group = Group::builder(store, launch.rank, launch.size).join(&worker).await?;
//! let mut gradient = vec![1.0f32; 1000];
//! group.all_reduce(&mut gradient).reduction(Reduction::Mean).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # The book
//! The folder `docs/src` of the repository is the book: a guide, how each part works, limits, errors and promises.
//!
//! # Features
//! | feature | default | what it adds |
//! | --- | --- | --- |
//! | `shm` | yes | shared memory, between processes of one host |
//! | `tcp` | yes | tensors over TCP; control sessions use TCP in any case |
//! | `verbs` | yes | RDMA, if libibverbs is installed (found at run time) |
//! | `metrics` | yes | counts for the recorder of the `metrics` crate |
//! | `tls` | no | mutual TLS; needs a C compiler |
//! | `redis` | no | groups whose ranks meet in Redis |
//! | `etcd` | no | groups whose ranks meet in etcd |
//! | `ndarray` | no | tensors of [arrays] of the crate `ndarray`, and the other way round |
//! | `safetensors` | no | tensors of safetensors files, and the other way round |
//! | `dlpack` | no | tensors of DLPack tensors of the crate `dlpark`, and the other way round |
//!
//! If the program was built without a fabric, [`Worker::peers`] shows that, and [`WorkerBuilder::require`] of that
//! fabric is an error.

#![forbid(unsafe_code)]

/// Element types that Rust does not have: 16-bit floats.
pub use half::{bf16, f16};
/// Groups of workers and their collectives.
#[doc(inline)]
pub use tensorwire_collective as collective;
pub use tensorwire_fabric::FabricKind;
pub use tensorwire_protocol::{Code, DataType, Key, KeyBuilder, Metadata, Shape, Status};
pub use tensorwire_rendezvous::{
    AsDelivered, AsTensor, AsVersioned, Delivered, Element, Fetch, FetchMany, Fetched, Filled, IntoBuffer,
    List, Peer, PeerInfo, Published, Recv, RecvMany, RemoteTensor, Sharing, Step, StepFrom, StepTo, Tensor,
    Version, Worker, WorkerBuilder, WorkerError,
};

/// The parts of a [`WorkerError`], and the errors of single functions.
pub mod errors {
    pub use tensorwire_protocol::{InvalidKey, UnknownDataType};
    pub use tensorwire_rendezvous::{Damage, KeyEnd, PeerLoss, ReceiveIntoError, TransferName};
}

/// The memory of tensors: pools, buffers, leases, and the program's own memory.
pub mod memory {
    pub use tensorwire_memory::*;
}

/// The settings of a [`WorkerBuilder`].
pub mod settings {
    pub use tensorwire_fabric::{UnknownWait, Wait};
    pub use tensorwire_protocol::{Mode, UnknownValidation};
    pub use tensorwire_rendezvous::{
        ClusterError, ClusterSpec, DuplicatePolicy, Flow, Limits, Memory, Tcp, Trust, Validation,
        control::{ControlError, Secret, host_and_port},
    };
    #[cfg(feature = "verbs")]
    pub use tensorwire_verbs_reactor::{Mtu, OnDemandPaging, Rdma, Setting, SettingError};
}

#[doc(inline)]
pub use tensorwire_rendezvous::arrays;

/// Sets: many tensors under one name, which change together, such as the weights of a model.
#[doc(inline)]
pub use tensorwire_rendezvous::sets;

/// Calls: a peer's function of tensors, answered by a handler.
#[doc(inline)]
pub use tensorwire_rendezvous::calls;

/// Discovery: the workers at all addresses of a name, as they come and go.
#[doc(inline)]
pub use tensorwire_rendezvous::discovery;

/// Pages: memory of fixed size that peers read and write by number, such as the blocks of a key-value cache.
#[doc(inline)]
pub use tensorwire_rendezvous::pages;

/// Reports: what a worker is doing, for its own program and for peers.
#[doc(inline)]
pub use tensorwire_rendezvous::report;

/// Subscriptions: the values that a peer has under one name, each as soon as there is one.
#[doc(inline)]
pub use tensorwire_rendezvous::subscriptions;

/// Counterparts for programs that come from TensorFlow: its rendezvous classes, their arguments, device names, and
/// `TF_CONFIG`.
pub mod tensorflow {
    pub use tensorwire_protocol::{DeviceName, InvalidDeviceName};
    pub use tensorwire_rendezvous::{
        AllocatorAttributes, CancellationToken, DeviceContext, IntraProcessRendezvous, LocalConfig,
        LocalRendezvous, Receive, RecvArgs, SendArgs, SimpleRendezvous, TF_CONFIG, TfConfig,
    };
}

/// The fabrics below a worker, their counters and errors, and the runtime on which they run.
pub mod fabric {
    pub use tensorwire_fabric::*;
    pub use tensorwire_protocol::{Counters, MessageCounts};
}

/// Mutual TLS: the identity of a worker, and the proofs of its peers (feature `tls`).
#[cfg(feature = "tls")]
pub mod tls {
    pub use tensorwire_rendezvous::{
        control::TlsNames,
        tls::{CertificateProblem, TlsError, TlsField, TlsIdentity},
    };
}
