//! A store that ends and restarts while ranks are in a group.

use std::time::Instant;

use crate::{
    harness::{LIMIT, serve, sum, tell, test},
    killed::go_on,
};

const SIZE: usize = 3;

fn restarted(name: &'static str, fabric: &'static str) {
    test(name, fabric, LIMIT, |test| {
        let mut ranks = test.group(SIZE);
        test.store.kill();
        tell(&mut ranks, &["reduce 1000", "reduce 1000000"]);
        for rank in ranks.iter().chain(&ranks) {
            rank.expect(&format!("round 1: {}", sum(0..SIZE)));
        }
        // More than half are left.
        ranks.remove(1).kill();
        tell(&mut ranks, &["reduce 1000", "shrink", "reduce 1000"]);
        let end = Instant::now() + 4 * LIMIT;
        for rank in &ranks {
            let error = rank.failure_until(end);
            assert!(error.contains("rank 1 is lost: "), "{error}");
        }
        go_on(&ranks, &[0, 2], SIZE - 1);
        // Half are left. Nothing listens there: the limit of the store's operations is that of the calls.
        ranks.remove(1).kill();
        tell(&mut ranks, &["shrink"]);
        let error = ranks[0].failure_until(Instant::now() + 4 * LIMIT);
        assert!(error.starts_with("NoMajority: ") && error.contains(&test.store_address), "{error}");
        // It may have voted for the other half before it lost its data.
        let (store, address) = serve(name, &test.store_address);
        assert_eq!(address, test.store_address);
        tell(&mut ranks, &["shrink"]);
        let error = ranks[0].failure_until(Instant::now() + 4 * LIMIT);
        assert!(error.starts_with("NoMajority: ") && error.contains("has lost its data"), "{error}");
        drop((ranks, store));
    });
}

#[test]
fn a_group_goes_on_without_its_store_over_shm() {
    restarted("restarted::a_group_goes_on_without_its_store_over_shm", "shm");
}

#[test]
fn a_group_goes_on_without_its_store_over_tcp() {
    restarted("restarted::a_group_goes_on_without_its_store_over_tcp", "tcp");
}
