//! A request to end a connection, left by a task that cannot take the receiver now.

use std::sync::atomic::{AtomicU8, Ordering};

use tensorwire_fabric::{FabricError, FabricKind, LossCause};

use crate::sender::End;

const OPEN: u8 = 0;
const CLOSED_BY_USER: u8 = 1;
const DRIVER_GONE: u8 = 2;

/// The request. It only increases: once the driver is gone, that is the reason, even if the user closed before.
#[derive(Debug, Default)]
pub(super) struct Closing(AtomicU8);

impl Closing {
    /// Records that the user closes.
    pub(super) fn by_user(&self) {
        self.0.fetch_max(CLOSED_BY_USER, Ordering::Release);
    }

    /// Records that nothing drives the connection any more.
    pub(super) fn driver_gone(&self) {
        self.0.fetch_max(DRIVER_GONE, Ordering::Release);
    }

    pub(super) fn is_wished(&self) -> bool {
        self.0.load(Ordering::Acquire) != OPEN
    }

    /// The end that was requested.
    pub(super) fn end(&self) -> Option<End> {
        match self.0.load(Ordering::Acquire) {
            OPEN => None,
            CLOSED_BY_USER => Some(End::closed()),
            _ => Some(Self::abandoned()),
        }
    }

    /// The end, if nothing drives the connection.
    pub(super) fn end_without_driver(&self) -> Option<End> {
        (self.0.load(Ordering::Acquire) == DRIVER_GONE).then(Self::abandoned)
    }

    /// The end of a connection that nothing drives.
    pub(super) fn abandoned() -> End {
        let detail = "the runtime that drove the connection has shut down".to_owned();
        End::silent(FabricError::PeerLost { kind: FabricKind::TCP, cause: LossCause::DeviceLost, detail })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_driver_is_the_reason_whatever_else_was_wished() {
        let closing = Closing::default();
        assert!(closing.end().is_none() && !closing.is_wished());
        closing.by_user();
        assert!(matches!(closing.end(), Some(End { error: FabricError::Closed, .. })));
        closing.driver_gone();
        closing.by_user();
        let error = closing.end().map(|end| end.error);
        assert!(matches!(error, Some(FabricError::PeerLost { cause: LossCause::DeviceLost, .. })));
    }
}
