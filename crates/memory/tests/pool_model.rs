//! Sequences of pool operations against a model of a few lines.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

use memory::{
    ALIGNMENT, Alloc, Buf, BufMut, GrantEnd, GrantId, Granted, MemoryError, MemoryObserver, Pool, PoolConfig,
    Span,
};
use proptest::{collection::vec, prelude::*};

const CAP: usize = 20 * ALIGNMENT;

#[derive(Debug, Clone)]
enum Op {
    Try(usize),
    /// Starts to wait for room.
    Wait(usize),
    /// Polls one of the waiting.
    Poll(usize),
    /// Gives a place in the queue up.
    Cancel(usize),
    Drop(usize),
    Freeze(usize),
    /// Another handle on the same bytes.
    Share(usize),
    Grant(usize),
    End(usize),
    /// Drops a grant without evidence.
    Leak(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let size = prop_oneof![
        Just(0),
        Just(1),
        Just(ALIGNMENT),
        Just(ALIGNMENT + 1),
        1..CAP,
        Just(CAP),
        Just(CAP + 1),
        Just(usize::MAX - 3)
    ];
    let which = 0..8usize;
    prop_oneof![
        3 => size.clone().prop_map(Op::Try),
        2 => size.prop_map(Op::Wait),
        3 => which.clone().prop_map(Op::Poll),
        1 => which.clone().prop_map(Op::Cancel),
        4 => which.clone().prop_map(Op::Drop),
        1 => which.clone().prop_map(Op::Freeze),
        1 => which.clone().prop_map(Op::Share),
        1 => which.clone().prop_map(Op::Grant),
        1 => which.clone().prop_map(Op::End),
        1 => which.prop_map(Op::Leak),
    ]
}

#[derive(Debug)]
enum Held {
    Mut(BufMut),
    Shared(Buf),
    Granted(Granted),
}

/// Notes whether it was woken.
#[derive(Debug, Default)]
struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

struct Waiting {
    size: usize,
    future: Pin<Box<Alloc>>,
    woken: Arc<Flag>,
}

/// What an observer saw: the ranges that are out of the pool.
#[derive(Debug, Default)]
struct Watch(Mutex<Vec<Span>>);

impl MemoryObserver for Watch {
    fn allocated(&self, span: &Span) {
        let mut out = self.0.lock().unwrap();
        let overlaps = |other: &Span| {
            other.block == span.block
                && other.range.start < span.range.end
                && span.range.start < other.range.end
        };
        assert!(!out.iter().any(overlaps), "{span:?} was given out twice");
        out.push(span.clone());
    }

    fn freed(&self, span: &Span) {
        let mut out = self.0.lock().unwrap();
        let place = out.iter().position(|other| other == span);
        out.remove(place.expect("freed what was not out"));
    }

    fn granted(&self, span: &Span, _: GrantId) {
        assert!(self.0.lock().unwrap().contains(span));
    }

    fn grant_ended(&self, span: &Span, _: GrantId, _: Option<GrantEnd>) {
        assert!(self.0.lock().unwrap().contains(span));
    }
}

struct Model {
    pool: Pool,
    watch: Arc<Watch>,
    held: Vec<Held>,
    waiting: Vec<Waiting>,
    /// Reserved bytes of every distinct buffer, leaked ones included.
    used: usize,
    leaked: usize,
}

fn reserved(size: usize) -> usize {
    size.next_multiple_of(ALIGNMENT)
}

impl Model {
    fn new() -> Self {
        let watch = Arc::new(Watch::default());
        let observer: Arc<dyn MemoryObserver> = watch.clone();
        let config = PoolConfig {
            block_bytes: 4096,
            cap_bytes: CAP as u64,
            observer: Some(observer),
            ..PoolConfig::new("model")
        };
        let pool = Pool::new(config).unwrap();
        Self { pool, watch, held: Vec::new(), waiting: Vec::new(), used: 0, leaked: 0 }
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Try(size) => self.try_alloc(size),
            Op::Wait(size) => {
                let (future, woken) = (Box::pin(self.pool.alloc(size)), Arc::default());
                self.waiting.push(Waiting { size, future, woken });
                self.poll(self.waiting.len() - 1);
            }
            Op::Poll(which) if which < self.waiting.len() => self.poll(which),
            Op::Cancel(which) if which < self.waiting.len() => drop(self.waiting.remove(which)),
            Op::Drop(which) if which < self.held.len() => self.drop_held(which),
            Op::Freeze(which) => self.change(which, |held| match held {
                Held::Mut(buffer) => Held::Shared(buffer.freeze()),
                other => other,
            }),
            Op::Share(which) => {
                if let Some(Held::Shared(buffer)) = self.held.get(which) {
                    let again = buffer.slice(0..buffer.len()).unwrap();
                    self.held.push(Held::Shared(again));
                }
            }
            Op::Grant(which) => self.change(which, |held| match held {
                Held::Mut(buffer) => Held::Granted(buffer.grant()),
                other => other,
            }),
            Op::End(which) => self.change(which, |held| match held {
                Held::Granted(granted) => Held::Mut(granted.end(GrantEnd::Content).unwrap()),
                other => other,
            }),
            Op::Leak(which) if matches!(self.held.get(which), Some(Held::Granted(_))) => self.leak(which),
            _ => {}
        }
        self.check();
    }

    fn change(&mut self, which: usize, change: impl FnOnce(Held) -> Held) {
        if which < self.held.len() {
            let held = self.held.swap_remove(which);
            self.held.push(change(held));
        }
    }

    fn try_alloc(&mut self, size: usize) {
        let full = !self.waiting.is_empty() || size < CAP + 1 && self.used + reserved(size) > CAP;
        match self.pool.try_alloc(size) {
            Ok(buffer) => {
                assert!(size == 0 || !full);
                self.got(buffer, size);
            }
            Err(MemoryError::TooLarge { .. }) => assert!(size > CAP),
            Err(MemoryError::Exhausted { used, .. }) => {
                assert!(full && size > 0);
                assert_eq!(used, self.used as u64);
            }
            Err(other) => panic!("{other}"),
        }
    }

    fn poll(&mut self, which: usize) {
        let size = self.waiting[which].size;
        let fits = which == 0 && size <= CAP && self.used + reserved(size) <= CAP;
        let waker = Waker::from(self.waiting[which].woken.clone());
        let answer = self.waiting[which].future.as_mut().poll(&mut Context::from_waker(&waker));
        match answer {
            Poll::Pending => {
                assert!(!fits && (1..=CAP).contains(&size));
                return;
            }
            Poll::Ready(Ok(buffer)) => {
                assert!(fits || size == 0);
                self.got(buffer, size);
            }
            Poll::Ready(Err(error)) => {
                assert!(matches!(error, MemoryError::TooLarge { .. }) && size > CAP, "{error}");
            }
        }
        self.waiting.remove(which);
    }

    fn got(&mut self, mut buffer: BufMut, size: usize) {
        assert_eq!(buffer.len(), size);
        assert_eq!(buffer.as_ptr().addr() % ALIGNMENT, 0);
        assert_eq!(buffer.block().is_none(), size == 0);
        buffer.fill(0xA5);
        self.used += reserved(size);
        self.held.push(Held::Mut(buffer));
    }

    fn drop_held(&mut self, which: usize) {
        let held = self.held.swap_remove(which);
        match &held {
            Held::Granted(_) => return self.held.push(held),
            Held::Mut(buffer) => self.used -= reserved(buffer.len()),
            Held::Shared(buffer) => {
                let place = |buffer: &Buf| (buffer.block().map(memory::Block::id), buffer.offset());
                let last = !self.held.iter().any(
                    |other| matches!(other, Held::Shared(o) if place(o) == place(buffer) && !o.is_empty()),
                );
                self.used -= if last { reserved(buffer.len()) } else { 0 };
            }
        }
        drop(held);
        // Whoever is first in line learns that there is room now.
        if let Some(first) = self.waiting.first()
            && self.used + reserved(first.size) <= CAP
        {
            assert!(first.woken.0.load(Ordering::Relaxed), "nobody told the first in line");
        }
    }

    fn leak(&mut self, which: usize) {
        if let Held::Granted(granted) = self.held.swap_remove(which) {
            self.leaked += reserved(granted.length());
            drop(granted);
        }
    }

    fn check(&self) {
        let stats = self.pool.stats();
        assert_eq!(stats.used_bytes, self.used as u64);
        assert_eq!(stats.leaked_bytes, self.leaked as u64);
        assert_eq!(stats.waiting, self.waiting.len());
        let out = self.watch.0.lock().unwrap();
        let out: usize = out.iter().map(|span| reserved(span.range.len())).sum();
        assert_eq!(out, self.used);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn a_pool_does_what_its_model_does(ops in vec(op(), 1..80)) {
        let mut model = Model::new();
        ops.iter().for_each(|op| model.apply(op));
        // Without evidence nothing leaked comes back; everything else does.
        while let Some(held) = model.held.pop() {
            if let Held::Granted(granted) = held {
                drop(granted.end(GrantEnd::NeverSent).unwrap());
            }
        }
        prop_assert_eq!(model.pool.stats().used_bytes, model.leaked as u64);
    }
}
