//! Requests of this worker for a report of the peer.

use tensorwire_protocol::report::WorkerReport;
use tokio::sync::oneshot;

use super::{LISTS_MAX, Session};

impl Session {
    /// A number for a request for a report, and the receiver of the answer.
    ///
    /// # Errors
    /// The session has ended, or too many requests are unanswered.
    pub(crate) fn ask_report(&self) -> Result<(u32, oneshot::Receiver<WorkerReport>), String> {
        let (give, report) = oneshot::channel();
        let mut state = self.lock();
        if let Some(why) = &state.over {
            return Err(why.detail.clone());
        }
        state.reports.retain(|_, waiting| !waiting.is_closed());
        if state.reports.len() >= LISTS_MAX {
            return Err(format!("{LISTS_MAX} requests for a report of this peer are unanswered"));
        }
        let number = self.number(&mut state);
        state.reports.insert(number, give);
        Ok((number, report))
    }

    /// Stores the peer's report.
    pub(crate) fn give_report(&self, request: u32, report: WorkerReport) {
        if let Some(waiting) = self.lock().reports.remove(&request) {
            let _ = waiting.send(report);
        }
    }
}
