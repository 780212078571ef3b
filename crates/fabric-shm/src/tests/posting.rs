//! Threads that post side by side.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use tensorwire_memory::Buf;
use tensorwire_verbs_reactor::{
    FabricError, Immediate, Link, QueuePair, RegionGeneration, RegionId, RemoteRange, RemoteRegion,
    WorkRequest,
};

use super::{
    super::{
        link::ShmLink,
        ring::{Descriptor, Source},
    },
    Rig, on_a_runtime,
};

/// Threads that post short writes; one more posts operations that are awaited.
const THREADS: u32 = 3;

/// What each posts.
const POSTS: u32 = 20_000;

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

/// Ends the posting threads, also when the test fails.
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

/// Posts notifications that have slots, and reaps completions to the end of the test, as the driver does: short writes find no
/// room before those of older operations are reaped.
fn post_awaited(queue_pair: &QueuePair, link: &ShmLink, is_over: &AtomicBool) {
    for post in 0..POSTS {
        let immediate = Some(Immediate(immediate(THREADS, post)));
        let request = WorkRequest::Write { local: Buf::empty(), remote: None, immediate };
        while !is_over.load(Ordering::Relaxed) {
            match queue_pair.post_now(&request) {
                Ok(_) => break,
                Err(FabricError::SendQueueFull { .. }) => link.drive(),
                Err(error) => panic!("{error}"),
            }
            thread::yield_now();
        }
    }
    while !is_over.load(Ordering::Relaxed) {
        link.drive();
        thread::yield_now();
    }
}

/// The next descriptor of the victim, once it is there.
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
    on_a_runtime(|| {
        let rig = Rig::with_slots(64);
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
