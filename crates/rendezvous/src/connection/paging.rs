//! Pages of arenas, between this worker and a peer.
//!
//! As with values, the receiver requests pages and the sender writes them. So a write of pages begins with a message by which the sender asks
//! the receiver to request them.

use std::{
    num::NonZeroU64,
    sync::{Arc, PoisonError},
};

use tensorwire_fabric::RemoteRegion;
use tensorwire_memory::{Buf, GrantEnd, copy::CopyReason};
use tensorwire_protocol::{
    Allocator, Awaiting, Code, Destination, Metadata, PageWrite, ReceiveOptions, Scope, Status, Stay, Take,
    TransferError,
    limits::PAGES_PER_REQUEST_MAX,
    pages::{InvalidPages, PageMoves},
};
use tensorwire_testpoints::sync::Mutex;

use crate::{
    connection::{
        DataConnection,
        fabric_channel::FabricChannel,
        peer_values::{PeerValues, Taken, Taking},
        sent_pages::AnswerPages,
    },
    error::{Transfer, WorkerError},
    peer_memory::{
        arena::{ArenaMemory, TakenPages},
        destinations::unexpected,
        lent::Lent,
    },
    values::{
        arenas::{ExposedArena, Outgoing, Written},
        sets::bytes_of,
    },
};

/// Most bytes of the pages of one request, unless one page has more. What else the connection sends waits for no more than a few of these.
const REQUEST_BYTES: usize = 512 << 10;

/// The same over shared memory, where the peer copies the pages in turns with everything else.
const SHARED_BYTES: usize = 4 << 20;

/// The arena's name and the pages in the key of a request.
fn split(key: &str) -> Result<(&str, PageMoves), Status> {
    PageMoves::split(key).map_err(|error: InvalidPages| Status::new(Code::InvalidArgument, error.to_string()))
}

impl PeerValues {
    /// The pages that `key` names of an arena, or, if it names none, the arena's size.
    pub(super) fn pages(&self, key: &str) -> Result<Taken, Status> {
        let (name, moves) = split(key)?;
        let arena = self.values.arenas.find(name)?;
        if moves.as_slice().is_empty() {
            let size = [arena.memory.page_bytes as u64, arena.memory.count().into()];
            return Ok(Taken::unnamed(size.map(u64::to_le_bytes).as_flattened()));
        }
        let shared = arena.memory.share(moves.as_slice().iter().map(|page| page.from), arena.token())?;
        let mut shared = Outgoing::OfArena(shared);
        let pages = shared.send();
        self.answer(pages, &moves, shared)
    }

    fn answer(&self, pages: Vec<Buf>, moves: &PageMoves, held: Outgoing) -> Result<Taken, Status> {
        AnswerPages::new(pages, moves, (held, self.connection.clone())).map(Taken::Pages)
    }

    /// The pages that `key` names of a write of this worker.
    pub(super) fn pages_of_write(&self, number: NonZeroU64, key: &str) -> Result<Taken, Status> {
        let (_, moves) = split(key)?;
        if moves.as_slice().is_empty() {
            return Err(Status::new(Code::InvalidArgument, "a request for pages of a write names some"));
        }
        let gone = || Status::new(Code::NotFound, "the write has ended, or its pages were requested before");
        let mut write = self.values.arenas.writes.take(number, &self.peer).ok_or_else(gone)?;
        let views = write.send();
        let page = |page: u32| {
            let outside = || Status::new(Code::InvalidArgument, format!("the write has no page {page}"));
            views.get(page as usize).cloned().ok_or_else(outside)
        };
        let pages = moves.as_slice().iter().map(|moved| page(moved.from)).collect::<Result<Vec<_>, _>>()?;
        self.answer(pages, &moves, write)
    }

    /// Requests the pages of a peer's write, and answers when they are there.
    pub(super) fn page_write(&self, key: &Arc<str>, write: PageWrite) -> Take<Taken, Taking> {
        let (connection, arena, moves) = match self.asked_to_pull(key) {
            Ok(asked) => asked,
            Err(status) => return Take::Now(Err(status)),
        };
        let (key, peer) = (key.clone(), self.peer.clone());
        Take::Later(Box::pin(async move {
            // A note may come without pages.
            if !moves.as_slice().is_empty() {
                let pages = arena.take(moves.as_slice()).await?;
                let name = Transfer { peer: &peer, key: &key, step: None };
                let scope = Scope::Pages(Some(write.number));
                // Never alone: this runs in the connection's task.
                let pulled = connection.pull_pages((&scope, &name), pages, Awaiting::Beside);
                pulled.await?;
            }
            if let Some(note) = write.note {
                arena.deliver(Written { peer: peer.clone(), note }).await?;
            }
            Ok(Taken::unnamed(&[]))
        }))
    }

    /// The connection with the peer, the arena into which it writes, and the pages.
    fn asked_to_pull(
        &self,
        key: &str,
    ) -> Result<(Arc<DataConnection>, Arc<ExposedArena>, PageMoves), Status> {
        let (name, moves) = split(key)?;
        let arena = self.values.arenas.find(name)?;
        Ok((self.own_connection()?, arena, moves))
    }
}

impl DataConnection {
    /// How many pages one request moves.
    pub(crate) fn pages_per_request(&self, page_bytes: usize) -> usize {
        if !self.queue_pair.capabilities().vectored {
            return 1;
        }
        // Pages are one write. It must leave room in the send queue for others.
        let deep = self.queue_pair.config().send_depth as usize / 4;
        let bytes = if self.queue_pair.shared_memory().is_some() { SHARED_BYTES } else { REQUEST_BYTES };
        (bytes / page_bytes.max(1)).min(PAGES_PER_REQUEST_MAX).min(deep).max(1)
    }

    /// Requests pages of the peer, and receives them into `pages`, which return to their arena: at once with the answer, or, if this is
    /// dropped, as soon as it is certain that the peer writes them no more.
    pub(crate) async fn pull_pages(
        &self,
        (scope, name): (&Scope, &Transfer<'_>),
        pages: TakenPages,
        awaiting: Awaiting,
    ) -> Result<(), WorkerError> {
        let local = |status| WorkerError::Local { transfer: name.name(), status };
        let region = self.region_of(pages.arena()).map_err(local)?;
        let confirmed = self.allocator.confirm(region).await;
        confirmed.map_err(|status| self.transfer_error(*name, TransferError::Local(status)))?;
        let allocator = PageAllocator::new(region, pages);
        let options = ReceiveOptions { awaiting, ..ReceiveOptions::default() };
        self.received((scope, name), &allocator, &options, |received| match received.lent {
            Some(Lent::Pages(granted)) => {
                drop(granted.end(GrantEnd::Content));
                Ok(())
            }
            _ => Err(local(unexpected(&received.metadata))),
        })
        .await
    }

    /// Keeps the connection until a transfer of several requests has ended. `None` if it is retired.
    pub(crate) fn stay(&self) -> Option<Stay<FabricChannel>> {
        self.protocol.stay()
    }

    /// Drops `held` now, or, if the connection is over, once no write of it is under way.
    pub(super) fn keep_until_closed(&self, held: Outgoing) {
        if self.protocol.failure().is_some() || self.is_over() {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(kept) = &mut *kept {
                return kept.push(held);
            }
        }
        drop(held);
    }

    /// No write is under way any more.
    pub(super) fn release_kept(&self) {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(kept);
    }

    /// Asks the peer to request the pages of a write, and waits until they are there.
    pub(crate) async fn write_pages(&self, name: &Transfer<'_>, write: PageWrite) -> Result<(), WorkerError> {
        let _turn = self.page_writes.acquire().await;
        let (scope, options) = (Scope::PageWrite(write), ReceiveOptions::default());
        self.receive(&scope, name, &options).await.map(drop)
    }

    /// The region of an arena that the peer may write.
    fn region_of(&self, arena: &ArenaMemory) -> Result<RemoteRegion, Status> {
        let refused = |message| Status::new(Code::FailedPrecondition, message);
        if self.is_validated() {
            return Err(refused(
                "pages are not validated: connect without validation, or fetch a tensor instead",
            ));
        }
        let region = self.allocator.enclosure.regions.get(arena.block.id());
        region
            .ok_or_else(|| refused("the peer may not write arenas: pages need `Trust::Cluster` at both ends"))
    }
}

/// Grants the pages of one request.
struct PageAllocator {
    region: RemoteRegion,
    expected: Arc<[Metadata]>,
    /// `None` once they are granted.
    pages: Mutex<Option<TakenPages>>,
}

impl PageAllocator {
    fn new(region: RemoteRegion, pages: TakenPages) -> Self {
        Self { region, expected: Arc::new([bytes_of(pages.length())]), pages: Mutex::new(Some(pages)) }
    }
}

impl Allocator for PageAllocator {
    type Lent = Lent;

    fn accepts(&self, metadata: &Metadata) -> Result<(), Status> {
        if self.expected.contains(metadata) { Ok(()) } else { Err(unexpected(metadata)) }
    }

    fn expected(&self) -> Option<&Arc<[Metadata]>> {
        Some(&self.expected)
    }

    fn copy_eager(&self, _: &Metadata, content: &[u8]) -> Lent {
        Lent::view(Buf::on_heap(content, CopyReason::Eager))
    }

    async fn allocate(&self, metadata: &Metadata) -> Result<(Lent, Destination), Status> {
        let pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner).take();
        let pages = pages.ok_or_else(|| unexpected(metadata))?;
        let (offset, capacity) = (pages.arena().offset, pages.arena().length());
        let (region, generation) = (self.region.region.0, self.region.generation.0);
        let destination = Destination { region, generation, offset, capacity, result: None };
        Ok((Lent::Pages(Box::new(pages.grant())), destination))
    }
}
