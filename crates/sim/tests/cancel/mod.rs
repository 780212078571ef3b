//! Every public asynchronous operation, polled k times and then dropped, for every k until it completes.
//!
//! After each: the operation's memory has returned, memory that a peer may still write is not allocated again (the
//! world's owner map checks that), and the same operation works. Tables and pools are as small as possible. So one
//! leaked entry or buffer blocks the next operation forever, and the world reports that it is stuck.
//! `SIM_CANCEL_SEEDS=100` runs as many seeds.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use crate::common;
mod calls;
mod groups;
mod local;
mod operations;
mod pages;
mod queue_pairs;
mod subscriptions;
mod workers;

use std::{future::poll_fn, pin::pin, task::Poll};

use tensorwire_sim::{Rng, Swarm, World};

/// Seeds of each case, if `SIM_CANCEL_SEEDS` is not set.
const SEEDS: u64 = 40;

/// No operation takes more polls than this.
const POLLS_MAX: usize = 2000;

/// Polls `operation` `polls` times, then drops it. `None` if it has not completed.
async fn polled<F: Future>(polls: usize, operation: F) -> Option<F::Output> {
    let mut operation = pin!(operation);
    let mut left = polls;
    poll_fn(|context| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match operation.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Lets `attempt` cancel its operation after 0, 1, 2, … polls until it returns that the operation completed.
async fn for_every_k(what: &str, mut attempt: impl AsyncFnMut(usize) -> bool) {
    for polls in 0..POLLS_MAX {
        if attempt(polls).await {
            assert!(polls > 0, "{what} completed without being polled");
            return;
        }
    }
    panic!("{what} had not completed after {POLLS_MAX} polls");
}

/// Runs `scenario` in one world of each seed. Latencies are short, so that a cancelled operation and the next one meet
/// on the wire.
fn on_seeds(scenario: impl AsyncFn(tensorwire_sim::Handle)) {
    let seeds = std::env::var("SIM_CANCEL_SEEDS").ok().map_or(SEEDS, |text| text.parse().unwrap());
    for seed in 0..seeds {
        let world = World::with_swarm(seed, Swarm::draw(&mut Rng::new(seed).fork(5)));
        world.replayed_by("cancel");
        world.run(scenario(world.handle())).unwrap();
        world.finish().unwrap();
    }
}
