//! Sharded sets: several publishers, and followers with layouts of their own.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::single_range_in_vec_init)] // tensors of one dimension

mod deltas;

use std::{ops::Range, slice, time::Duration};

use tensorwire_fabric::FabricKind;
use tensorwire_protocol::{Sharing, Validation};
use tensorwire_rendezvous::{
    Tensor, Worker, WorkerBuilder, WorkerError,
    sets::{Layout, ShardedSet},
};

use crate::{
    fabrics::kinds,
    sets::{SET, USUAL, on, run},
};

async fn workers(kind: FabricKind, role: &str, count: usize) -> Vec<Worker> {
    let mut workers = Vec::new();
    for number in 0..count {
        workers.push(on(kind, &format!("{role}_{number}")).start().await.unwrap());
    }
    workers
}

async fn sharded(publishers: &[Worker], follower: &Worker) -> ShardedSet {
    let mut parts = Vec::new();
    for publisher in publishers {
        parts.push(follower.peer_at(publisher.address()).await.unwrap().set(SET));
    }
    ShardedSet::new(parts)
}

/// A dimension of a matrix, and which ranges of it each of several workers has.
type Division = (usize, Vec<Vec<Range<u64>>>);

/// Equal parts for `count` workers.
fn even(axis: usize, length: u64, count: u64) -> Division {
    (axis, (0..count).map(|at| vec![length * at / count..length * (at + 1) / count]).collect())
}

/// Equal parts of each of three matrices in one.
fn fused(axis: usize, length: u64, count: u64) -> Division {
    let third = length / 3;
    let part = |at: u64| {
        (0..3).map(|of| of * third + third * at / count..of * third + third * (at + 1) / count).collect()
    };
    (axis, (0..count).map(part).collect())
}

const ROWS: u64 = 60;
const COLUMNS: u64 = 36;

/// The elements of these ranges of a matrix whose elements are `seed` and their places.
fn elements(seed: u32, axis: usize, ranges: &[Range<u64>]) -> Vec<u32> {
    let all = |length| vec![0..length];
    let (rows, columns) = match axis {
        0 => (ranges.to_vec(), all(COLUMNS)),
        _ => (all(ROWS), ranges.to_vec()),
    };
    let columns: Vec<u64> = columns.into_iter().flatten().collect();
    let row = |row: u64| {
        columns.iter().map(move |column| seed + (row * COLUMNS + column) as u32).collect::<Vec<_>>()
    };
    rows.into_iter().flatten().flat_map(row).collect()
}

fn part(worker: &Worker, seed: u32, axis: usize, ranges: &[Range<u64>]) -> Tensor {
    let along = ranges.iter().map(|range| range.end - range.start).sum();
    let shape = if axis == 0 { [along, COLUMNS] } else { [ROWS, along] };
    Tensor::from_values(worker.pool(), &shape, &elements(seed, axis, ranges)).unwrap()
}

fn length(axis: usize) -> u64 {
    [ROWS, COLUMNS][axis]
}

/// Commits the matrix in parts, and a bias that all have.
async fn commit(publishers: &[Worker], version: u64, seed: u32, (axis, parts): &Division) {
    for (publisher, ranges) in publishers.iter().zip(parts) {
        let matrix = part(publisher, seed, *axis, ranges).shard(*axis, length(*axis), ranges);
        let bias = Tensor::from_values(publisher.pool(), &[3], &[9_u32, 8, 7]).unwrap();
        publisher.set(SET).commit(version, [("matrix", matrix), ("bias", bias.into())]).await.unwrap();
    }
}

/// Bytes that the publishers have sent.
fn sent(publishers: &[Worker]) -> u64 {
    publishers.iter().flat_map(Worker::peers).map(|peer| peer.fabric.bytes_sent).sum()
}

#[test]
fn followers_get_their_layouts_bit_for_bit_and_each_byte_is_moved_once() {
    let layouts = [even, fused];
    for kind in kinds(USUAL) {
        run(async {
            for (sources, targets) in [(2, 3), (3, 2)] {
                let publishers = workers(*kind, "publisher", sources).await;
                let followers = workers(*kind, "follower", targets).await;
                let mut version = 0;
                for (of_source, source_axis) in layouts.iter().flat_map(|of| [(of, 0), (of, 1)]) {
                    version += 1;
                    let source = of_source(source_axis, length(source_axis), sources as u64);
                    commit(&publishers, version, version as u32 * 10_000, &source).await;
                    for (of_target, axis) in layouts.iter().flat_map(|of| [(of, 0), (of, 1)]) {
                        let (axis, parts) = of_target(axis, length(axis), targets as u64);
                        for (follower, ranges) in followers.iter().zip(&parts) {
                            let set = sharded(&publishers, follower).await;
                            let set = set.layout(Layout::new().part("matrix", axis, ranges));
                            let snapshot = set.fetch().await.unwrap();
                            let expected = elements(version as u32 * 10_000, axis, ranges);
                            assert_eq!(snapshot.get("matrix").unwrap().values::<u32>().unwrap(), expected);
                            assert_eq!(snapshot.get("bias").unwrap().values::<u32>().unwrap(), [9, 8, 7]);
                            assert_eq!((snapshot.version(), snapshot.len()), (version, 2));
                        }
                    }
                    let whole = sharded(&publishers, &followers[0]).await.fetch().await.unwrap();
                    let all = elements(version as u32 * 10_000, 0, &[0..ROWS]);
                    assert_eq!(whole.get("matrix").unwrap().values::<u32>().unwrap(), all);
                }
                for worker in followers.into_iter().chain(publishers) {
                    worker.shutdown().await;
                }
            }
        });
    }
}

/// A follower that wants these rows of the matrix, and what it gets of that.
async fn matrix(
    publishers: &[Worker],
    follower: WorkerBuilder,
    sharing: Sharing,
    rows: Range<u64>,
) -> (Worker, Tensor) {
    let follower = follower.start().await.unwrap();
    let mut parts = Vec::new();
    for publisher in publishers {
        parts.push(follower.peer_at(publisher.address()).await.unwrap().set(SET).sharing(sharing));
    }
    let layout = Layout::new().part("matrix", 0, slice::from_ref(&rows));
    let mut versions = ShardedSet::new(parts).layout(layout).follow();
    let staged = versions.next().await.unwrap().unwrap();
    let matrix = staged.snapshot().get("matrix").unwrap().clone();
    assert_eq!(matrix.values::<u32>().unwrap(), elements(7, 0, &[rows]));
    let has_view = matrix.buf().is_foreign();
    assert_eq!(
        (staged.copied() == 0, staged.bytes_moved() > matrix.bytes().len() as u64),
        (has_view, !has_view)
    );
    (follower, matrix)
}

#[test]
fn pieces_of_rows_that_are_validated_are_right() {
    run(async {
        let publishers = workers(FabricKind::TCP, "publisher", 3).await;
        commit(&publishers, 1, 7, &even(0, ROWS, 3)).await;
        let follower = on(FabricKind::TCP, "follower").validation(Validation::Xxh3);
        let (follower, _) = matrix(&publishers, follower, Sharing::View, 10..50).await;
        for worker in publishers.into_iter().chain([follower]) {
            worker.shutdown().await;
        }
    });
}

#[test]
fn on_one_host_one_run_of_bytes_is_a_view_unless_copies_are_wanted() {
    run(async {
        let publishers = workers(FabricKind::SHM, "publisher", 2).await;
        commit(&publishers, 1, 7, &even(0, ROWS, 2)).await;
        for (sharing, rows) in [(Sharing::View, 3..20), (Sharing::Copy, 3..20), (Sharing::Copy, 20..40)] {
            let (follower, matrix) =
                matrix(&publishers, on(FabricKind::SHM, "follower"), sharing, rows).await;
            assert_eq!(matrix.buf().is_foreign(), sharing == Sharing::View);
            follower.shutdown().await;
        }
        for worker in publishers {
            worker.shutdown().await;
        }
    });
}

#[test]
fn copies_of_strings_have_all_of_their_bytes() {
    run(async {
        let publishers = workers(FabricKind::SHM, "publisher", 1).await;
        let strings = Tensor::from_strings(publishers[0].pool(), &[2], &["one", "and another"]).unwrap();
        publishers[0].set(SET).commit(1, [("strings", strings.clone())]).await.unwrap();
        let follower = on(FabricKind::SHM, "follower").start().await.unwrap();
        for sharing in [Sharing::Copy, Sharing::View] {
            let peer = follower.peer_at(publishers[0].address()).await.unwrap();
            let snapshot = ShardedSet::new([peer.set(SET).sharing(sharing)]).fetch().await.unwrap();
            let got = snapshot.get("strings").unwrap();
            assert_eq!((got.bytes(), got.metadata()), (strings.bytes(), strings.metadata()));
        }
        for worker in publishers.into_iter().chain([follower]) {
            worker.shutdown().await;
        }
    });
}

#[test]
fn tensors_that_never_change_keep_no_old_version() {
    const BYTES: usize = 100_000;
    run(async {
        let publishers = workers(FabricKind::SHM, "publisher", 1).await;
        let publisher = &publishers[0];
        let follower = on(FabricKind::SHM, "follower").start().await.unwrap();
        let mut versions = sharded(&publishers, &follower).await.follow();
        let filled =
            |value: u8| Tensor::from_values(publisher.pool(), &[BYTES as u64], &vec![value; BYTES]).unwrap();
        for version in 1..7 {
            let tensors = [("fixed", filled(0)), ("step", filled(version as u8))];
            publisher.set(SET).commit(version, tensors).await.unwrap();
            let snapshot = versions.next().await.unwrap().unwrap().apply();
            assert_eq!(snapshot.get("fixed").unwrap().bytes(), [0; BYTES]);
            assert_eq!(snapshot.get("step").unwrap().bytes(), [version as u8; BYTES]);
        }
        // The newest two. The follower's views of older ones end soon after it has dropped them.
        while publisher.pool().stats().used_bytes > 2 * 2 * BYTES as u64 + 50_000 {
            tokio::task::yield_now().await;
        }
        drop(versions);
        for worker in publishers.into_iter().chain([follower]) {
            worker.shutdown().await;
        }
    });
}

/// Programs spawn fetches.
fn assert_may_move(_: &impl Send) {}

#[test]
fn a_newer_version_moves_only_what_has_changed() {
    const EACH: u64 = 100_000;
    run(async {
        let publishers = workers(FabricKind::TCP, "publisher", 2).await;
        let follower = on(FabricKind::TCP, "follower").start().await.unwrap();
        let commit = async |at: usize, version: u64, seed: u8| {
            let worker = &publishers[at];
            let rows = at as u64 * EACH..(at as u64 + 1) * EACH;
            let values = vec![seed; EACH as usize];
            let matrix =
                Tensor::from_values(worker.pool(), &[EACH], &values).unwrap().shard(0, 2 * EACH, &[rows]);
            let fixed = Tensor::from_values(worker.pool(), &[EACH], &vec![3_u8; EACH as usize]).unwrap();
            let fixed = fixed.shard(0, EACH, &[0..EACH]);
            worker.set(SET).commit(version, [("matrix", matrix), ("fixed", fixed)]).await.unwrap();
        };
        let is_right = |values: &Tensor, seeds: [u8; 2]| {
            let (one, other) = values.bytes().split_at(EACH as usize);
            one.iter().all(|byte| *byte == seeds[0]) && other.iter().all(|byte| *byte == seeds[1])
        };
        commit(0, 1, 1).await;
        commit(1, 1, 2).await;
        let set = sharded(&publishers, &follower).await;
        let before = sent(&publishers);
        let mut versions = set.follow();
        let staged = versions.next().await.unwrap().unwrap();
        assert_eq!(staged.changed().collect::<Vec<_>>(), ["fixed", "matrix"]);
        let told = staged.bytes_moved();
        let first = staged.apply();
        let moved = sent(&publishers) - before;
        // Both parts, and one of two replicas.
        assert!((3 * EACH..3 * EACH + 6000).contains(&moved), "{moved} bytes");
        assert!((3 * EACH..moved).contains(&told), "{told} of {moved} bytes");
        assert!(is_right(first.get("matrix").unwrap(), [1, 2]));
        assert_may_move(&set.fetch());
        let mut next = versions.next();
        assert_may_move(&next);
        assert!(futures::poll!(&mut next).is_pending());
        // One of the parts is the same memory as before, of which no other commit needs to be followed.
        commit(0, 2, 5).await;
        assert!(futures::poll!(&mut next).is_pending(), "a version of which a part is missing");
        let before = sent(&publishers);
        let old = first.get("matrix").unwrap().bytes()[EACH as usize];
        commit(1, 2, old).await;
        let staged = next.await.unwrap().unwrap();
        assert_eq!(staged.changed().collect::<Vec<_>>(), ["matrix"]);
        let second = staged.apply();
        assert!(is_right(second.get("matrix").unwrap(), [5, 2]) && second.version() == 2);
        assert!(is_right(first.get("matrix").unwrap(), [1, 2]), "what was fetched stays");
        let moved = sent(&publishers) - before;
        assert!(moved <= 4 * EACH, "{moved} bytes");
        for worker in publishers.into_iter().chain([follower]) {
            worker.shutdown().await;
        }
    });
}

#[test]
fn parts_that_do_not_fit_are_refused_by_the_names_of_both() {
    run(async {
        let publishers = workers(FabricKind::TCP, "publisher", 2).await;
        let follower = on(FabricKind::TCP, "follower").start().await.unwrap();
        let set = sharded(&publishers, &follower).await;
        let names: Vec<_> = publishers.iter().map(|publisher| publisher.name().to_owned()).collect();
        let mut version = 0;
        let mut refused = async |other: Range<u64>, set: &ShardedSet| {
            version += 1;
            commit(&publishers, version, 0, &(0, vec![vec![0..30], vec![other]])).await;
            match set.fetch().await {
                Err(error @ WorkerError::Config { field: "shards", .. }) => error.to_string(),
                other => panic!("{other:?}"),
            }
        };
        let overlap = refused(29..60, &set).await;
        assert!(names.iter().all(|name| overlap.contains(name)) && overlap.contains("29..30"), "{overlap}");
        let gap = refused(31..60, &set).await;
        assert!(names.iter().all(|name| gap.contains(name)) && gap.contains("30..31"), "{gap}");
        let outside = set.clone().layout(Layout::new().part("matrix", 0, &[0..61]));
        assert!(refused(30..60, &outside).await.contains("exceeds"));
        let nobody = set.clone().layout(Layout::new().part("none", 0, &[0..1]));
        assert!(refused(30..60, &nobody).await.contains("none"));
        for (publisher, ranges) in publishers.iter().zip([0..30, 30..60]) {
            let is_first = ranges.start == 0;
            let other =
                Tensor::from_values(publisher.pool(), &[30, COLUMNS], &vec![1_i32; 30 * COLUMNS as usize]);
            let tensor =
                if is_first { part(publisher, 0, 0, slice::from_ref(&ranges)) } else { other.unwrap() };
            publisher.set(SET).commit(100, [("matrix", tensor.shard(0, ROWS, &[ranges]))]).await.unwrap();
        }
        let types = set.fetch().await.unwrap_err().to_string();
        assert!(names.iter().all(|name| types.contains(name)) && types.contains("element type"), "{types}");
        let short = part(&publishers[0], 0, 0, &[0..30]).shard(0, ROWS, &[0..29]);
        let short = publishers[0].set(SET).commit(101, [("matrix", short)]).await.unwrap_err();
        assert!(
            matches!(&short, WorkerError::InvalidTensor { problem } if problem.contains("matrix")),
            "{short}"
        );
        for worker in publishers.into_iter().chain([follower]) {
            worker.shutdown().await;
        }
    });
}

#[test]
fn a_part_that_is_missing_for_liveness_is_named() {
    run(async {
        let publishers = workers(FabricKind::TCP, "publisher", 2).await;
        let liveness = Duration::from_millis(300);
        let follower = on(FabricKind::TCP, "follower").liveness(liveness).start().await.unwrap();
        let set = sharded(&publishers, &follower).await;
        let rows = even(0, ROWS, 2);
        commit(&publishers[..1], 4, 0, &rows).await;
        let missing = set.fetch().await.unwrap_err();
        let is_named = |error: &WorkerError, number: u64| {
            let name = publishers[1].name();
            matches!(error, WorkerError::Incomplete { version: Some(version), parts, .. } if parts == &[name] && *version == number)
        };
        assert!(is_named(&missing, 4), "{missing}");
        commit(&publishers, 5, 0, &rows).await;
        let mut versions = set.follow();
        let mut next = async || versions.next().await.unwrap().map(|staged| staged.apply().version());
        assert_eq!(next().await.unwrap(), 5);
        commit(&publishers[..1], 6, 0, &rows).await;
        // The last complete one is still there, and the next one is not.
        assert_eq!(set.fetch().await.unwrap().version(), 5);
        let missing = next().await.unwrap_err();
        assert!(is_named(&missing, 6), "{missing}");
        let second = (0, rows.1[1..].to_vec());
        commit(&publishers[1..], 6, 0, &second).await;
        assert_eq!(next().await.unwrap(), 6);
        // A publisher that is gone.
        commit(&publishers[..1], 7, 0, &rows).await;
        publishers[1].shutdown().await;
        let missing = next().await.unwrap_err();
        assert!(is_named(&missing, 7), "{missing}");
        assert_eq!(versions.current().unwrap().version(), 6, "what is complete stays");
        publishers[0].shutdown().await;
        follower.shutdown().await;
    });
}

/// Bytes of a tensor of which each of two publishers has a half.
const HALVED: u64 = 128 << 10;
const HALF: u64 = HALVED / 2;

/// Commits `count` tensors in halves.
async fn commit_halves(publishers: &[Worker], version: u64, count: u64) {
    for (at, publisher) in (0..).zip(publishers) {
        let half = |number| {
            let values = vec![(version + number) as u8; HALF as usize];
            let tensor = Tensor::from_values(publisher.pool(), &[HALF], &values).unwrap();
            (format!("{number}"), tensor.shard(0, HALVED, &[at * HALF..(at + 1) * HALF]))
        };
        publisher.set(SET).commit(version, (0..count).map(half)).await.unwrap();
    }
}

async fn with_receive_bytes(name: &str, receive_bytes: u64) -> Worker {
    let follower = on(FabricKind::TCP, name).memory(|memory| memory.receive_bytes = receive_bytes);
    follower.start().await.unwrap()
}

#[test]
fn room_for_the_results_and_the_longest_piece_is_enough_and_less_is_refused() {
    run(async {
        const COUNT: u64 = 20;
        let publishers = workers(FabricKind::TCP, "publisher", 2).await;
        commit_halves(&publishers, 1, COUNT).await;
        let needed = COUNT * HALVED + HALF;
        let follower = with_receive_bytes("follower", needed).await;
        let set = sharded(&publishers, &follower).await;
        let mut versions = set.follow();
        let snapshot = versions.next().await.unwrap().unwrap().apply();
        for (name, tensor) in snapshot.iter() {
            let value = 1 + name.parse::<u8>().unwrap();
            assert!(
                tensor.bytes().len() as u64 == HALVED && tensor.bytes().iter().all(|byte| *byte == value)
            );
        }
        // Another version does not fit beside that one.
        commit_halves(&publishers, 2, COUNT).await;
        let error = versions.next().await.unwrap().unwrap_err();
        let is_named = matches!(error, WorkerError::VersionTooLarge { version: 2, bytes, held, .. }
            if [bytes, held] == [needed, COUNT * HALVED]);
        assert!(is_named, "{error}");
        let small = with_receive_bytes("small", needed - 1).await;
        let error = sharded(&publishers, &small).await.fetch().await.unwrap_err();
        let is_named = matches!(error, WorkerError::VersionTooLarge { version: 2, bytes, held: 0, cap, .. }
            if [bytes, cap] == [needed, needed - 1]);
        assert!(is_named && error.to_string().contains("receive_bytes"), "{error}");
        for worker in publishers.into_iter().chain([follower, small]) {
            worker.shutdown().await;
        }
    });
}

#[test]
fn shards_that_wait_for_memory_of_others_end_with_a_message() {
    run(async {
        let publishers = workers(FabricKind::TCP, "publisher", 2).await;
        commit_halves(&publishers, 1, 2).await;
        let follower = with_receive_bytes("follower", 4 * HALVED).await;
        let others = follower.receive_pool().try_alloc(3 * HALVED as usize).unwrap();
        let mut parts = Vec::new();
        for publisher in &publishers {
            let peer = follower.peer_at(publisher.address()).await.unwrap();
            parts.push(peer.set(SET).timeout(Duration::from_millis(100)));
        }
        let set = ShardedSet::new(parts);
        let mut versions = set.follow();
        for waited in [set.fetch().await.map(drop), versions.next().await.unwrap().map(drop)] {
            let error = waited.unwrap_err();
            assert!(matches!(error, WorkerError::DeadlineExceeded { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains("wait for memory") && text.contains("receive_bytes"), "{text}");
        }
        drop(others);
        assert_eq!(versions.next().await.unwrap().unwrap().version(), 1);
        for worker in publishers.into_iter().chain([follower]) {
            worker.shutdown().await;
        }
    });
}

#[test]
fn s4_the_ranges_of_a_shard_count_as_bytes_of_the_set() {
    run(async {
        const MOST: u64 = 100_000;
        let publisher = on(FabricKind::TCP, "publisher").set_bytes(MOST).start().await.unwrap();
        let set = publisher.set(SET);
        // Every other element.
        let shard = |count: u64| {
            let ranges: Vec<_> = (0..count).map(|at| 2 * at..2 * at + 1).collect();
            let values = vec![1_u8; count as usize];
            Tensor::from_values(publisher.pool(), &[count], &values).unwrap().shard(0, 2 * count, &ranges)
        };
        set.commit(1, [("w", shard(500))]).await.unwrap();
        let refused = set.commit(2, [("w", shard(5000))]).await.unwrap_err();
        let is_named = matches!(&refused, WorkerError::SetTooLarge { set, version: 2, bytes, cap: MOST }
            if set == SET && (MOST..20 * MOST).contains(bytes));
        assert!(is_named && refused.to_string().contains("100000"), "{refused}");
        assert_eq!(set.version(), Some(1), "nothing has changed");
        set.commit(2, [("w", shard(1000))]).await.unwrap();
        publisher.shutdown().await;
    });
}

#[test]
fn s4_publishers_hold_a_version_no_longer_than_its_pieces_are_asked_for() {
    for kind in kinds(USUAL) {
        run(async {
            const COUNT: u64 = 3;
            let publishers = workers(*kind, "publisher", 2).await;
            let follower = on(*kind, "follower").start().await.unwrap();
            // Slices of one tensor, and whole parts of the others.
            let slices = Layout::new().part("0", 0, &[10..100, HALF - 10..HALF + 10, HALF + 20..HALF + 30]);
            let set = sharded(&publishers, &follower).await.layout(slices);
            commit_halves(&publishers, 1, COUNT).await;
            assert_eq!(set.fetch().await.unwrap().version(), 1);
            for version in [2, 3] {
                commit_halves(&publishers, version, COUNT).await;
            }
            for publisher in &publishers {
                // Each version has a table of its tensors.
                while publisher.pool().stats().used_bytes > 2 * (COUNT * HALF + 8192) {
                    tokio::task::yield_now().await;
                }
            }
            for worker in publishers.into_iter().chain([follower]) {
                worker.shutdown().await;
            }
        });
    }
}
