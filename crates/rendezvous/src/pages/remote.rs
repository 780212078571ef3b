//! The arenas of a peer.

use std::pin::pin;

use tensorwire_protocol::{ReceiveOptions, Scope};

use super::list::Pages;
use crate::{
    error::{Transfer as Named, WorkerError},
    values::published::check_published,
    worker::{metrics::Timed, peer::Peer},
};

/// An arena that a peer has exposed, found by [`Peer::arena`]. Cheap to clone. It stays valid when the connection breaks and is made again.
#[derive(Debug, Clone)]
pub struct RemoteArena {
    pub(super) peer: Peer,
    pub(super) name: String,
    page_bytes: usize,
    count: u32,
}

impl Peer {
    /// The arena that the peer has exposed under `name`.
    ///
    /// # Errors
    /// [`WorkerError::Remote`] with NOT_FOUND if it has exposed none, and those of a [`fetch`](Self::fetch). [`WorkerError::Config`] if the
    /// peer is this worker itself: use the arena.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn arena(&self, name: &str) -> Result<RemoteArena, WorkerError> {
        check_published(name)?;
        let worker = &self.worker;
        if worker.node.is_own(&self.known) {
            let remedy = "the peer is this worker: use its arena".to_owned();
            return Err(WorkerError::Config { field: "peer", value: self.name().to_owned(), remedy });
        }
        let key = format!("{name}{{}}");
        let named = Named { peer: self.name(), key: &key, step: None };
        let (scope, options) = (Scope::Pages(None), ReceiveOptions::default());
        let limit = worker.operations.defaults.limit;
        let fetched = pin!(worker.fetch_one(&self.known, &named, &scope, &options));
        let (size, _) = worker.timed(Timed::Fetch, limit, || format!("fetching {named}"), fetched).await?;
        let wrong = || {
            let problem = format!("the size of arena `{name}` came as {} bytes", size.bytes().len());
            WorkerError::InvalidTensor { problem }
        };
        let (page_bytes, rest) = size.bytes().split_first_chunk().ok_or_else(wrong)?;
        let count = rest.try_into().map_err(|_| wrong())?;
        let (page_bytes, count) = (u64::from_le_bytes(*page_bytes), u64::from_le_bytes(count));
        let page_bytes = usize::try_from(page_bytes).ok().filter(|bytes| *bytes > 0).ok_or_else(wrong)?;
        let count = u32::try_from(count).map_err(|_| wrong())?;
        Ok(RemoteArena { peer: self.clone(), name: name.to_owned(), page_bytes, count })
    }
}

impl RemoteArena {
    /// How many pages it has.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Bytes of each page.
    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Checks that the arena has these pages.
    pub(super) fn check(&self, pages: &Pages) -> Result<(), WorkerError> {
        match pages.numbers().iter().find(|page| **page >= self.count) {
            Some(page) => Err(WorkerError::Config {
                field: "page",
                value: page.to_string(),
                remedy: format!(
                    "arena `{}` of {} has {} pages, from number 0 on",
                    self.name,
                    self.peer.name(),
                    self.count
                ),
            }),
            None => Ok(()),
        }
    }
}
