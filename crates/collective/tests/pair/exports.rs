//! RemoteKey Get and Put: memory that is read and written by a key.

use futures::{future::try_join_all, join};
use tensorwire_collective::{
    Group, GroupError,
    pair::{Export, ExportKey},
};
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::Tensor;

use super::{over_fabrics, over_verbs, possible, ranks};

over_fabrics! {
    remote_key_get,
    remote_key_put,
    a_part_of_a_matrix_is_read_without_the_rest,
    reads_in_a_loop_let_a_write_happen,
    what_leaves_an_export_is_refused_before_anything_is_sent,
    keys_of_others_and_of_what_was_dropped_are_refused,
    writes_of_one_rank_keep_their_order,
    a_write_needs_no_memory_for_the_rest,
    a_write_changes_nothing_that_is_read,
}

over_verbs! {
    remote_key_get,
    remote_key_put,
    a_write_changes_nothing_that_is_read,
}

const LENGTHS: [usize; 3] = [0, 1024, 1_000_000];

fn bytes(group: &Group, bytes: &[u8]) -> Tensor {
    Tensor::from_values(group.worker().pool(), &[bytes.len() as u64], bytes).unwrap()
}

/// The export of this rank, and the keys of all.
async fn exported(group: &Group, content: &[u8]) -> (Export, Vec<ExportKey>) {
    let export = group.export(bytes(group, content)).unwrap();
    let keys = group.all_gather(bytes(group, &export.key().encode())).await.unwrap();
    (export, keys.iter().map(|key| ExportKey::decode(key.bytes()).unwrap()).collect())
}

fn content(rank: usize, length: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 7 + rank) as u8).collect()
}

async fn remote_key_get(fabric: FabricKind) {
    for size in possible(fabric, [2, 4]) {
        let ranks = ranks(fabric, size).await;
        for length in LENGTHS {
            ranks
                .each(async |group| {
                    let (export, keys) = exported(&group, &content(group.rank(), length)).await;
                    for (rank, key) in keys.iter().enumerate() {
                        assert_eq!((key.rank(), key.length()), (rank, length));
                        let all = group.get(key, ..).await.unwrap();
                        assert!(all.bytes() == content(rank, length), "of rank {rank}");
                        let part = length / 3..length / 2;
                        let some = group.get(key, part.clone()).await.unwrap();
                        assert!(some.bytes() == &content(rank, length)[part], "part of rank {rank}");
                    }
                    group.barrier().await.unwrap();
                    drop(export);
                })
                .await;
        }
        ranks.shutdown().await;
    }
}

async fn a_part_of_a_matrix_is_read_without_the_rest(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let (zero, one) = (&ranks.groups[0], &ranks.groups[1]);
    let values: Vec<i32> = (0..1 << 20).collect();
    let tensor = Tensor::from_values(one.worker().pool(), &[1 << 19, 2], &values).unwrap();
    let export = one.export(tensor.clone()).unwrap();
    let key = export.key();
    assert!(zero.get(&key, ..).await.unwrap().bytes() == tensor.bytes());
    zero.put(&key, 78, &[9]).await.unwrap();
    let mut expected = tensor.bytes()[77..85].to_vec();
    expected[1] = 9;
    let sent = || ranks.workers[1].peers().iter().map(|peer| peer.fabric.bytes_sent).sum::<u64>();
    let before = sent();
    assert_eq!(zero.get(&key, 77..85).await.unwrap().bytes(), expected);
    let moved = sent() - before;
    assert!(moved < 1000, "{moved} bytes");
    assert_eq!(export.tensor().unwrap().shape(), tensor.shape());
    drop(export);
    ranks.shutdown().await;
}

/// On one host no read waits for its owner.
async fn reads_in_a_loop_let_a_write_happen(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let (zero, one) = (&ranks.groups[0], &ranks.groups[1]);
    let export = one.export(bytes(one, &[0; 8])).unwrap();
    let key = export.key();
    let reads = async { while zero.get(&key, ..).await.unwrap().bytes()[0] == 0 {} };
    let ((), written) = join!(reads, zero.put(&key, 0, &[1]).into_future());
    written.unwrap();
    drop(export);
    ranks.shutdown().await;
}

/// Each rank writes its part of every export.
async fn remote_key_put(fabric: FabricKind) {
    for size in possible(fabric, [2, 4]) {
        let ranks = ranks(fabric, size).await;
        for length in LENGTHS {
            ranks
                .each(async |group| {
                    let (export, keys) = exported(&group, &vec![0; size * length]).await;
                    let own = content(group.rank(), length);
                    for key in &keys {
                        group.put(key, group.rank() * length, &own).await.unwrap();
                        let written = group.rank() * length..(group.rank() + 1) * length;
                        assert!(group.get(key, written).await.unwrap().bytes() == own);
                    }
                    group.barrier().await.unwrap();
                    let all: Vec<u8> = (0..size).flat_map(|rank| content(rank, length)).collect();
                    assert!(export.tensor().unwrap().bytes() == all);
                })
                .await;
        }
        ranks.shutdown().await;
    }
}

async fn what_leaves_an_export_is_refused_before_anything_is_sent(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    ranks
        .each(async |group| {
            let (export, keys) = exported(&group, &[1; 100]).await;
            let key = &keys[1 - group.rank()];
            let refused = [
                (group.get(key, 101..101).await.map(drop), "offset = `101`"),
                (group.get(key, 0..101).await.map(drop), "length = `101`"),
                (group.get(key, 50..101).await.map(drop), "offset = `50`"),
                (group.put(key, 100, &[1]).await, "offset = `100`"),
                (group.put(key, usize::MAX, &[1]).await, "offset = `18446744073709551615`"),
                (group.put(key, 0, &[1; 101]).await, "length = `101`"),
            ];
            for (refused, expected) in refused {
                let error = refused.unwrap_err().to_string();
                assert!(error.starts_with(expected), "{error}");
            }
            group.barrier().await.unwrap();
            assert_eq!(export.tensor().unwrap().bytes(), [1; 100]);
        })
        .await;
    ranks.shutdown().await;
}

async fn keys_of_others_and_of_what_was_dropped_are_refused(fabric: FabricKind) {
    let (first, other) = (ranks(fabric, 2).await, ranks(fabric, 2).await);
    let (zero, one) = (&first.groups[0], &first.groups[1]);
    let export = one.export(bytes(one, &[5; 8])).unwrap();
    let foreign = other.groups[1].export(bytes(&other.groups[1], &[6; 8])).unwrap();
    let refused = [zero.get(&foreign.key(), ..).await.map(drop), zero.put(&foreign.key(), 0, &[1]).await];
    for refused in refused {
        let error = refused.unwrap_err();
        assert!(matches!(&error, GroupError::Argument { field: "key", .. }), "{error}");
        assert!(error.to_string().contains("of another group, run or generation"), "{error}");
    }
    let key = export.key();
    assert_eq!(zero.get(&key, ..).await.unwrap().bytes(), [5; 8]);
    drop(export);
    let gone = [zero.get(&key, ..).await.map(drop), zero.put(&key, 0, &[1]).await];
    for gone in gone {
        assert!(matches!(&gone, Err(GroupError::Gone { rank: 1, what: "export", .. })), "{gone:?}");
    }
    let text = Tensor::from_strings(one.worker().pool(), &[1], &["a"]).unwrap();
    assert!(matches!(one.export(text), Err(GroupError::Argument { field: "tensor", .. })));
    drop(foreign);
    first.shutdown().await;
    other.shutdown().await;
}

async fn writes_of_one_rank_keep_their_order(fabric: FabricKind) {
    let ranks = ranks(fabric, 3).await;
    let export = ranks.groups[0].export(bytes(&ranks.groups[0], &[0; 8])).unwrap();
    let key = export.key();
    ranks
        .each(async |group| {
            let own = group.rank();
            let writes: Vec<[u8; 2]> = (0..20).map(|at| [own as u8 + 1, at]).collect();
            let written = writes.iter().map(|bytes| group.put(&key, 2 * own, bytes).into_future());
            try_join_all(written).await.unwrap();
        })
        .await;
    assert_eq!(export.tensor().unwrap().bytes(), [1, 19, 2, 19, 3, 19, 0, 0]);
    drop(export);
    ranks.shutdown().await;
}

async fn a_write_needs_no_memory_for_the_rest(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let (zero, one) = (&ranks.groups[0], &ranks.groups[1]);
    let export = one.export(bytes(one, &content(1, 1_000_000))).unwrap();
    let key = export.key();
    let place = || export.tensor().unwrap().buf().place().unwrap();
    let first = place();
    for at in 0..10 {
        zero.put(&key, 100_000 * at, &[9; 1000]).await.unwrap();
    }
    assert_eq!(place(), first);
    if fabric == FabricKind::SHM {
        // Neighbours find it from now on, without a message.
        assert_eq!(zero.get(&key, 100_000..100_002).await.unwrap().bytes(), [9; 2]);
        // The owner may still hold the first read's view for a while.
        loop {
            let before = place();
            zero.put(&key, 100_001, &[8]).await.unwrap();
            assert_eq!(zero.get(&key, 100_000..100_002).await.unwrap().bytes(), [9, 8]);
            if place() == before {
                break;
            }
        }
    }
    let first = place();
    // As much as a write in place has at most, and more.
    let long = vec![3; 1_000_000];
    zero.put(&key, 0, &long).await.unwrap();
    assert!(export.tensor().unwrap().bytes() == long);
    assert_eq!(place(), first);
    let export = one.export(bytes(one, &[0; 1_200_000])).unwrap();
    let longer = vec![4; 1_100_000];
    zero.put(&export.key(), 50_000, &longer).await.unwrap();
    let written = export.tensor().unwrap();
    assert!(written.bytes()[50_000..1_150_000] == longer);
    assert!(written.bytes()[..50_000] == [0; 50_000] && written.bytes()[1_150_000..] == [0; 50_000]);
    ranks.shutdown().await;
}

async fn a_write_changes_nothing_that_is_read(fabric: FabricKind) {
    let ranks = ranks(fabric, 2).await;
    let (zero, one) = (&ranks.groups[0], &ranks.groups[1]);
    let first = content(1, 100_000);
    let export = one.export(bytes(one, &first)).unwrap();
    let key = export.key();
    let (read, own) = (zero.get(&key, ..).await.unwrap(), export.tensor().unwrap());
    zero.put(&key, 8, &[1, 2]).await.unwrap();
    drop(own);
    let again = zero.get(&key, 8..10).await.unwrap();
    zero.put(&key, 9, &[3]).await.unwrap();
    assert!(read.bytes() == first, "a tensor that was read has changed");
    assert_eq!(again.bytes(), [1, 2]);
    assert_eq!(zero.get(&key, 8..10).await.unwrap().bytes(), [1, 3]);
    drop(export);
    ranks.shutdown().await;
}
