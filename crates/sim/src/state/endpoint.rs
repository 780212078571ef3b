//! One side of a queue pair.

use std::{sync::Arc, time::Duration};

use futures::channel::oneshot;
use tensorwire_fabric::{FabricError, QueuePair, QueuePairConfig, QueuePairCore, Role};

use super::{board::Words, domain::DomainShared, outbound::Outbound};
use crate::ids::{EndpointId, NodeId};

/// The state of a side.
///
/// ```text
/// Prepared → Meeting → Open → Failed → Closing → Flushed → Drained
///                        └──────────────↗
/// any → Dead (its node crashed)
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Made, `connect` not called.
    Prepared,
    /// Waits for the other side to call `connect`.
    Meeting,
    /// Connected.
    Open,
    /// The connection is over, and this side has seen that.
    Failed,
    /// The user closed it; operations may still complete, the peer's bytes may still land.
    Closing,
    /// Its operations have ended; the peer's bytes may still land.
    Flushed,
    /// Nothing of the peer reaches it any more.
    Drained,
    /// Its process is gone.
    Dead,
}

impl Phase {
    /// Whether bytes of the peer may still land.
    pub(crate) fn is_reachable(self) -> bool {
        (Self::Open..Self::Drained).contains(&self)
    }
}

/// One side of a queue pair.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) node: NodeId,
    pub(crate) domain: Arc<DomainShared>,
    pub(crate) core: Arc<QueuePairCore>,
    pub(crate) token: u64,
    pub(crate) phase: Phase,
    pub(crate) wish: Option<(EndpointId, Role)>,
    pub(crate) peer: Option<EndpointId>,
    /// Gives the connected queue pair to the waiting `connect`.
    pub(crate) meet: Option<oneshot::Sender<Result<QueuePair, FabricError>>>,
    /// Whether its process is stopped, and executes this side's work itself.
    pub(crate) stopped: bool,
    /// Whether a write completes once its source is read, as on a socket.
    pub(crate) completes_after_reading: bool,
    /// Whether the user has dropped the queue pair.
    pub(crate) is_dropped: bool,
    pub(crate) outbound: Outbound,
    /// The words of its board, if it has one.
    pub(crate) words: Words,
}

impl Endpoint {
    pub(crate) fn config(&self) -> QueuePairConfig {
        self.core.config()
    }

    /// Offers every step that is possible, with the time from which it is possible.
    pub(crate) fn offers(&self, all: &[Endpoint], mut offer: impl FnMut(WireStep, Duration)) {
        let outbound = &self.outbound;
        let Some(peer) = self.peer.and_then(|peer| all.get(peer.index())) else { return };
        if outbound.writes.is_empty() {
            return;
        }
        if self.may_act() && outbound.unread > 0 {
            offer(WireStep::Read, outbound.read_at);
        }
        if peer.can_be_reached() && outbound.carried > 0 {
            offer(WireStep::Land, outbound.land_at);
        }
        if peer.phase == Phase::Open && !peer.stopped && outbound.next_delivery().is_some() {
            offer(WireStep::Deliver, outbound.deliver_at);
        }
        if self.may_act() && peer.phase == Phase::Open && !peer.stopped && outbound.next_sample().is_some() {
            offer(WireStep::Sample, outbound.sample_at);
        }
        if self.may_act() && outbound.next_return().is_some() {
            offer(WireStep::Return, outbound.return_at);
        }
        if self.may_act() && outbound.next_completion(self.completes_after_reading).is_some() {
            offer(WireStep::Complete, outbound.complete_at);
        }
    }

    /// Whether this side still executes what it posted.
    fn may_act(&self) -> bool {
        matches!(self.phase, Phase::Open | Phase::Closing) && !self.outbound.cut && !self.stopped
    }

    /// Whether the peer's bytes can land here now.
    pub(crate) fn can_be_reached(&self) -> bool {
        self.phase.is_reachable() && !self.stopped
    }
}

/// The steps of a write, as the endpoint that posted it offers them.
#[derive(Debug, Clone, Copy)]
pub(crate) enum WireStep {
    Read,
    Land,
    Deliver,
    Complete,
    /// A piece of a read is read at the target.
    Sample,
    /// A piece of a read lands at the reader.
    Return,
}
