//! Sets: many tensors under one name, which change together, such as the weights of a model.
//!
//! A worker commits versions of a set; a peer fetches the newest one, or follows the set and gets each new version. A version is seen as a
//! whole or not at all: its tensors are never mixed with those of another version.
//!
//! ```
//! use tensorwire::{Tensor, Worker};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), tensorwire::WorkerError> {
//! let trainer = Worker::builder("trainer").start().await?;
//! let policy = trainer.set("policy");
//! let weight = Tensor::from_values(trainer.pool(), &[2], &[0.5f32, 1.5])?;
//! let bias = Tensor::from_values(trainer.pool(), &[1], &[0.1f32])?;
//! policy.commit(1, [("weight", weight), ("bias", bias)]).await?;
//!
//! let server = Worker::client().start().await?;
//! let peer = server.peer_at(trainer.address()).await?;
//! let snapshot = peer.set("policy").fetch().await?;
//! assert_eq!(snapshot.version(), 1);
//! assert_eq!(snapshot.get("weight").and_then(|weight| weight.as_slice::<f32>().ok()), Some(&[0.5, 1.5][..]));
//! # Ok(())
//! # }
//! ```

mod assembly;
mod borrowing;
mod committing;
mod comparing;
mod deriving;
mod fetching;
mod following;
mod listing;
mod making;
mod part;
mod plan;
pub(crate) mod publisher_loss;
mod room;
mod shard;
mod shard_plan;
mod sharded;
mod slices;
mod snapshot;
mod tasks;

pub use self::{
    committing::OwnSet,
    fetching::PeerSet,
    following::{Follow, Policy, Staged},
    shard::Shard,
    sharded::{Layout, ShardedSet},
    snapshot::Snapshot,
};
pub use crate::values::sets::listing::ListedSet;
