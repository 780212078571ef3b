//! The rendezvous family of one process, against the cases of `tensorflow-verbs.md` §2.4 to §2.9: the numbers in the
//! tests' names are that page's.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod cancellation;
mod contexts;
mod deaths;
mod device;
mod devices;
mod duplicates;
mod family;
mod local;
mod own_worker;
mod random;
mod support;
