//! ManySlotsNoLeaks: ever new tags, slots and exports leave nothing behind.

use std::ops::Range;

use futures::future::join_all;
use tensorwire_collective::Group;
use tensorwire_rendezvous::Tensor;
use tensorwire_verbs_reactor::FabricKind;

use super::{ranks, tensor, values};

/// How many are used before the memory is measured: more than a connection remembers keys, with their element types and shapes.
const BEFORE: u64 = 70_000;
const MANY: u64 = 10_000;

/// How many are used at the same time.
const TOGETHER: usize = 100;

/// What [`MANY`] may add to the process: 150 bytes for each. A key, a value, or an entry of a table takes more; the rest is what the
/// allocator loses between them.
const GROWTH_BYTES_MAX: usize = 1_500_000;

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size()
}

/// Uses many new ones, and measures what the last of them add.
async fn leaves_nothing(use_some: impl AsyncFn(&Group, &Group, Range<u64>)) {
    let ranks = ranks(FabricKind::SHM, 2).await;
    let [zero, one] = &ranks.groups[..] else { unreachable!("two ranks") };
    let use_all = async |all: Range<u64>| {
        for first in all.step_by(TOGETHER) {
            use_some(zero, one, first..first + TOGETHER as u64).await;
        }
    };
    use_all(0..BEFORE).await;
    let before = resident_bytes();
    use_all(BEFORE..BEFORE + MANY).await;
    let grown = resident_bytes().saturating_sub(before);
    println!("{MANY} more took {grown} bytes");
    assert!(grown < GROWTH_BYTES_MAX, "{grown} bytes");
    ranks.shutdown().await;
}

#[tokio::test]
async fn many_tags() {
    leaves_nothing(async |zero, one, tags| {
        let sent: Vec<_> =
            tags.clone().map(|tag| zero.send(1, tag, tensor(zero, &[tag as i32])).unwrap()).collect();
        let received = join_all(tags.clone().map(|tag| one.recv([0, 1], tag).into_future())).await;
        for (message, tag) in received.into_iter().zip(tags) {
            assert_eq!(values(&message.unwrap().tensor), [tag as i32]);
        }
        super::all_received(sent).await;
    })
    .await;
}

#[tokio::test]
async fn many_slots() {
    leaves_nothing(async |zero, one, slots| {
        let buffers =
            slots.map(|slot| (zero.send_buffer(1, slot, 4).unwrap(), one.recv_buffer(0, slot, 4).unwrap()));
        // All at once, so that not each waits for the messages of the one before.
        join_all(buffers.map(async |(mut outgoing, mut incoming)| {
            outgoing.send(0, 4, 0).await.unwrap();
            assert_eq!(incoming.wait_recv().await.unwrap(), 0..4);
            outgoing.wait_send().await.unwrap();
            drop(outgoing);
            // The task of the receive buffer has ended with that.
            incoming.wait_recv().await.unwrap_err();
        }))
        .await;
    })
    .await;
}

#[tokio::test]
async fn many_exports() {
    leaves_nothing(async |zero, one, exports| {
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
