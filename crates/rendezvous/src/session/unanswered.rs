//! Requests of this worker for the peer's list and for its report, which count together: the peer bounds their sum.

use tensorwire_protocol::report::WorkerReport;
use tokio::sync::oneshot;

use super::{LISTS_MAX, ListPage, Session};

/// A task that waits for an answer.
#[derive(Debug)]
pub(super) enum Unanswered {
    List(oneshot::Sender<ListPage>),
    Report(oneshot::Sender<WorkerReport>),
}

impl Unanswered {
    fn is_given_up(&self) -> bool {
        match self {
            Self::List(waiting) => waiting.is_closed(),
            Self::Report(waiting) => waiting.is_closed(),
        }
    }
}

impl Session {
    /// A number for a list request, and the receiver of the page.
    ///
    /// # Errors
    /// The session has ended, or too many requests are unanswered.
    pub(crate) fn ask_list(&self) -> Result<(u32, oneshot::Receiver<ListPage>), String> {
        self.ask(Unanswered::List)
    }

    /// A number for a request for a report, and the receiver of the answer.
    ///
    /// # Errors
    /// As [`ask_list`](Self::ask_list).
    pub(crate) fn ask_report(&self) -> Result<(u32, oneshot::Receiver<WorkerReport>), String> {
        self.ask(Unanswered::Report)
    }

    fn ask<T>(
        &self,
        kind: impl FnOnce(oneshot::Sender<T>) -> Unanswered,
    ) -> Result<(u32, oneshot::Receiver<T>), String> {
        let (give, answer) = oneshot::channel();
        let mut state = self.lock();
        if let Some(why) = &state.over {
            return Err(why.detail.clone());
        }
        state.unanswered.retain(|_, waiting| !waiting.is_given_up());
        if state.unanswered.len() >= LISTS_MAX {
            return Err(format!(
                "{LISTS_MAX} list requests or requests for reports to this peer are unanswered"
            ));
        }
        let number = self.number(&mut state);
        state.unanswered.insert(number, kind(give));
        Ok((number, answer))
    }

    /// Stores a page of the peer's list.
    pub(crate) fn give_list(&self, request: u32, page: ListPage) {
        let mut state = self.lock();
        match state.unanswered.remove(&request) {
            Some(Unanswered::List(waiting)) => drop(waiting.send(page)),
            other => state.unanswered.extend(other.map(|other| (request, other))),
        }
    }

    /// Stores the peer's report.
    pub(crate) fn give_report(&self, request: u32, report: WorkerReport) {
        let mut state = self.lock();
        match state.unanswered.remove(&request) {
            Some(Unanswered::Report(waiting)) => drop(waiting.send(report)),
            other => state.unanswered.extend(other.map(|other| (request, other))),
        }
    }
}
