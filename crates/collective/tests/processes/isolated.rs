//! A process with two groups: a rank that fails or misbehaves in one does not disturb the calls of the other.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::harness::{LIMIT, Other, Test, close, serve, sum, tell, test};

/// A length that travels with the call header, and one of several messages.
const LENGTHS: [usize; 2] = [10, 300_000];

/// Rounds of each length while the other group is disturbed.
const ROUNDS: usize = 20;

/// What the rank of the other group does while a call of that group is in progress.
enum Disturbance {
    Stopped,
    Killed,
    /// Requests tensors that do not exist, as often as possible.
    Floods,
    /// Makes another call.
    Differs,
}

/// Ranks 0 and 1 are a group. Rank 0 is also in another group, with a process that is disturbed.
fn isolated(name: &'static str, fabric: &'static str, disturbance: &Disturbance) {
    test(name, fabric, LIMIT, |test| {
        let mut ranks = test.group(2);
        let (store, address) = serve(name, "127.0.0.1:0");
        let elsewhere = Test { store, store_address: address.clone(), ..test };
        let mut other = elsewhere.rank("other", 1, 2);
        other.expect("waiting");
        ranks[0].tell(&format!("join aside {address}"));
        ranks[0].expect("joined 0 of 2");
        other.expect("joined 1 of 2");
        rounds_are_right(&mut ranks);
        ranks[0].tell("reduce aside");
        let begun = Instant::now();
        match disturbance {
            Disturbance::Stopped => other.signal(Signal::STOP),
            Disturbance::Killed => other.signal(Signal::KILL),
            Disturbance::Floods => {
                other.tell("flood job_0");
                other.expect("flooding");
            }
            Disturbance::Differs => other.tell("reduce 11"),
        }
        rounds_are_right(&mut ranks);
        if matches!(disturbance, Disturbance::Floods) {
            assert!(other.is_silent_for(Duration::ZERO), "it floods still");
        }
        ranks[0].tell("end aside");
        let error = ranks[0].failure_until(begun + 2 * LIMIT);
        let kinds: &[&str] = match disturbance {
            Disturbance::Stopped | Disturbance::Floods => &["TimedOut"],
            Disturbance::Killed => &["RankLost"],
            Disturbance::Differs => &["Mismatch", "Over"],
        };
        assert!(kinds.iter().any(|kind| error.starts_with(kind)), "{error}");
        rounds_are_right(&mut ranks);
        drop(other);
        close(ranks);
    });
}

fn rounds_are_right(ranks: &mut [Other]) {
    for length in LENGTHS {
        for _ in 0..ROUNDS {
            tell(ranks, &[&format!("reduce {length}")]);
        }
        for _ in 0..ROUNDS {
            ranks.iter().for_each(|rank| rank.expect(&format!("round 1: {}", sum(0..2))));
        }
    }
}

macro_rules! disturbances {
    ($($name:ident: $fabric:literal, $disturbance:ident;)*) => {
        $(#[test] fn $name() {
            isolated(concat!("isolated::", stringify!($name)), $fabric, &Disturbance::$disturbance);
        })*
    };
}
disturbances! {
    from_a_stopped_rank_over_shm: "shm", Stopped;
    from_a_stopped_rank_over_tcp: "tcp", Stopped;
    from_a_killed_rank_over_shm: "shm", Killed;
    from_a_killed_rank_over_tcp: "tcp", Killed;
    from_a_rank_that_floods_over_shm: "shm", Floods;
    from_a_rank_that_floods_over_tcp: "tcp", Floods;
    from_a_rank_that_calls_something_else_over_shm: "shm", Differs;
    from_a_rank_that_calls_something_else_over_tcp: "tcp", Differs;
}
