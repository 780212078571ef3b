//! Groups of workers in one process. A suite is a module.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod launch;
mod schedule;
mod store;
