//! The fabric contract, on worlds of several seeds.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{cell::RefCell, ops::Range, sync::Arc};

use futures::{FutureExt, future::LocalBoxFuture};
use tensorwire_fabric::{Fabric, Runtime};
use tensorwire_sim::{Allowed, Handle, Rng, Swarm, World};

use crate::contract::{self, Flavour};

/// Each rule must hold under this many seeds, if `SIM_CONTRACT_SEEDS` is not set.
const SEEDS: u64 = 5;

thread_local! {
    /// The world in which the test's rule runs, and the number of processes that the test has made there.
    static CURRENT: RefCell<Option<(Handle, u32)>> = const { RefCell::new(None) };
}

/// One more process of the current world.
fn fabric(_runtime: Arc<dyn Runtime>) -> Arc<dyn Fabric> {
    CURRENT.with_borrow_mut(|current| {
        let (handle, count) = current.as_mut().unwrap();
        *count += 1;
        handle.start_node(&format!("process:{count}")).unwrap().fabric()
    })
}

fn on_worlds<T, F>(_flavour: Flavour, test: T)
where
    T: Fn(Arc<dyn Runtime>) -> F + Send + Clone + 'static,
    F: Future<Output = ()> + 'static,
{
    for seed in seeds() {
        let test = test.clone();
        // Called for its limit of real time: the world has a runtime of its own.
        contract::bounded(Flavour::TwoWorkers, move |_runtime| async move {
            on_world(seed, &|runtime| test(runtime).boxed_local());
        });
    }
}

fn seeds() -> Range<u64> {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    number("SIM_SEED").map_or(0..number("SIM_CONTRACT_SEEDS").unwrap_or(SEEDS), |seed| seed..seed + 1)
}

/// Erased, so that all rules share its code.
fn on_world(seed: u64, test: &dyn Fn(Arc<dyn Runtime>) -> LocalBoxFuture<'static, ()>) {
    // Writes are split at a limit that the rules about it can reach, and there is room for every view.
    let swarm =
        Swarm { piece_bytes_max: 2 << 20, leases_max: 4096, ..Swarm::draw(&mut Rng::new(seed).fork(1)) };
    let world = World::with_swarm(seed, swarm);
    world.replayed_by("fabric");
    let handle = world.handle();
    // Tests break rules on purpose, on pools of their own.
    let mut allowed = Allowed::default();
    allowed.refusals = true;
    allowed.receiver_not_ready = true;
    allowed.unobserved_memory = true;
    handle.allow(allowed);
    CURRENT.set(Some((handle.clone(), 0)));
    world.run(test(handle.runtime())).unwrap();
    CURRENT.set(None);
    world.finish().unwrap();
}

contract_suite!(crate::contract::Setup { fabric: crate::fabric::fabric, peer_address: None }, run: crate::fabric::on_worlds);
