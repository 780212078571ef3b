//! What can happen to a world, one event at a time: methods of the shared world that change its state.

mod boards;
mod calls;
mod connection;
mod device;
mod faults;
mod flips;
mod freeze;
mod hostility;
mod late_packets;
mod loans;
mod post;
mod reads;
mod schedule;
mod sessions;
mod wire;

pub(crate) use connection::cannot_connect;
pub use hostility::Holdings;
pub(crate) use schedule::Step;
pub(crate) use sessions::wake;
