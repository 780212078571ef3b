//! The exchanges of two processes over shared words, under every interleaving that loom finds: the fabric's own steps,
//! compiled with loom's atomics.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a failed test

use loom::{
    cell::UnsafeCell,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use crate::{chunks, model, tail::Tail, word, words as steps};

#[test]
fn a_published_descriptor_is_whole_and_no_slot_is_overwritten_unread() {
    const SLOTS: usize = 2;
    const COUNT: u64 = 4;
    struct Ring {
        slots: [[AtomicU64; 3]; SLOTS],
        consumed: AtomicU64,
    }
    model(|| {
        let slots = [0; SLOTS].map(|_| [word(), word(), word()]);
        let ring = Arc::new(Ring { slots, consumed: word() });
        let producer = {
            let ring = ring.clone();
            thread::spawn(move || {
                for position in 0..COUNT {
                    while position - steps::load(&ring.consumed) >= SLOTS as u64 {
                        thread::yield_now();
                    }
                    let [sequence, first, second] = &ring.slots[position as usize % SLOTS];
                    let words = [(first, 10 + position), (second, 20 + position)];
                    steps::publish(sequence, words.into_iter(), position + 1);
                }
            })
        };
        for position in 0..COUNT {
            let [sequence, first, second] = &ring.slots[position as usize % SLOTS];
            while steps::load(sequence) != position + 1 {
                thread::yield_now();
            }
            let seen = (first.load(Ordering::Relaxed), second.load(Ordering::Relaxed));
            assert_eq!(seen, (10 + position, 20 + position));
            ring.consumed.store(position + 1, Ordering::Release);
        }
        producer.join().unwrap();
    });
}

/// Two threads post quiet descriptors into a ring of two slots without a lock, while a third, which has the producer's lock,
/// posts one that is not quiet and allows more of them.
#[test]
fn threads_that_post_side_by_side_never_share_a_slot_or_overwrite_an_unread_one() {
    const SLOTS: u64 = 2;
    struct Ring {
        tail: Tail,
        slots: [(AtomicU64, UnsafeCell<u64>); SLOTS as usize],
        consumed: AtomicU64,
    }
    impl Ring {
        fn post(&self, position: u64) {
            let (sequence, payload) = &self.slots[(position % SLOTS) as usize];
            // SAFETY: loom fails the model if anybody else accesses the slot meanwhile.
            payload.with_mut(|payload| unsafe { *payload = position });
            steps::publish(sequence, std::iter::empty(), position + 1);
        }
    }
    model(|| {
        let slots = [0; SLOTS as usize].map(|_| (word(), UnsafeCell::new(0)));
        let ring = Arc::new(Ring { tail: Tail::new(), slots, consumed: word() });
        ring.tail.allow_quiet(1);
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let ring = ring.clone();
                thread::spawn(move || {
                    let taken = ring.tail.take_quiet();
                    taken.into_iter().for_each(|position| ring.post(position));
                    u64::from(taken.is_some())
                })
            })
            .collect();
        let consumer = {
            let ring = ring.clone();
            thread::spawn(move || {
                let (sequence, payload) = &ring.slots[0];
                while steps::load(sequence) != 1 {
                    thread::yield_now();
                }
                // SAFETY: as in `post`.
                payload.with(|payload| assert_eq!(unsafe { *payload }, 0));
                ring.consumed.store(1, Ordering::Release);
            })
        };
        // One slot is left besides the position that a quiet descriptor may take.
        ring.post(ring.tail.take(1));
        let consumed = steps::load(&ring.consumed);
        assert!(consumed <= ring.tail.next(), "no peer can have executed more than was taken");
        ring.tail.allow_quiet(consumed + SLOTS);
        let quiet: u64 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert_eq!(ring.tail.next(), 1 + quiet);
        consumer.join().unwrap();
    });
}

/// A sleeper's words, and its eventfd as a number of edges.
struct Bell {
    sleep: AtomicU64,
    rung: AtomicU64,
    listens: AtomicU64,
    edges: AtomicU64,
}

impl Bell {
    fn new() -> Self {
        Self { sleep: word(), rung: word(), listens: word(), edges: word() }
    }

    fn ring(&self) {
        self.edges.fetch_add(1, Ordering::AcqRel);
    }
}

#[test]
fn no_wake_up_is_lost_between_two_ringers_and_one_sleeper() {
    model(|| {
        let bell = Arc::new(Bell::new());
        let work = Arc::new([word(), word()]);
        let ringers: Vec<_> = (0..2)
            .map(|index| {
                let (bell, work) = (bell.clone(), work.clone());
                thread::spawn(move || {
                    work[index].store(1, Ordering::Release);
                    if steps::must_ring(&bell.sleep, &bell.rung) {
                        bell.ring();
                    }
                })
            })
            .collect();
        // The sleeper falls asleep once, and looks again.
        steps::fall_asleep(&bell.sleep, 1);
        let seen = [0, 1].map(|index| steps::load(&work[index]) == 1);
        ringers.into_iter().for_each(|ringer| ringer.join().unwrap());
        let edges = bell.edges.load(Ordering::Acquire);
        assert!(seen == [true, true] || edges > 0, "asleep over work: {seen:?}");
        assert!(edges <= 1, "one sleep is rung once");
    });
}

#[test]
fn a_second_sleep_is_rung_again() {
    model(|| {
        let (bell, work) = (Arc::new(Bell::new()), Arc::new(word()));
        let ringer = {
            let (bell, work) = (bell.clone(), work.clone());
            thread::spawn(move || {
                for round in 1..=2 {
                    work.store(round, Ordering::Release);
                    if steps::must_ring(&bell.sleep, &bell.rung) {
                        bell.ring();
                    }
                }
            })
        };
        // Sleeps until all work is seen, as the driver does: takes the present edges, announces its sleep, looks again.
        // If an edge is lost, loom's limit of steps ends the model.
        for epoch in 1.. {
            let taken = bell.edges.load(Ordering::Acquire);
            steps::fall_asleep(&bell.sleep, epoch);
            if steps::load(&work) == 2 {
                break;
            }
            while bell.edges.load(Ordering::Acquire) == taken {
                thread::yield_now();
            }
        }
        ringer.join().unwrap();
        assert!(bell.edges.load(Ordering::Acquire) <= 2, "rung more often than there was work");
    });
}

#[test]
fn a_release_is_seen_or_rung_for_when_the_lender_listens() {
    model(|| {
        let (bell, lease, released) = (Arc::new(Bell::new()), Arc::new(word()), Arc::new(word()));
        let reader = {
            let (bell, lease, released) = (bell.clone(), lease.clone(), released.clone());
            thread::spawn(move || {
                steps::release(&lease, &released, 7);
                if steps::must_ring_for_release(&bell.listens, &bell.sleep, &bell.rung) {
                    bell.ring();
                }
            })
        };
        // The lender's pool has no free memory: it announces that it listens, falls asleep, looks again.
        bell.listens.store(1, Ordering::Relaxed);
        steps::fall_asleep(&bell.sleep, 1);
        let counted = steps::load(&released);
        if counted == 1 {
            assert_eq!(steps::load(&lease), 7, "counted before it was there");
        }
        reader.join().unwrap();
        assert!(counted == 1 || bell.edges.load(Ordering::Acquire) == 1, "the pool starves");
    });
}

#[test]
fn released_bytes_are_read_no_more() {
    model(|| {
        let (bytes, lease, released) = (Arc::new(UnsafeCell::new(1)), Arc::new(word()), Arc::new(word()));
        let reader = {
            let (bytes, lease) = (bytes.clone(), lease.clone());
            thread::spawn(move || {
                // SAFETY: loom fails the model if anyone writes meanwhile.
                assert_eq!(bytes.with(|bytes| unsafe { *bytes }), 1);
                steps::release(&lease, &released, 7);
            })
        };
        if steps::load(&lease) == 7 {
            // SAFETY: as above; this is the claim.
            bytes.with_mut(|bytes| unsafe { *bytes = 2 });
        }
        reader.join().unwrap();
    });
}

#[test]
fn bytes_of_a_closed_connection_are_never_delivered() {
    model(|| {
        let (byte, closed) = (Arc::new(AtomicU64::new(1)), Arc::new(word()));
        let target = {
            let (byte, closed) = (byte.clone(), closed.clone());
            thread::spawn(move || {
                let copied = byte.load(Ordering::Relaxed);
                (steps::is_closed(&closed) == 0).then_some(copied)
            })
        };
        steps::close(&closed, 1);
        byte.store(2, Ordering::Relaxed); // The source has a new owner.
        let delivered = target.join().unwrap();
        assert!(delivered.is_none_or(|byte| byte == 1), "torn");
    });
}

/// A payload of chunks that are plain memory to loom: it reports each chunk that two threads access without order.
struct Payload {
    chunks: chunks::Chunks,
    bytes: [UnsafeCell<u32>; 3],
}

impl Payload {
    fn copy(&self, chunk: u32) {
        // SAFETY: no other thread accesses the bytes meanwhile. That is what the model shows; loom fails if it does not hold.
        self.bytes[chunk as usize].with_mut(|bytes| unsafe { *bytes += 1 });
    }

    fn help(&self) {
        while let Some(chunk) = self.chunks.take_back() {
            self.copy(chunk);
            self.chunks.helped();
        }
    }
}

#[test]
fn a_helped_copy_copies_each_chunk_once_and_is_over_when_the_helper_has_left() {
    model(|| {
        let bytes = [0; 3].map(UnsafeCell::new);
        let payload = Arc::new(Payload { chunks: chunks::Chunks::new(3), bytes });
        let helper = {
            let payload = payload.clone();
            thread::spawn(move || payload.help())
        };
        while let Some(chunk) = payload.chunks.take_front() {
            payload.copy(chunk);
        }
        while !payload.chunks.all_left() {
            thread::yield_now();
        }
        for bytes in &payload.bytes {
            // SAFETY: as above.
            assert_eq!(bytes.with(|bytes| unsafe { *bytes }), 1);
        }
        helper.join().unwrap();
    });
}

#[test]
fn after_a_stop_the_helper_leaves_what_it_has_and_touches_nothing_more() {
    model(|| {
        let bytes = [0; 3].map(UnsafeCell::new);
        let payload = Arc::new(Payload { chunks: chunks::Chunks::new(3), bytes });
        let helper = {
            let payload = payload.clone();
            thread::spawn(move || payload.help())
        };
        payload.chunks.stop();
        while !payload.chunks.all_left() {
            thread::yield_now();
        }
        for bytes in &payload.bytes {
            // SAFETY: as above: the memory is someone else's from here on.
            bytes.with_mut(|bytes| unsafe { *bytes = 7 });
        }
        helper.join().unwrap();
        for bytes in &payload.bytes {
            // SAFETY: as above.
            assert_eq!(bytes.with(|bytes| unsafe { *bytes }), 7);
        }
    });
}
