//! Pages: memory of fixed size that peers read and write by number, such as the blocks of a key-value cache.
//!
//! An [`Arena`] is memory in pages of one size. [`Worker::expose`](crate::Worker::expose) lets peers read and write it under a name;
//! [`Peer::arena`](crate::Peer::arena) finds a peer's. A transfer moves any pages of one arena to any pages of another, without a copy:
//! the worker that has the pages writes them into the other's memory, by one-sided writes.
//!
//! Each page has readers or one writer. A page that is being written cannot be read, here or by a peer, and the reverse: such a use fails at
//! once, with the number of the page. So no reader sees parts of two contents, and a peer can write a page only while a transfer is under
//! way that names it. There is one exception: a page that was being written when its transfer failed or was given up may have parts of
//! both contents, until it is written again.
//!
//! ```
//! use tensorwire::{Worker, pages::Pages};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), tensorwire::WorkerError> {
//! let prefill = Worker::builder("prefill").start().await?;
//! let decode = Worker::builder("decode").start().await?;
//!
//! // 64 pages of 4 KiB, which peers may write.
//! let cache = decode.arena(64, 4096).await?;
//! let mut exposed = decode.expose("kv", &cache)?;
//!
//! let blocks = prefill.arena(16, 4096).await?;
//! blocks.page_mut(3)?.fill(7);
//! let remote = prefill.peer_at(decode.address()).await?.arena("kv").await?;
//! // Page 3 goes to page 40, and page 9 to page 2. The note arrives behind them.
//! let write = remote.write(&blocks, &Pages::from([3, 9]), &Pages::from([40, 2])).note(17);
//! let (written, note) = tokio::join!(write, exposed.next());
//! written?;
//! assert_eq!(note.note, 17);
//! assert_eq!(cache.page(40)?[..], [7; 4096]);
//! # Ok(())
//! # }
//! ```

mod exposed;
mod list;
mod remote;
mod transfer;

use std::{
    fmt,
    ops::{Deref, DerefMut},
    sync::Arc,
};

use tensorwire_memory::{Buf, BufMut, GivenMemory};

pub use self::{
    exposed::{Count, Exposed},
    list::Pages,
    remote::RemoteArena,
    transfer::Transfer,
};
use crate::{
    error::WorkerError,
    peer_memory::{
        arena::{ArenaMemory, TakenPages},
        import::{PIECE_BYTES, yield_once},
    },
    worker::Worker,
};
pub use crate::{peer_memory::arena::PageError, values::arenas::Written};

/// Most pages of an arena.
const PAGES_MAX: u32 = 1 << 24;

/// Memory in pages of one size, which are numbered from 0 on. Made by [`Worker::arena`] and [`Worker::arena_of`]. Cheap to clone; all
/// clones are the same memory, which returns to its pool or owner with the last of them and the last view of a page.
#[derive(Clone)]
pub struct Arena {
    pub(crate) memory: Arc<ArenaMemory>,
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("pages", &self.count()).field("page_bytes", &self.page_bytes()).finish()
    }
}

impl Worker {
    /// An arena of `count` pages of `page_bytes` bytes, all 0. Waits for memory of the [receive pool](Self::receive_pool), whose
    /// [size](crate::Memory::receive_bytes) must have room for it.
    ///
    /// # Errors
    /// [`WorkerError::Config`] for no pages, more than 2²⁴ of them, or pages of no bytes; [`WorkerError::Memory`] if the pool is too small.
    ///
    /// # Cancel safety
    /// Cancel-safe: the memory returns to the pool.
    pub async fn arena(&self, count: u32, page_bytes: usize) -> Result<Arena, WorkerError> {
        check_count(count as usize)?;
        let bytes = page_bytes.checked_mul(count as usize).filter(|bytes| *bytes > 0);
        let bytes = bytes.ok_or_else(|| no_page(page_bytes))?;
        let mut memory = self.receive_pool().alloc(bytes).await?;
        // It may have been another buffer's, and peers will see it.
        for piece in (0..bytes).step_by(PIECE_BYTES) {
            memory.get_mut(piece..bytes.min(piece + PIECE_BYTES)).unwrap_or_default().fill(0);
            yield_once().await;
        }
        Arena::of(memory, page_bytes)
    }

    /// An arena of the program's own memory, such as a cache that it allocated itself: as many pages of `page_bytes` bytes as `memory` has,
    /// with the bytes that are there. The arena has the memory until the last clone of it and the last view of a page are dropped; then
    /// `memory` is dropped, whose [`Drop`] may give it back to the program. Peers write it in place over every fabric, and read it in place
    /// over tcp and verbs; over shared memory a page that is sent is copied once.
    ///
    /// This blocks while devices register the memory, which takes long with verbs: call it before there is traffic, or in
    /// `spawn_blocking`. A connection uses at most 65,536 arenas in its life: make one for long use, instead of one for each transfer.
    ///
    /// # Errors
    /// [`WorkerError::Config`] if `memory` is not 1 to 2²⁴ whole pages; [`WorkerError::Memory`] if some of it was [joined or
    /// given](Self::user_memory) already, or a device cannot register it. `memory` is dropped then.
    pub fn arena_of(
        &self,
        memory: impl GivenMemory + 'static,
        page_bytes: usize,
    ) -> Result<Arena, WorkerError> {
        if page_bytes == 0 {
            return Err(no_page(page_bytes));
        }
        let memory = self.user_memory().give(memory)?;
        let bytes = memory.len();
        if bytes % page_bytes != 0 {
            let remedy = format!("the memory has {bytes} bytes: give it whole pages");
            return Err(WorkerError::Config { field: "page_bytes", value: page_bytes.to_string(), remedy });
        }
        check_count(bytes / page_bytes)?;
        Arena::of(memory, page_bytes)
    }
}

fn check_count(count: usize) -> Result<(), WorkerError> {
    if (1..=PAGES_MAX as usize).contains(&count) {
        return Ok(());
    }
    let remedy = "an arena has 1 to 16,777,216 pages".to_owned();
    Err(WorkerError::Config { field: "count", value: count.to_string(), remedy })
}

fn no_page(page_bytes: usize) -> WorkerError {
    let remedy = "give the bytes of a page, such as 65,536".to_owned();
    WorkerError::Config { field: "page_bytes", value: page_bytes.to_string(), remedy }
}

impl Arena {
    fn of(memory: BufMut, page_bytes: usize) -> Result<Self, WorkerError> {
        let memory = ArenaMemory::new(memory, page_bytes).ok_or_else(|| no_page(page_bytes))?;
        Ok(Self { memory: Arc::new(memory) })
    }

    /// How many pages it has.
    pub fn count(&self) -> u32 {
        self.memory.count()
    }

    /// Bytes of each page.
    pub fn page_bytes(&self) -> usize {
        self.memory.page_bytes
    }

    /// A view of a page. While it exists, the page cannot be written.
    ///
    /// # Errors
    /// [`PageError`]: there is no such page, or it is being written.
    pub fn page(&self, page: u32) -> Result<Buf, PageError> {
        self.memory.view(page)
    }

    /// A page for writing. Until that is dropped, nobody else can use the page.
    ///
    /// # Errors
    /// [`PageError`]: there is no such page, or it is in use.
    pub fn page_mut(&self, page: u32) -> Result<PageMut, PageError> {
        let taken = self.memory.take([page], None)?;
        Ok(PageMut { taken })
    }
}

/// A page that this program writes. Dropping it gives the page back to its arena.
#[derive(Debug)]
pub struct PageMut {
    taken: TakenPages,
}

impl Deref for PageMut {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.taken.first()
    }
}

impl DerefMut for PageMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.taken.first_mut()
    }
}

impl From<PageError> for WorkerError {
    fn from(error: PageError) -> Self {
        let (PageError::Outside { page, .. } | PageError::Busy { page }) = error;
        Self::Config { field: "page", value: page.to_string(), remedy: error.to_string() }
    }
}
