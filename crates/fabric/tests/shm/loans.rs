//! Views of memory: their limits, and their end when a process is stopped, killed or forked.

use std::{sync::Arc, task::Poll, time::Duration};

use futures::{channel::oneshot, future::join_all};
use tensorwire_fabric::{
    Access, Arrival, Fabric, FabricError, Immediate, QueuePair, QueuePairConfig, Runtime, WorkRequest,
};
use tensorwire_fabric_shm::ShmFabric;
use tensorwire_memory::{Buf, Place, copy::CopyReason};

use super::{
    SETUP,
    processes::{DEATH_LIMIT, Half, assert_end_of_file, counted},
};
use crate::{
    contract::{
        Flavour, Setup, bounded,
        pair::{Pair, RegisteredPool, pattern, step, yield_once},
    },
    process::{Other, alone, is_child, listen, say},
};

const LENGTH: usize = 1 << 20;

async fn loan(runtime: &Arc<dyn Runtime>, queue_pair: &QueuePair) -> Buf {
    match step(runtime, "a loan", queue_pair.next_arrival()).await.unwrap() {
        Arrival::Loan { buffer, .. } => buffer,
        other => panic!("not a loan: {other:?}"),
    }
}

async fn lent(runtime: &Arc<dyn Runtime>, pair: &Pair, buffer: Buf) -> Buf {
    let lend = pair.to_right.lend(buffer, Immediate(1));
    let (result, view) = futures::future::join(lend, loan(runtime, &pair.to_left)).await;
    result.unwrap();
    view
}

fn three_leases(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
    Arc::new(ShmFabric::new(runtime).unwrap().with_lease_cap(3))
}

#[test]
fn leases_count_per_process_through_all_its_connections() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let setup = Setup { fabric: three_leases, peer_address: None };
        let pair = Pair::new(setup, runtime.clone()).await;
        let (left, right) = pair.connect_again().await;
        let source = pair.left.source.filled(LENGTH, 1);
        let mut views = Vec::new();
        for (to, from) in [(&pair.to_right, &pair.to_left), (&left, &right), (&left, &right)] {
            let lend = to.lend(source.clone(), Immediate(1));
            let (result, view) = futures::future::join(lend, loan(&runtime, from)).await;
            result.unwrap();
            views.push(view);
        }
        for to in [&pair.to_right, &left] {
            let error =
                step(&runtime, "the refusal", to.lend(source.clone(), Immediate(1))).await.unwrap_err();
            assert!(matches!(error, FabricError::LeasesExhausted { open: 3, cap: 3 }), "{error}");
        }
        // Views of an ended connection still count.
        step(&runtime, "the close", left.close()).await;
        let error = pair.to_right.lend(source.clone(), Immediate(1)).await.unwrap_err();
        assert!(matches!(error, FabricError::LeasesExhausted { open: 3, cap: 3 }), "{error}");
        // Copies still work, and so do new views after others have ended.
        pair.works(&pair.to_right, &pair.to_left).await;
        views.clear();
        let mut free = None;
        while free.is_none() {
            match pair.to_right.lend(source.clone(), Immediate(1)).await {
                Ok(()) => free = Some(loan(&runtime, &pair.to_left).await),
                Err(error) => assert!(matches!(error, FabricError::LeasesExhausted { .. }), "{error}"),
            }
            yield_once().await;
        }
    });
}

#[test]
fn s4_bytes_of_leases_count_per_process_too() {
    fn two_lengths(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
        Arc::new(ShmFabric::new(runtime).unwrap().with_lease_bytes_cap(2 * LENGTH as u64))
    }
    bounded(Flavour::CurrentThread, |runtime| async move {
        let pair = Pair::new(Setup { fabric: two_lengths, peer_address: None }, runtime.clone()).await;
        let mut views = Vec::new();
        for length in [LENGTH, LENGTH - 1] {
            let view = lent(&runtime, &pair, pair.left.source.filled(length, 1)).await;
            views.push(view);
        }
        let error = pair.to_right.lend(pair.left.source.filled(2, 1), Immediate(1)).await.unwrap_err();
        let is_named = matches!(error, FabricError::LeasedBytesExhausted { held, wanted: 2, cap }
            if held + 1 == cap && cap == 2 * LENGTH as u64);
        assert!(is_named, "{error}");
        // A loan that still fits works; after the views have ended, all bytes can be lent again.
        let view = lent(&runtime, &pair, pair.left.source.filled(1, 1)).await;
        drop((views, view));
        let source = pair.left.source.filled(2 * LENGTH, 1);
        let mut result = pair.to_right.lend(source.clone(), Immediate(1)).await;
        while matches!(result, Err(FabricError::LeasedBytesExhausted { .. })) {
            yield_once().await;
            result = pair.to_right.lend(source.clone(), Immediate(1)).await;
        }
        result.unwrap();
        loan(&runtime, &pair.to_left).await;
    });
}

/// A view of what is attached at `place`, once it is resident.
fn attached_at(view: &Buf, place: &Place) -> Option<Buf> {
    loop {
        if let Poll::Ready(found) = view.attached_at(place) {
            return found;
        }
    }
}

#[test]
fn buffers_that_are_attached_to_a_lent_one_are_viewed_under_its_lease() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let pair = Pair::new(Setup { fabric: three_leases, peer_address: None }, runtime.clone()).await;
        let other_pool = RegisteredPool::new(&pair.left.domain, "another", Access::LOCAL, 1 << 20);
        let used = || pair.left.source.pool.stats().used_bytes + other_pool.pool.stats().used_bytes;
        let before = used();
        let attached =
            vec![pair.left.source.filled(LENGTH, 1), other_pool.filled(100, 2), other_pool.filled(300, 3)];
        let places: Vec<_> = attached.iter().map(|attached| attached.place().unwrap()).collect();
        let table = pair.left.source.pool.try_alloc(300).unwrap().freeze_with(attached);
        let view = lent(&runtime, &pair, table).await;
        let views: Vec<_> = places.iter().map(|place| attached_at(&view, place).unwrap()).collect();
        for (view, (length, seed)) in views.iter().zip([(LENGTH, 1), (100, 2), (300, 3)]) {
            assert!(view.is_foreign() && view[..] == pattern(length, seed)[..]);
        }
        // Places that a peer of this process names at will.
        let [place, ..] = places[..] else { panic!("no place") };
        for (block, offset, length) in
            [(u64::MAX, 0, 1), (0, 0, 1), (place.block, u64::MAX, 1), (place.block, 0, u64::MAX)]
        {
            assert!(attached_at(&view, &Place { block, offset, length }).is_none());
        }
        // The views share one lease: others are free, and the memory is held until the last view is gone.
        drop(view);
        let mut others = Vec::new();
        for _ in 0..2 {
            others.push(lent(&runtime, &pair, pair.left.source.filled(64, 1)).await);
        }
        pair.to_right.lend(pair.left.source.filled(64, 1), Immediate(1)).await.unwrap_err();
        drop(others);
        let mut views = views.into_iter();
        let last = views.next_back();
        drop(views);
        pair.works(&pair.to_right, &pair.to_left).await;
        assert!(used() > before + LENGTH as u64);
        drop(last);
        while used() > before {
            yield_once().await;
            pair.works(&pair.to_right, &pair.to_left).await;
        }
    });
}

#[test]
fn s4_bytes_of_attached_buffers_count_and_views_end_with_the_connection() {
    fn one_length(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
        Arc::new(ShmFabric::new(runtime).unwrap().with_lease_bytes_cap(LENGTH as u64))
    }
    bounded(Flavour::CurrentThread, |runtime| async move {
        let pair = Pair::new(Setup { fabric: one_length, peer_address: None }, runtime.clone()).await;
        let table = |bytes: usize| {
            let attached = vec![pair.left.source.filled(bytes, 1)];
            pair.left.source.pool.try_alloc(64).unwrap().freeze_with(attached)
        };
        let error = pair.to_right.lend(table(LENGTH), Immediate(1)).await.unwrap_err();
        let is_named =
            matches!(error, FabricError::LeasedBytesExhausted { wanted, .. } if wanted == LENGTH as u64 + 64);
        assert!(is_named, "{error}");
        let fits = table(LENGTH - 64);
        let place = fits.attached().next().unwrap().place().unwrap();
        let view = lent(&runtime, &pair, fits).await;
        let attached = attached_at(&view, &place).unwrap();
        step(&runtime, "the close", pair.to_left.close()).await;
        assert!(attached_at(&view, &place).is_none(), "the connection is over");
        assert!(attached[..] == pattern(LENGTH - 64, 1)[..], "views stay");
    });
}

#[test]
fn a_view_is_not_copied() {
    alone("shm::loans::a_view_is_not_copied", |runtime| {
        Box::pin(async move {
            let pair = Pair::new(SETUP, runtime.clone()).await;
            for length in [1, 64, 16 << 20] {
                let view = lent(&runtime, &pair, pair.left.source.filled(length, 3)).await;
                assert!(view[..] == pattern(length, 3)[..]);
            }
            for reason in [CopyReason::ShmPayload, CopyReason::ShmMessage, CopyReason::ShmInline] {
                assert_eq!(counted(reason), (0, 0), "{reason:?}");
            }
        })
    });
}

/// The child: takes a view, reports it, and follows the commands in the parent's lines.
async fn view_and_obey(runtime: Arc<dyn Runtime>) {
    let half = Half::new(runtime.clone());
    let queue_pair = half.dial().await;
    let view = loan(&runtime, &queue_pair).await;
    say("viewing");
    // On a separate thread, so that this side must ring for the completion of the loan.
    let (sender, order) = oneshot::channel();
    std::thread::spawn(move || sender.send(listen()));
    if order.await.unwrap() == "fork" {
        // SAFETY: the child of the fork calls nothing but `pause`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: no pointers are involved.
                unsafe { libc::pause() };
            }
        }
        say(&child.to_string());
        listen();
    }
    // Holds the view until the connection ends, and after that.
    while queue_pair.next_arrival().await.is_ok() {}
    say(if view[..] == pattern(LENGTH, 9)[..] { "whole" } else { "changed" });
    drop(view);
    say("released");
    listen();
}

/// The parent's side of a child that holds a view of its only buffer.
struct Viewed {
    other: Other,
    queue_pair: QueuePair,
    pool: RegisteredPool,
    _half: Half,
}

async fn viewed(test: &str, runtime: &Arc<dyn Runtime>) -> Viewed {
    let mut other = Other::start_as(&format!("shm::loans::{test}"), "1");
    let half = Half::new(runtime.clone());
    let queue_pair = half.accept(&mut other).await;
    let pool = RegisteredPool::new(&half.domain, "two buffers", Access::LOCAL, 2 * LENGTH as u64);
    let lend = queue_pair.lend(pool.filled(LENGTH, 9), Immediate(1));
    step(runtime, "the loan", lend).await.unwrap();
    assert_eq!(other.hear(), "viewing");
    Viewed { other, queue_pair, pool, _half: half }
}

async fn all_back(runtime: &Arc<dyn Runtime>, pool: &RegisteredPool) {
    let back = async {
        while pool.pool.stats().used_bytes > 0 {
            yield_once().await;
        }
    };
    step(runtime, "the memory to come back", back).await;
    assert_eq!((pool.pool.stats().retired_bytes, pool.pool.stats().leaked_bytes), (0, 0));
}

#[test]
fn d_peer_sigstop_a_view_keeps_its_bytes() {
    const TEST: &str = "d_peer_sigstop_a_view_keeps_its_bytes";
    if is_child() {
        return bounded(Flavour::CurrentThread, view_and_obey);
    }
    bounded(Flavour::CurrentThread, |runtime| async move {
        let Viewed { mut other, queue_pair, pool, _half } = viewed(TEST, &runtime).await;
        other.tell("go on");
        other.signal(libc::SIGSTOP);
        // The parent closes the connection, and overwrites all memory that it can allocate.
        step(&runtime, "the close", queue_pair.close()).await;
        assert_eq!(pool.pool.stats().retired_bytes, LENGTH as u64);
        let mut other_half = pool.pool.try_alloc(LENGTH).unwrap();
        other_half.fill(0xEE);
        pool.pool.try_alloc(64).expect_err("the viewed bytes were given out");
        other.signal(libc::SIGCONT);
        assert_eq!(other.hear(), "whole");
        assert_eq!(other.hear(), "released");
        drop(other_half);
        all_back(&runtime, &pool).await;
    });
}

#[test]
fn d_peer_sigkill_views_of_the_dead_come_back() {
    const TEST: &str = "d_peer_sigkill_views_of_the_dead_come_back";
    if is_child() {
        return bounded(Flavour::CurrentThread, view_and_obey);
    }
    bounded(Flavour::CurrentThread, |runtime| async move {
        for closed_before in [false, true] {
            let Viewed { other, queue_pair, pool, _half } = viewed(TEST, &runtime).await;
            if closed_before {
                step(&runtime, "the close", queue_pair.close()).await;
                assert_eq!(pool.pool.stats().retired_bytes, LENGTH as u64);
            }
            other.signal(libc::SIGKILL);
            all_back(&runtime, &pool).await;
        }
    });
}

#[test]
fn a_death_is_seen_although_a_child_of_the_dead_holds_the_sockets() {
    const TEST: &str = "a_death_is_seen_although_a_child_of_the_dead_holds_the_sockets";
    if is_child() {
        return bounded(Flavour::CurrentThread, view_and_obey);
    }
    bounded(Flavour::CurrentThread, |runtime| async move {
        let Viewed { mut other, queue_pair, pool, _half } = viewed(TEST, &runtime).await;
        other.tell("fork");
        let grandchild: i32 = other.hear().parse().unwrap();
        let killed = runtime.now();
        other.signal(libc::SIGKILL);
        let error = step(&runtime, "the loss", queue_pair.next_arrival()).await.unwrap_err();
        let took = runtime.now() - killed;
        // SAFETY: no pointers are involved; the process is the one that the child has just made.
        unsafe { libc::kill(grandchild, libc::SIGKILL) };
        assert_end_of_file(&error);
        assert!(took < DEATH_LIMIT + Duration::ZERO);
        all_back(&runtime, &pool).await;
    });
}

fn one_lease(runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
    Arc::new(ShmFabric::new(runtime).unwrap().with_lease_cap(1))
}

#[test]
fn loans_that_the_socket_has_no_room_for_fail_alone() {
    // More blocks than descriptors that fit into the socket while the peer does not read it.
    const BLOCKS: u32 = 400;
    // Too long to be carried in a ring's descriptor.
    const BYTES: usize = 200;
    alone("shm::loans::loans_that_the_socket_has_no_room_for_fail_alone", |runtime| {
        Box::pin(async move {
            let depths = QueuePairConfig { send_depth: 512, receive_depth: 512 };
            let setup = Setup { fabric: one_lease, peer_address: None };
            let pair = Pair::with_depths(setup, runtime.clone(), depths).await;
            let view = lent(&runtime, &pair, pair.left.source.filled(LENGTH, 1)).await;
            let single = |seed| {
                let pool = RegisteredPool::new(&pair.left.domain, "single", Access::LOCAL, 4096);
                pool.filled(BYTES, seed)
            };
            let grant = pair.grant_right(BYTES * BLOCKS as usize);
            let mut posted = Vec::new();
            for value in 0..BLOCKS {
                let remote = Some(grant.part(u64::from(value) * BYTES as u64, BYTES as u64));
                let (local, immediate) = (single(u64::from(value)), Some(Immediate(value)));
                let request = WorkRequest::Write { local, remote, immediate };
                posted.push(pair.to_right.post_now(&request).unwrap());
            }
            // A loan that must be posted now is refused.
            let refused = pair.to_right.lend_now(single(1), Immediate(2000)).unwrap_err();
            assert!(matches!(refused, FabricError::Busy { .. }), "{refused}");
            // A loan that may wait is posted later, when the peer has reached its limit of loans.
            let later = pair.to_right.lend(single(1), Immediate(2001));
            for value in 0..BLOCKS {
                assert_eq!(pair.arrival_at_right().await, (value, BYTES as u64));
            }
            for result in pair.step("the writes", join_all(posted)).await {
                result.unwrap();
            }
            let refused = pair.step("the loan", later).await.unwrap_err();
            assert!(matches!(refused, FabricError::LeasesExhausted { open: 1, cap: 1 }), "{refused}");
            pair.works(&pair.to_right, &pair.to_left).await;
            drop(view);
            let again = pair.to_right.lend_now(single(7), Immediate(2002));
            let again = again.expect("room for the loan, and a lease");
            let (result, view) = futures::future::join(again, loan(&runtime, &pair.to_left)).await;
            result.unwrap();
            assert!(view[..] == pattern(BYTES, 7)[..]);
        })
    });
}

/// Waits until the thread has slept for some time.
async fn until_asleep(runtime: &Arc<dyn Runtime>, thread: &str) {
    let asleep = || {
        let status = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap();
        let line = |name| status.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
        line("State:").contains('S').then(|| line("voluntary_ctxt_switches"))
    };
    let (mut seen, mut times) = (None, 0);
    while times < 5 {
        let now = asleep();
        times = if now.is_some() && now == seen { times + 1 } else { 0 };
        seen = now;
        runtime.sleep(Duration::from_millis(1)).await;
    }
}

#[test]
fn a_release_wakes_a_lender_that_sleeps() {
    const TEST: &str = "shm::loans::a_release_wakes_a_lender_that_sleeps";
    const RELEASES: u64 = 10;
    if is_child() {
        return bounded(Flavour::CurrentThread, |runtime| async move {
            let half = Half::new(runtime.clone());
            let queue_pair = half.dial().await;
            let lender = listen();
            for _ in 0..RELEASES {
                let view = loan(&runtime, &queue_pair).await;
                step(&runtime, "the lender's sleep", until_asleep(&runtime, &lender)).await;
                // Nothing else wakes the lender.
                drop(view);
            }
            say("released");
            listen();
        });
    }
    bounded(Flavour::CurrentThread, |runtime| async move {
        let mut other = Other::start_as(TEST, "1");
        let half = Half::new(runtime.clone());
        let queue_pair = half.accept(&mut other).await;
        // SAFETY: no pointers are involved.
        other.tell(&format!("{}/task/{}", std::process::id(), unsafe { libc::gettid() }));
        let single = RegisteredPool::new(&half.domain, "one buffer", Access::LOCAL, LENGTH as u64);
        for round in 0..=RELEASES {
            // Waits for the pool alone, and drives nothing.
            let mut buffer = step(&runtime, "the buffer", single.pool.alloc(LENGTH)).await.unwrap();
            buffer.fill(round as u8);
            if round < RELEASES {
                step(&runtime, "a loan", queue_pair.lend(buffer.freeze(), Immediate(1))).await.unwrap();
            }
        }
        assert_eq!(other.hear(), "released");
    });
}
