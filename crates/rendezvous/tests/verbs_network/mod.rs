//! Faults of the network between two RDMA devices: packets that are lost, late, out of order or damaged, a link that goes
//! down, a peer that dies. Two workers in processes of their own move values both ways and compare every byte.
//!
//! The tests break the network of their machine, between the devices `rxe1` and `rxe2` of `scripts/rxe-vm`: they need one
//! of their own, and run only with `TENSORWIRE_TEST_NETEM=1`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod link;
mod loss;
mod network;
mod traffic;
