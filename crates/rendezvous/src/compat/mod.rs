//! The rendezvous classes of TensorFlow that need no worker.

pub(crate) mod intra_process;
pub(crate) mod local;
pub(crate) mod simple;
