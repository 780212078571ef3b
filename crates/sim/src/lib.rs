//! A deterministic world for tests: a fabric, a runtime and a control plane that one seed decides.
//!
//! A [`World`] runs the tasks of any number of [`Node`]s on the calling thread, in virtual time. Writes really
//! write memory, in pieces of random size and order, and every piece is checked against an owner map of all
//! pools. A run that breaks a promise gives a [`Failure`], which prints the seed, the event hash, the last events
//! and the command that runs it again; two runs of one seed give equal hashes.
//!
//! | oracle | finds |
//! | --- | --- |
//! | S1 (owner map) | a peer's write outside the grant it was posted under, a grant ended while a write can still land,
//! a source released while posted, one range allocated twice |
//! | S2 ([`Pattern`]) | torn, mixed and stale contents |
//! | S3 ([`Node::begin`]) | operations that end twice, never, or badly without an injected fault |
//! | L1, L2 ([`Handle::bound`]) | operations that outlast the end of all faults, or their peer's death, by too long |
//! | always | an immediate without a receive, a refused access, a panic, a standstill, an endless run |
//!
//! What a scenario injects is a [`Plan`]. A run has two phases: *safety*, in which anything may be injected, and from
//! [`Fault::Heal`] on *liveness*, in which every operation must end. [`shrink()`] makes the plan of a failed run
//! small.
//!
//! ```
//! use std::time::Duration;
//! use tensorwire_sim::World;
//! use tensorwire_fabric::Runtime;
//!
//! let world = World::new(7);
//! let runtime = world.handle().runtime();
//! let slept = world.run(async move {
//!     runtime.sleep(Duration::from_secs(3600)).await;
//!     runtime.now()
//! })?;
//! assert!(slept >= Duration::from_secs(3600));
//! # Ok::<(), Box<tensorwire_sim::Failure>>(())
//! ```

#![forbid(unsafe_code)]

mod control;
mod descriptors;
mod fabric;
mod failure;
mod fault;
mod handle;
mod ids;
mod lock;
mod node;
mod observer;
mod pattern;
mod plan;
mod rng;
mod runtime;
mod shared;
mod shrink;
mod state;
mod steps;
mod swarm;
mod trace;
mod world;

pub use control::SimControl;
pub use fabric::SimFabric;
pub use failure::{Failure, Summary, Violation};
pub use fault::{Call, Fault};
pub use handle::{AddressInUse, Handle};
pub use ids::{BlockNumber, EndpointId, GrantNumber, LeaseId, NodeId, OperationId, SessionId, TaskId};
pub use node::{Node, Operation};
pub use pattern::{Mismatch, Pattern};
pub use plan::{BadPlan, Disturbance, Entry, Plan};
pub use rng::Rng;
pub use runtime::SimRuntime;
pub use shrink::{Shrunk, shrink};
pub use state::{Allowed, Bounds, OperationResult};
pub use steps::Holdings;
pub use swarm::{Completions, Swarm};
pub use trace::Event;
pub use world::World;
