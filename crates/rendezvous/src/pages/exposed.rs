//! Arenas that peers may read and write.

use std::{
    fmt,
    future::pending,
    sync::{Arc, Weak},
};

use tokio::sync::{mpsc, watch};

use super::{Arena, Written};
use crate::{
    error::WorkerError,
    peer_memory::arena::Ended,
    values::{SharedValues, arenas::ExposedArena, published::check_published},
    worker::Worker,
};

/// Longest name of an exposed arena, in bytes: requests have the pages behind it.
const NAME_BYTES_MAX: usize = 256;

impl Worker {
    /// Lets peers read and write the pages of `arena`, which they find under `name`, until the returned value is dropped or
    /// [ended](Exposed::end). Names of arenas are a name space of their own.
    ///
    /// # Errors
    /// [`WorkerError::Config`] for a name that is empty, longer than 256 bytes, or in use.
    pub fn expose(&self, name: &str, arena: &Arena) -> Result<Exposed, WorkerError> {
        self.check_runs()?;
        check_published(name)?;
        let refused = |remedy: &str| WorkerError::Config {
            field: "name of an arena",
            value: name.to_owned(),
            remedy: remedy.to_owned(),
        };
        if name.len() > NAME_BYTES_MAX {
            return Err(refused("a name of an arena has at most 256 bytes"));
        }
        let (ended, token) = watch::channel(());
        let (values, name) = (self.node.values().clone(), Arc::from(name));
        let exposed = values.arenas.expose(Arc::clone(&name), arena.memory.clone(), token);
        let (arena, notes) =
            exposed.ok_or_else(|| refused("another arena is exposed under it: choose another name"))?;
        Ok(Exposed { values, name, arena: Some(arena), notes, ended })
    }
}

/// An arena that peers may read and write, made by [`Worker::expose`]. Dropping it, or its [end](Self::end), refuses further transfers; those
/// under way go on.
#[must_use = "peers find the arena only while this exists"]
pub struct Exposed {
    values: SharedValues,
    name: Arc<str>,
    /// `None` once it is ended.
    arena: Option<Arc<ExposedArena>>,
    notes: mpsc::Receiver<Written>,
    /// Ends when no request has pages any more.
    ended: Ended,
}

impl fmt::Debug for Exposed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exposed").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Exposed {
    /// The next note of a peer's write, whose pages are there. Up to 256 notes wait to be taken; a write whose note finds no room waits.
    ///
    /// # Cancel safety
    /// Cancel-safe: a note is taken by the poll that returns it.
    pub async fn next(&mut self) -> Written {
        match self.notes.recv().await {
            Some(written) => written,
            // Not reached: the sender lives as long as the exposure.
            None => pending().await,
        }
    }

    /// Counts the writes that come with `note` from now on, instead of returning each from [`next`](Self::next). For pages that come in many
    /// writes, in any order. A note that waits for room already is not counted.
    ///
    /// # Errors
    /// [`WorkerError::Config`] if they are counted already.
    pub fn count(&self, note: u64) -> Result<Count, WorkerError> {
        let counted = self.arena.as_ref().and_then(|arena| Some((Arc::downgrade(arena), arena.count(note)?)));
        let (arena, count) = counted.ok_or_else(|| WorkerError::Config {
            field: "note",
            value: note.to_string(),
            remedy: "writes with this note are counted already: use that count, or another note".to_owned(),
        })?;
        Ok(Count { arena, note, count })
    }

    /// Ends the exposure, and waits until no peer has a page of it any more. From then on nothing of the arena moves. This takes no longer
    /// than the transfers under way, and a lost peer's end with its connection. Notes that were not taken are dropped.
    ///
    /// # Cancel safety
    /// Further transfers are refused from the first poll on. If the future is dropped, those under way go on.
    pub async fn end(mut self) {
        self.hide();
        // Notes that wait for room are refused.
        self.notes.close();
        self.ended.closed().await;
    }

    fn hide(&mut self) {
        if let Some(arena) = self.arena.take() {
            self.values.arenas.hide(&self.name);
            drop(arena);
        }
    }
}

impl Drop for Exposed {
    fn drop(&mut self) {
        self.hide();
    }
}

/// How many writes came with a note, made by [`Exposed::count`]. Dropping it ends the count.
#[derive(Debug)]
pub struct Count {
    /// The exposure may end before the count.
    arena: Weak<ExposedArena>,
    note: u64,
    count: watch::Receiver<u64>,
}

impl Count {
    /// How many have come.
    pub fn now(&self) -> u64 {
        *self.count.borrow()
    }

    /// Waits until at least so many have come. False if the exposure ended before.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub async fn reach(&mut self, writes: u64) -> bool {
        self.count.wait_for(|count| *count >= writes).await.is_ok()
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        if let Some(arena) = self.arena.upgrade() {
            arena.stop_counting(self.note);
        }
    }
}
