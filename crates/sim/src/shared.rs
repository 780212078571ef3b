//! The world that all its parts share: its state under locks, its time, its record.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use crate::{
    Rng, Swarm, Violation,
    ids::NodeId,
    lock::lock,
    state::{Chances, Ledger, Owners, State},
    trace::{Event, Trace},
};

/// The world as its parts see it.
pub(crate) struct Shared {
    me: Weak<Shared>,
    pub(crate) seed: u64,
    pub(crate) swarm: Swarm,
    now_nanos: AtomicU64,
    pub(crate) trace: Mutex<Trace>,
    /// Decides about rare branches, if these are to be taken.
    pub(crate) chances: Mutex<Option<Chances>>,
    /// The fabric is one between hosts.
    pub(crate) is_network: AtomicBool,
    pub(crate) failure: Mutex<Option<Violation>>,
    /// The test that runs this world again.
    pub(crate) replay: Mutex<String>,
    /// The plan of faults, and whether it was given instead of drawn from the seed.
    pub(crate) plan: Mutex<(String, bool)>,
    owners: Mutex<Owners>,
    ledger: Mutex<Ledger>,
    state: Mutex<State>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").field("seed", &self.seed).field("now", &self.now()).finish_non_exhaustive()
    }
}

impl Shared {
    /// A world of `seed` that keeps the last `tail` events.
    pub(crate) fn new(seed: u64, swarm: Swarm, tail: usize) -> Arc<Self> {
        let state = State::new(&Rng::new(seed), &swarm);
        Arc::new_cyclic(|me| Self {
            me: me.clone(),
            seed,
            swarm,
            now_nanos: AtomicU64::new(0),
            trace: Mutex::new(Trace::new(tail)),
            chances: Mutex::default(),
            is_network: AtomicBool::default(),
            failure: Mutex::default(),
            replay: Mutex::new("seeds".to_owned()),
            plan: Mutex::default(),
            owners: Mutex::default(),
            ledger: Mutex::default(),
            state: Mutex::new(state),
        })
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// A strong handle, for values that outlive a call.
    pub(crate) fn strong(&self) -> Option<Arc<Self>> {
        self.me.upgrade()
    }

    /// A weak handle, for values that may outlive the world.
    pub(crate) fn weak(&self) -> Weak<Self> {
        self.me.clone()
    }

    pub(crate) fn owners(&self) -> MutexGuard<'_, Owners> {
        lock(&self.owners)
    }

    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        lock(&self.ledger)
    }

    pub(crate) fn now(&self) -> Duration {
        Duration::from_nanos(self.now_nanos.load(Ordering::Relaxed))
    }

    pub(crate) fn advance_to(&self, at: Duration) {
        let nanos = u64::try_from(at.as_nanos()).unwrap_or(u64::MAX);
        self.now_nanos.fetch_max(nanos, Ordering::Relaxed);
    }

    pub(crate) fn record(&self, event: Event) {
        lock(&self.trace).record(self.now(), event);
    }

    /// The first violation ends the run; later ones are its consequences.
    pub(crate) fn violated(&self, violation: Violation) {
        lock(&self.failure).get_or_insert(violation);
    }

    pub(crate) fn check(&self, result: Result<(), Violation>) {
        if let Err(violation) = result {
            self.violated(violation);
        }
    }

    pub(crate) fn spawn(
        &self,
        node: NodeId,
        name: &'static str,
        task: tensorwire_fabric::BoxFuture<'static, ()>,
    ) {
        let mut state = self.state();
        if !state.is_alive(node) {
            drop(state);
            drop(task);
            return;
        }
        let id = state.tasks.spawn(node, name, task);
        self.record(Event::Spawned { node, task: id, name });
    }
}
