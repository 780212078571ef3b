//! Lists of a peer's published tensors, fetched page by page.

use std::{future::IntoFuture, pin::pin, time::Duration};

use tensorwire_fabric::BoxFuture;
use tensorwire_protocol::{
    Code, Status,
    wire::control::{ControlFrame, ListEntry},
};

use crate::{
    error::{Lost, PeerLoss, Transfer, TransferName, WorkerError},
    session::{ListPage, Session},
    values::published::{Published, Version},
    worker::peer::Peer,
};

impl Peer {
    /// Lists what the peer has published, sorted by name.
    ///
    /// # Errors
    /// Awaiting it returns [`WorkerError::Control`], [`WorkerError::PeerLost`] or [`WorkerError::DeadlineExceeded`].
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub fn list(&self) -> List<'_> {
        List::new(self)
    }

    /// The error of `transfer`, whose session has ended.
    pub(crate) fn lost_session(&self, session: &Session, transfer: Box<TransferName>) -> WorkerError {
        let Lost { loss, detail } = session.lost();
        match loss {
            PeerLoss::NameTaken => WorkerError::NameTaken { name: self.worker.name().to_owned(), detail },
            PeerLoss::ShutDownHere => WorkerError::ShutDown,
            _ => {
                let address = session.whereabouts();
                WorkerError::PeerLost { transfer, address, transport: "control plane", loss, detail }
            }
        }
    }
}

/// A request for the list of a peer's published tensors, made by [`Peer::list`]. Nothing is sent until it is awaited.
/// Awaiting it returns a [`Published`] for each tensor, sorted by name.
#[derive(Debug)]
#[must_use = "nothing is listed until it is awaited"]
pub struct List<'a> {
    peer: &'a Peer,
    limit: Duration,
    with_checksums: bool,
}

impl<'a> List<'a> {
    pub(crate) fn new(peer: &'a Peer) -> Self {
        Self { peer, limit: peer.worker.operations.defaults.limit, with_checksums: false }
    }

    /// The deadline, including the time to connect. Default: the worker's [`timeout`](crate::WorkerBuilder::timeout).
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Adds the XXH3-64 checksum of each tensor, which the peer computes unless it has done so before.
    pub fn with_checksums(mut self) -> Self {
        self.with_checksums = true;
        self
    }

    async fn run(self) -> Result<Vec<Published>, WorkerError> {
        let (node, known) = (&self.peer.worker.node, &self.peer.known);
        let session = if node.is_own(known) { None } else { Some(node.session(known).await?) };
        let incarnation = session.as_ref().map_or(node.incarnation(), |session| session.peer.incarnation);
        let pages = async {
            let mut list = ListSoFar::new(LIST_BYTES_MAX);
            loop {
                let after = list.last_name();
                let page = match &session {
                    Some(session) => self.peers_page(session, after).await?,
                    None => node.list_page(after.as_deref(), self.with_checksums).await,
                };
                let more = page.more && !page.entries.is_empty();
                match (list.take(page.entries, incarnation), &session) {
                    (Err(ListRefused::Disordered), Some(session)) => {
                        session.condemn(Lost::misbehaved("the peer's list is not sorted by name"));
                        return Err(self.lost(session));
                    }
                    (Err(ListRefused::TooLong(status)), _) => {
                        let transfer = list_of(known.name());
                        return Err(WorkerError::Local { transfer, status });
                    }
                    (Ok(()) | Err(ListRefused::Disordered), _) => {}
                }
                if !more {
                    return Ok(list.entries);
                }
            }
        };
        let what = || format!("listing what {} has published", known.name());
        self.peer.worker.within(self.limit, what, "does the peer run?", pin!(pages)).await
    }

    /// The page of the peer's list after the name `after`.
    async fn peers_page(&self, session: &Session, after: Option<String>) -> Result<ListPage, WorkerError> {
        let (request, page) = session.ask_list().map_err(|_| self.lost(session))?;
        let with_checksums = self.with_checksums;
        session.send(ControlFrame::ListRequest { request, after, with_checksums }).await?;
        page.await.map_err(|_| self.lost(session))
    }

    fn lost(&self, session: &Session) -> WorkerError {
        self.peer.lost_session(session, list_of(&session.peer.worker))
    }
}

impl<'a> IntoFuture for List<'a> {
    type Output = Result<Vec<Published>, WorkerError>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

/// The name of the transfer of a list in errors.
fn list_of(peer: &str) -> Box<TransferName> {
    Transfer { peer, key: "list", step: None }.name()
}

/// Longest list that is accepted from one peer, in bytes of memory: about a million names of usual length.
const LIST_BYTES_MAX: usize = 256 << 20;

/// The pages received so far.
#[derive(Debug)]
struct ListSoFar {
    entries: Vec<Published>,
    bytes: usize,
    bytes_max: usize,
}

/// The reason why a page is refused.
#[derive(Debug, PartialEq, Eq)]
enum ListRefused {
    /// Its names do not follow those of the previous page, so the list might never end.
    Disordered,
    /// The list is longer than the limit.
    TooLong(Status),
}

impl ListSoFar {
    /// An empty list.
    fn new(bytes_max: usize) -> Self {
        Self { entries: Vec::new(), bytes: 0, bytes_max }
    }

    /// The last name so far; the next page begins after it.
    fn last_name(&self) -> Option<String> {
        self.entries.last().map(|entry| entry.name.clone())
    }

    /// Appends a page of the peer's incarnation `incarnation`.
    ///
    /// # Errors
    /// The page is refused, and no further one is requested.
    fn take(&mut self, page: Vec<ListEntry>, incarnation: u64) -> Result<(), ListRefused> {
        for entry in page {
            if self.entries.last().is_some_and(|last| last.name >= entry.name) {
                return Err(ListRefused::Disordered);
            }
            self.bytes += entry.encoded_length() + size_of::<Published>();
            if self.bytes > self.bytes_max {
                let message = format!(
                    "the peer's list has more than {} bytes of names and shapes: fetch by name instead",
                    self.bytes_max
                );
                return Err(ListRefused::TooLong(Status::new(Code::ResourceExhausted, message)));
            }
            let version = Version { incarnation, number: entry.version };
            let ListEntry { name, metadata, checksum, .. } = entry;
            self.entries.push(Published { name, metadata, version, checksum });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tensorwire_protocol::{DataType, Metadata, Shape};

    use super::*;

    fn entry(name: String, rank: usize) -> ListEntry {
        let shape = Shape::new(vec![1; rank]).unwrap();
        let metadata = Metadata::new(DataType::U8, shape).unwrap();
        ListEntry { name, metadata, version: 1, checksum: None }
    }

    #[test]
    fn s5_a_list_that_does_not_go_on_is_refused() {
        let mut list = ListSoFar::new(1 << 20);
        assert_eq!(list.take(vec![entry("a".into(), 0), entry("b".into(), 0)], 7), Ok(()));
        assert_eq!(list.last_name().as_deref(), Some("b"));
        assert_eq!(list.take(Vec::new(), 7), Ok(()));
        assert_eq!(
            list.take(vec![entry("c".into(), 0), entry("c".into(), 0)], 7),
            Err(ListRefused::Disordered)
        );
        assert_eq!(list.take(vec![entry("a".into(), 0)], 7), Err(ListRefused::Disordered));
        assert_eq!(list.entries.len(), 3);
    }

    #[test]
    fn s4_a_list_without_an_end_is_refused() {
        let mut list = ListSoFar::new(1 << 20);
        let page = |number: usize| vec![entry(format!("{number:08}{}", "x".repeat(1000)), 254)];
        let pages = (0..1_000_000).take_while(|&number| list.take(page(number), 7).is_ok()).count();
        assert!((300..400).contains(&pages), "{pages}");
        let refused = list.take(page(usize::MAX), 7).unwrap_err();
        assert!(matches!(refused, ListRefused::TooLong(status) if status.message.contains("1048576")));
        // The memory of the shortest entries exceeds their bytes.
        let mut list = ListSoFar::new(1 << 20);
        let page = |number: usize| vec![entry(format!("{number:08}"), 0)];
        let pages = (0..1_000_000).take_while(|&number| list.take(page(number), 7).is_ok()).count();
        assert!(pages * size_of::<Published>() <= 1 << 20, "{pages}");
    }
}
