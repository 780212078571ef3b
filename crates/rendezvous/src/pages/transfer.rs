//! Transfers of pages.

use std::{
    fmt,
    ops::Range,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures::{StreamExt as _, TryStreamExt as _, future, stream};
use tensorwire_fabric::BoxFuture;
use tensorwire_memory::Buf;
use tensorwire_protocol::{
    Awaiting, PageWrite, Scope,
    limits::NAME_BYTES_MAX,
    pages::{PageMove, PageMoves},
};
use tokio::sync::watch;

use super::{Arena, list::Pages, remote::RemoteArena};
use crate::{
    connection::DataConnection,
    error::{Transfer as Named, WorkerError},
    peer_memory::arena::{Ended, PageError, TakenPages, Token},
    values::arenas::Outgoing,
    worker::metrics::Timed,
};

/// How many requests of one transfer are under way.
const REQUESTS: usize = 4;

/// The pages of this side, and those of the peer from which they are read.
#[derive(Debug, Clone)]
enum Local {
    Read { from: Pages, into: Arena },
    Write { from: Arena, pages: Pages },
    WriteBuffers(Vec<Buf>),
}

impl RemoteArena {
    /// Reads `pages` of the peer into the pages `at` of `into`, in this order. Nothing is moved until the transfer is awaited. The pages `at`
    /// cannot be used until they are there.
    ///
    /// # Errors
    /// Awaiting it returns [`WorkerError::Config`] for lists of different lengths, arenas with pages of different sizes, pages that an arena
    /// does not have, and pages of `into` that are in use; [`WorkerError::Remote`] with UNAVAILABLE if the peer writes one of its
    /// pages now, and with NOT_FOUND if the arena is exposed no more; [`WorkerError::Remote`] or [`WorkerError::Local`] with
    /// FAILED_PRECONDITION if contents are validated, or the side that is written does not trust the other
    /// ([`Trust::Hostile`](crate::Trust::Hostile)); otherwise as a [`fetch`](crate::Peer::fetch). After an error some of the pages may have
    /// been read, and the pages `at` may be in use until the peer has acknowledged that it writes them no more: [cancel](Transfer::cancel) the
    /// transfer to wait for that.
    pub fn read(&self, pages: &Pages, into: &Arena, at: &Pages) -> Transfer {
        self.transfer(Local::Read { from: pages.clone(), into: into.clone() }, at)
    }

    /// Writes the pages `pages` of `from` to the pages `at` of the peer, in this order. Nothing is moved until the transfer is awaited. The
    /// transfer ends when the pages are there, and their [note](Transfer::note), if there is one, is with the peer's program. Until then
    /// `pages` can be read, and not written.
    ///
    /// # Errors
    /// As [`read`](Self::read); UNAVAILABLE if the peer's program uses one of its pages. Pages that another transfer has are waited for. After
    /// an error some of the pages may have been written.
    pub fn write(&self, from: &Arena, pages: &Pages, at: &Pages) -> Transfer {
        self.transfer(Local::Write { from: from.clone(), pages: pages.clone() }, at)
    }

    /// As [`write`](Self::write), of pages that are in no arena: parts of any buffers, each as long as a page. Memory that the program has
    /// [joined](crate::Worker::user_memory) is found again by its addresses, and sent without a copy, except over shared memory,
    /// which needs one.
    ///
    /// # Errors
    /// As [`write`](Self::write), and [`WorkerError::Config`] for a buffer that is not as long as a page.
    pub fn write_from(&self, pages: Vec<Buf>, at: &Pages) -> Transfer {
        self.transfer(Local::WriteBuffers(pages), at)
    }

    fn transfer(&self, local: Local, to: &Pages) -> Transfer {
        let limit = self.peer.worker.operations.defaults.limit;
        Transfer::new(Plan { remote: self.clone(), local, to: to.clone(), note: None, limit })
    }
}

/// What a transfer moves.
#[derive(Debug, Clone)]
struct Plan {
    remote: RemoteArena,
    local: Local,
    /// Of the side that is written.
    to: Pages,
    note: Option<u64>,
    limit: Duration,
}

/// A transfer of pages, made by [`RemoteArena::read`] or [`RemoteArena::write`]: a future. It begins when it is first polled.
///
/// # Cancel safety
/// Dropping it gives the transfer up. Pages of this side that a peer may still write return to their arena as soon as it is certain that it
/// writes them no more: until then they are in use. [`cancel`](Self::cancel) waits for that.
#[must_use = "nothing is moved until it is awaited"]
pub struct Transfer {
    plan: Plan,
    /// `None` before the first poll, and once the pages are there.
    run: Option<BoxFuture<'static, Result<(), WorkerError>>>,
    /// When the transfer has no page of this side any more. `None` before the first poll.
    ended: Option<Ended>,
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer").field("plan", &self.plan).finish_non_exhaustive()
    }
}

impl Transfer {
    fn new(plan: Plan) -> Self {
        Self { plan, run: None, ended: None }
    }

    /// The deadline, including the time to connect. Default: the worker's [`timeout`](crate::WorkerBuilder::timeout).
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.plan.limit = limit;
        self
    }

    /// Of a write: gives the peer's program `note` ([`Exposed::next`](super::Exposed::next)), once all pages are there. A read has no note: awaiting it
    /// returns [`WorkerError::Config`] then.
    pub fn note(mut self, note: u64) -> Self {
        self.plan.note = Some(note);
        self
    }

    /// Gives the transfer up, and waits until it is certain that it moves nothing any more: of a read that the peer writes no page of this side,
    /// because it has answered or its connection is over; of a write that none of the pages is being sent. Then all pages of this side are
    /// free. A peer that does not answer is lost after [`liveness`](crate::WorkerBuilder::liveness), which ends this, too.
    ///
    /// The peer's pages of a write are free a round trip later. Some of the pages may have been moved, and the note may have been delivered.
    ///
    /// # Cancel safety
    /// The transfer is given up at the first poll.
    pub async fn cancel(mut self) {
        self.run = None;
        if tensorwire_testpoints::planted!("a cancelled transfer of pages does not wait for the peer") {
            return;
        }
        if let Some(ended) = &self.ended {
            ended.closed().await;
        }
    }
}

impl Future for Transfer {
    type Output = Result<(), WorkerError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if this.ended.is_none() {
            let (ended, token) = watch::channel(());
            this.run = Some(Box::pin(this.plan.clone().run(token, ended.clone())));
            this.ended = Some(ended);
        }
        let Some(run) = &mut this.run else { return Poll::Ready(Ok(())) };
        let moved = ready!(run.as_mut().poll(context));
        this.run = None;
        Poll::Ready(moved)
    }
}

impl Local {
    fn count(&self) -> usize {
        match self {
            Self::Read { from: pages, .. } | Self::Write { pages, .. } => pages.len(),
            Self::WriteBuffers(buffers) => buffers.len(),
        }
    }

    /// Some of the pages that are written.
    fn outgoing(&self, places: Range<usize>, token: Token) -> Result<Outgoing, PageError> {
        match self {
            Self::Write { from, pages } => {
                let pages = pages.numbers().get(places).unwrap_or_default();
                from.memory.share(pages.iter().copied(), token).map(Outgoing::OfArena)
            }
            Self::WriteBuffers(buffers) => {
                let pages = buffers.get(places).unwrap_or_default().to_vec();
                Ok(Outgoing::Buffers { pages, _token: token })
            }
            Self::Read { .. } => Ok(Outgoing::Buffers { pages: Vec::new(), _token: token }),
        }
    }

    /// Bytes of the pages of this side.
    fn page_bytes(&self) -> impl Iterator<Item = usize> {
        let (arena, buffers) = match self {
            Self::Read { into: arena, .. } | Self::Write { from: arena, .. } => (Some(arena), &[][..]),
            Self::WriteBuffers(buffers) => (None, &buffers[..]),
        };
        arena.map(Arena::page_bytes).into_iter().chain(buffers.iter().map(|buffer| buffer.len()))
    }
}

impl Plan {
    async fn run(self, token: Token, ended: Ended) -> Result<(), WorkerError> {
        self.check()?;
        let worker = self.remote.peer.worker.clone();
        let what = || format!("moving pages of {}", self.named(&self.remote.name));
        let moved = pin!(async {
            self.transfer(token).await?;
            // The peer may be faster than the completion of the last write of its pages.
            ended.closed().await;
            Ok(())
        });
        let moved = worker.timed(Timed::Pages, self.limit, what, moved).await;
        // Each request has a key with its pages, which is long.
        moved.map_err(|error| error.of(&self.remote.name))
    }

    fn check(&self) -> Result<(), WorkerError> {
        let refused =
            |field, value: String, remedy: String| Err(WorkerError::Config { field, value, remedy });
        let (moved, to) = (self.local.count(), self.to.len());
        if moved != to {
            let remedy = format!("name as many pages to read as to write, which are {to}");
            return refused("pages", moved.to_string(), remedy);
        }
        let page_bytes = self.remote.page_bytes();
        if let Some(other) = self.local.page_bytes().find(|bytes| *bytes != page_bytes) {
            let remedy = format!("the peer's pages have {page_bytes} bytes: make an arena of such pages");
            return refused("page_bytes", other.to_string(), remedy);
        }
        let mut sorted = self.to.numbers().to_vec();
        sorted.sort_unstable();
        if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return refused("page", twice[0].to_string(), "name each page that is written once".to_owned());
        }
        match &self.local {
            Local::Read { .. } if self.note.is_some() => {
                refused("note", "of a read".to_owned(), "only a write has a note".to_owned())
            }
            Local::Read { from, .. } => self.remote.check(from),
            Local::Write { .. } | Local::WriteBuffers(_) => self.remote.check(&self.to),
        }
    }

    async fn transfer(&self, token: Token) -> Result<(), WorkerError> {
        let peer = &self.remote.peer;
        let (connection, _stay) = peer.staying_connection().await?;
        match &self.local {
            Local::Read { from, into } => self.read(&connection, (from, into), token).await,
            Local::Write { .. } | Local::WriteBuffers(_) => self.write(&connection, token).await,
        }
    }

    async fn read(
        &self,
        connection: &Arc<DataConnection>,
        (from, into): (&Pages, &Arena),
        token: Token,
    ) -> Result<(), WorkerError> {
        // All pages are taken first, so that a transfer begins with all or none.
        let mut pages = into.memory.take(self.to.numbers().iter().copied(), Some(token))?;
        let requests = self.requests(connection, Some(from))?;
        // From the end, because that moves no other pages in their list.
        let reads = requests.into_iter().rev().map(|moves| {
            let count = moves.as_slice().len();
            (moves, pages.split_last(count))
        });
        let reads: Vec<_> = reads.collect();
        let awaiting = if reads.len() == 1 { Awaiting::Alone } else { Awaiting::Beside };
        let read = |(moves, pages): (PageMoves, TakenPages)| async move {
            let key = self.key(&moves);
            connection.pull_pages((&Scope::Pages(None), &self.named(&key)), pages, awaiting).await
        };
        stream::iter(reads).map(read).buffer_unordered(REQUESTS).try_for_each(future::ok).await
    }

    async fn write(&self, connection: &Arc<DataConnection>, token: Token) -> Result<(), WorkerError> {
        // The peer requests the pages of each write by their places in it.
        let requests = self.requests(connection, None)?;
        let mut first = 0;
        let outgoing = requests.into_iter().map(|moves| {
            let of_request = first..first + moves.as_slice().len();
            first = of_request.end;
            Ok((moves, self.local.outgoing(of_request, token.clone())?))
        });
        let mut writes = outgoing.collect::<Result<Vec<_>, PageError>>()?;
        // The note follows all pages.
        let last = match writes.pop() {
            Some(last) => last,
            None => (PageMoves::default(), self.local.outgoing(0..0, token.clone())?),
        };
        drop(token);
        let write = |(moves, pages)| self.write_some(connection, moves, (pages, None));
        stream::iter(writes).map(write).buffer_unordered(REQUESTS).try_for_each(future::ok).await?;
        let (moves, pages) = last;
        self.write_some(connection, moves, (pages, self.note)).await
    }

    async fn write_some(
        &self,
        connection: &Arc<DataConnection>,
        moves: PageMoves,
        (pages, note): (Outgoing, Option<u64>),
    ) -> Result<(), WorkerError> {
        let peer = &self.remote.peer;
        let offered = peer.worker.node.values().arenas.writes.offer(peer.name(), pages);
        let key = self.key(&moves);
        connection.write_pages(&self.named(&key), PageWrite { number: offered.number, note }).await
    }

    /// The moves of each request: from these pages, or, without them, from the places of the pages in the request.
    fn requests(
        &self,
        connection: &DataConnection,
        from: Option<&Pages>,
    ) -> Result<Vec<PageMoves>, WorkerError> {
        // Behind the name, each move has two numbers and two signs.
        let room = NAME_BYTES_MAX - self.remote.name.len() - "{}".len();
        let from_numbers = from.map_or(&[][..], Pages::numbers);
        let largest = from_numbers.iter().chain(self.to.numbers()).max();
        let digits = largest.map_or(1, |page| page.checked_ilog10().unwrap_or(0) as usize + 1);
        let by_length = room / (2 * digits + 2);
        let most = connection.pages_per_request(self.remote.page_bytes()).min(by_length).max(1);
        let places = self.to.numbers().chunks(most).enumerate();
        let request = |(number, to): (usize, &[u32])| {
            let moves = to.iter().enumerate().map(|(place, &to)| {
                let page = from_numbers.get(number * most + place).copied();
                PageMove { from: page.unwrap_or(place as u32), to }
            });
            PageMoves::new(moves).map_err(|error| WorkerError::Config {
                field: "pages",
                value: to.len().to_string(),
                remedy: error.to_string(),
            })
        };
        places.map(request).collect()
    }

    fn key(&self, moves: &PageMoves) -> String {
        format!("{}{moves}", self.remote.name)
    }

    fn named<'a>(&'a self, key: &'a str) -> Named<'a> {
        Named { peer: self.remote.peer.name(), key, step: None }
    }
}
