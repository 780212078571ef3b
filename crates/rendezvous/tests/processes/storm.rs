//! Four workers under full load, of which one is killed and started again every 200 ms.

use std::time::Duration;

use crate::{
    crowd::{COUNT, Crowd, Draw, Plan, gauges::told, is_member, number},
    harness::{bounded, role},
    rdma::patient,
};

/// Silence in the storm is load, not death.
const LIVENESS: Duration = Duration::from_secs(20);

/// How long a storm lasts, and how often somebody dies in it.
#[derive(Debug, Clone, Copy)]
struct Storm {
    lasts: Duration,
    every: Duration,
}

impl Storm {
    /// `TENSORWIRE_STORM_SECONDS`, or as long as every change can wait for.
    fn usual() -> Self {
        let lasts = Duration::from_secs(number("TENSORWIRE_STORM_SECONDS").unwrap_or(2));
        Self { lasts, every: Duration::from_millis(200) }
    }

    /// A number of deaths in so many thirds of the time.
    fn deaths(&self, thirds: u32) -> u32 {
        let deaths = (self.lasts * thirds / 3).as_millis() / self.every.as_millis();
        u32::try_from(deaths).unwrap().max(2)
    }
}

/// By how much the memory of the allocator may grow: a thousandth of what the storm moves.
const ANON_KIB: u64 = 1 << 10;

/// What may differ between two times at which as much is going on.
fn may_differ(name: &str, was: u64, is: u64) -> bool {
    match name {
        // Besides blocks, which stay in the pools and are bounded by their caps, memory is the allocator's.
        "rss_anon_kib" => is <= was + ANON_KIB,
        "rss_kib" => true,
        _ if name.ends_with("pool_block_bytes") => true,
        // Blocks of the own pools and of the peers', and arenas of the allocator.
        "mappings" => is <= was + 60,
        // The helper of large copies starts when it is first needed.
        "threads" => is == was + 1,
        _ => false,
    }
}

async fn storm(plan: Plan, storm: Storm) {
    let mut crowd = Crowd::start(plan).await;
    let mut draw = Draw::new(&*crowd.runtime);
    crowd.run_for(storm.every * 2).await;
    // Anybody may die: nobody gets wrong bytes, and each operation of those who live ends.
    println!("all are up");
    for _ in 0..storm.deaths(1) {
        crowd.restart(draw.below(COUNT));
        crowd.run_for(storm.every).await;
    }
    crowd.run_for(storm.every * 2).await;
    // One dies again and again: the others notice nothing of it among themselves, and keep nothing for it.
    let victim = draw.below(COUNT);
    crowd.kill(victim);
    crowd.is_still().await;
    let survivors = crowd.living();
    println!("{survivors:?} will survive");
    let before = crowd.settled(&survivors).await;
    let spared: Vec<String> = survivors.iter().map(usize::to_string).collect();
    crowd.tell_all(&format!("spare {}", spared.join(" ")));
    crowd.tell_all("go");
    let deaths = storm.deaths(2);
    for _ in 0..deaths {
        crowd.restart(victim);
        crowd.run_for(storm.every).await;
    }
    crowd.goes_right(&survivors, victim, deaths.into()).await;
    crowd.run_for(storm.every).await;
    crowd.kill(victim);
    crowd.is_still().await;
    for (index, before) in survivors.iter().zip(&before) {
        let after = crowd.is_back_at(*index, before, may_differ).await;
        println!("member {index} after {deaths} deaths:{}", told(&after));
        println!("  before:{}", told(before));
        let tallies = crowd.tallies(*index).await;
        println!("  with each: {tallies:?}");
        assert!(tallies[victim].right > u64::from(deaths), "nothing went right with {victim}: {tallies:?}");
    }
    crowd.end().await;
}

fn restarts(test: &'static str, fabric: &'static str, settings: Storm) {
    if is_member(role()) {
        return;
    }
    let limit = Duration::from_secs(60) + patient(settings.lasts * 2);
    bounded(limit, |_| storm(Plan { test, fabric, liveness: LIVENESS }, settings));
}

#[test]
fn d_restart_storm_of_one_of_four_under_full_load_over_shm() {
    restarts("storm::d_restart_storm_of_one_of_four_under_full_load_over_shm", "shm", Storm::usual());
}

#[test]
fn d_restart_storm_of_one_of_four_under_full_load_over_tcp() {
    restarts("storm::d_restart_storm_of_one_of_four_under_full_load_over_tcp", "tcp", Storm::usual());
}

/// A device takes seconds to be opened and connected where it is emulated.
#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn d_restart_storm_of_one_of_four_under_full_load_over_verbs() {
    let storm = Storm { lasts: Duration::from_secs(12), every: Duration::from_secs(3) };
    restarts("storm::d_restart_storm_of_one_of_four_under_full_load_over_verbs", "verbs", storm);
}
