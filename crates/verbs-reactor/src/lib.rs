//! RDMA through libibverbs, opened at run time.
//!
//! Nothing links against libibverbs and no build needs its headers: [`Library`] opens it at run time, through committed
//! bindings. If RDMA cannot be used, [`Availability`] names what is missing. [`VerbsFabric`] is the
//! [`Fabric`](tensorwire_fabric::Fabric) on a device. The code that all fabrics share is in `tensorwire-fabric`.
//!
//! A connection is a reliable connected queue pair with a completion queue and a completion channel of its own.
//! Messages without bytes frame it. The dialer sends a greeting, so that `connect` ends when both sides are ready. A
//! side that closes sends a farewell, so that its peer can distinguish an orderly close from a loss. A write longer
//! than the port's messages is split into pieces, and before the last piece a message carries the number of bytes
//! before it. A peer that dies sends nothing: the next operation fails when its retries run out, or the control
//! connection ends first.
//!
//! A process that uses verbs must not use them in a forked child. Starting other programs is safe.

#[macro_use]
mod log;

mod adapter;
mod address;
mod completion;
mod device;
mod domain;
mod doorbell;
mod driver;
mod endpoint;
mod environment;
mod error;
mod event;
mod event_channel;
mod fabric;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod library;
mod link;
mod message;
mod opened;
mod paging;
mod pending;
#[cfg(feature = "planted-bugs")]
pub mod planted;
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
mod sync;
mod sys;
mod tag;
mod watch;

pub use address::{Gid, GidEntry, GidKind};
pub use device::{Context, DeviceLimits, LinkLayer, Port};
pub use error::{Names, VerbsError};
pub use event::DeviceEvent;
pub use fabric::VerbsFabric;
pub use library::{Availability, Library};
pub use paging::Paging;
pub use settings::{Mtu, OnDemandPaging, Rdma, Setting, SettingError};

use device::ProtectionDomain;
use endpoint::Endpoint;
use settings::Timing;
