//! Keys, steps, published tensors and workers: the API that users program against.
//!
//! A [`Worker`] is one process of a cluster. It publishes tensors that any peer may fetch, and sends tensors of a step
//! that one peer receives. Peers connect on first use, over the best fabric that both support; it is logged once and
//! shown by [`Worker::peers`].
//!
//! ```no_run
//! use tensorwire::{Tensor, Worker};
//!
//! # async fn example() -> Result<(), tensorwire::WorkerError> {
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

pub mod arrays;
pub mod control;

pub mod calls;
mod compat;
mod connection;
pub mod discovery;
mod error;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
pub mod pages;
mod peer_memory;
pub mod report;
mod session;
pub mod sets;
pub mod subscriptions;
mod sync;
#[cfg(not(feature = "metrics"))]
mod unmetered;
mod values;
mod worker;

pub use compat::{
    intra_process::IntraProcessRendezvous,
    local::{LocalConfig, LocalRendezvous, Receive},
    simple::SimpleRendezvous,
};
pub use control::cluster::{ClusterError, ClusterSpec, TF_CONFIG, TfConfig};
pub use error::{KeyEnd, PeerLoss, TransferName, WorkerError};
pub use peer_memory::trust::Trust;
#[doc(hidden)]
pub use session::store::{MakeAnswer, STORE_WAITS_MAX, StoreAnswer, StoreService};
#[cfg(feature = "tls")]
pub use tensorwire_fabric_tcp::tls;
pub use tensorwire_protocol::{Damage, Sharing, Validation};
pub use values::{
    arguments::{CancellationToken, Delivered, RecvArgs, SendArgs},
    device_context::{AllocatorAttributes, DeviceContext},
    duplicates::DuplicatePolicy,
    published::{Published, Version},
    tensor::{Element, Tensor},
};
#[doc(hidden)]
pub use worker::store::{StoreAddress, Unanswered};
pub use worker::{
    PeerInfo, Worker,
    builder::{Flow, Limits, Memory, Tcp, WorkerBuilder},
    fetch::{Fetch, FetchMany, Fetched, RemoteTensor},
    list::List,
    notes::{Notes, PutNote},
    offer::{Offer, Ticket},
    peer::{AddressHint, Peer},
    receive::{Recv, RecvMany, StepFrom, StepTo},
    receive_into::{Filled, ReceiveIntoError},
    result_form::{AsDelivered, AsTensor, AsVersioned, IntoBuffer},
    step::Step,
};
