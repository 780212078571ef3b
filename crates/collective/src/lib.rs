//! Groups of workers and their collectives.
//!
//! A [`Group`] is a number of workers, its ranks, that call the same collectives in the same order. The ranks find each other
//! through a [`Store`](store::Store). They need it again only when the group shrinks or admits others.
//!
//! | module | what it contains |
//! | --- | --- |
//! | [`store`] | where ranks write their addresses and read those of the others |
//! | [`launch`] | which rank this process is, from the variables of its launcher |
//! | [`pair`] | sends, receives and shared memory between two ranks |
//! | [`reduction`] | how elements are combined |

#![forbid(unsafe_code)]

#[macro_use]
mod log;

mod call;
mod collectives;
mod error;
mod group;
pub mod launch;
pub mod pair;
pub mod reduction;
mod schedule;
pub mod store;

pub use call::{Call, CallKind};
pub use collectives::{Collective, Reducing, ReducingTensors};
pub use error::GroupError;
pub use group::{CALLS_UNDER_WAY, Group, GroupBuilder};
pub use reduction::Reduction;
pub use schedule::Algorithm;
