//! Devices that fail and come back.

use std::{io, sync::Arc};

use tensorwire_fabric::{FabricError, FabricKind, LossCause};

use crate::{
    ids::{EndpointId, NodeId},
    shared::Shared,
    state::{Action, NodeState, Phase, Reach, State, Trash},
    trace::Event,
};

impl Shared {
    /// # Errors
    /// The device of fabric `kind` has failed.
    pub(crate) fn find_device(&self, node: NodeId, kind: FabricKind) -> Result<(), FabricError> {
        let lost = |node: &NodeState| node.lost_devices.contains(&kind);
        if self.state().nodes.get(node.index()).is_some_and(lost) {
            let source = Arc::new(io::Error::other("an injected fault has removed it"));
            return Err(FabricError::Device { kind, call: "looking for a device", source });
        }
        Ok(())
    }

    pub(crate) fn lose_device(&self, node: NodeId, kind: FabricKind) {
        self.record(Event::DeviceLost { node, kind });
        let mut state = self.state();
        let Some(process) = state.nodes.get_mut(node.index()) else { return };
        process.lost_devices.push(kind);
        let address = process.address.clone();
        let mut trash: Trash = Vec::new();
        for index in 0..state.endpoints.len() {
            let endpoint = &state.endpoints[index];
            if endpoint.node == node && endpoint.domain.kind == kind {
                self.take_from_device(&mut state, EndpointId(index as u32), &mut trash);
            }
        }
        drop(state);
        self.ledger().fault(Reach::Address(address), Some(self.now()));
        // Wakes tasks that wait for a connection.
        drop(trash);
    }

    pub(crate) fn restore_device(&self, node: NodeId, kind: FabricKind) {
        self.record(Event::DeviceRestored { node, kind });
        if let Some(node) = self.state().nodes.get_mut(node.index()) {
            node.lost_devices.retain(|lost| *lost != kind);
        }
    }

    fn take_from_device(&self, state: &mut State, id: EndpointId, trash: &mut Trash) {
        let endpoint = &mut state.endpoints[id.index()];
        match endpoint.phase {
            Phase::Prepared | Phase::Meeting => {
                endpoint.phase = Phase::Drained;
                trash.push(Box::new(endpoint.meet.take()));
                self.refuse_suitors(state, id);
            }
            Phase::Open => {
                let (kind, peer) = (endpoint.domain.kind, endpoint.peer);
                let (cause, detail) = (LossCause::DeviceLost, "the device failed".to_owned());
                self.cut_outbound(state, id);
                state
                    .agenda
                    .plan(self.now(), Action::Fail(id, FabricError::PeerLost { kind, cause, detail }));
                if let Some(peer) = peer {
                    self.plan_loss(state, peer);
                }
            }
            Phase::Failed | Phase::Closing | Phase::Flushed | Phase::Drained | Phase::Dead => {}
        }
    }
}
