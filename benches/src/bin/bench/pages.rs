//! Reads of pages at random places of the other process's arena.

use tensorwire::{
    Peer, Worker,
    fabric::Runtime,
    pages::{Arena, Pages, RemoteArena},
};
use tensorwire_benches::random::Random;

use super::{
    error::BenchError,
    phase::{Phase, PhaseLength, Watch},
};

/// The name of the other process's arena.
pub(super) const ARENA: &str = "pages";
/// The bytes of both arenas, unless two transfers need more.
const ARENA_BYTES: usize = 64 << 20;
/// The bytes of the pages of one transfer, unless one page has more.
const TRANSFER_BYTES: usize = 16 << 20;
/// The most pages of one transfer.
const MOVED_MAX: usize = 1024;

/// The pages of one transfer, for pages of this size.
fn moved(page_bytes: usize) -> u32 {
    (TRANSFER_BYTES / page_bytes.max(1)).clamp(1, MOVED_MAX) as u32
}

/// The pages of an arena.
pub(super) fn count(page_bytes: usize) -> u32 {
    let pages = u32::try_from(ARENA_BYTES / page_bytes.max(1)).unwrap_or(u32::MAX);
    pages.clamp(2 * moved(page_bytes), 4 * MOVED_MAX as u32)
}

/// Two arenas, and the order in which pages are read.
#[derive(Debug)]
pub(super) struct PageReads {
    /// Its worker must exist as long as the arena.
    _worker: Worker,
    arena: Arena,
    remote: RemoteArena,
    random: Random,
}

impl PageReads {
    /// Between this process's worker and the other's, which has exposed its arena. Reads every page once, so that both sides have touched
    /// all of the memory.
    pub(super) async fn new(worker: Worker, server: &Peer, page_bytes: usize) -> Result<Self, BenchError> {
        let remote = server.arena(ARENA).await?;
        let arena = worker.arena(remote.count(), page_bytes).await?;
        let all = Pages::from(0..remote.count());
        remote.read(&all, &arena, &all).await?;
        Ok(Self { _worker: worker, arena, remote, random: Random::default() })
    }

    /// The pages of one transfer.
    pub(super) fn batch(&self) -> u64 {
        moved(self.arena.page_bytes()).into()
    }

    /// Each operation is a page.
    pub(super) async fn run(&mut self, clock: &dyn Runtime, plan: PhaseLength) -> Result<Phase, BenchError> {
        let batch = self.batch();
        // Lists that are prepared once serve many transfers.
        let both = [(); 2].map(|()| self.scattered());
        let mut watch = Watch::start(clock, plan.grouped(batch));
        for _ in 0..plan.ops.div_ceil(batch) {
            self.remote.read(&both[0], &self.arena, &both[1]).await?;
            (0..batch).for_each(|_| watch.tick());
        }
        Ok(watch.stop())
    }

    /// The pages of a transfer, each once, in random order.
    fn scattered(&mut self) -> Pages {
        let moved = moved(self.arena.page_bytes()) as usize;
        self.random.scattered(self.arena.count(), moved).collect()
    }
}
