//! Cancelled transfers of pages, and what waits for them.

use futures::future::join;
use tensorwire_rendezvous::pages::{Arena, Exposed, Pages, RemoteArena, Transfer};

use super::{
    polled,
    workers::{Two, every_k_beside_fetches},
};

/// What this file cancels.
pub(super) const CASES: [&str; 8] = [
    "arena",
    "cancel_transfer",
    "end_exposure",
    "find_arena",
    "next_written",
    "reach_count",
    "read_pages",
    "write_pages",
];

const PAGES: u32 = 3;
const PAGE_BYTES: usize = 1500;

/// An exposed arena of the server, and one of the client.
struct Arenas {
    theirs: Arena,
    exposed: Exposed,
    ours: Arena,
    remote: RemoteArena,
    all: Pages,
}

/// An arena whose pages have the contents of the transfers from `first` on.
async fn filled(two: &Two, worker: &tensorwire_rendezvous::Worker, first: u64) -> Arena {
    let arena = worker.arena(PAGES, PAGE_BYTES).await.unwrap();
    for page in 0..PAGES {
        two.handle.pattern().fill(first + u64::from(page), &mut arena.page_mut(page).unwrap());
    }
    arena
}

impl Arenas {
    async fn of(two: &Two) -> Self {
        let theirs = filled(two, &two.server, 10).await;
        let exposed = two.server.expose("kv", &theirs).unwrap();
        let ours = filled(two, &two.client, 20).await;
        let remote = two.peer.arena("kv").await.unwrap();
        Self { theirs, exposed, ours, remote, all: Pages::from(0..PAGES) }
    }

    fn read(&self) -> Transfer {
        self.remote.read(&self.all, &self.ours, &self.all)
    }

    fn write(&self) -> Transfer {
        self.remote.write(&self.ours, &self.all, &self.all).note(7)
    }

    /// The pages of the client's arena are free, and keep what is written to them.
    async fn is_free(&self, two: &Two) {
        for page in 0..PAGES {
            let content = 30 + u64::from(page);
            two.handle.pattern().fill(content, &mut self.ours.page_mut(page).unwrap());
        }
        two.fetches(1).await;
        for page in 0..PAGES {
            two.handle.verify(30 + u64::from(page), &self.ours.page(page).unwrap());
        }
    }

    /// Ends the exposure. Then no page of the server's arena moves.
    async fn end(self, two: &Two) {
        self.exposed.end().await;
        let free = (0..PAGES).all(|page| self.theirs.page_mut(page).is_ok());
        assert!(free, "a page is not free when the exposure has ended");
        two.fetches(1).await;
    }
}

fn holds(two: &Two, arena: &Arena, first: u64) {
    (0..PAGES).for_each(|page| two.handle.verify(first + u64::from(page), &arena.page(page).unwrap()));
}

#[test]
fn s3_an_arena_given_up_leaves_nothing_behind() {
    every_k_beside_fetches("arena", &async |two, polls| {
        polled(polls, two.client.arena(PAGES, PAGE_BYTES)).await.map(Result::unwrap).is_some()
    });
    every_k_beside_fetches("find_arena", &async |two, polls| {
        let theirs = filled(two, &two.server, 10).await;
        let _exposed = two.server.expose("kv", &theirs).unwrap();
        let found = polled(polls, two.peer.arena("kv")).await;
        found.map(|remote| assert_eq!(remote.unwrap().count(), PAGES)).is_some()
    });
}

#[test]
fn s3_a_transfer_of_pages_that_is_dropped_leaves_nothing_behind() {
    every_k_beside_fetches("read_pages", &async |two, polls| {
        let arenas = Arenas::of(two).await;
        let completed = polled(polls, arenas.read()).await.map(Result::unwrap).is_some();
        if completed {
            holds(two, &arenas.ours, 10);
        }
        arenas.end(two).await;
        completed
    });
    every_k_beside_fetches("write_pages", &async |two, polls| {
        let arenas = Arenas::of(two).await;
        let completed = polled(polls, arenas.write()).await.map(Result::unwrap).is_some();
        if completed {
            holds(two, &arenas.theirs, 20);
        }
        arenas.end(two).await;
        completed
    });
}

#[test]
fn s1_pages_of_a_cancelled_transfer_are_free_and_stay_as_they_are() {
    for is_write in [false, true] {
        every_k_beside_fetches("cancel a transfer", &async |two, polls| {
            let arenas = Arenas::of(two).await;
            let mut transfer = if is_write { arenas.write() } else { arenas.read() };
            let completed = polled(polls, &mut transfer).await.map(Result::unwrap).is_some();
            transfer.cancel().await;
            arenas.is_free(two).await;
            arenas.end(two).await;
            completed
        });
    }
}

#[test]
fn s3_a_cancel_given_up_leaves_nothing_behind() {
    for is_write in [false, true] {
        for before in [1, 3, 5] {
            every_k_beside_fetches("cancel_transfer", &async |two, polls| {
                let arenas = Arenas::of(two).await;
                let mut transfer = if is_write { arenas.write() } else { arenas.read() };
                drop(polled(before, &mut transfer).await);
                let completed = polled(polls, transfer.cancel()).await.is_some();
                if completed {
                    arenas.is_free(two).await;
                }
                arenas.end(two).await;
                completed
            });
        }
    }
}

#[test]
fn s3_the_end_of_an_exposure_given_up_leaves_nothing_behind() {
    every_k_beside_fetches("end_exposure", &async |two, polls| {
        let Arenas { theirs, exposed, ours, remote, all } = Arenas::of(two).await;
        let write = remote.write(&ours, &all, &all);
        let (completed, _) = join(polled(polls, exposed.end()), write).await;
        // The name is free in any case.
        two.server.expose("kv", &theirs).unwrap().end().await;
        assert!((0..PAGES).all(|page| ours.page_mut(page).is_ok()));
        completed.is_some()
    });
}

#[test]
fn s3_a_wait_for_a_note_given_up_loses_and_doubles_none() {
    every_k_beside_fetches("next_written", &async |two, polls| {
        let mut arenas = Arenas::of(two).await;
        let write = arenas.write();
        let (taken, written) = join(polled(polls, arenas.exposed.next()), write).await;
        written.unwrap();
        let (completed, taken) = match taken {
            Some(taken) => (true, taken),
            None => (false, arenas.exposed.next().await),
        };
        assert_eq!(taken.note, 7);
        holds(two, &arenas.theirs, 20);
        arenas.end(two).await;
        completed
    });
    every_k_beside_fetches("reach_count", &async |two, polls| {
        let arenas = Arenas::of(two).await;
        let mut count = arenas.exposed.count(7).unwrap();
        let (reached, written) = join(polled(polls, count.reach(1)), arenas.write()).await;
        written.unwrap();
        assert!(count.reach(1).await && count.now() == 1);
        holds(two, &arenas.theirs, 20);
        arenas.end(two).await;
        reached.is_some()
    });
}
