//! Runs of publishers and followers of a set, in which a process dies at each event in turn.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test support: a failed step is a failed test

use futures::future::{Either, select};
use tensorwire_sim::{Handle, World};

use crate::figures::{for_each_below, number};

/// The process that dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Publisher,
    Follower,
}

/// The number of a run, and the event at which the process of this side dies in it.
pub(crate) type Crash = (u64, Option<u64>);

/// Repeats a run with the death of a process after each of its events. The run is over when `following` is.
pub(crate) fn a_process_dies_at_each_event<S: Future, F: Future<Output = ()>>(
    serving: impl Fn(Handle, Crash) -> S + Sync,
    following: impl Fn(Handle, Crash) -> F + Sync,
) {
    let crash_run = |seed, crash_at, victim| {
        let world = World::new(seed);
        let crash = |of| (crash_at, Some(crash_at).filter(|_| victim == of));
        let serving = Box::pin(serving(world.handle(), crash(Victim::Publisher)));
        let followed = Box::pin(following(world.handle(), crash(Victim::Follower)));
        let scenario = async move {
            let Either::Right(((), serving)) = select(serving, followed).await else { unreachable!() };
            drop(serving);
        };
        let told = format!("seed {seed}, {victim:?} at event {crash_at}");
        world.run(scenario).unwrap_or_else(|failure| panic!("{told}: {failure}"));
        let summary = world.finish().unwrap_or_else(|failure| panic!("{told}: {failure}"));
        // The last follower's end counts as one. If there is no other, the run was over before its crash.
        summary.crashes > 1
    };
    let from = number("SIM_FROM").unwrap_or_default();
    for_each_below(number("SIM_SEEDS").map_or(1, |seeds| (seeds / 20).max(1)), |index| {
        let seed = from.wrapping_add(index);
        for victim in [Victim::Publisher, Victim::Follower] {
            let events = (0..).take_while(|&at| crash_run(seed, at, victim)).count();
            eprintln!("seed {seed}: {victim:?} died at each of {events} events");
            assert!(events > 100, "{events}");
        }
    });
}
