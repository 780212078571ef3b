//! Cases of whole workers on the simulator, under many seeds. They are those of `crates/rendezvous/tests/across`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../rendezvous/tests/across/cases/mod.rs"]
mod cases;

use std::{
    collections::BTreeSet,
    future::poll_fn,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    task::Poll,
    time::Duration,
};

use cases::{Given, Ground};
use tensorwire_fabric::{BoxFuture, Runtime};
use tensorwire_rendezvous::{Worker, WorkerBuilder};
use tensorwire_sim::{Handle, Node, World};

use crate::common::within;

/// Seeds of each case.
const SEEDS: u64 = 12;

/// Seeds of a case of ten thousand transfers.
const SEEDS_OF_MANY: u64 = 1;

/// The workers of one world.
struct Simulated {
    handle: Handle,
    nodes: Mutex<Vec<Node>>,
    next: AtomicU32,
    states: Arc<Mutex<States>>,
}

/// Figures of all worlds of one case.
#[derive(Debug, Default)]
struct States {
    expected: BTreeSet<&'static str>,
    reached: BTreeSet<&'static str>,
}

impl Ground for Simulated {
    fn runtime(&self) -> Arc<dyn Runtime> {
        self.handle.runtime()
    }

    fn start(&self, builder: WorkerBuilder, address: Option<&str>) -> BoxFuture<'static, Worker> {
        let new = || format!("w{}:1", self.next.fetch_add(1, Ordering::Relaxed));
        let node = self.handle.start_node(&address.map_or_else(new, str::to_owned)).unwrap();
        self.nodes.lock().unwrap().push(node.clone());
        let builder = within(&node, builder).memory(|memory| {
            memory.source_bytes = 64 << 20;
            memory.receive_bytes = 64 << 20;
            memory.block_bytes = 1 << 20;
        });
        Box::pin(async move { node.run("start", builder.start()).await.unwrap().unwrap() })
    }

    fn kill(&self, worker: Worker) -> BoxFuture<'static, ()> {
        let nodes = self.nodes.lock().unwrap();
        let node = nodes.iter().find(|node| node.is_alive() && node.address() == worker.address());
        node.unwrap().crash();
        Box::pin(async {})
    }

    fn moment(&self, turns: u32, part: Duration) -> BoxFuture<'static, ()> {
        if !part.is_zero() {
            return self.handle.runtime().sleep(part);
        }
        // In a world without latencies no time passes.
        let mut left = 3 * turns;
        Box::pin(poll_fn(move |context| {
            if left == 0 {
                return Poll::Ready(());
            }
            left -= 1;
            context.waker().wake_by_ref();
            Poll::Pending
        }))
    }

    fn must_reach(&self, states: &[&'static str]) {
        self.states.lock().unwrap().expected.extend(states);
    }

    fn reached(&self, state: &'static str) {
        self.states.lock().unwrap().reached.insert(state);
    }

    fn beside(&self, task: BoxFuture<'static, ()>) -> BoxFuture<'static, ()> {
        task
    }
}

fn run<F: Future<Output = ()> + Send + 'static>(name: &str, case: impl Fn(Given) -> F) {
    run_erased(name, &|ground| Box::pin(case(ground)));
}

/// Erased, so that all cases share its code.
fn run_erased(name: &str, case: &dyn Fn(Given) -> BoxFuture<'static, ()>) {
    let is_of_many = name.contains("many") || name.contains("ten_thousand");
    let states = Arc::new(Mutex::new(States::default()));
    for seed in 0..if is_of_many { SEEDS_OF_MANY } else { SEEDS } {
        let world = World::new(seed);
        world.replayed_by("across");
        let (handle, states) = (world.handle(), states.clone());
        let ground = Simulated { handle, nodes: Mutex::default(), next: AtomicU32::new(0), states };
        world.run(case(Arc::new(ground))).unwrap();
        world.finish().unwrap();
    }
    let States { expected, reached } = &*states.lock().unwrap();
    assert!(reached.is_superset(expected), "{name} reached {reached:?} alone");
}

macro_rules! simulated {
    ($($module:ident::$case:ident)*) => {
        $(#[test] fn $case() { crate::across::run(stringify!($case), crate::across::cases::$module::$case); })*
    };
}

mod sim_fabric {
    super::cases::every_case!(simulated);
}
