//! Workers in one process, in one binary: a suite is a module. What needs other processes is in `processes` and `overload`, what
//! looks at the whole process in `alone` and `secret_mode`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod block_on;
mod bounded;
mod editions;
mod fabrics;
mod rdma;
mod tables;
mod two;
#[cfg(feature = "test-certificates")]
mod watchdog;
mod watched;

mod across;
mod arrays;
mod bad_input;
mod calls;
mod cancel;
mod caps;
mod discovery;
mod durations;
mod errors;
mod family;
mod foreground;
mod half_pool;
mod life;
mod message_tables;
mod names;
mod notes;
mod offers;
mod outside;
mod pages;
mod published;
mod refused;
mod report;
mod sets;
mod shards;
mod slices;
mod standby;
mod subscriptions;
#[cfg(feature = "test-certificates")]
mod tls;
#[cfg(feature = "trace")]
mod traces;
mod trust;
mod validation;
mod view;
mod worker;
