//! A cell of a catalogue between the process that replaces its content and one that reads it, under every interleaving that
//! loom finds: the fabric's own steps, compiled over loom's atomics.

use loom::{
    cell::UnsafeCell,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use crate::{model, sequence, word, words};

/// Two pieces of memory, two words each. Contents use them alternately.
type Memory = [[AtomicU64; 2]; 2];

/// A cell: its sequence, and the index of the piece with its content.
struct Cell {
    sequence: AtomicU64,
    at: AtomicU64,
    memory: Memory,
}

#[test]
fn s2_a_copy_is_of_one_content_though_the_memory_is_reused() {
    model(|| {
        let cell =
            Arc::new(Cell { sequence: word(), at: word(), memory: [[word(), word()], [word(), word()]] });
        let publisher = {
            let cell = cell.clone();
            thread::spawn(move || {
                // Content 1 goes into the other piece, and content 2 into the piece of content 0.
                for content in 1..=2 {
                    let at = content % 2;
                    cell.memory[at as usize].iter().for_each(|word| word.store(content, Ordering::Relaxed));
                    sequence::replace(&cell.sequence, || cell.at.store(at, Ordering::Relaxed), || {});
                }
            })
        };
        if let Some(number) = sequence::begin(&cell.sequence) {
            let at = cell.at.load(Ordering::Relaxed);
            let copied = [0, 1].map(|index| cell.memory[at as usize][index].load(Ordering::Relaxed));
            if sequence::is_unchanged(&cell.sequence, number) {
                assert_eq!(copied, [number / 2; 2], "the content of edition {number}");
            }
        }
        publisher.join().unwrap();
    });
}

/// A cell whose content is in `memory`, and a reader's claim word. Contents are claimed by their number.
struct Viewed {
    sequence: AtomicU64,
    closed: AtomicU64,
    claim: AtomicU64,
    memory: UnsafeCell<u64>,
}

impl Viewed {
    /// A cell with content 2.
    fn new() -> Arc<Self> {
        let (sequence, memory) = (AtomicU64::new(2), UnsafeCell::new(7));
        Arc::new(Self { sequence, closed: word(), claim: word(), memory })
    }

    /// The reader claims, checks, views if allowed, and ends the claim, by the steps that the fabric calls.
    fn view(&self) {
        let Some(number) = sequence::begin(&self.sequence) else { return };
        let claim = || {
            sequence::claim(&self.claim, number);
            Some(())
        };
        let is_over = || words::is_closed(&self.closed) != 0;
        let view = sequence::view(&self.sequence, number, claim, is_over).filter(|()| number == 2);
        if view.is_some() {
            // SAFETY: the publisher writes only what is not claimed; loom reports it otherwise.
            self.memory.with(|memory| assert_eq!(unsafe { *memory }, 7));
        }
        words::release(&self.claim, &word(), 0);
    }

    /// The publisher reuses the memory if no reader claims it.
    fn reuse(&self) {
        if sequence::claimed(&self.claim) != 2 {
            // SAFETY: nobody views it; loom reports it otherwise.
            self.memory.with_mut(|memory| unsafe { *memory = 8 });
        }
    }
}

#[test]
fn s1_memory_is_not_reused_between_the_claim_the_look_and_the_end_of_a_view() {
    model(|| {
        let viewed = Viewed::new();
        let publisher = {
            let viewed = viewed.clone();
            thread::spawn(move || {
                sequence::replace(&viewed.sequence, || {}, || viewed.reuse());
            })
        };
        viewed.view();
        publisher.join().unwrap();
    });
}

#[test]
fn s1_memory_of_a_closed_connection_is_not_reused_under_a_view() {
    model(|| {
        let viewed = Viewed::new();
        let publisher = {
            let viewed = viewed.clone();
            thread::spawn(move || {
                // The publisher reads the claims once after the connection's end. Without claims it does not read them
                // again.
                words::close(&viewed.closed, 1);
                viewed.reuse();
            })
        };
        viewed.view();
        publisher.join().unwrap();
    });
}
