//! Views, with a neighbour that breaks the rules on either side.

use std::os::fd::AsFd;

use tensorwire_fabric::{
    Access, Arrival, FabricError, Immediate, Link, Look, Operation, PeerViolation, WorkRequest,
};
use tensorwire_memory::Buf;

use super::{
    super::{
        limits::{CHUNK_BYTES, CLAIMS_MAX, LEASES_MAX},
        ring::{Descriptor, OwnPage, PeerPage, Source},
    },
    LEASES, Rig, on_a_runtime,
};

const CONSUMED_AT: usize = 128;
const RELEASED_AT: usize = 192;
/// The lease words of a page set whose ring has eight slots.
const LEASES_AT: usize = 4096 + 8 * 256;

impl Rig {
    /// Lends a page of the victim.
    fn lend_one(&self) -> Operation {
        let local = self.pool.try_alloc(4096).unwrap().freeze();
        self.regions.register(self.runtime.as_ref(), local.block().unwrap(), Access::LOCAL);
        self.victim.post_now(&WorkRequest::Lend { local, immediate: Immediate(1) }).unwrap()
    }

    /// Reports for the attacker that it has executed `count` descriptors.
    fn execute(&self, count: u64) {
        self.page.forge(CONSUMED_AT, count);
        assert_ne!(self.settle(), Look::Over);
    }

    fn used(&self) -> u64 {
        self.pool.stats().used_bytes
    }

    /// Lends a range of the attacker's block 0 under the given lease.
    fn offer(&mut self, offset: u64, length: u64, slot: u32) {
        let source = Source::Lent { index: 0, offset, length, slot, generation: 7 };
        self.publish(&Descriptor {
            immediate: Some(3),
            continues: false,
            is_quiet: false,
            remote: None,
            source,
        });
    }

    fn violation(&self) -> PeerViolation {
        match self.failure() {
            FabricError::PeerMisbehaved { violation, .. } => violation,
            other => panic!("unexpected: {other}"),
        }
    }

    /// The view that the victim gets.
    fn view(&self) -> Buf {
        let next = std::pin::pin!(self.victim.next_arrival());
        match futures::FutureExt::now_or_never(next) {
            Some(Ok(Arrival::Loan { buffer, .. })) => buffer,
            other => panic!("unexpected: {other:?}"),
        }
    }
}

#[test]
fn a_lease_ends_with_its_own_generation_only() {
    on_a_runtime(|| {
        let rig = Rig::new();
        let operation = rig.lend_one();
        rig.execute(1);
        for garbage in [0, 2, 3, u64::MAX, 1 << 63] {
            rig.page.forge(LEASES_AT, garbage);
            rig.page.forge(RELEASED_AT, garbage.wrapping_add(99));
            assert_eq!(rig.settle(), Look::Idle);
            assert_eq!(rig.used(), 4096, "generation {garbage} ended a lease of generation 1");
        }
        rig.page.release(0, 1);
        rig.settle();
        assert_eq!(rig.used(), 0);
        drop(operation);
    });
}

#[test]
fn a_lease_released_twice_or_early_costs_nobody_else() {
    on_a_runtime(|| {
        let rig = Rig::new();
        let first = rig.lend_one();
        // Before it has taken the loan: the operation still owns the bytes.
        rig.page.release(0, 1);
        rig.settle();
        assert_eq!(rig.used(), 4096);
        rig.execute(1);
        assert_eq!(rig.used(), 0);
        // The slot's next lease has another generation.
        let second = rig.lend_one();
        rig.execute(2);
        rig.page.release(0, 1);
        rig.settle();
        assert_eq!(rig.used(), 4096);
        rig.page.release(0, 2);
        rig.settle();
        assert_eq!(rig.used(), 0);
        drop((first, second));
    });
}

#[test]
fn one_who_never_releases_runs_into_the_cap_alone() {
    on_a_runtime(|| {
        let rig = Rig::new();
        let lent: Vec<_> = (0..LEASES).map(|_| rig.lend_one()).collect();
        rig.execute(u64::from(LEASES));
        let refused = futures::FutureExt::now_or_never(rig.lend_one());
        match refused {
            Some(Err(FabricError::LeasesExhausted { open, cap })) => {
                assert_eq!((open, cap), (LEASES, LEASES));
            }
            other => panic!("unexpected: {other:?}"),
        }
        assert_eq!(rig.settle(), Look::Idle, "the connection lives");
        // One lease is released, so one more can be opened.
        rig.page.release(2, 1);
        let again = rig.lend_one();
        rig.execute(u64::from(LEASES) + 1);
        assert_eq!(rig.used(), u64::from(LEASES) * 4096);
        drop((lent, again));
    });
}

#[test]
fn leases_open_at_the_end_are_retired_until_they_are_released() {
    on_a_runtime(|| {
        let rig = Rig::new();
        let operation = rig.lend_one();
        rig.execute(1);
        rig.page.set_closed(1);
        assert_eq!(rig.settle(), Look::Over);
        assert_eq!((rig.used(), rig.pool.stats().retired_bytes), (4096, 4096));
        assert!(rig.link.has_leases() && rig.sees.listens());
        rig.page.release(0, 1);
        assert!(rig.link.reclaim());
        assert_eq!((rig.used(), rig.pool.stats().retired_bytes), (0, 0));
        drop(operation);
    });
}

#[test]
fn leases_of_a_dead_process_come_back() {
    on_a_runtime(|| {
        let rig = Rig::new();
        let operations = [rig.lend_one(), rig.lend_one()];
        rig.link.peer_died();
        assert!(matches!(rig.failure(), FabricError::PeerLost { .. }));
        assert_eq!(rig.pool.stats().retired_bytes, 2 * 4096);
        rig.link.bury();
        assert_eq!((rig.used(), rig.pool.stats().retired_bytes, rig.pool.stats().leaked_bytes), (0, 0, 0));
        drop(operations);
    });
}

#[test]
fn leases_that_nobody_watches_any_more_are_leaked_and_counted() {
    on_a_runtime(|| {
        let rig = Rig::new();
        let operation = rig.lend_one();
        rig.execute(1);
        let Rig { victim, link, pool, .. } = rig;
        drop((operation, victim, link));
        assert_eq!((pool.stats().used_bytes, pool.stats().leaked_bytes), (4096, 4096));
    });
}

#[test]
fn a_loan_is_a_view_until_it_is_dropped() {
    on_a_runtime(|| {
        let mut rig = Rig::new();
        rig.send_block(0, 4 * CHUNK_BYTES);
        rig.offer(100, 3 * CHUNK_BYTES as u64, 5);
        // Made resident in as many rounds as a copy would take.
        assert_eq!(rig.link.turn(), Look::More);
        assert_eq!(rig.sees.consumed(), 0);
        rig.settle();
        assert_eq!(rig.sees.consumed(), 1);
        let view = rig.view();
        assert!(view.len() == 3 * CHUNK_BYTES && view.iter().all(|&byte| byte == 7));
        // The second time takes one round.
        rig.offer(0, 4 * CHUNK_BYTES as u64 - CHUNK_BYTES as u64, 6);
        assert_ne!(rig.link.turn(), Look::More);
        let second = rig.view();
        // Even after the connection is over.
        Link::start_close(rig.link.as_ref());
        assert!(view.iter().all(|&byte| byte == 7));
        assert_eq!((rig.sees.lease(5), rig.sees.lease(6), rig.sees.released()), (0, 0, 0));
        drop(view.clone());
        drop(view);
        drop(second);
        assert_eq!((rig.sees.lease(5), rig.sees.lease(6), rig.sees.released()), (7, 7, 2));
    });
}

#[test]
fn loans_that_were_not_executed_are_released_at_the_end() {
    on_a_runtime(|| {
        let mut rig = Rig::new();
        rig.send_block(0, 4096);
        for slot in 0..3 {
            rig.offer(0, 4096, slot);
        }
        Link::start_close(rig.link.as_ref());
        assert_eq!(rig.victim.stats().arrivals, 0);
        assert_eq!([0, 1, 2, 3].map(|slot| rig.sees.lease(slot)), [7, 7, 7, 0]);
    });
}

#[test]
fn loans_out_of_bounds_are_refused() {
    let bad = [(0, 8193), (1, 8192), (8192, 1), (u64::MAX, 1), (u64::MAX, u64::MAX), (1 << 63, 1 << 63)];
    for (offset, length) in bad {
        on_a_runtime(|| {
            let mut rig = Rig::new();
            rig.send_block(0, 8192);
            rig.offer(offset, length, 0);
            assert_eq!(rig.violation(), PeerViolation::OutOfBounds, "{length} bytes from {offset}");
            assert_eq!(rig.victim.stats().arrivals, 0);
        });
    }
}

#[test]
fn loans_without_bytes_block_or_lease_are_refused() {
    for (send, length, slot) in [(false, 1, 0), (true, 0, 0), (true, 1, LEASES_MAX), (true, 1, u32::MAX)] {
        on_a_runtime(|| {
            let mut rig = Rig::new();
            if send {
                rig.send_block(0, 8192);
            }
            rig.offer(0, length, slot);
            assert_eq!(rig.violation(), PeerViolation::Malformed);
        });
    }
}

#[test]
fn more_loans_than_receives_end_the_connection_and_are_released() {
    on_a_runtime(|| {
        let mut rig = Rig::new();
        rig.send_block(0, 4096);
        for slot in 0..8 {
            rig.offer(0, 4096, slot);
        }
        rig.settle();
        rig.offer(0, 4096, 8);
        assert!(matches!(rig.failure(), FabricError::ReceiverNotReady { .. }));
        assert_eq!(rig.sees.lease(8), 7, "what could not be delivered");
        assert_eq!(rig.sees.lease(0), 0, "what was delivered");
    });
}

#[test]
fn every_slot_lease_and_claim_has_words_of_its_own() {
    let (own, fd) = OwnPage::new(64).unwrap();
    let seen = PeerPage::import(fd.as_fd(), own.slots()).unwrap();
    let descriptor = |tag| Descriptor {
        immediate: None,
        continues: false,
        is_quiet: false,
        remote: None,
        source: Source::Answer { tag, index: 0, offset: u64::MAX, length: u64::MAX },
    };
    (0..64).for_each(|position| own.publish(position, &descriptor(position as u32).encode()));
    (0..LEASES_MAX).for_each(|slot| own.release(slot, 1000 + u64::from(slot)));
    let claimed = |slot| 9000 + u64::from(slot);
    (0..CLAIMS_MAX).for_each(|slot| own.claim(slot, claimed(slot)));
    for position in 0..64 {
        assert_eq!(seen.descriptor(position), Ok(Some(descriptor(position as u32))));
    }
    for slot in 0..LEASES_MAX {
        assert_eq!(seen.lease(slot), 1000 + u64::from(slot), "lease {slot}");
    }
    assert_eq!(seen.lease(LEASES_MAX), 1000, "no slot reaches past the words");
    assert_eq!((seen.consumed(), seen.closed(), seen.sleep()), (0, 0, 0));
    assert_eq!(seen.released(), LEASES_MAX.into());
    assert!(seen.claims().eq((0..CLAIMS_MAX).map(claimed)));
    (0..CLAIMS_MAX).for_each(|slot| own.end_claim(slot));
    assert_eq!((seen.claims().count(), seen.released()), (0, (LEASES_MAX + CLAIMS_MAX).into()));
}
