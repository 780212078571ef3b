//! Bugs that are planted where queue pairs are destroyed. These tests pass by themselves; under the address sanitizer
//! their processes must fail, which `scripts/rxe-vm/asan` checks.

use futures::future::join;
use tensorwire_verbs_reactor::planted::{BadEnd, end_queue_pairs_badly};

use super::{SETUP, held::Held};
use crate::contract::{Flavour, bounded, pair::Pair};

/// One connection more than that of the pair, opened, used and closed.
fn one_connection(bad: BadEnd, check: fn(&Held, &Held)) {
    bounded(Flavour::CurrentThread, move |runtime| async move {
        let pair = Pair::new(SETUP, runtime).await;
        let (left, right) = pair.connect_again().await;
        pair.works(&left, &right).await;
        let before = Held::now();
        end_queue_pairs_badly(bad);
        pair.step("the closes", join(left.close(), right.close())).await;
        check(&before, &Held::now());
    });
}

#[test]
#[ignore = "plants a bug: scripts/rxe-vm/asan wants to see it found"]
fn a_queue_pair_that_is_never_destroyed_is_counted_and_leaks() {
    one_connection(BadEnd::Forgotten, |before, after| {
        assert_eq!((before.queue_pairs, after.queue_pairs), (4, 4));
    });
}

#[test]
#[ignore = "plants a bug: scripts/rxe-vm/asan wants to see it found"]
fn a_queue_pair_that_is_read_after_its_end_is_a_use_after_free() {
    one_connection(BadEnd::ReadAfterwards, |before, after| {
        assert_eq!((before.queue_pairs, after.queue_pairs), (4, 2));
    });
}
