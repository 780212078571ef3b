//! The rendezvous family of one process, against the cases of TensorFlow's: the numbers in the
//! tests' names are those of `scripts/spec-ids.txt`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod cancellation;
mod classes;
mod contexts;
mod deaths;
mod device;
mod devices;
mod duplicates;
mod local;
mod own_worker;
mod random;
mod support;
