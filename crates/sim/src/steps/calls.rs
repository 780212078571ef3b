//! Calls to the device and the operating system that fail once, on purpose.

use std::{io, sync::Arc};

use tensorwire_fabric::{FabricError, FabricKind};

use crate::{fault::Call, ids::NodeId, shared::Shared, state::Reach, trace::Event};

impl Shared {
    /// Counts one `call` of `node`; an error if this is the one that fails.
    pub(crate) fn attempt(&self, node: NodeId, call: Call) -> Result<(), FabricError> {
        let failed = {
            let mut state = self.state();
            let Some(node) = state.nodes.get_mut(node.index()) else { return Ok(()) };
            let failing = &mut node.failing;
            let due = failing.iter().position(|(which, left)| *which == call && *left == 0);
            match due {
                Some(index) => drop(failing.swap_remove(index)),
                None => {
                    failing.iter_mut().filter(|(which, _)| *which == call).for_each(|(_, left)| *left -= 1);
                }
            }
            due.is_some()
        };
        if !failed {
            return Ok(());
        }
        self.record(Event::CallFailed { node, call: call.name() });
        let address = self.state().nodes[node.index()].address.clone();
        self.ledger().fault(Reach::Address(address), Some(self.now()));
        let source = Arc::new(io::Error::from_raw_os_error(ENOMEM));
        Err(FabricError::Device { kind: FabricKind::SIM, call: call.name(), source })
    }
}

/// "Cannot allocate memory", as Linux numbers it.
const ENOMEM: i32 = 12;
