//! The collectives.

pub(crate) mod barrier;
mod broadcast;
mod collective;
mod combination;
mod deriving;
mod exchange;
mod reducing;
mod running;
mod tensors;
mod views;

pub use self::{collective::Collective, reducing::Reducing, tensors::ReducingTensors};
