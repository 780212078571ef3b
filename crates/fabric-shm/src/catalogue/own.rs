//! The catalogue that this side writes.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use futures::task::AtomicWaker;
use tensorwire_fabric::{CELL_CONTENT_BYTES, Catalogue, CellContent, CellNumber};
use tensorwire_memory::{
    Block, Buf, Retired,
    copy::{CopyReason, copy_bytes},
};
use tensorwire_testpoints::sync::Mutex;

use super::{
    BLOCK_AT, CATALOGUE_BYTES, CELLS, CONTENT_AT, Cells, EMPTY, HASH_AT, LENGTH_AT, MAGIC, MAGIC_AT, NAME_AT,
    NAME_LENGTH_AT, OFFSET_AT, SEQUENCE_AT, VIEWED_BYTES_AT, VIEWS_AT, WORD_BYTES, WORDS_AT, claim_of,
    name::Name,
};
use crate::{
    lease::{Claimed, LeaseCaps, PeerProcess},
    ring::PeerPage,
    sequence,
    sys::{self, Mapping},
};

/// One per domain. All peers of the domain read it.
#[derive(Debug)]
pub(crate) struct OwnCatalogue {
    pub(super) cells: Cells,
    fd: OwnedFd,
    /// Locked while a cell is written, so that each word has one writer at a time.
    state: Mutex<State>,
    /// Number of retired contents. Read without the lock.
    retired: AtomicUsize,
}

#[derive(Debug, Default)]
struct State {
    /// The memory of the contents, by cell.
    named: BTreeMap<u32, Buf>,
    /// The peers that may claim contents.
    readers: Vec<Arc<Reader>>,
    /// Contents that were replaced while a reader claimed them, each with the claim.
    retired: Vec<(u64, Retired)>,
}

impl State {
    /// All claims, sorted. [`sequence::replace`] searches them for the replaced content.
    fn claims(&self) -> Vec<u64> {
        let mut claims: Vec<_> = self.readers.iter().flat_map(|reader| reader.page.claims()).collect();
        claims.sort_unstable();
        claims
    }

    /// Takes out the retired contents that are not among `claims`.
    fn take_unclaimed(&mut self, claims: &[u64]) -> Vec<Buf> {
        let unclaimed = self.retired.extract_if(.., |(claim, _)| claims.binary_search(claim).is_err());
        unclaimed.filter_map(|(_, retired)| retired.end()).collect()
    }
}

/// The peer of a connection, which may view contents. It stays a reader until the connection is dropped.
#[derive(Debug)]
pub(crate) struct Reader {
    page: Arc<PeerPage>,
    process: Arc<PeerProcess>,
    /// The connection's driver, which watches for the end of claims.
    driver: Arc<AtomicWaker>,
}

#[cfg(test)]
impl Reader {
    pub(super) fn page(&self) -> &Arc<PeerPage> {
        &self.page
    }

    pub(super) fn process(&self) -> &Arc<PeerProcess> {
        &self.process
    }
}

impl OwnCatalogue {
    /// Makes, maps and seals an empty catalogue; `caps` limit the views of a process.
    pub(crate) fn new(caps: LeaseCaps) -> io::Result<Self> {
        let fd = sys::memfd(c"tensorwire-catalogue")?;
        // Most pages are never used, so they are not mapped here: mapping them would take longer than making them.
        sys::fill(fd.as_fd(), CATALOGUE_BYTES)?;
        let mapping = Mapping::new(fd.as_fd(), CATALOGUE_BYTES, true)?;
        sys::seal(fd.as_fd())?;
        let cells = Cells { mapping };
        cells.header(VIEWS_AT).store(caps.leases.into(), Ordering::Relaxed);
        cells.header(VIEWED_BYTES_AT).store(caps.bytes, Ordering::Relaxed);
        cells.header(MAGIC_AT).store(MAGIC, Ordering::Release);
        Ok(Self { cells, fd, state: Mutex::default(), retired: AtomicUsize::new(0) })
    }

    /// Honours the claims of the peer that writes `page`, from now until it [leaves](Self::leave). `driver` is woken when
    /// a content is retired for it.
    pub(crate) fn join(
        &self,
        page: Arc<PeerPage>,
        process: Arc<PeerProcess>,
        driver: Arc<AtomicWaker>,
    ) -> Arc<Reader> {
        let reader = Arc::new(Reader { page, process, driver });
        self.lock().readers.push(reader.clone());
        reader
    }

    /// Removes a reader that has no views and makes no claims any more: its process is dead, or the connection is over
    /// and [`is_viewed_by`](Self::is_viewed_by) was false. Returns memory to be dropped without a lock.
    pub(crate) fn leave(&self, reader: &Arc<Reader>) -> Vec<Buf> {
        self.lock().readers.retain(|other| !Arc::ptr_eq(other, reader));
        self.reclaim()
    }

    /// Whether contents are retired, so that the end of a claim may free memory.
    pub(crate) fn has_retired(&self) -> bool {
        self.retired.load(Ordering::Acquire) > 0
    }

    /// Returns memory that no reader views any more, to be dropped without a lock.
    pub(crate) fn reclaim(&self) -> Vec<Buf> {
        let mut state = self.lock();
        if state.retired.is_empty() {
            return Vec::new();
        }
        let claims = state.claims();
        let freed = state.take_unclaimed(&claims);
        self.retired.store(state.retired.len(), Ordering::Release);
        freed
    }

    /// Whether the reader views a content: one that a cell contains now, or a retired one. Claims of other contents
    /// were made too late, and will be withdrawn.
    pub(crate) fn is_viewed_by(&self, reader: &Reader) -> bool {
        let state = self.lock();
        reader.page.claims().any(|claim| self.viewed(&state, claim).is_some())
    }

    /// The contents that the process views, through all its connections.
    pub(crate) fn claimed_by(&self, process: &Arc<PeerProcess>) -> Claimed {
        let state = self.lock();
        let readers = state.readers.iter().filter(|reader| Arc::ptr_eq(&reader.process, process));
        let viewed = readers.flat_map(|reader| reader.page.claims());
        let viewed = viewed.filter_map(|claim| self.viewed(&state, claim));
        viewed.fold(Claimed::default(), |claimed, bytes| Claimed {
            contents: claimed.contents + 1,
            bytes: claimed.bytes.saturating_add(bytes),
        })
    }

    /// The length of a claimed content; `None` if neither a cell nor a retired content matches the claim.
    fn viewed(&self, state: &State, claim: u64) -> Option<u64> {
        let cell = (claim % CELLS as u64) as u32;
        let now = state.named.get(&cell).filter(|_| self.claim_now(cell) == claim);
        let retired = || state.retired.iter().find(|(retired, _)| *retired == claim);
        now.or_else(|| retired()?.1.buf()).map(|bytes| bytes.len() as u64)
    }

    /// The claim on the present content of the cell.
    fn claim_now(&self, cell: u32) -> u64 {
        claim_of(cell, self.cells.word(cell as usize, SEQUENCE_AT).load(Ordering::Relaxed))
    }

    /// Releases a content that was replaced, or retires it if a reader views it. `claims` are those after the
    /// replacement.
    fn retire(&self, state: &mut State, claims: &[u64], claim: u64, before: Option<Buf>) -> Replaced {
        let mut freed = state.take_unclaimed(claims);
        let mut viewers = Vec::new();
        match before {
            Some(before) if before.len() > CELL_CONTENT_BYTES && claims.binary_search(&claim).is_ok() => {
                state.retired.push((claim, before.retire()));
                viewers.clone_from(&state.readers);
            }
            other => freed.extend(other),
        }
        self.retired.store(state.retired.len(), Ordering::Release);
        Replaced { freed, viewers }
    }

    /// The memfd, which peers map.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Assigns a free cell to `name`.
    fn assign(&self, cell: usize, name: Name<'_>) {
        let store = |at, value| self.cells.word(cell, at).store(value, Ordering::Relaxed);
        store(LENGTH_AT, EMPTY);
        store(NAME_LENGTH_AT, name.length());
        for (index, word) in name.words().enumerate() {
            store(NAME_AT + index * WORD_BYTES, word);
        }
        // Last: a reader that finds the hash finds the name.
        self.cells.word(cell, HASH_AT).store(name.hash(), Ordering::Release);
    }

    fn store(&self, cell: usize, content: &CellContent) {
        let store = |at, value| self.cells.word(cell, at).store(value, Ordering::Relaxed);
        let CellContent { words, bytes } = content;
        store(LENGTH_AT, bytes.len() as u64);
        for (index, &word) in words.iter().enumerate() {
            store(WORDS_AT + index * WORD_BYTES, word);
        }
        if bytes.len() > CELL_CONTENT_BYTES {
            store(BLOCK_AT, bytes.block().map_or(0, |block| block.id().get()));
            store(OFFSET_AT, bytes.offset() as u64);
            return;
        }
        let mut staged = [0; CELL_CONTENT_BYTES];
        copy_bytes(&mut staged, bytes, CopyReason::ShmInline);
        for (index, part) in staged.as_chunks().0.iter().enumerate() {
            store(CONTENT_AT + index * WORD_BYTES, u64::from_le_bytes(*part));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is left to do, without a lock, for a content that was replaced.
struct Replaced {
    freed: Vec<Buf>,
    /// Readers one of which views it.
    viewers: Vec<Arc<Reader>>,
}

/// Whether neighbours can read the content.
fn is_readable(content: &CellContent) -> bool {
    content.bytes.len() <= CELL_CONTENT_BYTES || content.bytes.block().is_some_and(Block::shareable)
}

impl Catalogue for OwnCatalogue {
    fn cell(&self, name: &str) -> Option<CellNumber> {
        let name = Name::new(name)?;
        let _one_writer = self.lock();
        let cell = match self.cells.look_up(name) {
            Ok(cell) => cell,
            Err(free) => {
                let cell = free?;
                self.assign(cell, name);
                cell
            }
        };
        Some(CellNumber(cell as u32))
    }

    fn nameless_cell(&self, number: u32) -> Option<CellNumber> {
        Some(CellNumber(Cells::nameless(number)? as u32))
    }

    fn write(&self, cell: CellNumber, content: Option<CellContent>) -> Vec<Buf> {
        let content = content.filter(is_readable);
        let mut state = self.lock();
        let (number, at) = (cell.0, cell.0 as usize);
        let claim = self.claim_now(number);
        let store = || match &content {
            Some(content) => self.store(at, content),
            None => self.cells.word(at, LENGTH_AT).store(EMPTY, Ordering::Relaxed),
        };
        let claims = sequence::replace(self.cells.word(at, SEQUENCE_AT), store, || state.claims());
        let before = match content {
            Some(content) => state.named.insert(number, content.bytes),
            None => state.named.remove(&number),
        };
        let Replaced { freed, viewers } = self.retire(&mut state, &claims, claim, before);
        drop(state);
        // Each driver checks whether its peer has ended the claim, and asks for a ring at its end before it sleeps.
        viewers.iter().for_each(|reader| reader.driver.wake());
        freed
    }
}
