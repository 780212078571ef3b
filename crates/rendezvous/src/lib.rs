//! Keys, steps, published tensors and workers: what users program against.
//!
//! A [`Worker`] is one process of a cluster. It publishes tensors that any peer may fetch, and sends tensors
//! of a step that one peer receives. Peers connect on first use, over the best fabric both ends have; which
//! one is logged once and told by [`Worker::peers`].
//!
//! ```no_run
//! use rendezvous::{Tensor, Worker};
//!
//! # async fn example() -> Result<(), rendezvous::WorkerError> {
//! let server = Worker::builder("/job:ps/replica:0/task:0").start().await?;
//! let weights = Tensor::from_values(server.pool(), &[2, 2], &[1.0f32, 2.0, 3.0, 4.0])?;
//! server.publish("weights", weights)?;
//!
//! let client = Worker::builder("/job:worker/replica:0/task:0").start().await?;
//! let peer = client.peer_at(server.address()).await?;
//! let fetched = peer.fetch("weights").await?;
//! assert_eq!(fetched.values::<f32>()?, &[1.0, 2.0, 3.0, 4.0]);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

#[macro_use]
mod log;

pub mod control;

mod announce;
mod arguments;
mod awaited;
mod builder;
mod cluster;
mod connect;
mod data;
mod described;
mod destinations;
mod device_context;
mod driver;
mod duplicates;
mod enclosure;
mod encoded;
mod error;
mod fabric_channel;
mod fetch;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod gauges;
mod held_posts;
mod held_value;
mod import;
mod intra_process;
mod lent;
mod list;
mod liveness;
mod local;
mod log_quota;
mod lost;
mod meter;
mod name;
mod node;
mod outcome;
mod outputs;
mod peer;
mod peer_handle;
mod peers;
mod pools;
mod published;
mod receive;
mod receive_into;
mod ring;
mod serve;
mod session;
mod sessions;
mod sharded;
mod shutdown;
mod simple;
mod step;
mod steps;
mod table;
mod tensor;
mod trust;
mod values;
mod worker;

pub use arguments::{AllocatorAttributes, CancellationToken, Delivered, RecvArgs, SendArgs};
pub use awaited::{AsDelivered, AsTensor, AsVersioned, IntoBuffer};
pub use builder::{Flow, Limits, Memory, WorkerBuilder};
pub use cluster::{ClusterError, ClusterSpec, TF_CONFIG, TfConfig};
pub use device_context::DeviceContext;
pub use duplicates::DuplicatePolicy;
pub use error::{KeyEnd, PeerLoss, TransferName, WorkerError};
pub use fetch::{Fetch, FetchMany, Fetched};
pub use intra_process::IntraProcessRendezvous;
pub use list::List;
pub use local::{LocalConfig, LocalRendezvous, Receive};
pub use peer_handle::Peer;
pub use protocol::{Damage, Sharing, Validation};
pub use published::{Published, Version};
pub use receive::{Recv, RecvMany, StepFrom, StepTo};
pub use receive_into::{Filled, ReceiveIntoError};
pub use simple::SimpleRendezvous;
pub use step::Step;
pub use tensor::{Element, Tensor};
#[cfg(feature = "tls")]
pub use tensorwire_fabric_tcp::tls;
pub use trust::Trust;
pub use worker::{PeerInfo, Worker};
