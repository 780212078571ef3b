//! Honest workers move pages with rogues, which change no page but those of a transfer.

use std::time::Duration;

use futures::future::{Either, select};
use tensorwire_fabric::Runtime;
use tensorwire_rendezvous::{
    WorkerError,
    pages::{Arena, Pages, RemoteArena},
};
use tensorwire_sim::{Rng, Violation};

use super::{
    honest::Honest,
    stage::{PAGE_BYTES, PAGES, rogue_name},
};

fn fill(page: u32, bytes: &mut [u8]) {
    bytes.fill(100 + page as u8);
}

impl Honest {
    /// Reads or writes pages, and gives up now and then.
    pub(super) async fn moves_pages(self, rogue: usize, mut rng: Rng) {
        let peer = self.worker.peer(&rogue_name(rogue)).unwrap();
        let what = |what: &str| format!("{what} of rogue {rogue}");
        let found = self.with_rogue(rogue, what("the arena"), peer.arena("kv")).await;
        let Some(remote) = found else { return };
        let arena = self.worker.arena(PAGES, PAGE_BYTES).await.unwrap();
        for _ in 0..rng.within(1..4) {
            (0..PAGES).for_each(|page| fill(page, &mut arena.page_mut(page).unwrap()));
            let pages: Vec<u32> = (0..PAGES).filter(|_| rng.chance(1, 2)).collect();
            let moved = self.moves(&remote, &arena, (&pages, rng.chance(1, 2)), &mut rng);
            self.with_rogue(rogue, what("pages"), moved).await;
            for page in (0..PAGES).filter(|page| !pages.contains(page)) {
                self.is_kept(&arena, page);
            }
            // All are free, or the next round panics.
            if (0..PAGES).any(|page| arena.page_mut(page).is_err()) {
                let text = "a page is not free when its transfer with a rogue is over".to_owned();
                self.stage.handle.fail(Violation::Memory(text));
                return;
            }
        }
        // Nothing may change any more.
        (0..PAGES).for_each(|page| fill(page, &mut arena.page_mut(page).unwrap()));
        self.pause(&mut rng, Duration::from_millis(500)).await;
        (0..PAGES).for_each(|page| self.is_kept(&arena, page));
    }

    async fn moves(
        &self,
        remote: &RemoteArena,
        arena: &Arena,
        (pages, is_write): (&[u32], bool),
        rng: &mut Rng,
    ) -> Result<(), WorkerError> {
        let pages = Pages::from(pages);
        let mut transfer = if is_write {
            remote.write(arena, &pages, &pages).note(3)
        } else {
            remote.read(&pages, arena, &pages)
        };
        let runtime = self.node.runtime();
        let patience = if rng.chance(1, 3) { Duration::from_millis(50) } else { Duration::from_secs(60) };
        let ended = match select(&mut transfer, runtime.sleep(rng.duration(patience))).await {
            Either::Left((ended, _)) => ended,
            Either::Right(_) => Ok(()),
        };
        transfer.cancel().await;
        ended
    }

    fn is_kept(&self, arena: &Arena, page: u32) {
        let mut wanted = [0; PAGE_BYTES];
        fill(page, &mut wanted);
        if arena.page(page).is_ok_and(|bytes| bytes[..] == wanted) {
            return;
        }
        let text = format!("page {page} is in use or changed, which no rogue was asked for");
        self.stage.handle.fail(Violation::Memory(text));
    }
}
