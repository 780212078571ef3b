//! Packets that arrive after their sender or their target has died.

use std::sync::Weak;

use tensorwire_fabric::RemoteRange;

use super::domain::DomainShared;
use crate::ids::EndpointId;

/// A piece of a write that arrives after its sender or target has died.
#[derive(Debug)]
pub(crate) struct LatePacket {
    /// The address at which it arrives, at the node that runs there then.
    pub(crate) address: String,
    /// The side that it was sent to, and that side's domain.
    pub(crate) target: EndpointId,
    pub(crate) domain: Weak<DomainShared>,
    pub(crate) range: RemoteRange,
    pub(crate) key: u32,
}
