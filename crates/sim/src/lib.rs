//! A deterministic world for tests: a fabric, a runtime and a control plane that one seed decides.
//!
//! A [`World`] runs the tasks of any number of [`Node`]s on the calling thread, in virtual time. Writes really
//! write memory, in pieces of random size and order, and every piece is checked against an owner map of all
//! pools. A run that breaks a promise gives a [`Failure`], which prints the seed, the event hash, the last events
//! and the command that runs it again; two runs of one seed give equal hashes.
//!
//! | oracle | finds |
//! | --- | --- |
//! | S1 (owner map) | a peer's write outside the grant it was posted under, a grant ended while a write can still land, a source released while posted, one range given out twice |
//! | S2 ([`Pattern`]) | torn, mixed and stale contents |
//! | S3 ([`Node::begin`]) | operations that end twice, never, or badly without an injected fault |
//! | L1, L2 ([`Handle::bound`]) | operations that outlast the end of all faults, or their peer's death, by too long |
//! | always | an immediate without a receive, a refused access, a panic, a standstill, an endless run |
//!
//! What a scenario injects is a [`Plan`]. A run has two phases: *safety*, in which anything may be injected, and from
//! [`Fault::Heal`] on *liveness*, in which every operation must end. [`shrink`] makes the plan of a failed run
//! small.
//!
//! ```
//! use std::time::Duration;
//! use sim::World;
//! use verbs_reactor::Runtime;
//!
//! let world = World::new(7);
//! let runtime = world.handle().runtime();
//! let slept = world.run(async move {
//!     runtime.sleep(Duration::from_secs(3600)).await;
//!     runtime.now()
//! })?;
//! assert!(slept >= Duration::from_secs(3600));
//! # Ok::<(), Box<sim::Failure>>(())
//! ```

#![forbid(unsafe_code)]

mod chances;
mod checked;
mod clock;
mod connection;
mod control;
mod descriptors;
mod device;
mod endpoint;
mod executor;
mod fabric;
mod failing;
mod failure;
mod faults;
mod flips;
mod freeze;
mod handle;
mod hostile;
mod ids;
mod late;
mod ledger;
mod loans;
mod node;
mod owners;
mod plan;
mod post;
mod reads;
mod rng;
mod schedule;
mod shrink;
mod swarm;
mod trace;
mod wire;
mod world;

pub use checked::{Mismatch, Pattern};
pub use control::SimControl;
pub use fabric::SimFabric;
pub use failing::Call;
pub use failure::{Failure, Summary, Violation};
pub use faults::Fault;
pub use handle::{AddressInUse, Handle};
pub use hostile::Holdings;
pub use ids::{BlockNumber, EndpointId, GrantNumber, LeaseId, NodeId, OperationId, SessionId, TaskId};
pub use ledger::{Bounds, Outcome};
pub use node::{Node, Operation, SimRuntime};
pub use plan::{BadPlan, Disturbance, Entry, Plan};
pub use rng::Rng;
pub use shrink::{Shrunk, shrink};
pub use swarm::{Completions, Swarm};
pub use trace::Event;
pub use world::{Allowed, World};
