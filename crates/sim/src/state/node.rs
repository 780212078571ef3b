//! One incarnation of one process.

use std::{collections::BTreeSet, sync::Weak, task::Waker};

use tensorwire_fabric::FabricKind;

use super::{agenda::Action, domain::DomainShared};
use crate::{Rng, fault::Call, ids::TaskId};

/// Work that waits until a stopped process continues.
#[derive(Debug, Default)]
pub(crate) struct Frozen {
    /// Tasks that were woken meanwhile.
    pub(crate) tasks: BTreeSet<TaskId>,
    /// Actions of its queue pairs, where its own process executes them.
    pub(crate) actions: Vec<Action>,
}

/// One incarnation of one process.
#[derive(Debug)]
pub(crate) struct NodeState {
    pub(crate) address: String,
    pub(crate) alive: bool,
    pub(crate) rng: Rng,
    /// Tasks that wait for its crash.
    pub(crate) mourners: Vec<Waker>,
    /// Whether it is stopped between two of its steps.
    pub(crate) frozen: Option<Frozen>,
    /// Of 256 polls that are due, how many are deferred.
    pub(crate) slow_of_256: u32,
    /// Calls that fail once: the kind, and how many calls of that kind succeed before.
    pub(crate) failing: Vec<(Call, u64)>,
    /// Its domains, while they exist.
    pub(crate) domains: Vec<Weak<DomainShared>>,
    /// Its devices that have failed, by the kind that their fabrics simulate.
    pub(crate) lost_devices: Vec<FabricKind>,
}

impl NodeState {
    pub(crate) fn new(address: &str, rng: Rng) -> Self {
        Self {
            address: address.to_owned(),
            alive: true,
            rng,
            mourners: Vec::new(),
            frozen: None,
            slow_of_256: 0,
            failing: Vec::new(),
            domains: Vec::new(),
            lost_devices: Vec::new(),
        }
    }
}
