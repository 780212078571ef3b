//! Memory in pages of one size. Each page has one owner at a time: the arena, readers that share it, or one writer.

use std::{
    fmt, mem,
    sync::{
        Arc, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use tensorwire_memory::{Block, Buf, BufMut, GrantEnd, Granted};
use tensorwire_protocol::{Code, Status};
use tensorwire_testpoints::sync::Mutex;
use tokio::sync::{Notify, mpsc};

/// Why a page cannot be used now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PageError {
    /// The arena has fewer pages.
    #[error("the arena has no page {page}: it has {count}, from number 0 on")]
    Outside {
        /// The page.
        page: u32,
        /// How many pages the arena has.
        count: u32,
    },
    /// The page is being written, or is to be written and is being read; or it is twice in a list of pages to be written.
    #[error("page {page} is in use: drop its views, or wait for the transfer that has it")]
    Busy {
        /// The page.
        page: u32,
    },
}

impl From<PageError> for Status {
    fn from(error: PageError) -> Self {
        let code = match error {
            PageError::Outside { .. } => Code::InvalidArgument,
            PageError::Busy { .. } => Code::Unavailable,
        };
        Self::new(code, error.to_string())
    }
}

/// Part of something that ends when all of its tokens are dropped.
pub(crate) type Token = mpsc::Sender<()>;

/// The memory of an arena.
pub(crate) struct ArenaMemory {
    pub(crate) block: Block,
    /// First byte inside the block.
    pub(crate) offset: u64,
    pub(crate) page_bytes: usize,
    /// The pages. `None` while one is written.
    pages: Mutex<Vec<Option<Buf>>>,
    /// How many answers to peers are being sent from it.
    sending: AtomicUsize,
    /// Notified when one of them is sent.
    pub(crate) sent: Notify,
}

impl fmt::Debug for ArenaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArenaMemory")
            .field("pages", &self.count())
            .field("page_bytes", &self.page_bytes)
            .finish()
    }
}

impl ArenaMemory {
    /// `memory` in pages, which together are all of it. `None` if that is nothing.
    pub(crate) fn new(memory: BufMut, page_bytes: usize) -> Option<Self> {
        let block = memory.block()?.clone();
        let cuts: Vec<_> = (page_bytes..memory.len()).step_by(page_bytes).collect();
        let (_, pages) = memory.divide(&cuts)?;
        let pages: Vec<_> = pages.into_iter().map(|page| Some(page.freeze())).collect();
        let offset = pages.first()?.as_ref()?.offset() as u64;
        let pages = Mutex::new(pages);
        Some(Self { block, offset, page_bytes, pages, sending: AtomicUsize::new(0), sent: Notify::new() })
    }

    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.lock().len()).unwrap_or(u32::MAX)
    }

    /// Bytes of all pages.
    pub(crate) fn length(&self) -> u64 {
        u64::from(self.count()) * self.page_bytes as u64
    }

    /// Views of these pages, all or none.
    ///
    /// # Errors
    /// [`PageError`].
    pub(crate) fn views(&self, pages: impl IntoIterator<Item = u32>) -> Result<Vec<Buf>, PageError> {
        let known = self.lock();
        let count = u32::try_from(known.len()).unwrap_or(u32::MAX);
        let view = |page: u32| {
            let known = known.get(page as usize).ok_or(PageError::Outside { page, count })?;
            known.clone().ok_or(PageError::Busy { page })
        };
        pages.into_iter().map(view).collect()
    }

    /// Whether pages of it are being sent.
    pub(crate) fn is_sending(&self) -> bool {
        self.sending.load(Ordering::Acquire) > 0
    }

    /// Notes that pages of it are being sent, until the returned value is dropped. That is done after the last view of them.
    pub(crate) fn send(self: &Arc<Self>) -> Sending {
        self.sending.fetch_add(1, Ordering::AcqRel);
        Sending(self.clone())
    }

    /// Takes these pages out, to be written, all or none.
    ///
    /// # Errors
    /// [`PageError`].
    pub(crate) fn take(
        self: &Arc<Self>,
        pages: impl IntoIterator<Item = u32>,
        token: Option<Token>,
    ) -> Result<TakenPages, PageError> {
        let mut taken = TakenPages { arena: self.clone(), pages: Vec::new(), token };
        let failed = {
            let mut known = self.lock();
            pages.into_iter().find_map(|page| match take_one(&mut known, page) {
                Ok(buffer) => {
                    taken.pages.push((page, buffer));
                    None
                }
                Err(error) => Some(error),
            })
        };
        // Without the lock, because `taken` gives pages back.
        failed.map_or(Ok(taken), Err)
    }

    fn put_back(&self, page: u32, buffer: BufMut) {
        let mut known = self.lock();
        if let Some(known) = known.get_mut(page as usize) {
            *known = Some(buffer.freeze());
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<Buf>>> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn take_one(known: &mut [Option<Buf>], page: u32) -> Result<BufMut, PageError> {
    let count = u32::try_from(known.len()).unwrap_or(u32::MAX);
    let known = known.get_mut(page as usize).ok_or(PageError::Outside { page, count })?;
    let buffer = known.take().ok_or(PageError::Busy { page })?;
    buffer.try_into_mut().map_err(|buffer| {
        *known = Some(buffer);
        PageError::Busy { page }
    })
}

/// Pages are being sent from an arena.
#[derive(Debug)]
pub(crate) struct Sending(Arc<ArenaMemory>);

impl Drop for Sending {
    fn drop(&mut self) {
        self.0.sending.fetch_sub(1, Ordering::AcqRel);
        self.0.sent.notify_waiters();
    }
}

/// Pages that this side writes. Dropping this gives them back to their arena.
#[derive(Debug)]
pub(crate) struct TakenPages {
    arena: Arc<ArenaMemory>,
    pages: Vec<(u32, BufMut)>,
    token: Option<Token>,
}

impl TakenPages {
    pub(crate) fn arena(&self) -> &Arc<ArenaMemory> {
        &self.arena
    }

    /// Bytes of these pages.
    pub(crate) fn length(&self) -> u64 {
        self.pages.len() as u64 * self.arena.page_bytes as u64
    }

    /// The first page.
    pub(crate) fn first(&self) -> &[u8] {
        self.pages.first().map_or(&[], |(_, buffer)| buffer)
    }

    /// As [`first`](Self::first), for writing.
    pub(crate) fn first_mut(&mut self) -> &mut [u8] {
        self.pages.first_mut().map_or(&mut [], |(_, buffer)| buffer)
    }

    /// The first pages, up to this many.
    pub(crate) fn split_first(&mut self, count: usize) -> Self {
        let rest = self.pages.split_off(count.min(self.pages.len()));
        let pages = mem::replace(&mut self.pages, rest);
        Self { arena: self.arena.clone(), pages, token: self.token.clone() }
    }

    /// Lets a peer write them.
    pub(crate) fn grant(mut self) -> GrantedPages {
        let pages = mem::take(&mut self.pages).into_iter().map(|(page, buffer)| (page, buffer.grant()));
        GrantedPages { pages: pages.collect(), taken: self }
    }
}

impl Drop for TakenPages {
    fn drop(&mut self) {
        for (page, buffer) in self.pages.drain(..) {
            self.arena.put_back(page, buffer);
        }
    }
}

/// Pages that a peer may write. Pages whose grant was not [ended](Self::end) are lost to their arena: a peer could still write them.
#[derive(Debug)]
pub(crate) struct GrantedPages {
    pages: Vec<(u32, Granted)>,
    /// Without pages.
    taken: TakenPages,
}

impl GrantedPages {
    /// Takes the pages back. `why` is the evidence that the peer can no longer write them.
    pub(crate) fn end(self, why: GrantEnd) -> TakenPages {
        let Self { pages, mut taken } = self;
        for (page, granted) in pages {
            match granted.end(why) {
                Ok(buffer) => taken.pages.push((page, buffer)),
                Err(error) => log!(WARN, page, %error, "a page of an arena could not be reclaimed"),
            }
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use tensorwire_memory::{Pool, PoolConfig};

    use super::*;

    fn arena() -> Arc<ArenaMemory> {
        let memory = Pool::new(PoolConfig::new("test")).unwrap().try_alloc(4 * 64).unwrap();
        Arc::new(ArenaMemory::new(memory, 64).unwrap())
    }

    #[test]
    fn a_page_has_readers_or_one_writer() {
        let arena = arena();
        let views = arena.views([0, 1]).unwrap();
        assert_eq!(arena.take([2, 1], None).unwrap_err(), PageError::Busy { page: 1 });
        // Page 2 was given back.
        let mut taken = arena.take([3, 2], None).unwrap();
        assert_eq!(arena.views([0, 2]).unwrap_err(), PageError::Busy { page: 2 });
        assert_eq!(arena.take([0, 0], None).unwrap_err(), PageError::Busy { page: 0 });
        drop(views);
        taken.pages.iter_mut().for_each(|(_, page)| page.fill(7));
        let first = taken.split_first(1);
        drop(taken);
        assert_eq!(arena.views([3]).unwrap_err(), PageError::Busy { page: 3 });
        drop(first);
        assert!(arena.views([2, 3]).unwrap().iter().all(|page| page[..] == [7; 64]));
        assert_eq!(arena.take([1, 4], None).unwrap_err(), PageError::Outside { page: 4, count: 4 });
        assert_eq!(arena.views([4]).unwrap_err(), PageError::Outside { page: 4, count: 4 });
        assert!(arena.take(0..4, None).is_ok());
    }

    #[test]
    fn granted_pages_return_with_evidence_only() {
        let arena = arena();
        let granted = arena.take([0, 1], None).unwrap().grant();
        drop(granted.end(GrantEnd::Content));
        drop(arena.take([0, 1], None).unwrap().grant());
        assert_eq!(arena.views([1]).unwrap_err(), PageError::Busy { page: 1 });
    }
}
