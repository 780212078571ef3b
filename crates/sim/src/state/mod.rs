//! What a world consists of, as plain data. Everything that happens to it is in `steps`.

mod agenda;
mod board;
mod chances;
mod domain;
mod endpoint;
mod hostility;
mod late_packet;
mod leases;
mod ledger;
mod node;
mod outbound;
mod owners;
mod pieces;
mod read;
mod sessions;
mod tasks;

use std::any::Any;

use crate::{
    Rng, Swarm,
    fault::Fault,
    ids::{EndpointId, NodeId},
};

pub(crate) use agenda::{Action, Agenda};
pub(crate) use board::Words;
pub(crate) use chances::Chances;
pub(crate) use domain::DomainShared;
pub(crate) use endpoint::{Endpoint, Phase, WireStep};
pub(crate) use hostility::Hostility;
pub(crate) use late_packet::LatePacket;
pub(crate) use leases::{Lease, Leases, LentBytes};
pub use ledger::{Bounds, OperationResult};
pub(crate) use ledger::{Ledger, OpenOperation, Reach};
pub(crate) use node::{Frozen, NodeState};
pub(crate) use outbound::{Ended, Kind, Outbound, Part, Remote, SourceSpan, Write};
pub(crate) use owners::{Checked, Owners, PostedUnder};
pub(crate) use pieces::{PieceState, cut_into_pieces};
pub(crate) use read::{Read, ReadTarget, Section, is_carried, is_unread};
pub(crate) use sessions::{ControlState, Listener, Over, SessionSide};
pub(crate) use tasks::{Spins, Tasks};

/// Values to drop after the world's lock is released, because their destructors call back into it.
pub(crate) type Trash = Vec<Box<dyn Any + Send>>;

/// Findings that a scenario allows because it causes them on purpose.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Allowed {
    /// Accesses that the target refuses (hostile peers).
    pub refusals: bool,
    /// Immediates without a receive.
    pub receiver_not_ready: bool,
    /// Pools without the node's observer.
    pub unobserved_memory: bool,
}

/// The state under the scheduler's lock. Nothing that can call back into the world is called or dropped while the lock is
/// held.
pub(crate) struct State {
    pub(crate) rng: Rng,
    pub(crate) nodes: Vec<NodeState>,
    pub(crate) tasks: Tasks,
    pub(crate) agenda: Agenda,
    pub(crate) endpoints: Vec<Endpoint>,
    pub(crate) control: ControlState,
    pub(crate) allowed: Allowed,
    pub(crate) spins: Spins,
    /// Faults planned for a number of events.
    pub(crate) triggers: Vec<(u64, Fault)>,
    /// How many nodes are stopped.
    pub(crate) frozen: u32,
    /// Pairs of nodes whose next queue pair is half-open.
    pub(crate) half_open: Vec<(NodeId, NodeId)>,
    /// Memory that peers view.
    pub(crate) leases: Leases,
    /// Of 65,536 pieces, how many come with one bit flipped.
    pub(crate) flips_of_65536: u32,
    /// Hostile nodes.
    pub(crate) hostility: Hostility,
    /// Whether a task is polled in the middle of another process's poll.
    pub(crate) is_in_turn: bool,
}

impl State {
    /// The initial state, in which only the operator lives.
    pub(crate) fn new(seed: &Rng, swarm: &Swarm) -> Self {
        Self {
            rng: seed.fork(3),
            nodes: vec![NodeState::new("operator", seed.fork(2))],
            tasks: Tasks::default(),
            agenda: Agenda::default(),
            endpoints: Vec::new(),
            control: ControlState::default(),
            allowed: Allowed::default(),
            spins: Spins::default(),
            triggers: Vec::new(),
            frozen: 0,
            half_open: Vec::new(),
            leases: Leases::default(),
            flips_of_65536: swarm.flips_of_65536,
            hostility: Hostility::default(),
            is_in_turn: false,
        }
    }

    pub(crate) fn peer_of(&self, id: EndpointId) -> Option<EndpointId> {
        self.endpoints.get(id.index())?.peer
    }

    pub(crate) fn is_alive(&self, node: NodeId) -> bool {
        self.nodes.get(node.index()).is_some_and(|node| node.alive)
    }
}
