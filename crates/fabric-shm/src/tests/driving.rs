//! Progress, sleeps and wake-ups of the driver, which the tests poll themselves.

use std::{
    future::Future,
    os::fd::OwnedFd,
    pin::Pin,
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

use futures::FutureExt as _;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tensorwire_fabric::{
    Access, CELL_WORDS, Catalogue, CellContent, Driver, Effort, FabricError, Immediate, Link, Look,
    RegionGeneration, RegionId, RemoteRange, RemoteRegion, Wait, WorkRequest,
};
use tensorwire_memory::{GrantEnd, GrantId, MemoryObserver, Pool, PoolConfig, Span};
use tokio::io::{Interest, unix::AsyncFd};

use super::{
    super::{
        catalogue::claim_of,
        driver::ShmDriven,
        limits::{CHUNK_BYTES, UNREPORTED_MAX},
        ring::{Descriptor, OwnPage, PeerPage, Source},
        sys,
    },
    Rig, on_a_runtime, rings,
};

/// Counts how often it is woken.
#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// The victim's driver, which the test polls with a waker of its own.
struct Hand {
    driver: Pin<Box<Driver<ShmDriven>>>,
    count: Arc<Count>,
    waker: Waker,
}

impl Hand {
    fn new(rig: &Rig) -> Self {
        Self::waiting(rig, Wait::Sleep)
    }

    fn waiting(rig: &Rig, wait: Wait) -> Self {
        Self::with(rig, wait, None)
    }

    fn with(rig: &Rig, wait: Wait, before_arming: Option<Box<dyn FnOnce() + Send>>) -> Self {
        let mut driven = Self::driven(rig, None);
        driven.before_arming = before_arming;
        Self::of(rig, wait, driven)
    }

    fn driven(rig: &Rig, process: Option<AsyncFd<OwnedFd>>) -> ShmDriven {
        let bell = sys::watch(sys::eventfd().unwrap(), Interest::READABLE).unwrap();
        ShmDriven::new(rig.link.clone(), bell, process)
    }

    fn of(rig: &Rig, wait: Wait, driven: ShmDriven) -> Self {
        let count = Arc::new(Count::default());
        let waker = Waker::from(count.clone());
        Self { driver: Box::pin(Driver::new(driven, rig.patience(wait))), count, waker }
    }

    fn poll(&mut self) -> Poll<()> {
        self.driver.as_mut().poll(&mut Context::from_waker(&self.waker))
    }

    /// Wake-ups since the last call.
    fn woken(&self) -> usize {
        self.count.0.swap(0, Ordering::SeqCst)
    }

    /// Polls until the driver sleeps.
    fn sleep(&mut self) {
        for _ in 0..100 {
            assert!(self.poll().is_pending());
            if self.woken() == 0 {
                return;
            }
        }
        panic!("the driver does not come to rest");
    }
}

fn notification() -> Descriptor {
    Descriptor {
        immediate: Some(1),
        continues: false,
        is_quiet: false,
        remote: None,
        source: Source::Nothing,
    }
}

#[test]
fn an_idle_driver_arms_once_and_sleeps() {
    on_a_runtime(|| {
        let rig = Rig::new();
        let mut hand = Hand::new(&rig);
        assert_eq!(rig.sees.sleep(), 0);
        assert!(hand.poll().is_pending());
        assert_eq!(hand.woken(), 0, "nothing to do, yet not asleep");
        assert_eq!(rig.sees.sleep(), 1);
        // Each sleep is a new one for the peer.
        assert!(hand.poll().is_pending());
        assert_eq!(rig.sees.sleep(), 2);
        assert_eq!(rings(&rig.bell), 0);
    });
}

#[test]
fn an_idle_driver_costs_nothing_however_it_waits() {
    // Adaptive has no measurements at first, so it sleeps at once; its own wake-ups end.
    for wait in [Wait::Sleep, Wait::Adaptive] {
        on_a_runtime(|| {
            let mut rig = Rig::new();
            let mut hand = Hand::waiting(&rig, wait);
            hand.sleep();
            for _ in 0..8 {
                rig.publish(&notification());
                hand.sleep();
            }
            let epoch = rig.sees.sleep();
            for _ in 0..3 {
                assert!(hand.poll().is_pending());
                assert_eq!(hand.woken(), 0, "{wait:?}: woke itself over nothing");
            }
            assert_eq!(rig.sees.sleep(), epoch + 3);
            assert_eq!(rig.victim.stats().arrivals, 8, "all of them");
        });
    }
}

#[test]
fn a_driver_is_woken_only_while_it_sleeps() {
    on_a_runtime(|| {
        let rig = Rig::new();
        let mut hand = Hand::waiting(&rig, Wait::Busy);
        assert!(hand.poll().is_pending());
        assert_eq!(hand.woken(), 1, "others have a turn, then it looks again");
        rig.link.driver.wake();
        assert_eq!(hand.woken(), 0, "it looks again in any case");
    });
    on_a_runtime(|| {
        let rig = Rig::new();
        let mut hand = Hand::new(&rig);
        hand.sleep();
        rig.link.driver.wake();
        assert_eq!(hand.woken(), 1, "it sleeps");
        rig.link.driver.wake();
        assert_eq!(hand.woken(), 0, "it was woken");
    });
}

#[test]
fn what_rings_before_a_driver_sleeps_makes_it_look_again() {
    on_a_runtime(|| {
        let rig = Rig::new();
        let link = rig.link.clone();
        let rings = Box::new(move || link.driver.wake());
        let mut hand = Hand::with(&rig, Wait::Sleep, Some(rings));
        assert!(hand.poll().is_pending());
        assert_eq!(hand.woken(), 1);
        assert!(hand.poll().is_pending());
        assert_eq!(hand.woken(), 0, "nothing has rung since");
    });
}

#[test]
fn a_busy_driver_never_says_that_it_sleeps() {
    on_a_runtime(|| {
        let mut rig = Rig::new();
        let mut hand = Hand::waiting(&rig, Wait::Busy);
        for round in 0..200 {
            assert!(hand.poll().is_pending());
            assert_eq!(hand.woken(), 1, "others have a turn, then it looks again");
            if round == 100 {
                rig.publish(&notification());
            }
        }
        assert_eq!((rig.sees.sleep(), rig.victim.stats().arrivals), (0, 1));
        // The driver notices the peer's end although it never sleeps.
        let Rig { socket, victim, link, .. } = rig;
        drop(socket);
        link.frames_came(); // What the readiness event would do, which needs a runtime.
        assert!(hand.poll().is_ready());
        assert!(victim.failure().is_some());
    });
}

#[test]
fn work_that_comes_while_the_driver_falls_asleep_is_not_overlooked() {
    on_a_runtime(|| {
        let rig = Rig::new();
        let page = Arc::new(Mutex::new(None::<OwnPage>));
        // Published after the driver has polled; the producer still sees an awake consumer and does not ring.
        let publish = {
            let page = page.clone();
            move || page.lock().unwrap().take().unwrap().publish(0, &notification().encode())
        };
        let mut hand = Hand::with(&rig, Wait::Sleep, Some(Box::new(publish)));
        let Rig { sees, victim, .. } = rig;
        *page.lock().unwrap() = Some(rig.page);
        assert!(hand.poll().is_pending());
        assert_eq!(hand.woken(), 1, "asleep over work");
        assert_eq!((sees.consumed(), victim.stats().arrivals), (1, 1));
    });
}

#[test]
fn what_nobody_waits_for_is_reported_late() {
    on_a_runtime(|| {
        let mut rig = Rig::new();
        let quiet = Descriptor { is_quiet: true, ..notification() };
        for executed in 1..UNREPORTED_MAX {
            rig.publish(&quiet);
            rig.settle();
            assert_eq!((rig.sees.consumed(), rig.victim.stats().arrivals), (0, executed));
        }
        rig.publish(&quiet);
        rig.settle();
        assert_eq!(rig.sees.consumed(), UNREPORTED_MAX, "the attacker may need the room");
    });
    on_a_runtime(|| {
        let mut rig = Rig::new();
        rig.publish(&Descriptor { is_quiet: true, ..notification() });
        rig.settle();
        assert_eq!(rig.sees.consumed(), 0);
        rig.publish(&notification());
        rig.settle();
        assert_eq!(rig.sees.consumed(), 2, "the attacker may wait for the second");
    });
}

#[test]
fn completions_are_rung_for_after_the_users_tasks_have_run() {
    on_a_runtime(|| {
        let mut rig = Rig::new();
        let mut hand = Hand::new(&rig);
        hand.sleep();
        rig.page.set_sleep(1); // The attacker sleeps.
        rig.publish(&notification());
        assert!(hand.poll().is_pending());
        assert_eq!(rig.sees.consumed(), 1, "executed at once");
        assert_eq!((hand.woken(), rings(&rig.bell)), (1, 0), "those whom it woke first");
        assert!(hand.poll().is_pending());
        assert_eq!((hand.woken(), rings(&rig.bell)), (1, 0), "and those whom they woke");
        assert!(hand.poll().is_pending());
        assert_eq!((hand.woken(), rings(&rig.bell)), (0, 1), "then the completion");
    });
}

#[test]
fn an_answer_and_a_completion_ring_once_together() {
    on_a_runtime(|| {
        let mut rig = Rig::new();
        let mut hand = Hand::new(&rig);
        hand.sleep();
        rig.page.set_sleep(1);
        rig.publish(&notification());
        assert!(hand.poll().is_pending());
        let answer = rig.victim.notify(Immediate(2));
        assert_eq!(rings(&rig.bell), 1);
        hand.sleep();
        assert_eq!(rings(&rig.bell), 0, "already awake");
        drop(answer);
    });
}

#[test]
fn completions_are_rung_for_even_while_work_keeps_coming() {
    on_a_runtime(|| {
        let mut rig = Rig::new();
        let mut hand = Hand::new(&rig);
        rig.page.set_sleep(1);
        for poll in 1.. {
            rig.publish(&notification());
            assert!(hand.poll().is_pending());
            if rings(&rig.bell) == 1 {
                break;
            }
            assert!(poll < 8, "never rung");
        }
    });
}

#[test]
fn a_users_poll_leaves_unfinished_work_to_the_driver() {
    on_a_runtime(|| {
        let mut rig = Rig::new();
        let mut hand = Hand::new(&rig);
        hand.sleep();
        let (granted, range, key) = rig.lend(3 * CHUNK_BYTES);
        rig.send_block(0, 3 * CHUNK_BYTES);
        let source = Source::Block { index: 0, offset: 0 };
        rig.publish(&Descriptor {
            immediate: Some(1),
            continues: false,
            is_quiet: false,
            remote: Some((range, key)),
            source,
        });
        rig.link.progress(Effort::BeforeSleep);
        assert_eq!(hand.woken(), 1, "two chunks are left and nobody is awake");
        hand.sleep();
        assert_eq!(rig.victim.stats().bytes_received, 3 * CHUNK_BYTES as u64);
        granted.end(GrantEnd::Content).unwrap();
    });
}

#[test]
fn a_task_helps_only_while_looking_pays_and_the_peer_can_work_meanwhile() {
    on_a_runtime(|| {
        let mut rig = Rig::new();
        let _hand = Hand::new(&rig);
        rig.publish(&notification());
        assert!(!rig.victim.help(), "the driver has not found that looking pays");
        rig.link.connection().core.help().allow(true);
        assert!(rig.victim.help() && rig.victim.next_arrival().now_or_never().is_some());
        assert!(!rig.victim.help(), "there is nothing");
        // The peer last ran on this very CPU. A thread may be moved between the two lines.
        for _ in 0..100 {
            rig.page.set_cpu();
            rig.publish(&notification());
            if !rig.victim.help() {
                return;
            }
            drop(rig.victim.next_arrival().now_or_never());
        }
        panic!("looked a hundred times while the peer could not run");
    });
}

#[test]
fn a_task_that_helps_lets_others_have_their_turn() {
    on_a_runtime(|| {
        let mut rig = Rig::new();
        let mut hand = Hand::new(&rig);
        hand.sleep();
        rig.link.connection().core.help().allow(true);
        let mut finds = 0;
        for _ in 0..100 {
            rig.publish(&notification());
            if !rig.victim.help() {
                break;
            }
            drop(rig.victim.next_arrival().now_or_never());
            finds += 1;
        }
        assert_eq!(finds, 64);
        assert!(rig.victim.help(), "the next time");
        // One step of a long copy; the driver does the rest.
        let (granted, range, key) = rig.lend(3 * CHUNK_BYTES);
        rig.send_block(0, 3 * CHUNK_BYTES);
        rig.link.frames_came();
        let source = Source::Block { index: 0, offset: 0 };
        rig.publish(&Descriptor {
            immediate: None,
            continues: false,
            is_quiet: false,
            remote: Some((range, key)),
            source,
        });
        assert!(!rig.victim.help());
        assert_eq!(hand.woken(), 1, "two chunks are left");
        hand.sleep();
        assert_eq!(rig.victim.stats().bytes_received, 3 * CHUNK_BYTES as u64);
        granted.end(GrantEnd::Content).unwrap();
    });
}

#[test]
fn a_driver_that_finds_someone_at_work_is_woken_by_them() {
    on_a_runtime(|| {
        let mut rig = Rig::new();
        let mut hand = Hand::new(&rig);
        hand.sleep();
        rig.publish(&notification());
        let (epoch, held) = (rig.sees.sleep(), rig.link.hold_target());
        assert!(hand.poll().is_pending());
        assert_eq!(hand.woken(), 0, "spins");
        assert_eq!(rig.sees.sleep(), epoch, "must not say that it sleeps without having looked");
        drop(held);
        // The task that held the lock leaves `turn`, which wakes the driver.
        assert_eq!(rig.link.turn(), Look::Worked);
        assert_eq!(hand.woken(), 1);
        hand.sleep();
        assert!(rig.sees.sleep() > epoch);
    });
}

#[test]
fn a_close_that_finds_someone_at_work_is_carried_out() {
    on_a_runtime(|| {
        let rig = Rig::new();
        let mut hand = Hand::new(&rig);
        hand.sleep();
        let held = rig.link.hold_target();
        rig.link.start_close();
        assert_eq!(rig.sees.closed(), 0, "someone may be inside local memory");
        assert_eq!(hand.woken(), 1);
        drop(held);
        assert_eq!(hand.poll(), Poll::Ready(()));
        assert_ne!(rig.sees.closed(), 0);
    });
}

#[test]
fn a_dropped_driver_ends_the_connection() {
    // The runtime is shutting down: nothing would execute the peer's writes or notice its death any more.
    on_a_runtime(|| {
        let rig = Rig::new();
        let mut hand = Hand::new(&rig);
        hand.sleep();
        drop(hand);
        assert_ne!(rig.sees.closed(), 0);
        assert!(matches!(rig.victim.failure(), Some(FabricError::Closed)));
    });
}

/// A descriptor of a dead process, which is readable.
async fn dead_process() -> AsyncFd<OwnedFd> {
    let mut child = Command::new("true").spawn().unwrap();
    let pid = Pid::from_child(&child);
    let process = sys::watch(pidfd_open(pid, PidfdFlags::empty()).unwrap(), Interest::READABLE).unwrap();
    drop(process.readable().await.unwrap());
    child.wait().unwrap();
    process
}

#[tokio::test]
async fn d_a_claim_of_a_dead_process_holds_no_connection() {
    let rig = Rig::new();
    let catalogue = &rig.link.connection().catalogue;
    let cell = catalogue.cell("w").unwrap();
    let bytes = rig.pool.try_alloc(4096).unwrap().freeze();
    drop(catalogue.write(cell, Some(CellContent { words: [0; CELL_WORDS], bytes })));
    rig.page.claim(0, claim_of(cell.0, 2));
    assert!(rig.link.is_viewed());
    let mut hand = Hand::of(&rig, Wait::Sleep, Hand::driven(&rig, Some(dead_process().await)));
    // The content is still published, so the claim is still valid.
    assert_eq!(hand.poll(), Poll::Ready(()));
    assert!(matches!(rig.victim.failure(), Some(FabricError::PeerLost { .. })));
}

/// Reads the `closed` word, which the peer sees, whenever memory returns to the pool.
#[derive(Debug, Default)]
struct Watch {
    page: Mutex<Option<PeerPage>>,
    /// 1 + the word seen at the last return.
    seen: AtomicU64,
}

impl MemoryObserver for Watch {
    fn allocated(&self, _: &Span) {}

    fn freed(&self, _: &Span) {
        if let Some(page) = &*self.page.lock().unwrap() {
            self.seen.store(1 + page.closed(), Ordering::SeqCst);
        }
    }

    fn granted(&self, _: &Span, _: GrantId) {}

    fn grant_ended(&self, _: &Span, _: GrantId, _: Option<GrantEnd>) {}
}

#[test]
fn the_peer_is_told_of_a_close_before_any_source_comes_back() {
    on_a_runtime(|| {
        let rig = Rig::new();
        let Rig { victim, link, regions, runtime, sees, .. } = rig;
        let watch = Arc::new(Watch::default());
        let observer: Option<Arc<dyn MemoryObserver>> = Some(watch.clone());
        let config = PoolConfig { block_bytes: 1 << 16, observer, ..PoolConfig::new("watched") };
        let pool = Pool::new(config).unwrap();
        let local = pool.try_alloc(4096).unwrap().freeze();
        regions.register(runtime.as_ref(), local.block().unwrap(), Access::LOCAL);
        let (region, generation) = (RegionId(0), RegionGeneration(0));
        victim.add_remote_region(RemoteRegion { region, generation, base: 0, length: 1 << 20, key: 1 });
        let remote = Some(RemoteRange { region, generation, offset: 0, length: 4096 });
        let operation = victim.post_now(&WorkRequest::Write { local, remote, immediate: None }).unwrap();
        assert_eq!((sees.closed(), pool.stats().used_bytes), (0, 4096));
        *watch.page.lock().unwrap() = Some(sees);
        link.start_close();
        assert_eq!(pool.stats().used_bytes, 0, "the operation has let go");
        assert!(watch.seen.load(Ordering::SeqCst) > 1, "the bytes came back while the peer could send on");
        drop(operation);
    });
}
