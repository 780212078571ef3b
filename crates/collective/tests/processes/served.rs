//! A store that a rank of the group serves, and that ends with the rank; and too few ranks to go on.

use std::time::Instant;

use rustix::process::Signal;

use crate::{
    harness::{LIMIT, Other, STEP, close, sum, tell, test},
    killed::go_on,
};

/// The rank that serves the store is killed, and then others, as long as more than half are left.
fn killed(name: &'static str, fabric: &'static str, size: usize) {
    test(name, fabric, LIMIT, |test| {
        let mut ranks = test.group_with_own_store(size);
        let mut left: Vec<usize> = (0..size).collect();
        while left.len() > 2 {
            tell(&mut ranks, &["loop 100000", "shrink", "reduce 100000"]);
            for rank in &ranks {
                rank.expect(&format!("round 1: {}", sum(left.iter().copied())));
            }
            let killed = Instant::now();
            ranks.remove(0).kill();
            left.remove(0);
            for rank in &ranks {
                let error = rank.failure_until(killed + 2 * LIMIT);
                assert!(error.contains("rank 0 is lost: "), "{error}");
            }
            let noticed = killed.elapsed();
            go_on(&ranks, &left, left.len());
            println!(
                "{fabric}, {} of {size}: errors {noticed:?}, then {:?}",
                left.len(),
                killed.elapsed() - noticed
            );
        }
        close(ranks);
    });
}

#[test]
fn three_go_on_without_it_over_shm() {
    killed("served::three_go_on_without_it_over_shm", "shm", 3);
}

#[test]
fn three_go_on_without_it_over_tcp() {
    killed("served::three_go_on_without_it_over_tcp", "tcp", 3);
}

#[test]
fn five_go_on_without_it_over_shm() {
    killed("served::five_go_on_without_it_over_shm", "shm", 5);
}

#[test]
fn five_go_on_without_it_over_tcp() {
    killed("served::five_go_on_without_it_over_tcp", "tcp", 5);
}

/// Neither of two halves goes on without the store. Both together do.
#[test]
fn two_halves_without_the_store_are_both_too_few() {
    test("served::two_halves_without_the_store_are_both_too_few", "tcp", LIMIT, |test| {
        let mut ranks = test.group(4);
        test.store.kill();
        let mut halves = (ranks.split_off(2), ranks);
        halves.0.iter().for_each(|rank| rank.signal(Signal::STOP));
        for half in [&mut halves.1, &mut halves.0] {
            half.iter().for_each(|rank| rank.signal(Signal::CONT));
            tell(half, &["shrink"]);
            for rank in &*half {
                let error = rank.failure_until(Instant::now() + STEP);
                assert!(error.starts_with("NoMajority: group `tests`: only ranks ["), "{error}");
            }
        }
        let mut ranks: Vec<_> = halves.1.into_iter().chain(halves.0).collect();
        tell(&mut ranks, &["shrink", "reduce 1000"]);
        go_on(&ranks, &[0, 1, 2, 3], 4);
        close(ranks);
    });
}

/// The half with the store goes on, also if it was the stopped one. The other half is left out.
#[test]
fn the_half_that_serves_the_store_goes_on() {
    test("served::the_half_that_serves_the_store_goes_on", "shm", LIMIT, |test| {
        let mut with_store = test.group_with_own_store(4);
        let mut without = with_store.split_off(2);
        with_store.iter().for_each(|rank| rank.signal(Signal::STOP));
        tell(&mut without, &["shrink"]);
        for rank in &without {
            let error = rank.failure_until(Instant::now() + STEP);
            assert!(error.starts_with("NoMajority: "), "{error}");
        }
        with_store.iter().for_each(|rank| rank.signal(Signal::CONT));
        tell(&mut with_store, &["shrink", "reduce 1000"]);
        go_on(&with_store, &[0, 1], 2);
        tell(&mut without, &["shrink"]);
        for rank in &without {
            let error = rank.failure_until(Instant::now() + STEP);
            assert!(error.starts_with("LeftOut: "), "{error}");
        }
        without.into_iter().for_each(Other::end);
        close(with_store);
    });
}
