//! Waiting, visitors, bounds and conversions of pools and buffers.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    future::Future,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    task::{Context, Poll, Wake, Waker},
    thread,
    time::Duration,
};

use bytes::Bytes;
use tensorwire_memory::{
    ALIGNMENT, Block, BlockId, BlockVisitor, Buf, BufMut, GrantEnd, MemoryError, Pool, PoolConfig,
    VisitError,
    copy::{CopyReason, copy_bytes, copy_past_caches, count},
};

fn pool(cap_bytes: u64) -> Pool {
    Pool::new(PoolConfig { block_bytes: 4096, cap_bytes, ..PoolConfig::new("test") }).unwrap()
}

fn poll<F: Future + Unpin>(future: &mut F, waker: &Waker) -> Poll<F::Output> {
    pin!(future).poll(&mut Context::from_waker(waker))
}

#[derive(Debug, Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn the_first_in_line_is_served_first_even_when_a_later_one_would_fit() {
    let pool = pool(256);
    let held = pool.try_alloc(128).unwrap();
    let waker = Waker::noop();
    let (mut large, mut small) = (pool.alloc(256), pool.alloc(64));
    assert!(poll(&mut large, waker).is_pending());
    assert!(poll(&mut small, waker).is_pending(), "overtook the one before");
    assert!(matches!(pool.try_alloc(64), Err(MemoryError::Exhausted { .. })), "overtook the queue");
    drop(held);
    assert!(poll(&mut small, waker).is_pending());
    let Poll::Ready(Ok(large)) = poll(&mut large, waker) else { panic!("room and first in line") };
    assert!(poll(&mut small, waker).is_pending());
    drop(large);
    assert!(poll(&mut small, waker).is_ready());
}

#[test]
fn giving_a_place_up_lets_the_next_one_move_up_and_tells_it() {
    let pool = pool(256);
    let held = pool.try_alloc(192).unwrap();
    let woken = Arc::new(Count::default());
    let waker = Waker::from(woken.clone());
    let (mut large, mut small) = (pool.alloc(256), pool.alloc(64));
    assert!(poll(&mut large, Waker::noop()).is_pending());
    assert!(poll(&mut small, &waker).is_pending());
    drop(large);
    assert_eq!(woken.0.load(Ordering::Relaxed), 1);
    assert!(poll(&mut small, &waker).is_ready());
    assert_eq!(pool.stats().waiting, 0);
    drop(held);
}

#[test]
fn every_waiter_is_served_when_buffers_come_back_one_by_one() {
    let pool = pool(64);
    let mut held = Some(pool.try_alloc(64).unwrap());
    let woken: Vec<_> = (0..10).map(|_| Arc::new(Count::default())).collect();
    let mut waiting: Vec<_> = (0..10).map(|_| pool.alloc(64)).collect();
    for (future, woken) in waiting.iter_mut().zip(&woken) {
        assert!(poll(future, &Waker::from(woken.clone())).is_pending());
    }
    for (mut future, woken) in waiting.into_iter().zip(&woken) {
        drop(held.take());
        assert!(woken.0.load(Ordering::Relaxed) > 0, "room came and the next in line was not told");
        match poll(&mut future, Waker::noop()) {
            Poll::Ready(Ok(buffer)) => held = Some(buffer),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_waiter_polled_with_another_waker_is_told_through_that_one() {
    let pool = pool(64);
    let held = pool.try_alloc(64).unwrap();
    let (old, new) = (Arc::new(Count::default()), Arc::new(Count::default()));
    let mut waiting = pool.alloc(64);
    assert!(poll(&mut waiting, &Waker::from(old.clone())).is_pending());
    assert!(poll(&mut waiting, &Waker::from(new.clone())).is_pending());
    drop(held);
    assert_eq!((old.0.load(Ordering::Relaxed), new.0.load(Ordering::Relaxed)), (0, 1));
}

/// A waker that is the last owner of a buffer, as the handle of a dropped task can be.
struct Owner {
    _buffer: Mutex<BufMut>,
}

impl Wake for Owner {
    fn wake(self: Arc<Self>) {}
}

/// Runs `test` in another thread, because a deadlock would otherwise hang the whole run.
fn bounded(test: impl FnOnce() + Send + 'static) {
    let (done, watchdog) = mpsc::channel();
    let worker = thread::spawn(move || {
        test();
        let _ = done.send(());
    });
    match watchdog.recv_timeout(Duration::from_secs(10)) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("deadlock"),
        Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => worker.join().unwrap(),
    }
}

#[test]
fn a_waker_that_owns_buffers_of_the_pool_can_be_let_go_by_the_pool() {
    bounded(|| {
        let pool = pool(192);
        let owner =
            |pool: &Pool| Waker::from(Arc::new(Owner { _buffer: Mutex::new(pool.try_alloc(64).unwrap()) }));
        let (first, second) = (owner(&pool), owner(&pool));
        let mut waiting = pool.alloc(192);
        assert!(poll(&mut waiting, &first).is_pending());
        drop(first);
        // Replaces the first waker, whose buffer returns to the pool during a call of the pool.
        assert!(poll(&mut waiting, &second).is_pending());
        drop(second);
        assert_eq!(pool.stats().used_bytes, 64);
        drop(waiting);
        assert_eq!(pool.stats().used_bytes, 0);
    });
}

#[test]
fn many_threads_share_one_small_pool_without_losing_a_wake_up() {
    bounded(|| {
        let pool = pool(256);
        let threads: Vec<_> = (1..=4)
            .map(|number| {
                let pool = pool.clone();
                thread::spawn(move || {
                    for round in 0..500 {
                        let mut buffer = block_on(pool.alloc(number * 61)).unwrap();
                        buffer.fill(round as u8);
                        assert!(buffer.iter().all(|byte| *byte == round as u8));
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!((pool.stats().used_bytes, pool.stats().waiting), (0, 0));
    });
}

struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future + Unpin>(mut future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        match poll(&mut future, &waker) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

/// Counts the blocks that it registers, and refuses them while the test asks for that.
#[derive(Debug, Default)]
struct Visitor {
    seen: Mutex<Vec<BlockId>>,
    left: Mutex<Vec<BlockId>>,
    refuses: Mutex<bool>,
}

impl BlockVisitor for Visitor {
    fn block_added(&self, block: &Block) -> Result<(), VisitError> {
        if *self.refuses.lock().unwrap() {
            return Err(VisitError(Arc::new(std::io::Error::other("no room"))));
        }
        self.seen.lock().unwrap().push(block.id());
        Ok(())
    }

    fn block_removed(&self, block: &Block) {
        self.left.lock().unwrap().push(block.id());
    }
}

/// Registers one block; +1 for each registered block, -1 for each removed one.
#[derive(Debug, Default)]
struct OneBlock(Mutex<Vec<i32>>);

impl BlockVisitor for OneBlock {
    fn block_added(&self, _: &Block) -> Result<(), VisitError> {
        let mut events = self.0.lock().unwrap();
        if events.is_empty() {
            events.push(1);
            return Ok(());
        }
        Err(VisitError(Arc::new(std::io::Error::other("no room"))))
    }

    fn block_removed(&self, _: &Block) {
        self.0.lock().unwrap().push(-1);
    }
}

impl Visitor {
    fn refuse(&self, refuses: bool) {
        *self.refuses.lock().unwrap() = refuses;
    }

    fn count(&self) -> usize {
        self.seen.lock().unwrap().len()
    }
}

#[test]
fn every_visitor_sees_every_block_once_whenever_it_comes() {
    let pool = pool(1 << 20);
    let (early, late) = (Arc::new(Visitor::default()), Arc::new(Visitor::default()));
    pool.add_visitor(early.clone()).unwrap();
    let held: Vec<_> = (0..3).map(|_| pool.try_alloc(4096).unwrap()).collect();
    pool.add_visitor(late.clone()).unwrap();
    let more: Vec<_> = (0..2).map(|_| pool.try_alloc(4096).unwrap()).collect();
    for visitor in [&early, &late] {
        let mut seen = visitor.seen.lock().unwrap().clone();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!((seen.len(), visitor.count()), (5, 5));
    }
    drop((held, more));
}

#[test]
fn a_visitor_that_is_removed_gives_back_what_it_was_handed_and_gets_no_more() {
    let pool = pool(1 << 20);
    let (going, staying) = (Arc::new(Visitor::default()), Arc::new(Visitor::default()));
    let held: Vec<_> = (0..2).map(|_| pool.try_alloc(4096).unwrap()).collect();
    let known: Arc<dyn BlockVisitor> = going.clone();
    pool.add_visitor(known.clone()).unwrap();
    pool.add_visitor(staying.clone()).unwrap();
    let large = pool.try_alloc(100_000).unwrap();
    pool.remove_visitor(&known);
    let more = pool.try_alloc(4096).unwrap();
    // Once is enough.
    pool.remove_visitor(&known);
    let given = going.seen.lock().unwrap().clone();
    assert_eq!((given.len(), &given), (3, &*going.left.lock().unwrap()));
    assert_eq!((staying.count(), staying.left.lock().unwrap().len()), (4, 0));
    drop((held, large, more));
}

#[test]
fn a_visitor_that_is_removed_gives_back_the_block_that_a_later_one_refused() {
    let pool = pool(1 << 20);
    let (willing, refusing) = (Arc::new(Visitor::default()), Arc::new(Visitor::default()));
    let known: Arc<dyn BlockVisitor> = willing.clone();
    pool.add_visitor(known.clone()).unwrap();
    pool.add_visitor(refusing.clone()).unwrap();
    refusing.refuse(true);
    pool.try_alloc(100).unwrap_err();
    pool.remove_visitor(&known);
    assert_eq!(*willing.seen.lock().unwrap(), *willing.left.lock().unwrap());
    refusing.refuse(false);
    let buffer = pool.try_alloc(100).unwrap();
    assert_eq!((willing.count(), refusing.count()), (1, 1), "the one that stays was passed over");
    assert_eq!(refusing.seen.lock().unwrap()[0], buffer.block().unwrap().id());
}

#[test]
fn a_refusal_leaves_nothing_half_made_and_repeated_ones_pile_nothing_up() {
    let pool = pool(1 << 20);
    let (willing, refusing) = (Arc::new(Visitor::default()), Arc::new(Visitor::default()));
    pool.add_visitor(willing.clone()).unwrap();
    pool.add_visitor(refusing.clone()).unwrap();
    refusing.refuse(true);
    for _ in 0..5 {
        let error = pool.try_alloc(100).unwrap_err();
        assert!(matches!(&error, MemoryError::Register { pool: "test", .. }), "{error}");
        assert!(error.to_string().contains("no room"));
        assert_eq!((pool.stats().used_bytes, pool.stats().block_bytes), (0, 0));
    }
    assert_eq!((willing.count(), refusing.count()), (1, 0), "each refusal registered one more block");
    refusing.refuse(false);
    let buffer = pool.try_alloc(100).unwrap();
    let id = buffer.block().unwrap().id();
    assert_eq!((willing.count(), refusing.count()), (1, 1));
    assert_eq!((willing.seen.lock().unwrap()[0], refusing.seen.lock().unwrap()[0]), (id, id));
    assert_eq!(pool.stats().block_bytes, 4096);
}

#[test]
fn a_block_that_was_refused_is_not_used_for_a_buffer_that_does_not_fit_it() {
    let pool = pool(1 << 20);
    let refusing = Arc::new(Visitor::default());
    pool.add_visitor(refusing.clone()).unwrap();
    refusing.refuse(true);
    pool.try_alloc(100).unwrap_err();
    refusing.refuse(false);
    let buffer = pool.try_alloc(100_000).unwrap();
    assert!(buffer.block().unwrap().length() >= 100_000);
    assert_eq!(refusing.count(), 1);
}

#[test]
fn a_refusal_is_told_to_an_async_caller_and_the_next_in_line_goes_on() {
    let pool = pool(8192);
    let held = pool.try_alloc(4096).unwrap();
    let refusing = Arc::new(Visitor::default());
    pool.add_visitor(refusing.clone()).unwrap();
    let woken = Arc::new(Count::default());
    let (mut first, mut second) = (pool.alloc(8192), pool.alloc(64));
    assert!(poll(&mut first, Waker::noop()).is_pending());
    assert!(poll(&mut second, &Waker::from(woken.clone())).is_pending());
    drop(held);
    refusing.refuse(true);
    // Needs a block of its own.
    assert!(matches!(poll(&mut first, Waker::noop()), Poll::Ready(Err(MemoryError::Register { .. }))));
    assert_eq!(woken.0.load(Ordering::Relaxed), 1);
    assert!(matches!(poll(&mut second, Waker::noop()), Poll::Ready(Ok(_))));
}

#[test]
fn a_visitor_that_refuses_the_present_blocks_is_not_added() {
    let pool = pool(1 << 20);
    let held = pool.try_alloc(4096).unwrap();
    let refusing = Arc::new(Visitor::default());
    refusing.refuse(true);
    assert!(matches!(pool.add_visitor(refusing.clone()), Err(MemoryError::Register { .. })));
    let more = pool.try_alloc(4096).unwrap();
    assert_eq!(refusing.count(), 0);
    // It has room for the first block only, which is removed again.
    let full = Arc::new(OneBlock::default());
    assert!(matches!(pool.add_visitor(full.clone()), Err(MemoryError::Register { .. })));
    assert_eq!(*full.0.lock().unwrap(), [1, -1]);
    drop((held, more));
}

#[test]
fn absurd_sizes_are_refused_whatever_the_cap() {
    for cap in [0, 1, 1 << 30, u64::MAX] {
        let pool = pool(cap);
        let held = pool.try_alloc(1);
        for length in
            [usize::MAX, usize::MAX - 1, usize::MAX - ALIGNMENT, usize::MAX / 2, isize::MAX as usize]
        {
            let error = pool.try_alloc(length).unwrap_err();
            assert!(
                matches!(error, MemoryError::TooLarge { .. } | MemoryError::Exhausted { .. }),
                "{length} of {cap}: {error}"
            );
        }
        assert_eq!(held.is_ok(), cap >= ALIGNMENT as u64);
    }
}

#[test]
fn s4_buffers_of_ever_larger_sizes_reuse_each_others_blocks() {
    let cap = 1 << 20;
    let pool = pool(cap);
    let mut length = 64;
    while length <= cap as usize {
        drop(pool.try_alloc(length).unwrap());
        length += 4096;
    }
    let mapped = pool.stats().block_bytes;
    assert!(mapped <= 7 * cap, "{mapped} bytes mapped for one buffer at a time of at most {cap}");
}

#[test]
fn a_buffer_alone_in_its_block_wastes_at_most_a_quarter() {
    let pool = pool(1 << 30);
    for length in [4097, 10_000, 65_537, 1 << 20, (1 << 20) + 1, 5_000_000] {
        let buffer = pool.try_alloc(length).unwrap();
        let block = buffer.block().unwrap().length();
        // Whole pages come on top.
        assert!(block >= length && block <= length + length / 4 + 4096, "{length} in {block}");
        drop(buffer);
    }
}

#[test]
fn freed_neighbours_merge_into_room_for_a_large_buffer() {
    let pool = pool(4096);
    let mut small: Vec<_> = (0..64).map(|_| Some(pool.try_alloc(64).unwrap())).collect();
    // Every order of freeing leaves one range.
    for index in (0..64).step_by(2).chain((1..64).step_by(2).rev()) {
        small[index] = None;
    }
    let whole = pool.try_alloc(4096).unwrap();
    assert_eq!(pool.stats().block_bytes, 4096);
    drop(whole);
}

#[test]
fn bytes_share_the_buffer_and_give_it_back() {
    let pool = pool(4096);
    let mut buffer = pool.try_alloc(1000).unwrap();
    buffer.iter_mut().enumerate().for_each(|(index, byte)| *byte = index as u8);
    let buffer = buffer.freeze();
    let address = buffer.as_ptr();
    let copies: u64 = [CopyReason::Import, CopyReason::Local].map(|reason| count(reason).bytes).iter().sum();
    let bytes = Bytes::from(buffer.clone());
    assert_eq!(bytes.as_ptr(), address, "the bytes were copied");
    let tail = Bytes::from(buffer.slice(900..1000).unwrap());
    assert_eq!(tail.as_ptr().addr(), address.addr() + 900);
    assert_eq!(tail[..], buffer[900..]);
    let after: u64 = [CopyReason::Import, CopyReason::Local].map(|reason| count(reason).bytes).iter().sum();
    assert_eq!(copies, after);
    drop((buffer, bytes));
    assert_eq!(pool.stats().used_bytes, 1024);
    drop(tail);
    assert_eq!(pool.stats().used_bytes, 0);
    assert!(Bytes::from(Buf::empty()).is_empty());
}

#[test]
fn slices_stay_inside_their_buffer() {
    let pool = pool(4096);
    let mut buffer = pool.try_alloc(100).unwrap();
    buffer.iter_mut().enumerate().for_each(|(index, byte)| *byte = index as u8);
    let buffer = buffer.freeze();
    let middle = buffer.slice(10..90).unwrap();
    assert_eq!((middle.len(), middle[0], middle.offset()), (80, 10, buffer.offset() + 10));
    assert_eq!(middle.slice(5..10).unwrap()[..], [15, 16, 17, 18, 19]);
    assert!(middle.slice(80..80).unwrap().is_empty());
    #[allow(clippy::reversed_empty_ranges)]
    for range in [0..81, 81..81, 5..4, 0..usize::MAX, usize::MAX..usize::MAX] {
        assert!(middle.slice(range.clone()).is_none(), "{range:?}");
    }
}

#[test]
fn a_buffer_never_aliases_memory_that_is_lent() {
    let pool = pool(4096);
    let lent: Vec<_> = (0..8).map(|_| pool.try_alloc(256).unwrap().grant()).collect();
    let owned: Vec<_> = (0..8).map(|_| pool.try_alloc(256).unwrap().freeze()).collect();
    for granted in &lent {
        let apart = |buffer: &Buf| buffer.offset().abs_diff(granted.offset()) >= 256;
        assert!(owned.iter().all(apart));
    }
    lent.into_iter().for_each(|granted| drop(granted.end(GrantEnd::NeverSent).unwrap()));
}

#[test]
fn copies_are_counted_by_reason_and_cut_to_the_shorter_side() {
    // No other test of this binary copies for this reason.
    let before = count(CopyReason::ShmInline);
    let mut into = [0; 5];
    assert_eq!(copy_bytes(&mut into, &[1; 9], CopyReason::ShmInline), 5);
    assert_eq!(copy_bytes(&mut into, &[2; 2], CopyReason::ShmInline), 2);
    assert_eq!(copy_bytes(&mut into, &[], CopyReason::ShmInline), 0);
    assert_eq!(into, [2, 2, 1, 1, 1]);
    let after = count(CopyReason::ShmInline);
    assert_eq!((after.calls - before.calls, after.bytes - before.bytes), (3, 7));
}

/// At every offset from a cache line, and with every remainder.
#[test]
fn copies_past_the_caches_copy_every_byte_and_no_other() {
    let source: Vec<u8> = (0..300).map(|at| at as u8 | 1).collect();
    for (start, length) in
        (0..66).flat_map(|start| [0, 1, 15, 16, 17, 63, 64, 100, 200].map(|length| (start, length)))
    {
        let mut into = vec![0; 300];
        let from = &source[start / 3..][..length];
        let copied = copy_past_caches(&mut into[start..start + length], from, CopyReason::SimPiece);
        assert_eq!(copied, length);
        assert_eq!(&into[start..start + length], from, "{length} at {start}");
        assert!(
            into[..start].iter().chain(&into[start + length..]).all(|byte| *byte == 0),
            "{length} at {start}"
        );
    }
}

/// Of several pages, which are copied side by side.
#[test]
fn copies_of_several_pages_past_the_caches_copy_every_byte() {
    let source: Vec<u8> = (0..50_000_u32).map(|at| (at % 251) as u8 | 1).collect();
    for (start, length) in [(0, 16_384), (3, 16_384 + 64), (64, 49_000), (5, 33_000)] {
        let mut into = vec![0; 50_000];
        copy_past_caches(&mut into[start..start + length], &source[7..][..length], CopyReason::SimPiece);
        assert_eq!(&into[start..start + length], &source[7..][..length], "{length} at {start}");
        assert!(into[..start].iter().chain(&into[start + length..]).all(|byte| *byte == 0));
    }
}

#[test]
fn copies_past_the_caches_are_counted_and_cut_to_the_shorter_side() {
    // No other test of this binary copies for this reason.
    let (before, mut into) = (count(CopyReason::Decrypted), [0; 5]);
    assert_eq!(copy_past_caches(&mut into, &[1; 9], CopyReason::Decrypted), 5);
    assert_eq!(copy_past_caches(&mut into, &[2; 2], CopyReason::Decrypted), 2);
    assert_eq!(into, [2, 2, 1, 1, 1]);
    let after = count(CopyReason::Decrypted);
    assert_eq!((after.calls - before.calls, after.bytes - before.bytes), (2, 7));
}

#[test]
fn a_frozen_buffer_is_written_again_only_by_its_last_holder() {
    let pool = pool(4096);
    let buffer = pool.try_alloc(100).unwrap().freeze();
    let clone = buffer.clone();
    let buffer = buffer.try_into_mut().unwrap_err();
    drop(clone);
    let slice = buffer.slice(1..2).unwrap();
    let buffer = buffer.try_into_mut().unwrap_err();
    drop(slice);
    let exposure = buffer.expose();
    let buffer = buffer.try_into_mut().unwrap_err();
    drop(exposure);
    let bytes = Bytes::from(buffer.clone());
    let buffer = buffer.try_into_mut().unwrap_err();
    drop(bytes);
    let part = buffer.slice(0..99).unwrap();
    drop(buffer);
    let whole = part.slice(0..99).unwrap();
    assert!(part.try_into_mut().is_err(), "a part was written as the whole");
    assert!(whole.try_into_mut().is_err(), "a part was written as the whole");
    assert!(Buf::on_heap(&[1], CopyReason::Import).try_into_mut().is_err());

    let buffer = pool.try_alloc(100).unwrap().freeze();
    let place = buffer.as_ptr();
    let mut buffer = buffer.try_into_mut().unwrap();
    buffer.fill(7);
    let buffer = buffer.freeze();
    assert_eq!((buffer.as_ptr(), &buffer[..]), (place, &[7; 100][..]));
    drop(buffer);
    assert_eq!(pool.stats().used_bytes, 0);
}
