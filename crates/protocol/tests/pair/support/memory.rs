//! Destination memory that records its owners, and refuses what a correct connection never does.

use std::{
    collections::BTreeMap,
    future::poll_fn,
    sync::{Arc, Mutex},
    task::{Poll, Waker},
};

use tensorwire_protocol::{
    Allocator, Code, Destination, LentEnd, Metadata, ResultSlot, Status, limits::RESULT_BYTES,
};

/// Longest that a block can be.
const BLOCK_BYTES_MAX: u64 = 1 << 20;

/// A result slot that was not written.
const UNWRITTEN: [u8; RESULT_BYTES] = [0xDD; RESULT_BYTES];

/// The memory that a connection was drained of, without its own rings.
pub(crate) fn values(drained: Vec<Lent>) -> Vec<Lent> {
    let (rings, values): (Vec<_>, Vec<_>) = drained.into_iter().partition(|lent| lent.ring.is_some());
    rings.into_iter().for_each(Lent::end_drained);
    values
}

/// Granted memory. It must be taken back; otherwise it is a leak.
#[derive(Debug)]
pub(crate) struct Lent {
    block: usize,
    lease: u32,
    memory: Memory,
    is_settled: bool,
    /// The number of an own ring, which is no block; `None` in it for the record slots.
    ring: Option<Option<usize>>,
    /// What was validated.
    copy: (Vec<u8>, Option<[u8; RESULT_BYTES]>),
}

impl Drop for Lent {
    fn drop(&mut self) {
        if !self.is_settled && !std::thread::panicking() {
            self.memory.0.lock().unwrap().leaked += 1;
        }
    }
}

impl Lent {
    /// Memory with a copy of the bytes that have landed. The copy is validated.
    pub(crate) fn copied(mut self) -> Self {
        {
            let state = self.memory.0.lock().unwrap();
            let block = &state.blocks[self.block];
            let result = (state.has_results && !block.is_view).then_some(block.result);
            self.copy = (block.bytes.clone(), result);
        }
        self
    }

    pub(crate) fn content(&self) -> &[u8] {
        &self.copy.0
    }

    pub(crate) fn result(&self) -> Option<[u8; RESULT_BYTES]> {
        self.copy.1
    }

    pub(crate) fn ring(&self) -> Option<Option<usize>> {
        self.ring
    }

    /// The first `length` of its bytes, for a receive that is done.
    pub(crate) fn finish(self, length: usize) -> Vec<u8> {
        let mut bytes = self.memory.0.lock().unwrap().blocks[self.block].bytes.clone();
        bytes.truncate(length);
        self.end(LentEnd::Content);
        bytes
    }

    pub(crate) fn end(mut self, end: LentEnd) {
        self.is_settled = true;
        if self.ring.is_some() {
            return self.memory.ring_ended(format!("ring {end:?}"));
        }
        self.memory.clone().free(self.block, self.lease, Some(end));
    }

    /// After the queue pair is gone.
    pub(crate) fn end_drained(mut self) {
        self.is_settled = true;
        if self.ring.is_some() {
            return self.memory.ring_ended("ring drained".to_owned());
        }
        self.memory.clone().free(self.block, self.lease, None);
    }
}

#[derive(Debug)]
struct Block {
    /// Counts uses.
    lease: u32,
    is_lent: bool,
    /// The peer's memory, viewed here.
    is_view: bool,
    bytes: Vec<u8>,
    /// Its result slot.
    result: [u8; RESULT_BYTES],
}

#[derive(Debug, Default)]
struct State {
    blocks: Vec<Block>,
    /// Reused last in, first out: at once.
    free: Vec<usize>,
    capacity: usize,
    waiting: Vec<Waker>,
    ends: BTreeMap<String, u64>,
    leaked: u64,
    drained: u64,
    refusal: Option<Status>,
    is_stuck: bool,
    prefers_eager: bool,
    has_results: bool,
}

impl State {
    /// Blocks that are no views.
    fn own(&self) -> usize {
        self.blocks.iter().filter(|block| !block.is_view).count()
    }
}

/// A pool of blocks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Memory(Arc<Mutex<State>>);

impl Memory {
    pub(crate) fn new(capacity: usize) -> Self {
        let memory = Self::default();
        memory.0.lock().unwrap().capacity = capacity;
        memory
    }

    /// Memory whose destinations have result slots, or not.
    pub(crate) fn with_results(capacity: usize, has_results: bool) -> Self {
        let memory = Self::new(capacity);
        memory.0.lock().unwrap().has_results = has_results;
        memory
    }

    /// Memory without blocks is a script's, which takes anything.
    pub(crate) fn is_script(&self) -> bool {
        self.0.lock().unwrap().capacity == 0
    }

    /// Every later allocation fails.
    pub(crate) fn refuse(&self, status: Status) {
        self.0.lock().unwrap().refusal = Some(status);
    }

    /// Allocations succeed again.
    pub(crate) fn allow(&self) {
        self.0.lock().unwrap().refusal = None;
    }

    /// Sets whether known values come inside a message if they may.
    pub(crate) fn prefer_eager(&self, is_preferred: bool) {
        self.0.lock().unwrap().prefers_eager = is_preferred;
    }

    /// Every later allocation waits, until this is called with false.
    pub(crate) fn stick(&self, is_stuck: bool) {
        let wakers = {
            let mut state = self.0.lock().unwrap();
            state.is_stuck = is_stuck;
            std::mem::take(&mut state.waiting)
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// A write of the peer lands.
    pub(crate) fn write(&self, destination: Destination, bytes: &[u8], result: Option<[u8; RESULT_BYTES]>) {
        let mut state = self.0.lock().unwrap();
        if state.capacity == 0 {
            return;
        }
        let block = state.blocks.get_mut(destination.offset as usize).expect("a write outside all memory");
        assert!(block.is_lent, "S1: a write landed in memory that was taken back");
        assert_eq!(block.lease, destination.generation, "S1: a write landed in memory that was lent again");
        assert!(bytes.len() as u64 <= destination.capacity);
        block.bytes[..bytes.len()].copy_from_slice(bytes);
        if let Some(result) = result {
            block.result = result;
        }
    }

    /// A view of bytes of the peer.
    pub(crate) fn view(&self, bytes: Vec<u8>) -> Lent {
        let mut state = self.0.lock().unwrap();
        state.blocks.push(Block { lease: 1, is_lent: true, is_view: true, bytes, result: UNWRITTEN });
        let copy = (Vec::new(), None);
        let memory = self.clone();
        Lent { block: state.blocks.len() - 1, lease: 1, memory, is_settled: false, ring: None, copy }
    }

    /// An own ring, by its number, or the record slots.
    pub(crate) fn ring(&self, ring: Option<usize>) -> Lent {
        let (memory, copy) = (self.clone(), (Vec::new(), None));
        Lent { block: usize::MAX, lease: 0, memory, is_settled: false, ring: Some(ring), copy }
    }

    fn ring_ended(&self, why: String) {
        *self.0.lock().unwrap().ends.entry(why).or_default() += 1;
    }

    /// How often an own ring, or the slots, were given back for `why`.
    pub(crate) fn rings_ended(&self, why: &str) -> u64 {
        self.0.lock().unwrap().ends.get(&format!("ring {why}")).copied().unwrap_or(0)
    }

    /// The number of views that are held.
    pub(crate) fn viewed(&self) -> usize {
        self.0.lock().unwrap().blocks.iter().filter(|block| block.is_lent && block.is_view).count()
    }

    pub(crate) fn lent(&self) -> usize {
        self.0.lock().unwrap().blocks.iter().filter(|block| block.is_lent).count()
    }

    pub(crate) fn leaked(&self) -> u64 {
        self.0.lock().unwrap().leaked
    }

    pub(crate) fn drained(&self) -> u64 {
        self.0.lock().unwrap().drained
    }

    /// How often memory was given back for `end`.
    pub(crate) fn ended(&self, end: LentEnd) -> u64 {
        self.0.lock().unwrap().ends.get(&format!("{end:?}")).copied().unwrap_or(0)
    }

    fn free(self, block: usize, lease: u32, end: Option<LentEnd>) {
        let wakers = {
            let mut state = self.0.lock().unwrap();
            let entry = &mut state.blocks[block];
            assert!(entry.is_lent && entry.lease == lease, "memory was given back twice");
            entry.is_lent = false;
            entry.bytes.fill(0xEE);
            if !state.blocks[block].is_view {
                state.free.push(block);
            }
            match end {
                Some(end) => *state.ends.entry(format!("{end:?}")).or_default() += 1,
                None => state.drained += 1,
            }
            std::mem::take(&mut state.waiting)
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    fn try_allocate(&self, metadata: &Metadata) -> Option<(Lent, Destination)> {
        let mut state = self.0.lock().unwrap();
        if state.is_stuck {
            return None;
        }
        let block = match state.free.pop() {
            Some(block) => block,
            None if state.own() < state.capacity => {
                state.blocks.push(Block {
                    lease: 0,
                    is_lent: false,
                    is_view: false,
                    bytes: Vec::new(),
                    result: UNWRITTEN,
                });
                state.blocks.len() - 1
            }
            None => return None,
        };
        let entry = &mut state.blocks[block];
        entry.lease += 1;
        entry.is_lent = true;
        entry.bytes = vec![0xDD; metadata.byte_length as usize];
        entry.result = UNWRITTEN;
        let lease = entry.lease;
        let capacity = metadata.byte_length;
        let offset = block as u64;
        let result = state.has_results.then_some(ResultSlot { region: 2, generation: lease, offset });
        let destination = Destination { region: 1, generation: lease, offset, capacity, result };
        let copy = (Vec::new(), None);
        Some((Lent { block, lease, memory: self.clone(), is_settled: false, ring: None, copy }, destination))
    }
}

impl Allocator for Memory {
    type Lent = Lent;

    fn prefers_eager(&self, _: &Metadata) -> bool {
        self.0.lock().unwrap().prefers_eager
    }

    fn copy_eager(&self, _: &Metadata, content: &[u8]) -> Lent {
        self.view(content.to_vec())
    }

    async fn allocate(&self, metadata: &Metadata) -> Result<(Lent, Destination), Status> {
        assert!(metadata.byte_length > 0, "memory for nothing");
        if metadata.byte_length > BLOCK_BYTES_MAX {
            return Err(exhausted());
        }
        poll_fn(|context| {
            if let Some(status) = self.0.lock().unwrap().refusal.clone() {
                return Poll::Ready(Err(status));
            }
            if let Some(allocated) = self.try_allocate(metadata) {
                return Poll::Ready(Ok(allocated));
            }
            let mut state = self.0.lock().unwrap();
            if !state.waiting.iter().any(|known| known.will_wake(context.waker())) {
                state.waiting.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await
    }
}

/// The error of a failed allocation in tests.
pub(crate) fn exhausted() -> Status {
    Status::new(Code::ResourceExhausted, "the pool is at its cap")
}
