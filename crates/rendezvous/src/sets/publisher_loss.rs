//! A publisher that is lost, and may come back.

use std::time::Duration;

use tensorwire_fabric::Runtime;
use tensorwire_protocol::Code;

use crate::{
    error::{PeerLoss, WorkerError},
    sets::fetching::PeerSet,
};

/// First and longest pause before a lost publisher is asked again.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// The pause before a lost publisher is asked again; none at first.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Pause(Duration);

impl Pause {
    pub(crate) fn is_none(self) -> bool {
        self.0.is_zero()
    }

    /// The next pause is twice as long as the one before.
    pub(crate) fn lengthen(&mut self) {
        self.0 = (self.0 * 2).clamp(PAUSE_MIN, PAUSE_MAX);
    }

    pub(crate) fn length(self) -> Duration {
        self.0
    }

    pub(crate) async fn sleep(self, runtime: &dyn Runtime) {
        if !self.is_none() {
            runtime.sleep(self.0).await;
        }
    }
}

pub(super) fn warn_of_loss(set: &PeerSet, error: &WorkerError) {
    let (peer, set) = (set.peer.name(), set.name());
    log!(WARN, peer, set, %error, "the publisher of a set is lost; asking again");
}

/// Whether the peer may come back after this error.
pub(crate) fn is_loss(error: &WorkerError) -> bool {
    match error {
        WorkerError::PeerLost { loss, .. } => !matches!(loss, PeerLoss::Misbehaved | PeerLoss::NameTaken),
        WorkerError::NoFabric { .. } | WorkerError::NoAddress { .. } => true,
        WorkerError::Control(_) | WorkerError::Fabric(_) => true,
        WorkerError::Remote { status, .. } => matches!(status.code, Code::Unavailable | Code::Cancelled),
        _ => false,
    }
}
