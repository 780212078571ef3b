//! All tests of the fabrics except the models, in one binary: a suite is a module. Suites whose names begin with
//! `verbs` need an RDMA device.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a failed test

#[macro_use]
mod contract;
mod own_network;
mod process;
mod process_pair;
mod rdma_devices;

mod loopback;
mod shm;
mod tcp;
#[cfg(feature = "test-certificates")]
mod tls;
mod verbs;
mod verbs_device;
mod verbs_faults;
