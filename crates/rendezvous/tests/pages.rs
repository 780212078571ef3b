//! Pages of arenas over shm and tcp, between workers of one process.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use futures::{FutureExt as _, join};
use tensorwire_fabric::FabricKind;
use tensorwire_memory::copy::{CopyReason, count};
use tensorwire_protocol::{Code, Validation};
use tensorwire_rendezvous::{
    Tensor, Trust, Worker, WorkerError,
    pages::{Arena, PageError, Pages, Transfer, Written},
};

use crate::{
    fabrics::{assert_moves_over, kinds, over_verbs},
    sets::{USUAL, on, run},
    two::Two,
};

const PAGES: u32 = 300;

/// Less than a request, more than one write of every fabric, and one that is no power of two.
const PAGE_BYTES: [usize; 4] = [8, 4096, 5000, 700_000];

async fn arena(worker: &Worker, count: u32, page_bytes: usize, first: u8) -> Arena {
    let arena = worker.arena(count, page_bytes).await.unwrap();
    (0..count).for_each(|page| arena.page_mut(page).unwrap().fill(first.wrapping_add(page as u8)));
    arena
}

fn is_filled(arena: &Arena, page: u32, value: u8) -> bool {
    arena.page(page).unwrap().iter().all(|byte| *byte == value)
}

/// Pages in an order that neither side has, each once.
fn scattered(count: u32, step: u32) -> Pages {
    (0..count).map(|number| number * step % PAGES).collect()
}

/// Checks that the client's write came with this note.
fn assert_noted(written: &Written, note: u64) {
    assert_eq!((written.note, written.peer.contains("client")), (note, true), "{written:?}");
}

#[test]
fn pages_come_where_they_are_wanted_and_no_others_change() {
    run(async {
        for &kind in kinds(USUAL) {
            for page_bytes in PAGE_BYTES {
                let count = if page_bytes > 100_000 { 5 } else { 200 };
                let two = Two::of(|name| on(kind, name)).await;
                let theirs = arena(&two.server, PAGES.min(count * 2), page_bytes, 100).await;
                let mut exposed = two.server.expose("kv", &theirs).unwrap();
                let ours = arena(&two.client, PAGES.min(count * 2), page_bytes, 0).await;
                let remote = two.peer.arena("kv").await.unwrap();
                assert_eq!((remote.count(), remote.page_bytes()), (theirs.count(), page_bytes));
                let pages = theirs.count();
                let from: Pages = (0..count).map(|number| number * 7 % pages).collect();
                let to: Pages = (0..count).map(|number| (pages - 1 + number * 11) % pages).collect();

                remote.read(&from, &ours, &to).await.unwrap();
                let came = |page: u32| to.numbers().iter().position(|to| *to == page);
                for page in 0..pages {
                    let value = came(page).map_or(page, |at| 100 + from.numbers()[at]);
                    assert!(is_filled(&ours, page, value as u8), "{kind}: page {page} of {page_bytes} bytes");
                }
                remote.write(&ours, &to, &from).note(9).await.unwrap();
                assert_noted(&exposed.next().now_or_never().unwrap(), 9);
                assert!((0..pages).all(|page| is_filled(&theirs, page, (100 + page) as u8)), "{kind}");
                assert_moves_over(&two.client, kind);
                two.end().await;
            }
        }
    });
}

#[test]
fn a_page_in_use_is_refused_by_its_number() {
    run(async {
        for &kind in kinds(USUAL) {
            let two = Two::of(|name| on(kind, name)).await;
            let theirs = arena(&two.server, 8, 4096, 100).await;
            let exposed = two.server.expose("kv", &theirs).unwrap();
            let ours = arena(&two.client, 8, 4096, 0).await;
            let remote = two.peer.arena("kv").await.unwrap();
            let busy = |ended: Result<(), WorkerError>, page: &str| {
                let error = ended.unwrap_err();
                let WorkerError::Remote { status, .. } = &error else { panic!("{error}") };
                assert!(status.code == Code::Unavailable && status.message.contains(page), "{kind}: {error}");
            };
            let view = theirs.page(3).unwrap();
            busy(remote.write(&ours, &Pages::from(0..8), &Pages::from(0..8)).await, "page 3");
            // A view does not hinder a read.
            remote.read(&Pages::from([3]), &ours, &Pages::from([0])).await.unwrap();
            drop(view);
            let written = theirs.page_mut(5).unwrap();
            busy(remote.read(&Pages::from(0..8), &ours, &Pages::from(0..8)).await, "page 5");
            drop(written);
            remote.write(&ours, &Pages::from(0..8), &Pages::from(0..8)).await.unwrap();

            let view = ours.page(2).unwrap();
            let refused = remote.read(&Pages::from(0..8), &ours, &Pages::from(0..8)).await.unwrap_err();
            assert!(
                matches!(&refused, WorkerError::Config { field: "page", value, .. } if value == "2"),
                "{refused}"
            );
            drop(view);
            // What was refused has left nothing in use.
            assert!((0..8).all(|page| ours.page_mut(page).is_ok() && theirs.page_mut(page).is_ok()));
            drop(exposed);
            let gone = remote.read(&Pages::from([0]), &ours, &Pages::from([0])).await.unwrap_err();
            assert!(
                matches!(&gone, WorkerError::Remote { status, .. } if status.code == Code::NotFound),
                "{gone}"
            );
            two.end().await;
        }
    });
}

#[test]
fn notes_follow_their_pages_and_wait_for_room() {
    run(async {
        for &kind in kinds(USUAL) {
            let two = Two::of(|name| on(kind, name)).await;
            let theirs = two.server.arena(200, 4096).await.unwrap();
            let mut exposed = two.server.expose("kv", &theirs).unwrap();
            let ours = arena(&two.client, 200, 4096, 1).await;
            let remote = two.peer.arena("kv").await.unwrap();
            let mut counted = exposed.count(7).unwrap();
            assert!(exposed.count(7).is_err());
            // Three writes in any order; the note of each comes when its pages are there.
            let part = |first: u32| Pages::from(first..first + 60);
            let writes = [0, 60, 120].map(|first| remote.write(&ours, &part(first), &part(first)).note(7));
            let written = futures::future::try_join_all(writes);
            let (written, reached) = join!(written, counted.reach(3));
            written.unwrap();
            assert!(reached && counted.now() == 3);
            assert!((0..180).all(|page| is_filled(&theirs, page, 1 + page as u8)), "{kind}");
            drop(counted);
            // A note without pages.
            let none = Pages::default();
            remote.write(&ours, &none, &none).note(1).await.unwrap();
            assert_noted(&exposed.next().await, 1);
            // 256 wait, and the next write waits for the program.
            for number in 0..256 {
                remote.write(&ours, &none, &none).note(number).await.unwrap();
            }
            let mut waits = remote.write(&ours, &Pages::from([0]), &Pages::from([199])).note(256);
            assert!(
                std::future::poll_fn(|context| std::task::Poll::Ready(
                    waits.poll_unpin(context).is_pending()
                ))
                .await
            );
            for number in 0..256 {
                assert_noted(&exposed.next().await, number);
            }
            waits.await.unwrap();
            assert_noted(&exposed.next().await, 256);
            exposed.end().await;
            two.end().await;
        }
    });
}

#[test]
fn pages_are_free_as_soon_as_their_transfer_has_ended() {
    run(async {
        for &kind in kinds(USUAL) {
            let two = Two::of(|name| on(kind, name)).await;
            let theirs = arena(&two.server, 64, 4096, 100).await;
            let _exposed = two.server.expose("kv", &theirs).unwrap();
            let ours = arena(&two.client, 64, 4096, 0).await;
            let remote = two.peer.arena("kv").await.unwrap();
            let all = Pages::from(0..64);
            for number in 0..300_u32 {
                remote.read(&all, &ours, &all).await.unwrap();
                let value = ours.page(0).unwrap()[0];
                ours.page_mut(number % 64).unwrap().fill(value);
                remote.write(&ours, &all, &all).await.unwrap();
                drop(ours.page_mut(0).unwrap());
            }
            two.end().await;
        }
    });
}

/// Both ways, more transfers than there may be requests, of which none waits for one of the other way.
#[test]
fn transfers_of_both_ways_need_no_requests_of_each_other() {
    run(async {
        for &kind in kinds(USUAL) {
            let two = Two::of(|name| on(kind, name).flow(|flow| flow.requests_max = 1)).await;
            let back = two.server.wait_for_peer("client").await.unwrap();
            let theirs = arena(&two.server, 64, 4096, 100).await;
            let ours = arena(&two.client, 64, 4096, 0).await;
            let _exposed =
                [two.server.expose("kv", &theirs).unwrap(), two.client.expose("kv", &ours).unwrap()];
            let (to, fro) = (two.peer.arena("kv").await.unwrap(), back.arena("kv").await.unwrap());
            // Each page of the lower half comes from the other side, and each of the upper half goes there.
            let transfers = (0..32).flat_map(|page| {
                let (from, at) = (Pages::from([32 + page]), Pages::from([page]));
                [to.write(&ours, &from, &at), fro.write(&theirs, &from, &at)]
            });
            futures::future::try_join_all(transfers).await.unwrap();
            for page in 0..32 {
                assert!(is_filled(&theirs, page, 32 + page as u8), "{kind}: {page}");
                assert!(is_filled(&ours, page, 132 + page as u8), "{kind}: {page}");
            }
            two.end().await;
        }
    });
}

#[test]
fn pages_go_back_and_forth_with_their_notes() {
    run(async {
        for &kind in kinds(USUAL) {
            let two = Two::of(|name| on(kind, name)).await;
            let back = two.server.wait_for_peer("client").await.unwrap();
            let theirs = two.server.arena(8, 4096).await.unwrap();
            let ours = arena(&two.client, 8, 4096, 1).await;
            let mut there = two.server.expose("kv", &theirs).unwrap();
            let mut here = two.client.expose("kv", &ours).unwrap();
            let (to, fro) = (two.peer.arena("kv").await.unwrap(), back.arena("kv").await.unwrap());
            let all = Pages::from(0..8);
            for number in 0..200 {
                // The answer to each write may come after the next write.
                let (sent, returned) = join!(to.write(&ours, &all, &all).note(number), async {
                    assert_eq!(there.next().await.note, number);
                    fro.write(&theirs, &all, &all).note(number).await
                });
                sent.and(returned).unwrap();
                assert_eq!(here.next().await.note, number);
            }
            // At once, each waits for pages that the other has, or is refused; none hangs.
            for _ in 0..50 {
                let (one, other) = join!(to.write(&ours, &all, &all), fro.write(&theirs, &all, &all));
                for ended in [one, other] {
                    if let Err(error) = ended {
                        let is_busy = matches!(&error, WorkerError::Remote { status, .. } if status.code == Code::Unavailable);
                        assert!(is_busy, "{kind}: {error}");
                    }
                }
            }
            assert!((0..8).all(|page| is_filled(&theirs, page, 1 + page as u8)), "{kind}");
            two.end().await;
        }
    });
}

#[test]
fn the_end_of_an_exposure_refuses_the_notes_that_wait() {
    run(async {
        for &kind in kinds(USUAL) {
            let two = Two::of(|name| on(kind, name)).await;
            let theirs = two.server.arena(8, 4096).await.unwrap();
            let exposed = two.server.expose("kv", &theirs).unwrap();
            let ours = arena(&two.client, 8, 4096, 1).await;
            let remote = two.peer.arena("kv").await.unwrap();
            let none = Pages::default();
            for number in 0..256 {
                remote.write(&ours, &none, &none).note(number).await.unwrap();
            }
            let waits = remote.write(&ours, &Pages::from([0]), &Pages::from([7])).note(256);
            let ends = async {
                while theirs.page(7).is_ok_and(|page| page[0] == 0) {
                    tokio::task::yield_now().await;
                }
                exposed.end().await;
            };
            let (refused, ()) = join!(waits, ends);
            let refused = refused.unwrap_err();
            let is_cancelled =
                matches!(&refused, WorkerError::Remote { status, .. } if status.code == Code::Cancelled);
            assert!(is_cancelled, "{kind}: {refused}");
            assert!((0..8).all(|page| theirs.page_mut(page).is_ok() && ours.page_mut(page).is_ok()));
            two.end().await;
        }
    });
}

#[test]
fn a_lost_peer_frees_all_pages() {
    run(async {
        for &kind in kinds(USUAL) {
            for polls in 1..8 {
                let two = Two::of(|name| on(kind, name)).await;
                let theirs = arena(&two.server, PAGES, 4096, 100).await;
                let _exposed = two.server.expose("kv", &theirs).unwrap();
                let ours = arena(&two.client, PAGES, 4096, 0).await;
                let remote = two.peer.arena("kv").await.unwrap();
                let half = [Pages::from(0..PAGES / 2), Pages::from(PAGES / 2..PAGES)];
                let read = polled(remote.read(&half[0], &ours, &half[0]), polls).await;
                let write = polled(remote.write(&ours, &half[1], &half[1]), polls).await;
                let Two { server, client, .. } = two;
                let (_, (), ()) = join!(server.shutdown(), read.cancel(), write.cancel());
                assert!((0..PAGES).all(|page| ours.page_mut(page).is_ok()), "{kind}: {polls}");
                assert!((0..PAGES).all(|page| theirs.page_mut(page).is_ok()), "{kind}: {polls}");
                client.shutdown().await;
            }
        }
    });
}

#[test]
fn memory_of_the_program_is_written_from_where_it_lies() {
    run(async {
        for &kind in kinds(USUAL) {
            let two = Two::of(|name| on(kind, name)).await;
            let theirs = two.server.arena(8, 4096).await.unwrap();
            let _exposed = two.server.expose("kv", &theirs).unwrap();
            let remote = two.peer.arena("kv").await.unwrap();
            let own: Vec<u8> = (0..4096 * 4).map(|byte| (byte / 4096) as u8 + 1).collect();
            let joined = two.client.user_memory().join(Arc::new(own)).unwrap();
            let page = |number: usize| {
                let address = joined.buf()[4096 * number..4096 * (number + 1)].as_ptr_range();
                two.client.user_memory().find(address).unwrap()
            };
            let before = count(CopyReason::Import).bytes;
            remote.write_from([3, 0, 2].map(page).to_vec(), &Pages::from([1, 7, 4])).await.unwrap();
            let copies = count(CopyReason::Import).bytes - before;
            assert_eq!(copies, if kind == FabricKind::SHM { 3 * 4096 } else { 0 }, "{kind}");
            for (at, value) in [(1, 4), (7, 1), (4, 3), (0, 0), (5, 0)] {
                assert!(is_filled(&theirs, at, value), "{kind}: page {at}");
            }
            let short = vec![page(0).slice(1..4096).unwrap()];
            let refused = remote.write_from(short, &Pages::from([0])).await.unwrap_err();
            assert!(matches!(&refused, WorkerError::Config { field: "page_bytes", .. }), "{refused}");
            two.end().await;
        }
    });
}

#[test]
fn memory_of_the_program_is_an_arena_that_peers_write_where_it_lies() {
    run(async {
        for &kind in kinds(USUAL) {
            let two = Two::of(|name| on(kind, name)).await;
            let cache: Vec<u8> = (0..4096 * 8).map(|byte| (byte / 4096) as u8 + 1).collect();
            let address = cache.as_ptr();
            let theirs = two.server.arena_of(cache, 4096).unwrap();
            assert_eq!(
                (theirs.count(), theirs.page(3).unwrap().as_ptr()),
                (8, address.wrapping_add(3 * 4096))
            );
            // Known to the connection from its beginning, and made while there is one.
            let _exposed = two.server.expose("kv", &theirs).unwrap();
            let remote = two.peer.arena("kv").await.unwrap();
            let ours = two.client.arena_of(vec![0_u32; 1024 * 8], 4096).unwrap();
            let copied = |before: u64| (count(CopyReason::Import).bytes - before) / 4096;

            let before = count(CopyReason::Import).bytes;
            remote.read(&Pages::from([7, 2]), &ours, &Pages::from([0, 5])).await.unwrap();
            assert_eq!(copied(before), if kind == FabricKind::SHM { 2 } else { 0 }, "{kind}");
            for (at, value) in [(0, 8), (5, 3), (1, 0), (7, 0)] {
                assert!(is_filled(&ours, at, value), "{kind}: page {at}");
            }
            remote.write(&ours, &Pages::from([5, 1]), &Pages::from([0, 1])).await.unwrap();
            for (at, value) in [(0, 3), (1, 0), (2, 3), (7, 8)] {
                assert!(is_filled(&theirs, at, value), "{kind}: page {at}");
            }
            // A fetch fills such memory in place, too.
            let tensor = Tensor::from_values(two.server.pool(), &[4096], &[9_u8; 4096]).unwrap();
            two.server.publish("tensor", tensor).unwrap();
            let own = two.client.user_memory().give(vec![0_u8; 4096]).unwrap();
            let place = own.as_ptr();
            let fetched = two.peer.fetch("tensor").into_buffer(own).await.unwrap();
            assert_eq!((fetched.bytes().as_ptr(), fetched.bytes()), (place, &[9; 4096][..]), "{kind}");
            // Nothing was put elsewhere.
            assert_eq!(theirs.page(1).unwrap().as_ptr(), address.wrapping_add(4096));
            two.end().await;
        }
    });
}

#[test]
fn a_cancelled_transfer_moves_nothing_more() {
    run(async {
        for &kind in kinds(USUAL) {
            let two = Two::of(|name| on(kind, name)).await;
            let theirs = arena(&two.server, PAGES, 4096, 100).await;
            let exposed = two.server.expose("kv", &theirs).unwrap();
            let ours = arena(&two.client, PAGES, 4096, 0).await;
            let remote = two.peer.arena("kv").await.unwrap();
            let all = scattered(PAGES, 7);
            for polls in 0..20 {
                for transfer in [remote.read(&all, &ours, &all), remote.write(&ours, &all, &all)] {
                    polled(transfer, polls).await.cancel().await;
                    // Every page of this side is free at once: it can be written here.
                    for page in 0..PAGES {
                        ours.page_mut(page).unwrap().fill(page as u8);
                    }
                }
            }
            // The peer's are, when it has learnt of that.
            exposed.end().await;
            assert!((0..PAGES).all(|page| theirs.page_mut(page).is_ok()), "{kind}");
            assert!((0..PAGES).all(|page| is_filled(&ours, page, page as u8)), "{kind}");
            two.end().await;
        }
    });
}

/// The transfer after up to so many polls.
async fn polled(mut transfer: Transfer, polls: u32) -> Transfer {
    for _ in 0..polls {
        let is_over =
            std::future::poll_fn(|context| std::task::Poll::Ready(transfer.poll_unpin(context).is_ready()))
                .await;
        if is_over {
            break;
        }
        tokio::task::yield_now().await;
    }
    transfer
}

#[test]
fn bad_lists_name_the_field_and_the_remedy() {
    run(async {
        let two = Two::of(|name| on(FabricKind::SHM, name)).await;
        let theirs = two.server.arena(8, 64).await.unwrap();
        let _exposed = two.server.expose("kv", &theirs).unwrap();
        let (ours, longer) = (two.client.arena(8, 64).await.unwrap(), two.client.arena(8, 65).await.unwrap());
        let remote = two.peer.arena("kv").await.unwrap();
        let (few, many, outside) = (Pages::from(0..2), Pages::from(0..3), Pages::from([7, 8]));
        for (transfer, field) in [
            (remote.read(&few, &ours, &many), "pages"),
            (remote.read(&few, &longer, &few), "page_bytes"),
            (remote.read(&outside, &ours, &few), "page"),
            (remote.read(&few, &ours, &outside), "page"),
            (remote.write(&ours, &few, &outside), "page"),
            (remote.write(&ours, &outside, &few), "page"),
            (remote.write(&ours, &few, &Pages::from([1, 1])), "page"),
            (remote.read(&few, &ours, &few).note(3), "note"),
        ] {
            let error = transfer.await.unwrap_err();
            assert!(
                matches!(&error, WorkerError::Config { field: named, remedy, .. } if *named == field && !remedy.is_empty()),
                "{error}"
            );
        }
        assert_eq!(ours.page(8).unwrap_err(), PageError::Outside { page: 8, count: 8 });
        for refused in [
            two.server.arena(0, 64).await.unwrap_err(),
            two.server.arena(1, 0).await.unwrap_err(),
            two.server.arena(u32::MAX, 1).await.unwrap_err(),
            two.server.arena_of(vec![0_u8; 100], 64).unwrap_err(),
            two.server.arena_of(vec![0_u8; 100], 0).unwrap_err(),
            two.server.arena_of(Vec::<u8>::new(), 64).unwrap_err(),
            two.server.arena_of(vec![0_u8; (1 << 24) + 1], 1).unwrap_err(),
            two.server.expose("kv", &theirs).unwrap_err(),
            two.server.expose("", &theirs).unwrap_err(),
            two.server.expose(&"n".repeat(257), &theirs).unwrap_err(),
            two.server.peer("server").unwrap().arena("kv").await.unwrap_err(),
        ] {
            assert!(matches!(&refused, WorkerError::Config { .. }), "{refused}");
        }
        let missing = two.peer.arena("none").await.unwrap_err();
        assert!(
            matches!(&missing, WorkerError::Remote { status, .. } if status.code == Code::NotFound),
            "{missing}"
        );
        two.end().await;
    });
}

#[test]
fn pages_are_refused_without_trust_and_with_validation() {
    run(async {
        for &kind in kinds(USUAL) {
            for hostile in [true, false] {
                // Shared memory needs trust.
                if hostile && kind == FabricKind::SHM {
                    continue;
                }
                let two = Two::of(|name| {
                    if hostile {
                        on(kind, name).trust(Trust::Hostile)
                    } else {
                        on(kind, name).validation(Validation::Xxh3)
                    }
                })
                .await;
                let theirs = two.server.arena(8, 4096).await.unwrap();
                let _exposed = two.server.expose("kv", &theirs).unwrap();
                let ours = two.client.arena(8, 4096).await.unwrap();
                let remote = two.peer.arena("kv").await.unwrap();
                let pages = Pages::from(0..8);
                for transfer in [remote.read(&pages, &ours, &pages), remote.write(&ours, &pages, &pages)] {
                    let error = transfer.await.unwrap_err();
                    assert!(
                        matches!(&error, WorkerError::Remote { status, .. } | WorkerError::Local { status, .. }
                            if status.code == Code::FailedPrecondition),
                        "{kind}: {error}"
                    );
                }
                assert!((0..8).all(|page| ours.page_mut(page).is_ok() && theirs.page_mut(page).is_ok()));
                two.end().await;
            }
        }
    });
}

over_verbs! {
    pages_come_where_they_are_wanted_and_no_others_change
    a_page_in_use_is_refused_by_its_number
    notes_follow_their_pages_and_wait_for_room
    pages_are_free_as_soon_as_their_transfer_has_ended
    transfers_of_both_ways_need_no_requests_of_each_other
    pages_go_back_and_forth_with_their_notes
    the_end_of_an_exposure_refuses_the_notes_that_wait
    a_lost_peer_frees_all_pages
    memory_of_the_program_is_written_from_where_it_lies
    memory_of_the_program_is_an_arena_that_peers_write_where_it_lies
    a_cancelled_transfer_moves_nothing_more
}
