//! A scenario's handle on the world.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tensorwire_fabric::RemoteRange;

use crate::{
    Allowed, Bounds, Call, Disturbance, Entry, Event, Fault, Holdings, Node, Pattern, Plan, Rng, SimRuntime,
    Swarm, Violation,
    ids::NodeId,
    lock::lock,
    shared::Shared,
    state::{Action, Chances, NodeState, Reach},
};

/// A scenario's handle on the world. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Handle {
    shared: Arc<Shared>,
}

/// A node at this address is alive.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a living node has the address `{0}`; crash it first")]
pub struct AddressInUse(pub String);

impl Handle {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Starts a node at `address`: a new one, or a new incarnation after a crash.
    ///
    /// # Errors
    /// [`AddressInUse`].
    pub fn start_node(&self, address: &str) -> Result<Node, AddressInUse> {
        let mut state = self.shared.state();
        if state.nodes.iter().any(|node| node.alive && node.address == address) {
            return Err(AddressInUse(address.to_owned()));
        }
        let id = NodeId(state.nodes.len() as u32);
        let rng = Rng::new(self.shared.seed).fork(1000 + u64::from(id.0));
        state.nodes.push(NodeState::new(address, rng));
        drop(state);
        self.shared.record(Event::Started { node: id });
        for reach in [Reach::Address(address.to_owned()), Reach::Stopped(address.to_owned())] {
            self.shared.ledger().healed(&reach, self.shared.now());
        }
        Ok(Node::new(self.shared.clone(), id, address))
    }

    /// Injects `fault` now.
    pub fn inject(&self, fault: Fault) {
        self.shared.inject(fault);
    }

    /// Injects `fault` after `delay` of virtual time. A planned fault counts as something to wait for.
    pub fn inject_after(&self, delay: Duration, fault: Fault) {
        let at = self.shared.now() + delay;
        self.shared.state().agenda.plan(at, Action::Fault(fault));
    }

    /// Injects `fault` once the world has seen `events` more events. Does not count as something to wait for.
    pub fn inject_at_event(&self, events: u64, fault: Fault) {
        let at = lock(&self.shared.trace).events() + events;
        self.shared.state().triggers.push((at, fault));
    }

    /// Injects `entry` of a plan into `nodes`, which are its members now. After a crash, the scenario restarts the node. An
    /// entry for a member that does not exist does nothing.
    pub fn arrange(&self, entry: &Entry, nodes: &[NodeId]) {
        let node = |place: usize| nodes.get(place).copied();
        let pair = |one, other| node(one).zip(node(other));
        let fault = match entry.what {
            Disturbance::Crash(place, _) => node(place).map(Fault::Crash),
            Disturbance::LoseLink(one, other) => pair(one, other).map(|(a, b)| Fault::LoseLink(a, b)),
            Disturbance::LoseControl(one, other) => pair(one, other).map(|(a, b)| Fault::LoseControl(a, b)),
            Disturbance::HalfOpen(one, other) => pair(one, other).map(|(a, b)| Fault::HalfOpen(a, b)),
            Disturbance::Slow(place) => node(place).map(Fault::Slow),
            Disturbance::Pause(place, length) => node(place).map(|node| Fault::Pause(node, length)),
            Disturbance::Heal => Some(Fault::Heal),
            Disturbance::Fail(place, call, successes) => {
                return node(place).into_iter().for_each(|node| self.fail_call(node, call, successes));
            }
            Disturbance::Flip(of_65536) => return self.flip_bits(of_65536),
        };
        match (fault, entry.after) {
            (Some(fault), 0) => self.inject(fault),
            (Some(fault), after) => self.inject_at_event(after, fault),
            (None, _) => {}
        }
    }

    /// Ends every lasting fault: planned faults are dropped, stopped nodes go on, slow ones run normally. The liveness phase
    /// begins: operations must succeed, once all nodes have seen what was lost before.
    pub fn heal(&self) {
        self.shared.inject(Fault::Heal);
    }

    /// Bounds the time that operations of the ledger take: see [`Bounds`]. Without this, nothing is bounded.
    pub fn bound(&self, bounds: Bounds) {
        self.shared.ledger().bound(bounds);
    }

    /// Notes what this run injects, for a report. `is_given` is whether it was given instead of drawn from the seed.
    pub fn note_plan(&self, plan: &Plan, is_given: bool) {
        *lock(&self.shared.plan) = (plan.to_string(), is_given);
    }

    /// From now on, this many of 65,536 pieces of contents arrive with one bit flipped; also of contents inside messages,
    /// and of result slots. Only for scenarios that validate checksums. Until [`heal`](Self::heal).
    pub fn flip_bits(&self, of_65536: u32) {
        self.shared.state().flips_of_65536 = of_65536;
    }

    /// From now on the seed decides which rare branches of the code under test (`tensorwire_testpoints::chance!`) are
    /// taken. Each world draws how often each branch is taken. A branch that is taken is a mark
    /// ([`Summary::marks`](crate::Summary::marks)) under its name.
    pub fn take_chances(&self) {
        lock(&self.shared.chances).get_or_insert_with(|| Chances::new(Rng::new(self.shared.seed).fork(4)));
    }

    /// Connections that are made from now on are between hosts: no peer lends its memory for views.
    pub fn lend_nothing(&self) {
        self.shared.is_network.store(true, Ordering::Relaxed);
    }

    /// How often the branch called `mark` was taken so far.
    pub fn reached(&self, mark: &str) -> u64 {
        lock(&self.shared.trace).reached(mark)
    }

    /// Bits that were flipped so far.
    pub fn flips(&self) -> u64 {
        self.shared.ledger().flips
    }

    /// Makes one call of `node` fail: the one after `successes` more calls of its kind.
    pub fn fail_call(&self, node: NodeId, call: Call, successes: u64) {
        if let Some(node) = self.shared.state().nodes.get_mut(node.index()) {
            node.failing.push((call, successes));
        }
    }

    /// Whether a failure asked for by [`fail_call`](Self::fail_call) has not happened yet.
    pub fn has_failure_ahead(&self, node: NodeId) -> bool {
        self.shared.state().nodes.get(node.index()).is_some_and(|node| !node.failing.is_empty())
    }

    /// Allows findings that the scenario causes on purpose.
    pub fn allow(&self, allowed: Allowed) {
        self.shared.state().allowed = allowed;
    }

    /// From now on `node` may do anything: a refusal or failure that involves it is no finding.
    pub fn turn_hostile(&self, node: NodeId) {
        self.shared.turn_hostile(node);
    }

    /// The peers of `node` share a protection domain, as under `Trust::Cluster`: hostile peers write there only in
    /// grants that they [`claim`](Self::claim).
    pub fn share_domain(&self, node: NodeId) {
        self.shared.share_domain(node);
    }

    /// `target` has named `range` to `hostile`, so that grant is for `hostile`.
    pub fn claim(&self, hostile: NodeId, target: NodeId, range: &RemoteRange) {
        self.shared.claim(hostile, target, range);
    }

    /// The resources that `node` holds now.
    pub fn holdings(&self, node: NodeId) -> Holdings {
        self.shared.holdings(node)
    }

    /// Ends the run with the scenario's own finding.
    pub fn fail(&self, violation: Violation) {
        self.shared.violated(violation);
    }

    /// The operator's runtime: its time and random numbers survive every crash.
    pub fn runtime(&self) -> Arc<SimRuntime> {
        Arc::new(SimRuntime::new(self.shared.clone(), NodeId::OPERATOR))
    }

    /// The seed's contents.
    pub fn pattern(&self) -> Pattern {
        Pattern::new(self.shared.seed)
    }

    /// The knobs.
    pub fn swarm(&self) -> &Swarm {
        &self.shared.swarm
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.shared.seed
    }

    /// Virtual time.
    pub fn now(&self) -> Duration {
        self.shared.now()
    }

    /// The last events, oldest first.
    pub fn events(&self) -> Vec<(Duration, Event)> {
        lock(&self.shared.trace).tail()
    }

    /// Checks that `bytes` are the content of `transfer` (S2); a difference ends the run.
    pub fn verify(&self, transfer: u64, bytes: &[u8]) {
        if let Err(mismatch) = self.pattern().verify(transfer, bytes) {
            self.fail(Violation::Data(mismatch.to_string()));
        }
    }
}
