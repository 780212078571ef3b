//! Threads that post concurrently.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use tensorwire_fabric::{
    Effort, FabricError, Immediate, Link, QueuePair, RegionGeneration, RegionId, RemoteRange, RemoteRegion,
    WorkRequest,
};
use tensorwire_memory::{Buf, Exposure};

use super::{
    super::{
        limits::READS_MAX,
        link::ShmLink,
        ring::{Descriptor, Source},
    },
    Rig, on_a_runtime,
};

/// Threads that post short writes; one more posts operations that are awaited.
const THREADS: u32 = 3;

/// Posts of each thread.
const POSTS: u32 = 20_000;

/// A ring with room for the operations and answers of a [`Rig`], and eight quiet writes.
const TIGHT_SLOTS: u32 = 32;

/// More bytes than fit into the words of a descriptor.
const BYTES: usize = 24;

const RANGE: RemoteRange =
    RemoteRange { region: RegionId(0), generation: RegionGeneration(0), offset: 0, length: BYTES as u64 };

/// The thread in the upper bits, the number of the post in the others.
fn immediate(thread: u32, post: u32) -> u32 {
    thread << 24 | post
}

fn payload(immediate: u32) -> [u8; BYTES] {
    std::array::from_fn(|at| immediate.to_le_bytes()[at % 4])
}

/// Ends the posting threads, even when the test fails.
struct Over<'test>(&'test AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn post_short(link: &ShmLink, thread: u32, is_over: &AtomicBool) {
    for post in 0..POSTS {
        let immediate = immediate(thread, post);
        while link.submit_inline(&payload(immediate), Some(&RANGE), Some(Immediate(immediate))).is_none() {
            if is_over.load(Ordering::Relaxed) {
                return;
            }
            thread::yield_now();
        }
    }
}

/// Posts notifications that have slots, and reaps completions until the test ends, as the driver does: short writes
/// find no room before the completions of older operations are reaped.
fn post_awaited(queue_pair: &QueuePair, link: &ShmLink, is_over: &AtomicBool) {
    for post in 0..POSTS {
        let immediate = Some(Immediate(immediate(THREADS, post)));
        let request = WorkRequest::Write { local: Buf::empty(), remote: None, immediate };
        while !is_over.load(Ordering::Relaxed) {
            match queue_pair.post_now(&request) {
                Ok(_) => break,
                Err(FabricError::SendQueueFull { .. }) => drop(link.progress(Effort::BeforeSleep)),
                Err(error) => panic!("{error}"),
            }
            thread::yield_now();
        }
    }
    while !is_over.load(Ordering::Relaxed) {
        link.progress(Effort::BeforeSleep);
        thread::yield_now();
    }
}

/// Waits for the next descriptor of the victim.
fn next(rig: &Rig, position: u64) -> Descriptor {
    loop {
        if let Some(descriptor) = rig.sees.descriptor(position).unwrap() {
            return descriptor;
        }
        thread::yield_now();
    }
}

#[test]
fn what_threads_post_side_by_side_comes_whole_and_once_and_in_the_order_of_each_thread() {
    side_by_side(64);
}

#[test]
fn so_it_does_through_a_ring_that_is_nearly_full_of_operations() {
    side_by_side(TIGHT_SLOTS);
}

fn side_by_side(slots: u32) {
    on_a_runtime(|| {
        let rig = Rig::with_slots(slots);
        let RemoteRange { region, generation, .. } = RANGE;
        rig.victim.add_remote_region(RemoteRegion { region, generation, base: 0, length: 4096, key: 1 });
        let (link, queue_pair): (Arc<ShmLink>, _) = (rig.link.clone(), rig.victim.clone());
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let (link, queue_pair, is_over) = (&*link, &queue_pair, &is_over);
            let _over = Over(is_over);
            (0..THREADS).for_each(|thread| drop(scope.spawn(move || post_short(link, thread, is_over))));
            scope.spawn(move || post_awaited(queue_pair, link, is_over));
            let mut seen = [0; THREADS as usize + 1];
            for position in 0..u64::from(POSTS * (THREADS + 1)) {
                let descriptor = next(&rig, position);
                let found = descriptor.immediate.unwrap();
                let seen = &mut seen[(found >> 24) as usize];
                assert_eq!(found & 0xFF_FFFF, *seen, "in the order of its thread");
                *seen += 1;
                assert_eq!(descriptor.is_quiet, found >> 24 < THREADS);
                if descriptor.source == Source::Inline {
                    // SAFETY: the slot has room for `BYTES`, and the victim changes it only after it was told below that
                    // the descriptor is executed.
                    let bytes = unsafe { *rig.sees.inline_pointer(position).cast::<[u8; BYTES]>() };
                    assert_eq!(bytes, payload(found), "whole");
                }
                rig.page.set_consumed(position + 1);
            }
            assert_eq!(seen, [POSTS; THREADS as usize + 1]);
        });
        rig.settle();
        let stats = rig.victim.stats();
        assert_eq!(stats.operations, u64::from(POSTS * (THREADS + 1)));
        assert_eq!(stats.bytes_sent, u64::from(POSTS * THREADS) * BYTES as u64);
    });
}

/// The posts of one thread into a tight ring, which the peer executes later.
struct Tight {
    rig: Rig,
    /// The descriptors that are in the ring and not executed, from position `executed` on: operations, quiet writes and
    /// answers, each with a number.
    posted: VecDeque<(Posted, u32)>,
    executed: u64,
    readable: (RemoteRange, u32),
    _exposure: Exposure,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Posted {
    Operation,
    Quiet,
    Answer,
}

impl Tight {
    fn new() -> Self {
        let rig = Rig::with_slots(TIGHT_SLOTS);
        let RemoteRange { region, generation, .. } = RANGE;
        rig.victim.add_remote_region(RemoteRegion { region, generation, base: 0, length: 4096, key: 1 });
        let (exposure, range, key) = rig.exposes(64);
        let readable = (range, key);
        Self { rig, posted: VecDeque::new(), executed: 0, readable, _exposure: exposure }
    }

    fn count(&self, kind: Posted) -> usize {
        self.posted.iter().filter(|(posted, _)| *posted == kind).count()
    }

    /// Posts if there is room; returns whether there was.
    fn post(&mut self, kind: Posted, number: u32) -> bool {
        let immediate = Some(Immediate(number));
        let is_posted = match kind {
            Posted::Quiet => self.rig.link.submit_inline(&payload(number), Some(&RANGE), immediate).is_some(),
            Posted::Operation => {
                let request = WorkRequest::Write { local: Buf::empty(), remote: None, immediate };
                self.rig.victim.post_now(&request).is_ok()
            }
            Posted::Answer if self.count(Posted::Answer) == READS_MAX as usize => false,
            Posted::Answer => {
                let (range, key) = self.readable;
                self.rig.asks(range, key, number);
                self.rig.settle();
                true
            }
        };
        is_posted.then(|| self.posted.push_back((kind, number)));
        is_posted
    }

    /// Lets the peer execute the oldest `count` descriptors.
    fn execute(&mut self, count: usize) {
        let count = count.min(self.posted.len());
        self.posted.drain(..count);
        self.executed += count as u64;
        self.rig.page.set_consumed(self.executed);
    }

    /// Checks that the ring has exactly the posted descriptors, whole.
    fn check(&self) {
        for (position, (kind, number)) in (self.executed..).zip(&self.posted) {
            let found = self.rig.sees.descriptor(position).unwrap();
            let found = found.unwrap_or_else(|| panic!("{kind:?} {number} waits at {position}"));
            let expected = match kind {
                Posted::Operation => found.source == Source::Nothing && !found.is_quiet,
                Posted::Quiet => found.source == Source::Inline && found.is_quiet,
                Posted::Answer => matches!(found.source, Source::Answer { tag, .. } if tag == *number),
            };
            let immediate = found.immediate == (*kind != Posted::Answer).then_some(*number);
            assert!(expected && immediate, "{kind:?} {number} at {position}: {found:?}");
        }
        assert!(self.posted.len() <= TIGHT_SLOTS as usize);
    }
}

#[test]
fn operations_and_answers_have_their_room_beside_all_the_quiet_writes_that_fit() {
    on_a_runtime(|| {
        let mut tight = Tight::new();
        let mut number = 0..;
        for kind in [Posted::Quiet, Posted::Operation, Posted::Answer] {
            while tight.post(kind, number.next().unwrap()) {}
            tight.check();
        }
        assert_eq!(
            [8, 8, 16],
            [Posted::Quiet, Posted::Operation, Posted::Answer].map(|kind| tight.count(kind))
        );
    });
}

#[test]
fn a_ring_that_is_nearly_full_makes_no_operation_or_answer_wait_and_overwrites_nothing() {
    on_a_runtime(|| {
        for seed in 1..=20_u64 {
            let mut tight = Tight::new();
            let mut state = seed;
            let mut draw = |below: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) % below
            };
            for number in 0..2000 {
                let kind = match draw(8) {
                    0..=2 => Some(Posted::Quiet),
                    3..=4 => Some(Posted::Operation),
                    5 => Some(Posted::Answer),
                    _ => None,
                };
                match kind {
                    Some(kind) => _ = tight.post(kind, number),
                    None if draw(2) == 0 => tight.execute(draw(12) as usize),
                    None => _ = tight.rig.settle(),
                }
                tight.check();
            }
            assert!(tight.rig.victim.failure().is_none(), "seed {seed}");
        }
    });
}
