//! Four workers under steady load for long, over shm and tcp, of which now and then one is killed, stopped or cut off.

use std::time::Duration;

use rustix::process::Signal;

use crate::{
    crowd::{
        CUT_OFF, Crowd, Draw, MIXED, Plan,
        gauges::{Gauges, status, told},
        is_member, number,
    },
    harness::{bounded, role},
};

/// A stop may be longer.
const LIVENESS: Duration = Duration::from_secs(3);

/// Those that are never killed, and those that are.
const LONG_LIVED: [usize; 2] = [0, 1];
const MORTAL: [usize; 2] = [2, CUT_OFF];

/// The one that nothing at all happens to.
const UNTOUCHED: usize = LONG_LIVED[0];

/// How often memory is sampled, and progress printed.
const SAMPLE: Duration = Duration::from_millis(500);
const PROGRESS: Duration = Duration::from_secs(10);

/// How long a soak is, which part of it counts as warm-up, and how much memory may grow after that.
#[derive(Debug, Clone, Copy)]
struct Soak {
    /// With the warm-up.
    lasts: Duration,
    warm_up: Duration,
    /// Memory under load is the median of the samples of so long. It is printed, not asserted: which parts of the mortal's pools
    /// are mapped depends on how long it has lived, and one part of 1 MiB is more than may grow.
    window: Duration,
    /// Of memory at rest, in thousandths.
    growth: u64,
    /// Between two faults.
    pause: Duration,
}

impl Soak {
    /// `SOAK_MINUTES` after the warm-up, with a fault every `SOAK_PAUSE` milliseconds or so, or as long as every change can
    /// wait for.
    fn usual() -> Self {
        let seconds = Duration::from_secs;
        match number("SOAK_MINUTES") {
            Some(minutes) => Self {
                lasts: seconds(180 + 60 * minutes),
                warm_up: seconds(180),
                window: seconds(120),
                growth: 10,
                pause: Duration::from_millis(number("SOAK_PAUSE").unwrap_or(3000)),
            },
            // Too short for a claim about memory, long enough for each fault.
            None => Self {
                lasts: seconds(4),
                warm_up: seconds(1),
                window: seconds(1),
                growth: 500,
                pause: Duration::from_millis(100),
            },
        }
    }
}

/// Resident memory of each of the long-lived, in KiB.
type Sample = [u64; LONG_LIVED.len()];

struct Soaking {
    crowd: Crowd,
    draw: Draw,
    soak: Soak,
    began: Duration,
    samples: Vec<Sample>,
    told: Duration,
    faults: [u64; 3],
    right: u64,
}

impl Soaking {
    fn elapsed(&self) -> Duration {
        self.crowd.runtime.now() - self.began
    }

    fn sample(&mut self) {
        let crowd = &self.crowd;
        self.samples.push(LONG_LIVED.map(|index| status(&crowd.pid(index), "VmRSS").unwrap()));
    }

    /// The load goes on for so long.
    async fn run_for(&mut self, duration: Duration) {
        let end = self.elapsed() + duration;
        while self.elapsed() < end {
            self.crowd.run_for(SAMPLE.min(end - self.elapsed())).await;
            self.sample();
            if self.elapsed() >= self.told + PROGRESS {
                self.told = self.elapsed();
                self.progress().await;
            }
        }
    }

    /// One line; those that nothing happens to have got on.
    async fn progress(&mut self) {
        let tallies = self.crowd.tallies(UNTOUCHED).await;
        let right: u64 = tallies.iter().map(|tally| tally.right).sum();
        let failed: u64 = tallies.iter().map(|tally| tally.failed).sum();
        let resident = self.samples.last().unwrap();
        let anonymous = LONG_LIVED.map(|index| status(&self.crowd.pid(index), "RssAnon").unwrap());
        let [kills, stops, cuts] = self.faults;
        println!(
            "{} s: {right} right, {failed} failed, {kills} kills, {stops} stops, {cuts} cuts, {resident:?} KiB resident, \
             {anonymous:?} of them anonymous",
            self.elapsed().as_secs()
        );
        assert!(right > self.right, "nothing has gone right for {PROGRESS:?}");
        self.right = right;
    }

    /// The median of the samples of the latest window, of each.
    fn resident(&self) -> Sample {
        let count = (self.soak.window.as_millis() / SAMPLE.as_millis()) as usize;
        let latest = &self.samples[self.samples.len().saturating_sub(count)..];
        std::array::from_fn(|which| {
            let mut of_one: Vec<u64> = latest.iter().map(|sample| sample[which]).collect();
            of_one.sort_unstable();
            of_one[of_one.len() / 2]
        })
    }

    fn one_of(&mut self, some: &[usize]) -> usize {
        some[self.draw.below(some.len())]
    }

    fn up_to(&mut self, most: Duration) -> Duration {
        most * self.draw.below(1000) as u32 / 1000
    }

    async fn fault(&mut self) {
        let which = self.draw.below(3);
        self.faults[which] += 1;
        match which {
            0 => {
                let victim = self.one_of(&MORTAL);
                self.crowd.kill(victim);
                let down = self.up_to(self.soak.pause / 2);
                self.run_for(down).await;
                self.crowd.begin(victim);
                self.crowd.tell(victim, "go");
            }
            1 => {
                let stopped = self.one_of(&[1, 2, CUT_OFF]);
                self.crowd.signal(stopped, Signal::STOP);
                let time = self.up_to((LIVENESS * 3 / 2).min(self.soak.pause));
                self.run_for(time).await;
                self.crowd.signal(stopped, Signal::CONT);
            }
            _ => {
                let is_reset = self.draw.below(2) == 0;
                self.crowd.cut(is_reset);
            }
        }
    }

    /// Faults now and then, until so long after the beginning.
    async fn until(&mut self, time: Duration) {
        while self.elapsed() < time {
            let pause = self.soak.pause / 2 + self.up_to(self.soak.pause);
            self.run_for(pause).await;
            self.fault().await;
        }
        self.run_for(self.soak.pause).await;
    }

    /// What the long-lived hold while nothing happens and the mortal are dead.
    async fn alone(&mut self) -> Vec<Gauges> {
        MORTAL.into_iter().for_each(|mortal| self.crowd.kill(mortal));
        self.crowd.is_still().await;
        let mut held = Vec::new();
        for index in LONG_LIVED {
            held.push(self.crowd.gauges(index).await);
        }
        held
    }
}

/// What may differ between two times at which as much is going on.
fn may_differ(name: &str, was: u64, is: u64) -> bool {
    match name {
        "rss_anon_kib" | "rss_kib" => true,
        // Two workers have one session, or two when each dialled the other.
        "sessions" | "fd.socket" | "tasks" => is.abs_diff(was) <= 1,
        "mappings" => is.abs_diff(was) <= 8,
        _ => false,
    }
}

/// By how much `is` is more than `was`.
fn percent(was: u64, is: u64) -> f64 {
    100.0 * (is as f64 / was as f64 - 1.0)
}

async fn soak(plan: Plan, soak: Soak) {
    let crowd = Crowd::start(plan).await;
    let (draw, began) = (Draw::new(&*crowd.runtime), crowd.runtime.now());
    let mut soaking = Soaking {
        crowd,
        draw,
        soak,
        began,
        samples: Vec::new(),
        told: Duration::ZERO,
        faults: [0; 3],
        right: 0,
    };
    soaking.crowd.is_still().await;
    soaking.crowd.tour(LONG_LIVED).await;
    soaking.crowd.tell_all("go");
    soaking.until(soak.warm_up).await;
    let resident = soaking.resident();
    let before = soaking.alone().await;
    MORTAL.into_iter().for_each(|mortal| soaking.crowd.begin(mortal));
    soaking.crowd.tell_all("go");
    soaking.until(soak.lasts).await;
    soaking.progress().await;
    let at_end = soaking.resident();
    println!(
        "resident, median of {:?}: {resident:?} KiB after {:?}, {at_end:?} KiB at the end",
        soak.window, soak.warm_up
    );
    soaking.alone().await;
    let mut grown = Vec::new();
    for (index, before) in LONG_LIVED.into_iter().zip(&before) {
        let after = soaking.crowd.is_back_at(index, before, may_differ).await;
        println!("member {index} before:{}\n  after:{}", told(before), told(&after));
        let [was, is] = [before, &after].map(|gauges| gauges["rss_kib"]);
        println!("member {index} at rest: {was} KiB resident, then {is}: {:+.2} %", percent(was, is));
        if is > was + was * soak.growth / 1000 {
            grown.push((index, was, is));
        }
    }
    assert!(grown.is_empty(), "memory at rest grew by more than {} thousandths: {grown:?}", soak.growth);
    soaking.crowd.end().await;
}

#[test]
fn d_soak_of_four_workers_with_faults_now_and_then_over_shm_and_tcp() {
    const TEST: &str = "soak::d_soak_of_four_workers_with_faults_now_and_then_over_shm_and_tcp";
    if is_member(role()) {
        return;
    }
    let settings = Soak::usual();
    let limit = settings.lasts * 5 / 4 + Duration::from_secs(90);
    bounded(limit, |_| soak(Plan { test: TEST, fabric: MIXED, liveness: LIVENESS }, settings));
}
