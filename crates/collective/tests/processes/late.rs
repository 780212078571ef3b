//! A rank that comes late.

use std::time::Duration;

use crate::harness::{STEP, close, sum, tell, test};

const SIZE: usize = 3;

/// How late it comes.
const LATE: Duration = Duration::from_secs(2);

fn late(name: &'static str, fabric: &'static str, late: usize) {
    test(name, fabric, STEP, |test| {
        let others = (0..SIZE).filter(|rank| *rank != late);
        let mut ranks: Vec<_> = others.map(|rank| test.rank("job", rank, SIZE)).collect();
        ranks.iter().for_each(|rank| rank.expect("waiting"));
        assert!(ranks[0].is_silent_for(LATE), "nobody joins without rank {late}");
        ranks.insert(late, test.rank("job", late, SIZE));
        ranks[late].expect("waiting");
        for (rank, other) in ranks.iter().enumerate() {
            other.expect(&format!("joined {rank} of {SIZE}"));
        }
        tell(&mut ranks, &["reduce 1000"]);
        ranks.iter().for_each(|rank| rank.expect(&format!("round 1: {}", sum(0..SIZE))));
        close(ranks);
    });
}

#[test]
fn the_first_rank_over_shm() {
    late("late::the_first_rank_over_shm", "shm", 0);
}

#[test]
fn the_last_rank_over_tcp() {
    late("late::the_last_rank_over_tcp", "tcp", SIZE - 1);
}
