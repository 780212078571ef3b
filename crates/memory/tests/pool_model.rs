//! Sequences of pool operations against a model of a few lines.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

use proptest::{collection::vec, prelude::*};
use tensorwire_memory::{
    ALIGNMENT, Alloc, Block, BlockId, Buf, BufMut, Exposure, GrantEnd, GrantId, Granted, MemoryError,
    MemoryObserver, Pool, PoolConfig, Retired, Span,
};

/// Two blocks and a half, which fill up to the last byte, so that a piece that is too small is noticed.
const CAP: usize = 5 * BLOCK / 2;
const BLOCK: usize = 4096;

#[derive(Debug, Clone)]
enum Op {
    Try(usize),
    /// Starts to wait for room.
    Wait(usize),
    /// Polls one of the waiting allocations.
    Poll(usize),
    /// Cancels a waiting allocation.
    Cancel(usize),
    Drop(usize),
    Freeze(usize),
    /// Another handle on the same bytes.
    Share(usize),
    Grant(usize),
    End(usize),
    /// Drops a grant without evidence.
    Leak(usize),
    /// For content that does not exist yet.
    Early(usize),
    /// The peer of a grant reports that the content was written.
    Answer(usize),
    /// Lets peers read a part of a shared buffer.
    Expose(usize, usize, usize),
    /// A peer reads at random.
    Read(usize, usize),
    /// A lost peer may still read a shared buffer.
    Retire(usize),
    Release(usize),
    /// Drops the token without a release.
    Forget(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let size = prop_oneof![
        Just(0),
        Just(1),
        Just(ALIGNMENT),
        Just(ALIGNMENT + 1),
        1..CAP,
        1..BLOCK,
        1..BLOCK / 4,
        1..BLOCK / 4,
        Just(CAP),
        Just(CAP + 1),
        Just(usize::MAX - 3)
    ];
    let which = 0..8usize;
    prop_oneof![
        3 => size.clone().prop_map(Op::Try),
        2 => size.clone().prop_map(Op::Wait),
        3 => which.clone().prop_map(Op::Poll),
        1 => which.clone().prop_map(Op::Cancel),
        4 => which.clone().prop_map(Op::Drop),
        1 => which.clone().prop_map(Op::Freeze),
        1 => which.clone().prop_map(Op::Share),
        1 => which.clone().prop_map(Op::Grant),
        1 => which.clone().prop_map(Op::End),
        1 => which.clone().prop_map(Op::Leak),
        2 => size.prop_map(Op::Early),
        1 => which.clone().prop_map(Op::Answer),
        1 => (which.clone(), 0..100usize, 0..200usize).prop_map(|(which, a, b)| Op::Expose(which, a, b)),
        2 => (0..4096usize, 1..100usize).prop_map(|(offset, length)| Op::Read(offset, length)),
        1 => which.clone().prop_map(Op::Retire),
        1 => which.clone().prop_map(Op::Release),
        1 => which.prop_map(Op::Forget),
    ]
}

#[derive(Debug)]
enum Held {
    Mut(BufMut),
    Shared(Buf),
    Exposed(Exposure),
    Retired(Retired),
    Granted(Granted),
}

/// Identifies an allocation; `None` for an empty one.
type Place = Option<(BlockId, usize)>;

impl Held {
    /// The shared bytes that it holds.
    fn buf(&self) -> Option<&Buf> {
        match self {
            Self::Shared(buffer) => Some(buffer),
            Self::Exposed(exposure) => Some(exposure.buf()),
            Self::Retired(retired) => retired.buf(),
            Self::Mut(_) | Self::Granted(_) => None,
        }
    }
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

/// What an observer has seen: the allocated ranges.
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
    /// Every allocation that is not empty, with its reserved bytes.
    out: BTreeMap<(BlockId, usize), usize>,
    /// Allocations whose content does not exist yet.
    early: BTreeSet<(BlockId, usize)>,
    leaked: BTreeSet<(BlockId, usize)>,
}

fn reserved(size: usize) -> usize {
    size.next_multiple_of(ALIGNMENT)
}

impl Model {
    fn new() -> Self {
        let watch = Arc::new(Watch::default());
        let observer: Arc<dyn MemoryObserver> = watch.clone();
        let config = PoolConfig {
            block_bytes: BLOCK,
            cap_bytes: CAP as u64,
            observer: Some(observer),
            ..PoolConfig::new("model")
        };
        let pool = Pool::new(config).unwrap();
        let (out, early, leaked) = Default::default();
        Self { pool, watch, held: Vec::new(), waiting: Vec::new(), out, early, leaked }
    }

    fn used(&self) -> usize {
        self.out.values().sum()
    }

    fn sum(&self, places: &BTreeSet<(BlockId, usize)>) -> usize {
        places.iter().map(|place| self.out[place]).sum()
    }

    /// Allocations that a retired token holds.
    fn retired(&self) -> BTreeSet<(BlockId, usize)> {
        let tokens = self.held.iter().filter(|held| matches!(held, Held::Retired(_)));
        tokens.filter_map(|held| self.place(held.buf()?)).collect()
    }

    /// The allocation that `buffer` is a part of.
    fn place(&self, buffer: &Buf) -> Place {
        let block = buffer.block()?.id();
        let before = self.out.range(..=(block, buffer.offset())).next_back();
        before.map(|(place, _)| *place)
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Try(size) => self.try_alloc(size),
            Op::Early(size) => self.try_alloc_early(size),
            Op::Wait(size) => {
                let (future, woken) = (Box::pin(self.pool.alloc(size)), Arc::default());
                self.waiting.push(Waiting { size, future, woken });
                self.poll(self.waiting.len() - 1);
            }
            Op::Poll(which) if which < self.waiting.len() => self.poll(which),
            Op::Cancel(which) if which < self.waiting.len() => drop(self.waiting.remove(which)),
            Op::Drop(which) if which < self.held.len() => self.drop_held(which),
            Op::Share(which) => {
                if let Some(Held::Shared(buffer)) = self.held.get(which) {
                    let again = buffer.slice(0..buffer.len()).unwrap();
                    self.held.push(Held::Shared(again));
                }
            }
            Op::Expose(which, start, end) => {
                let part =
                    self.held.get(which).and_then(Held::buf).and_then(|buffer| buffer.slice(start..end));
                // An empty part at the end of one allocation looks like the start of the next.
                let part = part.filter(|part| !part.is_empty());
                self.held.extend(part.map(|part| Held::Exposed(part.expose())));
            }
            Op::Read(offset, length) => self.read(offset, length),
            Op::Leak(which) if matches!(self.held.get(which), Some(Held::Granted(_))) => self.leak(which),
            Op::Forget(which) if matches!(self.held.get(which), Some(Held::Retired(_))) => self.leak(which),
            Op::Release(which) if matches!(self.held.get(which), Some(Held::Retired(_))) => {
                self.drop_held(which);
            }
            ref other => self.change(other),
        }
        self.check();
    }

    /// Operations that turn one value into another.
    fn change(&mut self, op: &Op) {
        let (Op::Freeze(which) | Op::Grant(which) | Op::End(which) | Op::Answer(which) | Op::Retire(which)) =
            *op
        else {
            return;
        };
        if which >= self.held.len() {
            return;
        }
        let held = match (op, self.held.swap_remove(which)) {
            (Op::Freeze(_), Held::Mut(buffer)) => {
                let buffer = buffer.freeze();
                self.exists(self.place(&buffer));
                Held::Shared(buffer)
            }
            (Op::Grant(_), Held::Mut(buffer)) => Held::Granted(buffer.grant()),
            (Op::End(_), Held::Granted(granted)) => {
                self.exists(granted.block().map(|block| (block.id(), granted.offset())));
                Held::Mut(granted.end(GrantEnd::Content).unwrap())
            }
            (Op::Answer(_), Held::Granted(granted)) => {
                granted.answered();
                self.exists(granted.block().map(|block| (block.id(), granted.offset())));
                Held::Granted(granted)
            }
            (Op::Retire(_), Held::Shared(buffer)) => Held::Retired(buffer.retire()),
            (_, other) => other,
        };
        self.held.push(held);
    }

    /// The content of an allocation exists now.
    fn exists(&mut self, place: Place) {
        place.map(|place| self.early.remove(&place));
    }

    fn try_alloc(&mut self, size: usize) {
        let full = !self.waiting.is_empty() || size < CAP + 1 && self.used() + reserved(size) > CAP;
        match self.pool.try_alloc(size) {
            Ok(buffer) => {
                assert!(size == 0 || !full);
                self.got(buffer, size);
            }
            Err(MemoryError::TooLarge { .. }) => assert!(size > CAP),
            Err(MemoryError::Exhausted { used, .. }) => {
                assert!(full && size > 0);
                assert_eq!(used, self.used() as u64);
            }
            Err(other) => panic!("{other}"),
        }
    }

    fn try_alloc_early(&mut self, size: usize) {
        let full = !self.waiting.is_empty() || size < CAP + 1 && self.used() + reserved(size) > CAP;
        let retired = self.sum(&self.retired());
        let share = CAP.saturating_sub(self.sum(&self.leaked)).saturating_sub(retired) / 2;
        let early = self.sum(&self.early);
        match self.pool.try_alloc_early(size) {
            Ok(buffer) => {
                assert!(size == 0 || !full && early + reserved(size) <= share);
                let place = buffer.block().map(|block| (block.id(), offset_of(&buffer)));
                self.got(buffer, size);
                self.early.extend(place);
            }
            Err(MemoryError::TooLarge { .. }) => assert!(size > CAP),
            Err(MemoryError::Exhausted { .. }) => assert!(full && size > 0),
            Err(MemoryError::EarlyExhausted { early: told, share: bound, .. }) => {
                assert!(!full && early + reserved(size) > share);
                assert_eq!((told, bound), (early as u64, share as u64));
            }
            Err(other) => panic!("{other}"),
        }
    }

    /// Checks that a peer finds bytes exactly where one exposure covers them, and that they are those that their owner
    /// wrote.
    fn read(&self, offset: usize, length: usize) {
        let blocks: Vec<_> = self.held.iter().filter_map(|held| held.buf()?.block()).collect();
        for block in blocks {
            let covers = |held: &Held| match held {
                Held::Exposed(exposure) => {
                    let part = exposure.buf();
                    part.block().map(Block::id) == Some(block.id())
                        && part.offset() <= offset
                        && offset + length <= part.offset() + part.len()
                }
                _ => false,
            };
            match block.exposed(offset as u64, length as u64) {
                Ok(found) => {
                    assert!(self.held.iter().any(covers));
                    assert!(found.len() == length && found.iter().all(|byte| *byte == 0xA5));
                }
                Err(MemoryError::NotExposed { .. }) => assert!(!self.held.iter().any(covers)),
                Err(other) => panic!("{other}"),
            }
        }
    }

    fn poll(&mut self, which: usize) {
        let size = self.waiting[which].size;
        let fits = which == 0 && size <= CAP && self.used() + reserved(size) <= CAP;
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
        if let Some(block) = buffer.block() {
            let again = self.out.insert((block.id(), offset_of(&buffer)), reserved(size));
            assert!(again.is_none(), "given out twice");
        }
        self.held.push(Held::Mut(buffer));
    }

    /// Drops or releases one value, which frees its allocation if no other value holds it.
    fn drop_held(&mut self, which: usize) {
        let held = self.held.swap_remove(which);
        let place = match &held {
            Held::Granted(_) => return self.held.push(held),
            Held::Mut(buffer) => buffer.block().map(|block| (block.id(), offset_of(buffer))),
            other => other.buf().and_then(|buffer| self.place(buffer)),
        };
        let is_kept = |other: &Held| other.buf().is_some_and(|buffer| self.place(buffer) == place);
        if let Some(place) = place
            && !self.held.iter().any(is_kept)
            && !self.leaked.contains(&place)
        {
            self.out.remove(&place);
            self.early.remove(&place);
        }
        match held {
            Held::Retired(retired) => retired.release(),
            other => drop(other),
        }
        // The first caller in line is woken when there is room.
        if let Some(first) = self.waiting.first()
            && self.used() + reserved(first.size) <= CAP
        {
            assert!(first.woken.0.load(Ordering::Relaxed), "nobody told the first in line");
        }
    }

    /// Drops a grant without evidence, or a retired token without a release.
    fn leak(&mut self, which: usize) {
        let held = self.held.swap_remove(which);
        let place = match &held {
            Held::Granted(granted) => granted.block().map(|block| (block.id(), granted.offset())),
            other => other.buf().and_then(|buffer| self.place(buffer)),
        };
        self.exists(place);
        self.leaked.extend(place);
        drop(held);
    }

    fn check(&self) {
        let stats = self.pool.stats();
        assert_eq!(stats.used_bytes, self.used() as u64);
        assert_eq!(stats.early_bytes, self.sum(&self.early) as u64);
        assert_eq!(stats.leaked_bytes, self.sum(&self.leaked) as u64);
        assert_eq!(stats.retired_bytes, self.sum(&self.retired()) as u64);
        assert_eq!(stats.waiting, self.waiting.len());
        let out = self.watch.0.lock().unwrap();
        let out: usize = out.iter().map(|span| reserved(span.range.len())).sum();
        assert_eq!(out, self.used());
    }
}

/// First byte inside the block.
fn offset_of(buffer: &BufMut) -> usize {
    buffer.as_ptr().addr() - buffer.block().unwrap().base().as_ptr().addr()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(6000) })]

    #[test]
    fn a_pool_does_what_its_model_does(ops in vec(op(), 1..80)) {
        let mut model = Model::new();
        ops.iter().for_each(|op| model.apply(op));
        // Leaked bytes never return without evidence; everything else returns.
        while let Some(held) = model.held.pop() {
            match held {
                Held::Granted(granted) => drop(granted.end(GrantEnd::NeverSent).unwrap()),
                Held::Retired(retired) => retired.release(),
                other => drop(other),
            }
        }
        prop_assert_eq!(model.pool.stats().used_bytes, model.sum(&model.leaked) as u64);
    }
}
