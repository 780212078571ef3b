//! Injected faults.

use std::task::Waker;

use tensorwire_fabric::LossCause;

use super::connection::lost;
use crate::{
    fault::Fault,
    ids::{EndpointId, NodeId},
    shared::Shared,
    state::{Action, Kind, Phase, Reach, State, Trash},
    trace::Event,
};

/// Names of the phases of a run.
const SAFETY: &str = "safety";
const LIVENESS: &str = "liveness";

impl Shared {
    /// The phase of the run.
    pub(crate) fn phase(&self) -> &'static str {
        if self.ledger().is_healed() { LIVENESS } else { SAFETY }
    }

    pub(crate) fn inject(&self, fault: Fault) {
        match fault {
            Fault::Crash(node) => self.crash(node),
            Fault::LoseLink(one, other) => self.lose_link(one, other),
            Fault::LoseControl(one, other) => self.lose_control(one, other),
            Fault::Freeze(node) => self.freeze(node),
            Fault::Pause(node, length) => {
                self.freeze(node);
                let at = self.now() + length;
                self.state().agenda.plan(at, Action::Fault(Fault::Thaw(node)));
            }
            Fault::Thaw(node) => self.thaw(node),
            Fault::Slow(node) => self.slow(node),
            Fault::HalfOpen(one, other) => self.state().half_open.push((one, other)),
            Fault::LoseDevice(node, kind) => self.lose_device(node, kind),
            Fault::RestoreDevice(node, kind) => self.restore_device(node, kind),
            Fault::Heal => self.heal(),
        }
    }

    /// Ends every lasting fault, and begins the liveness phase.
    fn heal(&self) {
        let nodes = {
            let mut state = self.state();
            state.triggers.clear();
            state.half_open.clear();
            state.flips_of_65536 = 0;
            for node in &mut state.nodes {
                node.slow_of_256 = 0;
                node.failing.clear();
                node.lost_devices.clear();
            }
            state.nodes.len() as u32
        };
        (0..nodes).for_each(|node| self.thaw(NodeId(node)));
        let began = self.ledger().all_must_end(self.now());
        if began {
            self.record(Event::Phase { name: LIVENESS });
        }
    }

    /// Kills the process of `node` between two of its steps.
    fn crash(&self, node: NodeId) {
        if node == NodeId::OPERATOR || !self.state().is_alive(node) {
            return;
        }
        self.record(Event::Crashed { node });
        self.owners().forget_node(node);
        let mut state = self.state();
        state.nodes[node.index()].alive = false;
        if state.nodes[node.index()].frozen.take().is_some() {
            state.frozen -= 1;
        }
        let mourners = std::mem::take(&mut state.nodes[node.index()].mourners);
        let address = state.nodes[node.index()].address.clone();
        let mut trash: Trash = Vec::new();
        self.plan_late_packets(&mut state, node);
        self.kill_endpoints(&mut state, node, &mut trash);
        self.kill_sessions(&mut state, node);
        let seen = self.now() + state.rng.duration(self.swarm.detection_max);
        state.agenda.plan(seen, Action::Bury(node));
        trash.push(Box::new(state.tasks.remove_node(Some(node))));
        trash.push(Box::new(state.agenda.remove_node(Some(node))));
        drop(state);
        let mut ledger = self.ledger();
        ledger.forget_node(node);
        ledger.death(&address, self.now());
        ledger.fault(Reach::Address(address), None);
        ledger.crashes += 1;
        drop(ledger);
        // Runs the destructors of a dead process: they find nothing left to act on.
        drop(trash);
        mourners.into_iter().for_each(Waker::wake);
    }

    fn kill_endpoints(&self, state: &mut State, node: NodeId, trash: &mut Trash) {
        for index in 0..state.endpoints.len() {
            let endpoint = &mut state.endpoints[index];
            if endpoint.node != node || endpoint.phase == Phase::Dead {
                continue;
            }
            endpoint.phase = Phase::Dead;
            trash.push(Box::new(endpoint.meet.take()));
            trash.push(Box::new(endpoint.outbound.take_read()));
            let id = EndpointId(index as u32);
            match endpoint.peer {
                Some(peer) => {
                    self.cut_outbound(state, id);
                    self.plan_loss(state, peer);
                }
                None => self.refuse_suitors(state, id),
            }
        }
    }

    /// Lets nothing more leave `id`. Each piece in flight arrives or is lost.
    pub(crate) fn cut_outbound(&self, state: &mut State, id: EndpointId) {
        let State { rng, endpoints, .. } = state;
        let outbound = &mut endpoints[id.index()].outbound;
        let pieces = outbound.cut(|| rng.chance(1, 2));
        for write in &mut outbound.writes {
            if matches!(write.kind, Kind::Loan { .. }) && rng.chance(1, 2) {
                // Its lease ends when the lender's side ends, or with the lender's process.
                write.lose();
            }
        }
        if pieces > 0 {
            self.record(Event::PiecesLost { endpoint: id, pieces });
        }
        let writes = outbound.torn();
        if writes > 0 {
            self.record(Event::Torn { endpoint: id, writes });
        }
    }

    /// Plans when `id` sees that its connection is lost.
    pub(crate) fn plan_loss(&self, state: &mut State, id: EndpointId) {
        let causes = [LossCause::EndOfFile, LossCause::Reset, LossCause::RetryExceeded];
        let cause = state.rng.pick(causes);
        let at = self.now() + state.rng.duration(self.swarm.detection_max);
        state.agenda.plan(at, Action::Fail(id, lost(cause, "an injected fault")));
    }

    fn lose_link(&self, one: NodeId, other: NodeId) {
        self.record(Event::LinkLost { from: one, to: other, control: false });
        self.ledger_link(one, other);
        let mut state = self.state();
        for index in 0..state.endpoints.len() {
            let endpoint = &state.endpoints[index];
            let Some(peer) = endpoint.peer.filter(|_| endpoint.phase.is_reachable()) else { continue };
            let ends = (endpoint.node, state.endpoints[peer.index()].node);
            if ends == (one, other) || ends == (other, one) {
                let id = EndpointId(index as u32);
                self.cut_outbound(&mut state, id);
                self.plan_loss(&mut state, id);
            }
        }
    }

    fn lose_control(&self, one: NodeId, other: NodeId) {
        self.record(Event::LinkLost { from: one, to: other, control: true });
        self.ledger_link(one, other);
        self.lose_sessions(one, other);
    }

    pub(crate) fn ledger_link(&self, one: NodeId, other: NodeId) {
        let (a, b) = {
            let state = self.state();
            (state.nodes[one.index()].address.clone(), state.nodes[other.index()].address.clone())
        };
        self.ledger().fault(Reach::Between(a, b), Some(self.now()));
    }
}
