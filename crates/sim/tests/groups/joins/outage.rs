//! A store over a network that fails for some time: calls take time, and failed calls may or may not have been made.

use std::{
    ops::Range,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::FutureExt;
use tensorwire_collective::store::{MemoryStore, Store, StoreError};
use tensorwire_fabric::{BoxFuture, Runtime};
use tensorwire_sim::{Handle, Rng};

/// The longest round trip to the store.
const WAY: Duration = Duration::from_millis(2);

/// How often a wait checks whether the store still answers.
const LOOK: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(super) struct FailingStore {
    below: Arc<MemoryStore>,
    handle: Handle,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    rng: Rng,
    outage: Option<Range<Duration>>,
}

impl FailingStore {
    pub(super) fn new(below: &Arc<MemoryStore>, handle: &Handle, rng: Rng) -> Arc<Self> {
        let state = Mutex::new(State { rng, outage: None });
        Arc::new(Self { below: below.clone(), handle: handle.clone(), state })
    }

    /// When the store fails, measured from its first use.
    pub(super) fn draw_outage(rng: &mut Rng) -> Range<Duration> {
        let latest = Duration::from_millis(rng.pick([0, 20, 20_000]));
        let from = rng.duration(latest);
        let length = Duration::from_millis(rng.pick([10, 3_000, 600_000]));
        from..from + length
    }

    /// Fails from now on for this time.
    pub(super) fn fail_during(&self, outage: Range<Duration>) {
        let now = self.handle.now();
        self.state.lock().unwrap().outage = Some(now + outage.start..now + outage.end);
    }

    pub(super) fn heal(&self) {
        self.state.lock().unwrap().outage = None;
    }

    fn is_out(&self) -> bool {
        let now = self.handle.now();
        self.state.lock().unwrap().outage.as_ref().is_some_and(|outage| outage.contains(&now))
    }

    fn error() -> StoreError {
        StoreError::Unreachable {
            store: "the store of this scenario".to_owned(),
            detail: "it is cut off".to_owned(),
        }
    }

    /// Makes a call, unless the request is lost.
    async fn call<T>(&self, call: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        let (there, back, arrives) = {
            let rng = &mut self.state.lock().unwrap().rng;
            (rng.duration(WAY), rng.duration(WAY), rng.chance(1, 2))
        };
        self.handle.runtime().sleep(there).await;
        if self.is_out() && !arrives {
            return Err(Self::error());
        }
        let answer = call.await;
        self.handle.runtime().sleep(back).await;
        if self.is_out() { Err(Self::error()) } else { answer }
    }

    /// A wait in progress ends, too, once the store fails.
    async fn wait_for(&self, keys: &[String], limit: Duration) -> Result<Vec<Vec<u8>>, StoreError> {
        let end = self.handle.now() + limit;
        loop {
            let left = end.saturating_sub(self.handle.now());
            match self.below.wait(keys, left.min(LOOK)).await {
                Err(StoreError::TimedOut { .. }) if self.is_out() => return Err(Self::error()),
                Err(StoreError::TimedOut { .. }) if left > LOOK => {}
                ended => return ended,
            }
        }
    }
}

impl Store for FailingStore {
    fn set<'a>(&'a self, key: &'a str, value: &'a [u8]) -> BoxFuture<'a, Result<(), StoreError>> {
        self.call(self.below.set(key, value)).boxed()
    }

    fn get<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<Vec<Option<Vec<u8>>>, StoreError>> {
        self.call(self.below.get(keys)).boxed()
    }

    fn wait<'a>(
        &'a self,
        keys: &'a [String],
        limit: Duration,
    ) -> BoxFuture<'a, Result<Vec<Vec<u8>>, StoreError>> {
        self.call(self.wait_for(keys, limit)).boxed()
    }

    fn add<'a>(&'a self, key: &'a str, delta: i64) -> BoxFuture<'a, Result<i64, StoreError>> {
        self.call(self.below.add(key, delta)).boxed()
    }

    fn compare_set<'a>(
        &'a self,
        key: &'a str,
        expected: Option<&'a [u8]>,
        value: &'a [u8],
    ) -> BoxFuture<'a, Result<Option<Vec<u8>>, StoreError>> {
        self.call(self.below.compare_set(key, expected, value)).boxed()
    }

    fn delete<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<bool, StoreError>> {
        self.call(self.below.delete(key)).boxed()
    }
}
