//! Memory in pages of one size. Each page has one owner at a time: the arena, readers that share it, or one writer.

use std::{
    fmt, mem,
    sync::{Arc, MutexGuard, PoisonError},
};

use tensorwire_memory::{Block, Buf, BufMut, GrantEnd, Granted};
use tensorwire_protocol::{Code, Status};
use tensorwire_testpoints::sync::Mutex;
use tokio::sync::{Notify, watch};

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

/// Part of an operation, which has ended when all of its tokens are dropped. `watch::channel` makes the first one.
pub(crate) type Token = watch::Receiver<()>;

/// Tells by [`closed`](watch::Sender::closed) when an operation has ended.
pub(crate) type Ended = watch::Sender<()>;

/// The memory of an arena.
pub(crate) struct ArenaMemory {
    pub(crate) block: Block,
    /// First byte inside the block.
    pub(crate) offset: u64,
    pub(crate) page_bytes: usize,
    pages: Mutex<Vec<Page>>,
    /// Notified when a transfer has ended that had pages of it.
    pub(crate) freed: Notify,
}

#[derive(Debug)]
struct Page {
    /// `None` while it is written.
    buffer: Option<Buf>,
    /// How many transfers are writing or sending it. Those end without the program's doing.
    transfers: u32,
}

impl fmt::Debug for ArenaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArenaMemory")
            .field("pages", &self.count())
            .field("page_bytes", &self.page_bytes)
            .finish_non_exhaustive()
    }
}

impl ArenaMemory {
    /// `memory` in pages, which together are all of it. `None` if that is nothing.
    pub(crate) fn new(memory: BufMut, page_bytes: usize) -> Option<Self> {
        let block = memory.block()?.clone();
        let cuts: Vec<_> = (page_bytes..memory.len()).step_by(page_bytes).collect();
        let (_, pages) = memory.divide(&cuts)?;
        let page = |page: BufMut| Page { buffer: Some(page.freeze()), transfers: 0 };
        let pages: Vec<_> = pages.into_iter().map(page).collect();
        let offset = pages.first()?.buffer.as_ref()?.offset() as u64;
        Some(Self { block, offset, page_bytes, pages: Mutex::new(pages), freed: Notify::new() })
    }

    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.lock().len()).unwrap_or(u32::MAX)
    }

    /// Bytes of all pages.
    pub(crate) fn length(&self) -> u64 {
        u64::from(self.count()) * self.page_bytes as u64
    }

    /// A view of a page.
    ///
    /// # Errors
    /// [`PageError`].
    pub(crate) fn view(&self, page: u32) -> Result<Buf, PageError> {
        view_of(&mut self.lock(), page)
    }

    /// Views of these pages, which are to be [sent](SharedPages::send), all or none.
    ///
    /// # Errors
    /// [`PageError`].
    pub(crate) fn share(
        self: &Arc<Self>,
        pages: impl IntoIterator<Item = u32>,
        token: Token,
    ) -> Result<SharedPages, PageError> {
        let mut known = self.lock();
        let views = pages.into_iter().map(|page| Ok((page, view_of(&mut known, page)?)));
        let pages: Vec<_> = views.collect::<Result<_, PageError>>()?;
        drop(known);
        Ok(SharedPages { arena: self.clone(), pages, are_sent: false, _token: token })
    }

    /// Whether transfers are writing or sending this page.
    pub(crate) fn is_moved(&self, page: u32) -> bool {
        find(&mut self.lock(), page).is_ok_and(|page| page.transfers > 0)
    }

    /// Takes these pages out, to be written, all or none. With a token it is a transfer that writes them.
    ///
    /// # Errors
    /// [`PageError`].
    pub(crate) fn take(
        self: &Arc<Self>,
        pages: impl IntoIterator<Item = u32>,
        token: Option<Token>,
    ) -> Result<TakenPages, PageError> {
        let mut known = self.lock();
        let mut taken = Vec::new();
        for page in pages {
            match take_one(&mut known, page) {
                Ok(buffer) => taken.push((page, buffer)),
                Err(error) => {
                    // Under the same lock, so that nobody finds them taken.
                    taken.into_iter().for_each(|(page, buffer)| put_back(&mut known, page, buffer));
                    return Err(error);
                }
            }
        }
        if token.is_some() {
            count_transfer(&mut known, taken.iter().map(|(page, _)| *page));
        }
        drop(known);
        Ok(TakenPages { arena: self.clone(), pages: taken, token })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Page>> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn find(known: &mut [Page], page: u32) -> Result<&mut Page, PageError> {
    let count = u32::try_from(known.len()).unwrap_or(u32::MAX);
    known.get_mut(page as usize).ok_or(PageError::Outside { page, count })
}

fn view_of(known: &mut [Page], page: u32) -> Result<Buf, PageError> {
    find(known, page)?.buffer.clone().ok_or(PageError::Busy { page })
}

fn take_one(known: &mut [Page], page: u32) -> Result<BufMut, PageError> {
    let known = find(known, page)?;
    let buffer = known.buffer.take().ok_or(PageError::Busy { page })?;
    buffer.try_into_mut().map_err(|buffer| {
        known.buffer = Some(buffer);
        PageError::Busy { page }
    })
}

fn put_back(known: &mut [Page], page: u32, buffer: BufMut) {
    if let Ok(known) = find(known, page) {
        known.buffer = Some(buffer.freeze());
    }
}

fn count_transfer(known: &mut [Page], pages: impl Iterator<Item = u32>) {
    for page in pages {
        if let Ok(known) = find(known, page) {
            known.transfers += 1;
        }
    }
}

fn end_transfer(known: &mut [Page], page: u32) {
    if let Ok(known) = find(known, page) {
        known.transfers -= 1;
    }
}

/// Views of pages that are to be sent.
#[derive(Debug)]
pub(crate) struct SharedPages {
    arena: Arc<ArenaMemory>,
    pages: Vec<(u32, Buf)>,
    are_sent: bool,
    _token: Token,
}

impl SharedPages {
    /// Sends them from now on, until this is dropped. Returns the views, in the order in which the pages were named.
    pub(crate) fn send(&mut self) -> Vec<Buf> {
        if !self.are_sent {
            count_transfer(&mut self.arena.lock(), self.pages.iter().map(|(page, _)| *page));
            self.are_sent = true;
        }
        self.pages.iter().map(|(_, view)| view.clone()).collect()
    }
}

impl Drop for SharedPages {
    fn drop(&mut self) {
        let mut known = self.arena.lock();
        for (page, view) in self.pages.drain(..) {
            // Not the last handle: the arena has another.
            drop(view);
            if self.are_sent {
                end_transfer(&mut known, page);
            }
        }
        drop(known);
        self.arena.freed.notify_waiters();
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

    /// The last pages, up to this many.
    pub(crate) fn split_last(&mut self, count: usize) -> Self {
        let pages = self.pages.split_off(self.pages.len().saturating_sub(count));
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
        let is_transfer = self.token.is_some();
        let mut known = self.arena.lock();
        for (page, buffer) in self.pages.drain(..) {
            put_back(&mut known, page, buffer);
            if is_transfer {
                end_transfer(&mut known, page);
            }
        }
        drop(known);
        self.arena.freed.notify_waiters();
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
        let (_, token) = watch::channel(());
        let mut views = arena.share([0, 1], token).unwrap();
        assert!(!arena.is_moved(1));
        drop(views.send());
        assert!(arena.is_moved(1) && !arena.is_moved(2));
        assert_eq!(arena.take([2, 1], None).unwrap_err(), PageError::Busy { page: 1 });
        // Page 2 was given back.
        let mut taken = arena.take([3, 2], None).unwrap();
        assert_eq!(arena.view(2).unwrap_err(), PageError::Busy { page: 2 });
        assert_eq!(arena.take([0, 0], None).unwrap_err(), PageError::Busy { page: 0 });
        drop(views);
        assert!(!arena.is_moved(1) && !arena.is_moved(2));
        taken.pages.iter_mut().for_each(|(_, page)| page.fill(7));
        let last = taken.split_last(1);
        drop(taken);
        assert_eq!(arena.view(2).unwrap_err(), PageError::Busy { page: 2 });
        drop(last);
        assert!([2, 3].map(|page| arena.view(page).unwrap()).iter().all(|page| page[..] == [7; 64]));
        assert_eq!(arena.take([1, 4], None).unwrap_err(), PageError::Outside { page: 4, count: 4 });
        assert_eq!(arena.view(4).unwrap_err(), PageError::Outside { page: 4, count: 4 });
        assert!(arena.take(0..4, None).is_ok());
    }

    #[test]
    fn granted_pages_return_with_evidence_only() {
        let arena = arena();
        let granted = arena.take([0, 1], None).unwrap().grant();
        drop(granted.end(GrantEnd::Content));
        drop(arena.take([0, 1], None).unwrap().grant());
        assert_eq!(arena.view(1).unwrap_err(), PageError::Busy { page: 1 });
    }
}
