//! Rare branches of the code under test (`tensorwire_testpoints::chance!`): the seed decides which are taken.

use std::{collections::BTreeMap, time::Duration};

use crate::Rng;

/// Decides for every point. Each has a random sequence of its own, so that a new point does not change the others.
#[derive(Debug)]
pub(crate) struct Chances {
    rng: Rng,
    points: BTreeMap<&'static str, Point>,
}

#[derive(Debug)]
struct Point {
    rng: Rng,
    of_256: u32,
    /// When it was last asked for, and how often it was taken at that time.
    last: Duration,
    taken: u32,
}

/// How often of 256 times a point is taken. Each world draws one of these for each point.
const OF_256: [u32; 5] = [0, 0, 4, 40, 128];

/// Maximum number of times that a point is taken at one virtual time. A task that waits for several things asks for all
/// of them at each wake-up, so a task that is woken without a reason would otherwise wake itself forever.
const AT_ONE_TIME_MAX: u32 = 64;

impl Chances {
    pub(crate) fn new(rng: Rng) -> Self {
        Self { rng, points: BTreeMap::new() }
    }

    /// Whether the branch `name` is taken at `now`.
    pub(crate) fn take(&mut self, name: &'static str, now: Duration) -> bool {
        let purpose = &self.rng;
        let point = self.points.entry(name).or_insert_with(|| {
            let hash = name.bytes().fold(0, |hash: u64, byte| hash.wrapping_mul(31) ^ u64::from(byte));
            let mut rng = purpose.fork(hash);
            let of_256 = rng.pick(OF_256);
            Point { rng, of_256, last: Duration::ZERO, taken: 0 }
        });
        if point.last != now {
            (point.last, point.taken) = (now, 0);
        }
        let is_taken = point.rng.chance(point.of_256, 256) && point.taken < AT_ONE_TIME_MAX;
        point.taken += u32::from(is_taken);
        is_taken
    }
}
