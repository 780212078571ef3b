//! Packets that arrive after their sender or their target has died.

use std::{sync::Arc, time::Duration};

use crate::{
    Violation,
    ids::{EndpointId, NodeId},
    shared::Shared,
    state::{Action, DomainShared, LatePacket, PieceState, State, Write},
    trace::Event,
};

/// Longest delay of a late packet.
const LATE_MAX: Duration = Duration::from_secs(2);

/// Of 256 pieces under way when a process dies, how many arrive late, after the queue pair is gone.
const LATE_OF_256: u32 = 64;

impl Shared {
    /// `node` is about to die: some pieces under way between it and its peers arrive late, when the queue pair that
    /// they were for is gone.
    pub(crate) fn plan_late_packets(&self, state: &mut State, node: NodeId) {
        let mut packets = Vec::new();
        for endpoint in &state.endpoints {
            let Some(peer) = endpoint.peer.map(|peer| &state.endpoints[peer.index()]) else { continue };
            if endpoint.node == node || peer.node == node {
                let address = &state.nodes[peer.node.index()].address;
                let target = endpoint.peer.unwrap_or(EndpointId(u32::MAX));
                let late = |write| late_copy(write, address, target, &peer.domain);
                packets.extend(endpoint.outbound.writes.iter().filter_map(late));
            }
        }
        for packet in packets {
            if state.rng.chance(LATE_OF_256, 256) {
                let at = self.now() + self.swarm.detection_max + state.rng.duration(LATE_MAX);
                state.agenda.plan(at, Action::Late(packet));
            }
        }
    }

    /// The queue pair that the packet was for is gone, so its NIC drops it. Another incarnation at the same address must
    /// refuse it even if it came through: by generation, by key, or because nothing is granted there.
    pub(crate) fn late_packet(&self, packet: &LatePacket) {
        let domains: Vec<_> = {
            let state = self.state();
            let target = state.endpoints.get(packet.target.index());
            if target.is_some_and(|target| target.phase.is_reachable()) {
                // It is not late: the same bytes are still under way.
                return;
            }
            let alive = state.nodes.iter().filter(|node| node.alive && node.address == packet.address);
            alive.flat_map(|node| &node.domains).filter_map(|domain| domain.upgrade()).collect()
        };
        for domain in domains {
            if packet.domain.as_ptr() == Arc::as_ptr(&domain) {
                // The same incarnation: only its queue pair is gone, and that is the protection.
                self.record(Event::LateRefused { why: "late packet, queue pair gone" });
                continue;
            }
            match domain.table.write_target(&packet.range, packet.key) {
                Ok(_) => {
                    let address = &packet.address;
                    let text =
                        format!("a packet for an earlier life of {address} was let into {:?}", packet.range);
                    self.violated(Violation::Memory(text));
                }
                Err(_) => self.record(Event::LateRefused { why: "late packet, earlier life" }),
            }
        }
    }
}

fn late_copy(
    write: &Write,
    address: &str,
    target: EndpointId,
    domain: &Arc<DomainShared>,
) -> Option<LatePacket> {
    let mut under_way = write.pieces.iter().filter(|piece| matches!(piece.state, PieceState::Carried(_)));
    let remote = under_way.find_map(|piece| write.parts[piece.part].remote.as_ref())?;
    let (address, domain) = (address.to_owned(), Arc::downgrade(domain));
    Some(LatePacket { address, target, domain, range: remote.range, key: remote.key })
}
