//! Many connections one after the other: nothing is left of them.

use std::time::Duration;

use futures::future::join;
use verbs_reactor::{Access, Immediate};

use crate::{
    SETUP,
    contract::{
        Flavour, bounded,
        pair::{Pair, RegisteredPool, immediate, pattern},
    },
};

const ROUNDS: u32 = 100;
const BYTES: usize = 70_000;

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn a_hundred_rounds_of_connect_transfer_close_leave_nothing() {
    bounded(Flavour::TwoWorkers, |runtime| async move {
        let pair = Pair::new(SETUP, runtime.clone()).await;
        let readable = RegisteredPool::new(&pair.right.domain, "readable", Access::READABLE, 1 << 20);
        let exposed = readable.filled(BYTES, 5);
        let region = readable.region(exposed.block().unwrap());
        let _exposure = exposed.expose();
        round(&pair, 0, &exposed, region).await;
        let descriptors = descriptors();
        for number in 1..=ROUNDS {
            round(&pair, number, &exposed, region).await;
        }
        // The last connection's driver may still be at its end.
        let closed = async {
            while self::descriptors() > descriptors {
                runtime.sleep(Duration::from_millis(10)).await;
            }
        };
        pair.step("the end of file descriptors", closed).await;
        for pool in [&pair.left.source.pool, &pair.left.receive.pool, &pair.right.receive.pool] {
            assert_eq!((pool.stats().used_bytes, pool.stats().leaked_bytes), (0, 0));
        }
    });
}

async fn round(pair: &Pair, number: u32, exposed: &memory::Buf, region: verbs_reactor::RemoteRegion) {
    let (left_end, right_end) = pair.connect_again().await;
    let lent = pair.right.receive.lend(BYTES);
    left_end.add_remote_region(lent.region);
    left_end.add_remote_region(region);
    let write =
        left_end.write_imm(pair.left.source.filled(BYTES, number.into()), lent.range, Immediate(number));
    let range = verbs_reactor::RemoteRange {
        region: region.region,
        generation: region.generation,
        offset: exposed.offset() as u64,
        length: BYTES as u64,
    };
    let read = left_end.read(range, pair.left.receive.pool.try_alloc(BYTES).unwrap());
    let all = join(join(write, read), right_end.next_arrival());
    let ((written, read), arrival) = pair.step("the transfers", all).await;
    written.unwrap();
    assert_eq!(immediate(arrival.unwrap()), (number, BYTES as u64));
    assert!(read.unwrap()[..] == exposed[..]);
    assert!(lent.take()[..] == pattern(BYTES, number.into())[..]);
    pair.step("the closes", join(left_end.close(), right_end.close())).await;
}

/// Open file descriptors of this process.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}
