//! ManySlotsNoLeaks: ever new tags, slots and exports leave nothing behind.

use tensorwire_collective::Group;
use tensorwire_rendezvous::Tensor;
use tensorwire_verbs_reactor::FabricKind;

use super::{over_fabrics, ranks, tensor, values};

over_fabrics! {
    many_tags,
    many_slots,
    many_exports,
}

/// How many are used before the memory is measured: as many as there are places in the tables of names, which are bounded.
const BEFORE: u64 = 20_000;
const MANY: u64 = 10_000;

/// What [`MANY`] may add to the process. It is below 100 bytes for each.
const GROWTH_BYTES_MAX: usize = 1_000_000;

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size()
}

/// Uses many new ones, with each rank's figures for what waits before and after.
async fn leaves_nothing(fabric: FabricKind, use_one: impl AsyncFn(&Group, &Group, u64)) {
    let ranks = ranks(fabric, 2).await;
    let [zero, one] = &ranks.groups[..] else { unreachable!("two ranks") };
    for number in 0..BEFORE {
        use_one(zero, one, number).await;
    }
    let before = resident_bytes();
    for number in BEFORE..BEFORE + MANY {
        use_one(zero, one, number).await;
    }
    let grown = resident_bytes().saturating_sub(before);
    println!("{MANY} more took {grown} bytes");
    assert!(grown < GROWTH_BYTES_MAX, "{grown} bytes");
    for worker in &ranks.workers {
        assert!(worker.peers().len() <= 1);
    }
    ranks.shutdown().await;
}

async fn many_tags(fabric: FabricKind) {
    leaves_nothing(fabric, async |zero, one, tag| {
        let sent = zero.send(1, tag, tensor(zero, &[tag as i32])).unwrap();
        assert_eq!(values(&one.recv([0, 1], tag).await.unwrap().tensor), [tag as i32]);
        sent.await.unwrap();
    })
    .await;
}

async fn many_slots(fabric: FabricKind) {
    leaves_nothing(fabric, async |zero, one, slot| {
        let (mut outgoing, mut incoming) =
            (zero.send_buffer(1, slot, 4).unwrap(), one.recv_buffer(0, slot, 4).unwrap());
        outgoing.send(0, 4, 0).await.unwrap();
        assert_eq!(incoming.wait_recv().await.unwrap(), 0..4);
        outgoing.wait_send().await.unwrap();
        drop(outgoing);
        // So that its task has ended.
        incoming.wait_recv().await.unwrap_err();
    })
    .await;
}

async fn many_exports(fabric: FabricKind) {
    leaves_nothing(fabric, async |zero, one, _| {
        let export =
            one.export(Tensor::from_values(one.worker().pool(), &[4], &[1u8, 2, 3, 4]).unwrap()).unwrap();
        zero.put(&export.key(), 1, &[9]).await.unwrap();
        assert_eq!(zero.get(&export.key(), ..).await.unwrap().bytes(), [1, 9, 3, 4]);
        drop(export);
    })
    .await;
}
