//! Values to send: one queue per scope and key, oldest waiter first.

use std::{
    collections::{HashMap, VecDeque},
    future::{Future, poll_fn},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Poll, Waker},
};

use futures::{
    FutureExt, StreamExt,
    channel::oneshot,
    future::BoxFuture,
    stream::{self, BoxStream},
};
use tensorwire_protocol::{
    Metadata, Scope, Sequenced, Source, Status, SubscriptionTerms, Take, TensorRequest,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TestValue {
    pub(crate) metadata: Metadata,
    pub(crate) bytes: Vec<u8>,
    place: (Scope, String),
    /// Its position in its queue, which never changes.
    sequence: u64,
}

#[derive(Debug, Default)]
struct Waiter {
    given: Option<Result<TestValue, Status>>,
    waker: Option<Waker>,
}

type SharedWaiter = Arc<Mutex<Waiter>>;

#[derive(Debug, Default)]
struct Queue {
    sent: u64,
    values: VecDeque<TestValue>,
    waiters: VecDeque<SharedWaiter>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct TestSource {
    table: Arc<Mutex<HashMap<(Scope, String), Queue>>>,
    /// What the next refusals wait for.
    turns: Arc<Mutex<VecDeque<oneshot::Receiver<()>>>>,
    /// Whether the request itself takes a value that the source has, and not the answer's first poll.
    gives_now: Arc<AtomicBool>,
}

impl TestSource {
    pub(crate) fn give_now(&self, gives_now: bool) {
        self.gives_now.store(gives_now, Ordering::Relaxed);
    }

    pub(crate) fn send(&self, scope: Scope, key: &str, metadata: Metadata, bytes: Vec<u8>) {
        let place = (scope, key.to_owned());
        let sequence = {
            let mut table = self.table.lock().unwrap();
            let queue = table.entry(place.clone()).or_default();
            queue.sent += 1;
            queue.sent
        };
        self.give(TestValue { metadata, bytes, place, sequence });
    }

    /// A value of `length` bytes, each `fill`.
    pub(crate) fn send_bytes(&self, scope: Scope, key: &str, length: u64, fill: u8) {
        self.send(scope, key, super::bytes_of(length), vec![fill; length as usize]);
    }

    /// The oldest waiter for `key` gets `status`; false without one.
    pub(crate) fn refuse(&self, scope: Scope, key: &str, status: Status) -> bool {
        let waiter =
            self.table.lock().unwrap().get_mut(&(scope, key.to_owned())).and_then(|q| q.waiters.pop_front());
        waiter.is_some_and(|waiter| {
            settle(&waiter, Err(status));
            true
        })
    }

    /// The next refusal that has no turn yet waits for this one.
    pub(crate) fn hold_refusal(&self) -> oneshot::Sender<()> {
        let (give, turn) = oneshot::channel();
        self.turns.lock().unwrap().push_back(turn);
        give
    }

    /// The values that were not taken.
    pub(crate) fn stored(&self, scope: Scope, key: &str) -> usize {
        self.table.lock().unwrap().get(&(scope, key.to_owned())).map_or(0, |queue| queue.values.len())
    }

    /// The number of takes that wait.
    pub(crate) fn waiting(&self, scope: Scope, key: &str) -> usize {
        self.table.lock().unwrap().get(&(scope, key.to_owned())).map_or(0, |queue| queue.waiters.len())
    }

    /// The newest value under the key of `value`. Those before it are left out.
    fn newest(&self, value: TestValue) -> TestValue {
        let mut table = self.table.lock().unwrap();
        let queued = table.get_mut(&value.place).and_then(|queue| queue.values.drain(..).next_back());
        queued.filter(|queued| queued.sequence > value.sequence).unwrap_or(value)
    }

    fn give(&self, value: TestValue) {
        let mut table = self.table.lock().unwrap();
        let queue = table.entry(value.place.clone()).or_default();
        match queue.waiters.pop_front() {
            Some(waiter) => {
                drop(table);
                settle(&waiter, Ok(value));
            }
            None => {
                let at = queue.values.partition_point(|other| other.sequence < value.sequence);
                queue.values.insert(at, value);
            }
        }
    }
}

/// Pages at their places, with zeros between them.
pub(crate) fn laid_out(pages: Vec<(Vec<u8>, u64)>) -> Vec<u8> {
    let mut content = Vec::new();
    for (page, place) in pages {
        content.resize(place as usize, 0);
        content.extend(page);
    }
    content
}

fn settle(waiter: &SharedWaiter, given: Result<TestValue, Status>) {
    let waker = {
        let mut waiter = waiter.lock().unwrap();
        waiter.given = Some(given);
        waiter.waker.take()
    };
    waker.into_iter().for_each(Waker::wake);
}

struct Interest {
    source: TestSource,
    place: (Scope, String),
    waiter: SharedWaiter,
}

impl Drop for Interest {
    fn drop(&mut self) {
        if let Some(queue) = self.source.table.lock().unwrap().get_mut(&self.place) {
            queue.waiters.retain(|waiter| !Arc::ptr_eq(waiter, &self.waiter));
        }
        let given = self.waiter.lock().unwrap().given.take();
        if let Some(Ok(value)) = given {
            self.source.give(value);
        }
    }
}

impl TestSource {
    fn take_at(&self, scope: Scope, key: &Arc<str>) -> Take<TestValue, <Self as Source>::Taking> {
        let place = (scope, key.to_string());
        let waiter = SharedWaiter::default();
        {
            let mut table = self.table.lock().unwrap();
            let queue = table.entry(place.clone()).or_default();
            match queue.values.pop_front() {
                Some(value) if self.gives_now.load(Ordering::Relaxed) => return Take::Now(Ok(value)),
                Some(value) => waiter.lock().unwrap().given = Some(Ok(value)),
                None => queue.waiters.push_back(waiter.clone()),
            }
        }
        let interest = Interest { source: self.clone(), place, waiter };
        Take::Later(Box::pin(poll_fn(move |context| {
            let mut waiter = interest.waiter.lock().unwrap();
            match waiter.given.take() {
                Some(given) => Poll::Ready(given),
                None => {
                    waiter.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })))
    }
}

impl Source for TestSource {
    type Bytes = Vec<u8>;
    type Taken = TestValue;
    type Taking = Pin<Box<dyn Future<Output = Result<TestValue, Status>> + Send>>;

    fn subscribe(
        self: &Arc<Self>,
        (scope, key): (Scope, &Arc<str>),
        terms: SubscriptionTerms,
    ) -> BoxStream<'static, Result<Sequenced<TestValue>, Status>> {
        let next = move |(source, key): (Arc<Self>, Arc<str>)| async move {
            let taken = match source.take_at(scope, &key) {
                Take::Now(taken) => taken,
                Take::Later(taking) => taking.await,
            };
            let chosen = taken.map(|value| if terms.every { value } else { source.newest(value) });
            let next = chosen.map(|taken| Sequenced { sequence: taken.sequence, taken, began: 0 });
            Some((next, (source, key)))
        };
        stream::unfold((self.clone(), key.clone()), next).boxed()
    }

    fn take(&self, request: &TensorRequest) -> Take<TestValue, Self::Taking> {
        self.take_at(request.scope, &request.key)
    }

    fn before_refusal(&self) -> Option<BoxFuture<'static, ()>> {
        let turn = self.turns.lock().unwrap().pop_front()?;
        Some(turn.map(drop).boxed())
    }

    fn metadata(taken: &TestValue) -> &Metadata {
        &taken.metadata
    }

    fn bytes(taken: &TestValue) -> Option<&Vec<u8>> {
        Some(&taken.bytes).filter(|bytes| !bytes.is_empty())
    }

    /// A value that is asked for as pages is pages of 8 bytes, each to twice its place. An answer to a call is pieces of 8 bytes.
    fn pages(taken: &TestValue) -> Option<Vec<(Vec<u8>, u64)>> {
        let distance = match taken.place.0 {
            Scope::Pages(_) => 16,
            Scope::Call(_) => 8,
            _ => return None,
        };
        let pages = taken.bytes.chunks(8).zip(0..);
        Some(pages.map(|(page, number)| (page.to_vec(), distance * number)).collect())
    }

    /// How many values were sent under its key, itself included.
    fn version(taken: &TestValue) -> u64 {
        taken.sequence
    }

    fn put_back(&self, taken: TestValue) {
        self.give(taken);
    }
}
