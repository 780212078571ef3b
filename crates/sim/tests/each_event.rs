//! Runs of publishers and followers of a set, in which a process dies at each event in turn.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test support: a failed step is a failed test

use futures::future::{Either, select};
use tensorwire_sim::{Handle, Summary, World};

use crate::figures::{for_each_below, number};

/// Deaths of one process that every change can wait for. In a run of more events it dies at one in two of them, or one in three and so on;
/// which, the seed chooses. `SIM_SEEDS` tries all events.
const DEATHS: u64 = 500;

/// An event that no run reaches.
const NEVER: u64 = 1 << 40;

/// The process that dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Publisher,
    Follower,
}

/// The number of a run, and the event at which the process of this side dies in it.
pub(crate) type Crash = (u64, Option<u64>);

/// Repeats a run with the death of a process after each of its events, up to [`DEATHS`]. The run is over when `following` is.
pub(crate) fn a_process_dies_at_each_event<S: Future, F: Future<Output = ()>>(
    serving: impl Fn(Handle, Crash) -> S + Sync,
    following: impl Fn(Handle, Crash) -> F + Sync,
) {
    let crash_run = |seed, crash_at, victim| -> Summary {
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
        world.finish().unwrap_or_else(|failure| panic!("{told}: {failure}"))
    };
    let (from, seeds) = (number("SIM_FROM").unwrap_or_default(), number("SIM_SEEDS"));
    for_each_below(2 * seeds.map_or(1, |seeds| (seeds / 20).max(1)), |index| {
        let seed = from.wrapping_add(index / 2);
        let victim = if index.is_multiple_of(2) { Victim::Publisher } else { Victim::Follower };
        let events = crash_run(seed, NEVER, victim).events;
        let step = if seeds.is_some() { 1 } else { events.div_ceil(DEATHS).max(1) };
        // The last follower's end counts as one crash. If there is no other, the run was over before its crash.
        let dies = |at: &u64| crash_run(seed, *at, victim).crashes > 1;
        let deaths = (seed % step..).step_by(step as usize).take_while(dies).count();
        eprintln!("seed {seed}: {victim:?} died at {deaths} of {events} events");
        assert!(deaths > 100, "{deaths}");
    });
}
