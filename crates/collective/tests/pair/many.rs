//! ManySlotsNoLeaks: many new tags, slots and exports leave nothing behind.

use std::ops::Range;

use tensorwire_collective::Group;
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{Tensor, Worker};

use super::{all_received, over_fabrics, tensor, values};
use crate::group::{PATIENCE, joined};
use crate::join_all::join_all;

over_fabrics! {
    many_tags,
    many_slots,
    many_exports,
}

const MANY: u64 = 10_000;

/// How many are used at the same time.
const TOGETHER: usize = 100;

/// Values that may wait on a worker: what [`TOGETHER`] need. If each left one behind, a send would soon be rejected, and a
/// request left behind would soon block the others.
const VALUES_MAX: usize = 4 * TOGETHER;

/// How much all of them may add to the process. A connection stores the names and element types of a bounded number of keys, and
/// both its ranks are in this process; anything more is a leak.
const GROWTH_BYTES_MAX: usize = 1000 * MANY as usize;

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size()
}

/// Uses many new ones.
async fn leaves_nothing(fabric: FabricKind, use_some: impl AsyncFn(&Group, &Group, Range<u64>)) {
    let workers = ["rank_0", "rank_1"].map(async |name| {
        let worker = Worker::builder(name).require(fabric).limits(|limits| limits.values_max = VALUES_MAX);
        worker.start().await.unwrap()
    });
    let ranks = joined(join_all(workers).await, PATIENCE).await;
    let [zero, one] = &ranks.groups[..] else { unreachable!("two ranks") };
    let mut before = 0;
    for first in (0..MANY).step_by(TOGETHER) {
        use_some(zero, one, first..first + TOGETHER as u64).await;
        // From here on, all memory that is reused exists.
        before = if first == 0 { resident_bytes() } else { before };
    }
    let grown = resident_bytes().saturating_sub(before);
    println!("{MANY} took {grown} bytes");
    assert!(grown < GROWTH_BYTES_MAX, "{grown} bytes");
    for worker in &ranks.workers {
        let published = worker.peer(worker.name()).unwrap().list().await.unwrap();
        assert!(published.is_empty(), "{} are published still", published.len());
    }
    ranks.shutdown().await;
}

async fn many_tags(fabric: FabricKind) {
    leaves_nothing(fabric, async |zero, one, tags| {
        let sent: Vec<_> =
            tags.clone().map(|tag| zero.send(1, tag, tensor(zero, &[tag as i32])).unwrap()).collect();
        let received = join_all(tags.clone().map(|tag| one.recv([0, 1], tag).into_future())).await;
        for (message, tag) in received.into_iter().zip(tags) {
            assert_eq!(values(&message.unwrap().tensor), [tag as i32]);
        }
        all_received(sent).await;
    })
    .await;
}

async fn many_slots(fabric: FabricKind) {
    leaves_nothing(fabric, async |zero, one, slots| {
        let buffers =
            slots.map(|slot| (zero.send_buffer(1, slot, 4).unwrap(), one.recv_buffer(0, slot, 4).unwrap()));
        // All at once, so that each does not wait for the messages of the one before.
        join_all(buffers.map(async |(mut outgoing, mut incoming)| {
            outgoing.send(0, 4, 0).await.unwrap();
            assert_eq!(incoming.wait_recv().await.unwrap(), 0..4);
            outgoing.wait_send().await.unwrap();
            drop(outgoing);
            // This ends the task of the receive buffer.
            incoming.wait_recv().await.unwrap_err();
        }))
        .await;
    })
    .await;
}

async fn many_exports(fabric: FabricKind) {
    leaves_nothing(fabric, async |zero, one, exports| {
        let content = Tensor::from_values(one.worker().pool(), &[4], &[1u8, 2, 3, 4]).unwrap();
        let exports = exports.map(|_| one.export(content.clone()).unwrap());
        join_all(exports.map(async |export| {
            zero.put(&export.key(), 1, &[9]).await.unwrap();
            assert_eq!(zero.get(&export.key(), ..).await.unwrap().bytes(), [1, 9, 3, 4]);
        }))
        .await;
    })
    .await;
}
