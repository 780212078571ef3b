//! All tests of pools and of who owns their bytes, in one binary: a suite is a module.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod blocks;
mod division;
#[cfg(feature = "dlpack")]
mod dlpack;
mod early;
mod exposures;
mod foreign;
mod grants;
mod huge;
mod limits;
#[cfg(shuttle)]
mod models;
mod pool;
mod pool_model;
mod refusals;
mod retired;
mod user;
