//! Tests of when tasks and the driver read the socket, and when the driver sleeps. The tests poll the driver, on a
//! runtime whose IO runs only when a test requests it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a failed test

use std::{
    future::Future,
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use futures::FutureExt as _;
#[cfg(feature = "test-certificates")]
use rustls::ClientConnection;
use tensorwire_fabric::{
    Access, Capabilities, Driver, Immediate, QueuePair, QueuePairConfig, RegionTable, RemoteRange, Spinner,
    Wait,
};
use tensorwire_memory::{GrantEnd, Pool, PoolConfig};
use tokio::runtime::Runtime as Tokio;

use crate::{
    Stream,
    clock::Clock,
    driver::TcpDriven,
    frame::{Ending, Frame, HEADER_BYTES, Key, WriteFrame},
    link::TcpLink,
};

#[cfg(feature = "test-certificates")]
use crate::tls::{
    TlsPurpose,
    test_certificates::{Authority, Wanted},
};

/// A bound for what normally takes a few polls.
const POLLS_MAX: usize = 1_000_000;

/// Counts how often it is woken.
#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// One side of a stream under its driver. The peer is a bare socket.
struct Hand {
    driver: Driver<TcpDriven>,
    queue_pair: QueuePair,
    table: Arc<RegionTable>,
    peer: TcpStream,
    clock: Clock,
    count: Arc<Count>,
    waker: Waker,
}

impl Hand {
    fn waiting(wait: Wait) -> Self {
        Self::sharing(&Spinner::new(wait))
    }

    /// Must be called on a runtime.
    fn sharing(spinner: &Arc<Spinner>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        peer.set_nodelay(true).unwrap();
        stream.set_nonblocking(true).unwrap();
        Self::over(tokio::net::TcpStream::from_std(stream).unwrap().into(), peer, spinner)
    }

    fn over(stream: Stream, peer: TcpStream, spinner: &Arc<Spinner>) -> Self {
        let clock = Clock::default();
        let table = Arc::new(RegionTable::new(&clock));
        let depths = QueuePairConfig { send_depth: 16, receive_depth: 1024 };
        let (link, queue_pair) = TcpLink::new(table.clone(), depths, Capabilities::WRITES, stream).unwrap();
        let driver = TcpDriven::start(link, Arc::new(clock.clone()), spinner.clone());
        let count = Arc::new(Count::default());
        let waker = Waker::from(count.clone());
        Self { driver, queue_pair, table, peer, clock, count, waker }
    }

    fn poll(&mut self) -> Poll<()> {
        Pin::new(&mut self.driver).poll(&mut Context::from_waker(&self.waker))
    }

    /// Wake-ups since the last call.
    fn woken(&self) -> usize {
        self.count.0.swap(0, Ordering::SeqCst)
    }

    fn arrivals(&self) -> u64 {
        self.queue_pair.stats().arrivals
    }

    /// The peer writes a notification.
    fn notify(&mut self) {
        self.notify_often(1);
    }

    /// The peer writes `count` notifications, as one segment.
    fn notify_often(&mut self, count: usize) {
        let mut header = [0; HEADER_BYTES];
        header[0] = 2; // a write with immediate
        self.peer.write_all(&header.repeat(count)).unwrap();
    }

    /// Runs IO until the driver is woken.
    fn turn(&self, tokio: &Tokio) {
        for _ in 0..POLLS_MAX {
            if self.woken() > 0 {
                return;
            }
            tokio.block_on(tokio::task::yield_now());
        }
        panic!("not woken");
    }

    /// Polls every microsecond until the driver sleeps, for longer than the longest budget.
    fn sleep(&mut self) {
        for _ in 0..1000 {
            assert!(self.poll().is_pending());
            if self.woken() == 0 {
                return;
            }
            self.clock.pass(Duration::from_micros(1));
        }
        panic!("the driver does not come to rest");
    }

    /// Receives a notification that readiness announces, at the current time of the test's clock. Leaves the driver
    /// awake.
    fn receive_one(&mut self, tokio: &Tokio) {
        let before = self.arrivals();
        self.notify();
        while self.arrivals() == before {
            self.turn(tokio);
            assert!(self.poll().is_pending());
        }
    }

    /// Polls until the woken tasks have had their turns.
    fn pass_turns(&mut self) {
        for _ in 0..3 {
            self.woken();
            assert!(self.poll().is_pending());
        }
    }

    /// Polls without running IO, while the driver keeps itself awake and `done` is false.
    fn look_until(&mut self, done: impl Fn(&Self) -> bool) {
        for _ in 0..POLLS_MAX {
            if done(self) {
                return;
            }
            assert!(self.poll().is_pending());
            assert!(self.woken() > 0, "fell asleep");
        }
        panic!("looked in vain");
    }
}

pub(crate) fn on_a_runtime(test: impl FnOnce(&Tokio)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _guard = runtime.enter();
    test(&runtime);
}

#[test]
fn an_idle_driver_costs_nothing_however_it_waits() {
    for wait in [Wait::Sleep, Wait::Adaptive] {
        on_a_runtime(|tokio| {
            let mut hand = Hand::waiting(wait);
            hand.sleep();
            for _ in 0..8 {
                hand.receive_one(tokio);
                hand.sleep();
            }
            for _ in 0..3 {
                assert!(hand.poll().is_pending());
                assert_eq!(hand.woken(), 0, "{wait:?}: woke itself over nothing");
            }
            assert_eq!(hand.arrivals(), 8, "all of them");
        });
    }
}

#[test]
fn a_sleeping_driver_reads_only_what_readiness_announces() {
    on_a_runtime(|tokio| {
        let mut hand = Hand::waiting(Wait::Sleep);
        hand.sleep();
        hand.notify();
        for _ in 0..100 {
            assert!(hand.poll().is_pending());
            assert_eq!((hand.woken(), hand.arrivals()), (0, 0));
        }
        hand.turn(tokio);
        assert!(hand.poll().is_pending());
        assert_eq!(hand.arrivals(), 1);
    });
}

#[test]
fn a_busy_driver_finds_bytes_and_the_end_without_readiness() {
    on_a_runtime(|_| {
        let mut hand = Hand::waiting(Wait::Busy);
        for _ in 0..200 {
            assert!(hand.poll().is_pending());
            assert_eq!(hand.woken(), 1, "others have a turn, then it looks again");
            hand.clock.pass(Duration::from_micros(1_000_000));
        }
        hand.notify();
        hand.look_until(|hand| hand.arrivals() == 1);
        hand.peer.shutdown(Shutdown::Write).unwrap();
        for _ in 0..POLLS_MAX {
            if hand.poll().is_ready() {
                break;
            }
        }
        assert!(hand.queue_pair.failure().is_some(), "the end was not found");
    });
}

#[test]
fn an_adaptive_driver_looks_while_its_budget_lasts_then_sleeps() {
    on_a_runtime(|tokio| {
        let mut hand = Hand::waiting(Wait::Adaptive);
        assert!(hand.poll().is_pending());
        assert_eq!(hand.woken(), 0, "nothing to go by at first");
        // Answers that arrive at once: polling would have been worthwhile.
        for _ in 0..8 {
            hand.receive_one(tokio);
        }
        hand.notify();
        hand.look_until(|hand| hand.arrivals() == 9);
        // Nothing arrives any more.
        assert!(hand.poll().is_pending());
        assert!(hand.woken() > 0, "gave up at once");
        hand.clock.pass(Duration::from_micros(1_000));
        hand.sleep();
        // A notification that arrives now wakes it, although it has polled before.
        hand.notify();
        hand.turn(tokio);
        assert!(hand.poll().is_pending());
        assert_eq!(hand.arrivals(), 10);
    });
}

#[test]
fn a_connection_that_is_ending_gives_the_turn_to_look_back() {
    on_a_runtime(|tokio| {
        let spinner = Spinner::new(Wait::Adaptive);
        let mut hands = [Hand::sharing(&spinner), Hand::sharing(&spinner)];
        for hand in &mut hands {
            hand.sleep();
            for _ in 0..8 {
                hand.receive_one(tokio);
            }
        }
        hands.iter_mut().for_each(Hand::pass_turns);
        let [first, second] = &mut hands;
        assert!(first.woken() > 0, "looks");
        assert_eq!(second.woken(), 0, "not both");
        // A frame of an unknown kind: this side lingers until the peer has received the refusal.
        first.peer.write_all(&[99; HEADER_BYTES]).unwrap();
        for _ in 0..POLLS_MAX {
            assert!(first.poll().is_pending());
            if first.queue_pair.failure().is_some() {
                break;
            }
        }
        assert!(first.poll().is_pending(), "lingers");
        second.receive_one(tokio);
        second.pass_turns();
        assert!(second.woken() > 0, "the turn did not come back");
    });
}

#[test]
fn a_task_that_helps_reads_without_readiness_and_takes_none_from_the_driver() {
    on_a_runtime(|tokio| {
        let mut hand = Hand::waiting(Wait::Adaptive);
        assert!(!hand.queue_pair.may_help(), "nothing to go by at first");
        hand.sleep();
        for _ in 0..8 {
            hand.receive_one(tokio);
        }
        hand.sleep();
        assert!(hand.queue_pair.may_help());
        hand.notify();
        let helped = (0..POLLS_MAX).any(|_| hand.queue_pair.help());
        assert!(helped, "nothing came");
        assert_eq!(hand.arrivals(), 9);
        // Readiness of those bytes is never announced; that of the next ones is.
        hand.notify();
        hand.turn(tokio);
        hand.look_until(|hand| hand.arrivals() == 10);
    });
}

/// Bytes that the peer can read at once.
fn readable(peer: &mut TcpStream) -> usize {
    peer.set_nonblocking(true).unwrap();
    let mut bytes = [0; 64 * HEADER_BYTES];
    let read = peer.read(&mut bytes);
    peer.set_nonblocking(false).unwrap();
    read.unwrap_or(0)
}

#[test]
fn small_writes_that_follow_one_leave_with_the_drivers_turn_and_not_more_than_a_few_wait() {
    on_a_runtime(|_| {
        let mut hand = Hand::waiting(Wait::Sleep);
        let post = |hand: &Hand| {
            let posted = hand.queue_pair.post_inline(&[], None, Some(Immediate(7)));
            assert!(matches!(posted, Some(Ok(()))));
        };
        for _ in 0..2 {
            hand.sleep();
            post(&hand);
            assert_eq!((readable(&mut hand.peer), hand.woken()), (HEADER_BYTES, 0), "alone: at once");
            (0..5).for_each(|_| post(&hand));
            assert_eq!((readable(&mut hand.peer), hand.woken()), (0, 1));
            assert!(hand.poll().is_pending());
            assert_eq!(readable(&mut hand.peer), 5 * HEADER_BYTES, "as one");
        }
        hand.sleep();
        (0..1 + 32).for_each(|_| post(&hand));
        assert_eq!(readable(&mut hand.peer), 33 * HEADER_BYTES);
    });
}

#[test]
fn what_waits_for_the_driver_is_sent_before_a_close() {
    on_a_runtime(|_| {
        let mut hand = Hand::waiting(Wait::Sleep);
        hand.sleep();
        for _ in 0..3 {
            assert!(matches!(hand.queue_pair.post_inline(&[], None, Some(Immediate(7))), Some(Ok(()))));
        }
        let close = hand.queue_pair.close();
        assert!(Box::pin(close).now_or_never().is_some(), "nothing is outstanding");
        // And the goodbye.
        assert_eq!(readable(&mut hand.peer), 4 * HEADER_BYTES);
    });
}

#[test]
fn what_one_task_posts_in_a_row_leaves_together() {
    on_a_runtime(|_| {
        let mut hand = Hand::waiting(Wait::Sleep);
        hand.sleep();
        let together = hand.queue_pair.together();
        let mut notices: Vec<_> = (0..3).map(|_| Box::pin(hand.queue_pair.notify(Immediate(7)))).collect();
        assert!(notices.iter_mut().all(|notice| notice.as_mut().now_or_never().is_none()), "also if awaited");
        drop(together);
        assert_eq!((readable(&mut hand.peer), hand.woken()), (3 * HEADER_BYTES, 0));
        assert!(notices.iter_mut().all(|notice| notice.as_mut().now_or_never().is_some()));
        let together = hand.queue_pair.together();
        drop(hand.queue_pair.notify(Immediate(7)));
        let close = hand.queue_pair.close();
        assert!(Box::pin(close).now_or_never().is_some(), "nothing is outstanding");
        assert_eq!(readable(&mut hand.peer), 2 * HEADER_BYTES, "and the goodbye");
        drop(together);
    });
}

#[test]
fn what_is_left_to_the_driver_leaves_with_the_next_post_or_its_turn() {
    on_a_runtime(|_| {
        let mut hand = Hand::waiting(Wait::Sleep);
        let post = |hand: &Hand| {
            let posted = hand.queue_pair.post_inline(&[], None, Some(Immediate(7)));
            assert!(matches!(posted, Some(Ok(()))));
        };
        for another_follows in [true, false] {
            hand.sleep();
            let together = hand.queue_pair.together();
            (0..2).for_each(|_| post(&hand));
            together.leave();
            assert_eq!((readable(&mut hand.peer), hand.woken()), (0, 1));
            if another_follows {
                post(&hand);
                assert_eq!(readable(&mut hand.peer), 3 * HEADER_BYTES, "as one");
            }
            assert!(hand.poll().is_pending());
            let left = if another_follows { 0 } else { 2 };
            assert_eq!(readable(&mut hand.peer), left * HEADER_BYTES);
        }
    });
}

#[test]
fn a_task_that_helps_leaves_what_is_left_to_the_driver() {
    /// More than one turn takes.
    const FRAMES: usize = 400;
    on_a_runtime(|tokio| {
        let mut hand = Hand::waiting(Wait::Adaptive);
        hand.sleep();
        for _ in 0..8 {
            hand.receive_one(tokio);
        }
        hand.sleep();
        hand.notify_often(FRAMES);
        while hand.arrivals() == 8 {
            assert!(!hand.queue_pair.help(), "more than it may do is done");
        }
        assert!(hand.arrivals() < FRAMES as u64, "all in one turn");
        hand.turn(tokio);
        hand.sleep();
        assert_eq!(hand.arrivals(), 8 + FRAMES as u64);
    });
}

#[test]
fn a_long_payload_wakes_a_sleeping_driver_a_few_times_and_its_end_at_once() {
    const BYTES: usize = 1 << 20;
    const PIECE: usize = 32 << 10;
    on_a_runtime(|tokio| {
        let mut hand = Hand::waiting(Wait::Sleep);
        let pool = Pool::new(PoolConfig { block_bytes: BYTES, ..PoolConfig::new("target") }).unwrap();
        let granted = pool.try_alloc(BYTES).unwrap().grant();
        let region = hand.table.register(&hand.clock, granted.block().unwrap(), Access::RECEIVE);
        let range = RemoteRange {
            region: region.region,
            generation: region.generation,
            offset: granted.offset() as u64,
            length: BYTES as u64,
        };
        let ending = Ending::Immediate(Immediate(7));
        let frame = WriteFrame { range, key: Key(region.key), length: BYTES as u64, ending };
        hand.sleep();
        for arrivals in 1..=2 {
            hand.peer.write_all(&Frame::Write(frame).encode()).unwrap();
            let mut wake_ups = 0;
            for _ in 0..BYTES / PIECE {
                hand.peer.write_all(&[1; PIECE]).unwrap();
                for _ in 0..10 {
                    tokio.block_on(tokio::task::yield_now());
                    if hand.woken() > 0 {
                        wake_ups += 1;
                        assert!(hand.poll().is_pending());
                    }
                }
            }
            assert_eq!(hand.arrivals(), arrivals);
            assert!((4..20).contains(&wake_ups), "{wake_ups} for {} pieces", BYTES / PIECE);
        }
        hand.receive_one(tokio);
        assert_eq!(hand.arrivals(), 3, "what is short is announced as it comes");
        drop(hand);
        assert!(granted.end(GrantEnd::QueuePairDrained).is_ok());
    });
}

/// An encrypted stream, and its peer's socket with the records of that side.
#[cfg(feature = "test-certificates")]
fn encrypted(tokio: &Tokio) -> (Stream, TcpStream, ClientConnection) {
    let member = Authority::new().unwrap().issue(&Wanted::worker("/job:a/replica:0/task:0")).unwrap();
    let identity = member.identity().unwrap();
    let (dialled, accepted) = tokio.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = tokio::net::TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        tokio::join!(identity.connect(TlsPurpose::Data, stream), identity.accept(accepted))
    });
    let tokio_rustls::TlsStream::Client(dialled) = dialled.unwrap() else { unreachable!() };
    let (peer, records) = dialled.into_inner();
    (accepted.unwrap().into(), peer.into_std().unwrap(), records)
}

#[cfg(feature = "test-certificates")]
#[test]
fn decrypted_bytes_that_a_task_leaves_behind_wake_the_driver() {
    /// More than one turn takes, and all in one record.
    const FRAMES: usize = 400;
    on_a_runtime(|tokio| {
        let (stream, peer, mut records) = encrypted(tokio);
        let mut hand = Hand::over(stream, peer, &Spinner::new(Wait::Sleep));
        hand.sleep();
        let mut notification = [0; HEADER_BYTES];
        notification[0] = 2; // a write with immediate
        records.writer().write_all(&notification.repeat(FRAMES)).unwrap();
        records.write_tls(&mut hand.peer).unwrap();
        // A task empties the socket before the runtime sees that bytes have arrived, so it never announces them.
        let arrives = || hand.queue_pair.next_arrival().now_or_never().is_some();
        assert!((0..POLLS_MAX).any(|_| arrives()), "nothing came");
        assert!(hand.arrivals() < FRAMES as u64, "all in one turn");
        hand.turn(tokio);
        hand.sleep();
        assert_eq!(hand.arrivals(), FRAMES as u64);
    });
}
