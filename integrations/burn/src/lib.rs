//! Glue.

#![forbid(unsafe_code)]

mod convert;
mod error;
mod gradients;
mod memory_of;
mod parameters;
mod replicas;
mod weights;

pub use error::Error;
pub use replicas::Replicas;
pub use weights::{SnapshotStore, named_tensors};
