//! The arenas that this worker has exposed, and its writes of pages that wait for peers to request them.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    pin::pin,
    sync::{Arc, MutexGuard, PoisonError},
};

use futures::FutureExt as _;
use tensorwire_memory::Buf;
use tensorwire_protocol::{Code, Status, pages::PageMove};
use tensorwire_testpoints::sync::Mutex;
use tokio::sync::{mpsc, watch};

use crate::{
    peer_memory::arena::{ArenaMemory, PageError, SharedPages, TakenPages, Token},
    values::pending::Pending,
};

/// How many notes of one arena wait for the program. A write whose note finds no room waits.
const NOTES_MAX: usize = 256;

/// A write of a peer, whose pages are there.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Written {
    /// The peer's name.
    pub peer: String,
    /// The note.
    pub note: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Arenas {
    exposed: Mutex<BTreeMap<Arc<str>, Arc<ExposedArena>>>,
    /// The pages of this worker's writes.
    pub(crate) writes: Pending<Outgoing>,
}

/// An arena that peers may read and write.
#[derive(Debug)]
pub(crate) struct ExposedArena {
    pub(crate) memory: Arc<ArenaMemory>,
    notes: mpsc::Sender<Written>,
    /// How many writes came with a note, for notes that are counted.
    counts: Mutex<BTreeMap<u64, watch::Sender<u64>>>,
    /// Every request of a peer that has pages has a clone.
    token: Token,
}

impl ExposedArena {
    /// Takes pages out for a peer's write. Waits for pages that other transfers have: a peer may be faster than the completion of its read, or
    /// than the acknowledgement of its cancelled write.
    ///
    /// # Errors
    /// As [`ArenaMemory::take`].
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub(crate) async fn take(&self, pages: &[PageMove]) -> Result<TakenPages, PageError> {
        loop {
            let mut freed = pin!(self.memory.freed.notified());
            freed.as_mut().enable();
            match self.memory.take(pages.iter().map(|page| page.to), Some(self.token())) {
                Err(PageError::Busy { page }) if self.memory.is_moved(page) => freed.await,
                // Freed since `take`.
                Err(PageError::Busy { .. }) if freed.as_mut().now_or_never().is_some() => {}
                taken => return taken,
            }
        }
    }

    pub(crate) fn token(&self) -> Token {
        self.token.clone()
    }

    /// Passes a note on to the program.
    ///
    /// # Cancel safety
    /// A note is passed on in the poll that returns, or not at all.
    ///
    /// # Errors
    /// CANCELLED: the arena is exposed no more.
    pub(crate) async fn deliver(&self, written: Written) -> Result<(), Status> {
        {
            let counts = self.counts();
            if let Some(count) = counts.get(&written.note) {
                count.send_modify(|count| *count += 1);
                return Ok(());
            }
        }
        let ended =
            |_| Status::new(Code::Cancelled, "the arena is exposed no more, so nobody reads the note");
        self.notes.send(written).await.map_err(ended)
    }

    /// Counts the writes with this note from now on. `None` if they are counted already.
    pub(crate) fn count(&self, note: u64) -> Option<watch::Receiver<u64>> {
        match self.counts().entry(note) {
            Entry::Occupied(_) => None,
            Entry::Vacant(vacant) => Some(vacant.insert(watch::Sender::new(0)).subscribe()),
        }
    }

    pub(crate) fn stop_counting(&self, note: u64) {
        let stopped = self.counts().remove(&note);
        drop(stopped);
    }

    fn counts(&self) -> MutexGuard<'_, BTreeMap<u64, watch::Sender<u64>>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The pages of a write.
#[derive(Debug)]
pub(crate) enum Outgoing {
    OfArena(SharedPages),
    Buffers { pages: Vec<Buf>, _token: Token },
}

impl Outgoing {
    /// Sends them from now on, until this is dropped.
    pub(crate) fn send(&mut self) -> Vec<Buf> {
        match self {
            Self::OfArena(pages) => pages.send(),
            Self::Buffers { pages, .. } => pages.clone(),
        }
    }
}

impl Arenas {
    /// Exposes `memory`. Returns where its notes arrive, or `None` if the name is in use.
    pub(crate) fn expose(
        &self,
        name: Arc<str>,
        memory: Arc<ArenaMemory>,
        token: Token,
    ) -> Option<(Arc<ExposedArena>, mpsc::Receiver<Written>)> {
        let (notes, receiver) = mpsc::channel(NOTES_MAX);
        let exposed = Arc::new(ExposedArena { memory, notes, counts: Mutex::default(), token });
        match self.exposed().entry(name) {
            Entry::Occupied(_) => None,
            Entry::Vacant(vacant) => Some((vacant.insert(exposed).clone(), receiver)),
        }
    }

    pub(crate) fn hide(&self, name: &str) {
        let hidden = self.exposed().remove(name);
        drop(hidden);
    }

    /// The arena that is exposed under `name`.
    ///
    /// # Errors
    /// NOT_FOUND.
    pub(crate) fn find(&self, name: &str) -> Result<Arc<ExposedArena>, Status> {
        let found = self.exposed().get(name).cloned();
        found.ok_or_else(|| Status::new(Code::NotFound, format!("no arena is exposed under `{name}`")))
    }

    fn exposed(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Arc<ExposedArena>>> {
        self.exposed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
