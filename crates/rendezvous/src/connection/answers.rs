//! Answers that a publication sends.

use std::sync::Arc;

use tensorwire_fabric::QueuePair;

use crate::{
    connection::{driver::Work, entries::Entries},
    values::published::WaitingAnswers,
};

/// The answers of one connection. `publish` sends those that it has woken, so that no task must be woken before they leave.
#[derive(Debug)]
pub(crate) struct PeerAnswers {
    pub(crate) queue_pair: QueuePair,
    pub(crate) entries: Arc<Entries<Work>>,
}

impl WaitingAnswers for PeerAnswers {
    fn send(&self) {
        if tensorwire_testpoints::chance!("a publication leaves answers to the connection's task") {
            return;
        }
        let together = self.queue_pair.together();
        self.entries.poll_woken();
        together.leave();
    }
}
