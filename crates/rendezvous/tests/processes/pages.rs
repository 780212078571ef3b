//! Two processes read and write each other's pages, and one of them is killed in the middle, again and again.

use std::time::Duration;

use tensorwire_protocol::Code;
use tensorwire_rendezvous::{
    Worker, WorkerError,
    pages::{Arena, Exposed, Pages, RemoteArena},
};

use crate::harness::{Other, PARENT, bounded, builder, kind, memory_returns, role, say, step};

const CHILD: &str = "/job:child/replica:0/task:0";
const NAME: &str = "kv";
/// Several requests in each half of an arena.
const PAGES: u32 = 512;
const PAGE_BYTES: usize = 16 << 10;
const KILLS: u64 = 12;

/// The pages that the arena's owner changes, and its peer reads.
fn read() -> Pages {
    Pages::from(0..PAGES / 2)
}

/// The pages that the peer writes, in another order than it has them.
fn written() -> Pages {
    (PAGES / 2..PAGES).rev().collect()
}

/// Fills every page with one byte. Those of an exposed arena may be in use.
fn fill(arena: &Arena, pages: &Pages, byte: u64) {
    for mut page in pages.numbers().iter().filter_map(|page| arena.page_mut(*page).ok()) {
        page.fill(byte as u8);
    }
}

/// No page that can be read is torn.
fn check(arena: &Arena, pages: &Pages) {
    for view in pages.numbers().iter().filter_map(|page| arena.page(*page).ok()) {
        assert!(view.iter().all(|byte| *byte == view[0]), "a page is torn");
    }
}

/// An arena that the peer uses, and one for this side of the transfers.
async fn arenas(worker: &Worker) -> [Arena; 2] {
    let arena = || async { worker.arena(PAGES, PAGE_BYTES).await.unwrap() };
    [arena().await, arena().await]
}

/// The peer looks at one of the pages, or changes it.
fn is_in_use(error: &WorkerError) -> bool {
    matches!(error, WorkerError::Remote { status, .. } if status.code == Code::Unavailable)
}

/// Reads the peer's pages until that fails.
async fn reads(remote: &RemoteArena, local: &Arena, exposed: &Arena) -> WorkerError {
    for number in 0.. {
        // A read may meet this.
        fill(exposed, &read(), number);
        match remote.read(&read(), local, &read()).await {
            Ok(()) => check(local, &read()),
            Err(error) if is_in_use(&error) => {}
            Err(error) => return error,
        }
    }
    unreachable!("numbers do not end")
}

/// Writes the peer's pages until that fails.
async fn writes(remote: &RemoteArena, local: &Arena) -> WorkerError {
    for number in 0.. {
        fill(local, &written(), number);
        match remote.write(local, &written(), &written()).note(number).await {
            Err(error) if !is_in_use(&error) => return error,
            _ => {}
        }
    }
    unreachable!("numbers do not end")
}

/// Looks at the pages whenever the peer has written them. It may write them again meanwhile, and cannot while they are looked at.
async fn look(exposed: &mut Exposed, arena: &Arena) {
    loop {
        exposed.next().await;
        let pages = written();
        for page in pages.numbers() {
            check(arena, &Pages::from([*page]));
        }
    }
}

/// Reads and writes until it is killed, or loses its parent.
async fn child(words: Vec<String>) {
    let worker = builder(CHILD, kind(&words[1])).bind(&words[3]).start().await.unwrap();
    let [arena, local] = arenas(&worker).await;
    let mut exposed = worker.expose(NAME, &arena).unwrap();
    let remote = worker.set_address(PARENT, &words[2]).unwrap().arena(NAME).await.unwrap();
    say(worker.address());
    let moved = futures::future::join(reads(&remote, &local, &arena), writes(&remote, &local));
    tokio::select! {
        _ = moved => {}
        () = look(&mut exposed, &arena) => {}
    }
}

/// Lets a child live for so long, and returns its address.
async fn life(
    test: &str,
    role: &str,
    worker: &Worker,
    [arena, local]: &[Arena; 2],
    time: Duration,
) -> String {
    let mut exposed = worker.expose(NAME, arena).unwrap();
    let mut other = Other::start(test, role);
    let address = other.hear().await;
    let remote = worker.peer_at(&address).await.unwrap().arena(NAME).await.unwrap();
    {
        let mut moved =
            std::pin::pin!(futures::future::join(reads(&remote, local, arena), writes(&remote, local)));
        tokio::select! {
            early = &mut moved => panic!("{early:?}"),
            () = look(&mut exposed, arena) => unreachable!("it is exposed"),
            () = worker.runtime().sleep(time) => {}
        }
        other.kill();
        for error in <[WorkerError; 2]>::from(step("the end of both transfers", moved).await) {
            // A transfer that began after the kill finds nobody.
            let is_lost = matches!(error, WorkerError::PeerLost { .. } | WorkerError::Control(_));
            assert!(is_lost, "{error:?}");
        }
    }
    step("the end of what the child had begun", exposed.end()).await;
    // Until the queue pair is drained, it has views of what was being sent, and the pages that the child could write.
    let is_free = |page: u32| arena.page_mut(page).is_ok() && local.page_mut(page).is_ok();
    step("the return of all pages", async {
        while !(0..PAGES).all(is_free) {
            worker.runtime().sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    address
}

fn killed_amid_pages(test: &'static str, fabric: &'static str) {
    let limit = Duration::from_secs(110);
    if let Some(words) = role() {
        return bounded(limit, |_| child(words));
    }
    bounded(limit, |_| async move {
        let worker = builder(PARENT, kind(fabric)).start().await.unwrap();
        let arenas = arenas(&worker).await;
        let mut address = "127.0.0.1:0".to_owned();
        for kill in 0..KILLS {
            let role = format!("child {fabric} {} {address}", worker.address());
            let time = Duration::from_micros(20_000 + kill * 1733 % 7000);
            address = life(test, &role, &worker, &arenas, time).await;
        }
        drop(arenas);
        worker.shutdown().await;
        memory_returns(&worker).await;
    });
}

#[test]
fn d_pages_are_free_and_whole_when_the_peer_is_killed_over_tcp() {
    killed_amid_pages("pages::d_pages_are_free_and_whole_when_the_peer_is_killed_over_tcp", "tcp");
}

#[test]
fn d_pages_are_free_and_whole_when_the_peer_is_killed_over_shm() {
    killed_amid_pages("pages::d_pages_are_free_and_whole_when_the_peer_is_killed_over_shm", "shm");
}
