//! The collectives.

pub(crate) mod barrier;
mod broadcast;
mod collective;
mod deriving;
mod exchange;
mod how;
mod reducing;
mod running;
mod tensors;
mod views;

pub use self::{collective::Collective, reducing::Reducing, tensors::ReducingTensors};
