//! The faults of a run: a plan that the seed draws round by round, or one that was given.

use std::time::Duration;

use tensorwire_sim::{Call, Disturbance, Entry, Plan, Rng};

use super::Run;

pub(super) struct Faults {
    run: Run,
    given: Option<Plan>,
    drawn: Plan,
    rounds: u32,
    healing: Rng,
}

impl Faults {
    pub(super) fn new(run: &Run, given: Option<Plan>, rounds: u32, healing: Rng) -> Self {
        let mut drawn = Plan::default();
        if run.setup.flips_of_65536 > 0 {
            let what = Disturbance::Flip(run.setup.flips_of_65536);
            drawn.entries.push(Entry { round: 0, after: 0, what });
        }
        Self { run: run.clone(), given, drawn, rounds, healing }
    }

    /// The faults of this round. Draws in any case, so that a given plan does not change the traffic.
    pub(super) fn of_round(&mut self, round: u32, rng: &mut Rng) -> Vec<Entry> {
        let mut entries = draw(self.run.setup.workers, round, rng);
        if round + 1 == self.rounds && self.healing.chance(1, 2) {
            // In the middle of the traffic, so that much is in progress; otherwise after it.
            let last = entries.iter().map(|entry| entry.after).max().unwrap_or(0);
            let after = last + 1 + self.healing.below(2000) as u64;
            entries.push(Entry { round, after, what: Disturbance::Heal });
        }
        self.drawn.entries.extend(entries);
        let plan = self.given.as_ref().unwrap_or(&self.drawn);
        self.run.handle.note_plan(plan, self.given.is_some());
        plan.of_round(round)
    }
}

/// The number of events until a fault.
fn soon(rng: &mut Rng) -> u64 {
    50 + rng.below(3000) as u64
}

/// A crash in the first round, at a random event of it; sometimes another crash, or any other fault.
fn draw(workers: usize, round: u32, rng: &mut Rng) -> Vec<Entry> {
    let victim = rng.below(workers);
    let other = (victim + 1 + rng.below(workers - 1)) % workers;
    let mut entries = Vec::new();
    let mut add = |after, what| entries.push(Entry { round, after, what });
    if rng.chance(1, 3) {
        add(soon(rng), Disturbance::LoseLink(victim, other));
    }
    if rng.chance(1, 4) {
        add(soon(rng), Disturbance::LoseControl(victim, other));
    }
    if rng.chance(1, 4) {
        add(soon(rng), Disturbance::HalfOpen(victim, other));
        add(soon(rng), Disturbance::LoseLink(victim, other));
    }
    if rng.chance(1, 3) {
        add(0, Disturbance::Slow(other));
    }
    if rng.chance(1, 4) {
        let call = rng.pick([Call::Register, Call::Prepare, Call::Post, Call::Allocate]);
        let successes = match call {
            Call::Post => rng.below(300),
            Call::Allocate => rng.below(100),
            _ => rng.below(4),
        };
        add(0, Disturbance::Fail(other, call, successes as u64));
    }
    if rng.chance(1, 2) {
        // Stops that no peer notices, that outlast connecting, and that outlast every deadline.
        let longest = rng.pick([50, 40_000, 15_000_000, 90_000_000]);
        let length = micros(rng.duration(Duration::from_micros(longest)));
        add(soon(rng), Disturbance::Pause(other, length));
    }
    if round == 0 || rng.chance(1, 3) {
        let after = soon(rng);
        add(after, Disturbance::Crash(victim, micros(rng.duration(Duration::from_millis(50)))));
    }
    entries
}

/// In the unit in which a plan prints it.
fn micros(length: Duration) -> Duration {
    Duration::from_micros(length.as_micros() as u64)
}
