//! RDMA through libibverbs, opened at run time.
//!
//! Nothing links against libibverbs and no build needs its headers: [`Library`] opens it while the program runs,
//! through bindings that were generated ahead. [`Availability`] names what is missing where there is no
//! RDMA; [`VerbsFabric`] is the [`Fabric`](crate::Fabric) on a device.
//!
//! A connection is a reliable connected queue pair with a completion queue and a completion channel of its own.
//! Messages without bytes, which arrive by another opcode than writes, frame it: a greeting from the dialer, so that
//! `connect` ends when both sides are ready, and a farewell, so that a peer learns of an orderly close. A write longer than the port's messages is split, and before its last piece a message says how much went
//! before. A peer that dies sends nothing: it is noticed by the next operation, whose retries run out, or by the
//! control connection.
//!
//! A process that uses verbs must not go on using them in a forked child; starting other programs is fine.

mod adapter;
mod address;
mod completion;
mod counts;
mod device;
mod domain;
mod doorbell;
mod driver;
pub(crate) mod endpoint;
mod environment;
mod error;
mod event;
mod event_channel;
mod fabric;
mod glance;
mod library;
mod link;
mod message;
mod opened;
mod paging;
mod pending;
mod queue_pair;
mod ranges;
mod region;
mod registrations;
mod round_trip;
mod selection;
mod send;
mod send_queue;
mod settings;
mod submissions;
mod sys;
mod tag;
mod watch;

pub use address::{Gid, GidEntry, GidKind};
pub use counts::VerbsCounts;
pub use device::{Context, DeviceLimits, LinkLayer, Port};
pub use error::{Names, VerbsError};
pub use event::DeviceEvent;
pub use fabric::VerbsFabric;
pub use library::{Availability, Library};
pub use paging::Paging;
pub use settings::{Mtu, OnDemandPaging, Rdma, Setting, SettingError};

use counts::CallCounters;
use device::ProtectionDomain;
use endpoint::Endpoint;
use settings::Timing;
