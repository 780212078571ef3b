//! Counterparts of TensorFlow's rendezvous classes within one process, without a worker.

pub(crate) mod intra_process;
pub(crate) mod local;
pub(crate) mod simple;
