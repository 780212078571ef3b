//! Parts of tensors that change in few elements.

use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::sets::{Follow, Layout};

use super::*;

/// Elements that change in a version.
const CHANGES: u64 = 20;

/// The matrix: in each version after the first, some elements have changed.
fn matrix_of(version: u64) -> Vec<u32> {
    let mut elements = elements(0, 0, &[0..ROWS]);
    for version in 2..=version {
        for change in 0..CHANGES {
            elements[((version * 977 + change * 433) % (ROWS * COLUMNS)) as usize] += version as u32;
        }
        // A run that crosses the ends of rows, and of parts.
        let begin = (version * 131 % (ROWS - 2) * COLUMNS + COLUMNS - 3) as usize;
        elements[begin..begin + 7].iter_mut().for_each(|element| *element += 1);
    }
    elements
}

/// Places in the matrix of the elements of these ranges, as [`elements`] has them.
fn places((axis, ranges): (usize, &[Range<u64>])) -> Vec<usize> {
    elements(0, axis, ranges).into_iter().map(|place| place as usize).collect()
}

fn values(matrix: &[u32], part: (usize, &[Range<u64>])) -> Vec<u32> {
    places(part).into_iter().map(|place| matrix[place]).collect()
}

async fn commit_matrix(publishers: &[Worker], version: u64, (axis, parts): &Division) {
    let matrix = matrix_of(version);
    for (publisher, ranges) in publishers.iter().zip(parts) {
        let along: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let shape = if *axis == 0 { [along, COLUMNS] } else { [ROWS, along] };
        let part = values(&matrix, (*axis, ranges));
        let part = Tensor::from_values(publisher.pool(), &shape, &part).unwrap();
        let part = part.shard(*axis, length(*axis), ranges);
        publisher.set(SET).commit(version, [("matrix", part)]).await.unwrap();
    }
}

/// What a follower wants of the matrix, and its versions.
struct Following<'a> {
    wanted: (usize, &'a [Range<u64>]),
    versions: Follow,
}

impl Following<'_> {
    async fn get(&mut self, version: u64) -> u64 {
        let staged = self.versions.next().await.unwrap().unwrap();
        let moved = staged.bytes_moved();
        let snapshot = staged.apply();
        assert_eq!(snapshot.version(), version);
        let matrix = snapshot.get("matrix").unwrap().values::<u32>().unwrap();
        assert!(matrix == values(&matrix_of(version), self.wanted), "version {version}, {:?}", self.wanted);
        moved
    }
}

/// Publishers whose parts are `source`, and followers with the parts `target`.
async fn change_by_deltas(
    (publishers, source): (&[Worker], &Division),
    (followers, target): (&[Worker], &Division),
    first: u64,
) {
    commit_matrix(publishers, first, source).await;
    let mut following = Vec::new();
    for (follower, ranges) in followers.iter().zip(&target.1) {
        let layout = Layout::new().part("matrix", target.0, ranges);
        let versions = sharded(publishers, follower).await.layout(layout).follow();
        following.push(Following { wanted: (target.0, ranges), versions });
    }
    for following in &mut following {
        assert!(following.get(first).await >= 4 * places(following.wanted).len() as u64);
    }
    // The third one is left out, because nobody asks for it, and two deltas lead to the fourth. Publishers compare some versions after
    // each one that a follower has asked for.
    for version in 1..=4 {
        commit_matrix(publishers, first + version, source).await;
        if version == 3 {
            continue;
        }
        for following in &mut following {
            let moved = following.get(first + version).await;
            assert!(moved * 2 < 4 * places(following.wanted).len() as u64, "{moved} bytes");
        }
    }
}

#[test]
fn parts_that_change_in_few_elements_are_made_of_deltas() {
    let layouts = [even, fused].into_iter().flat_map(|of| [(of, 0), (of, 1)]);
    run(async {
        for (sources, targets) in [(2, 3), (3, 2)] {
            let publishers = workers(FabricKind::TCP, "publisher", sources).await;
            let followers = workers(FabricKind::TCP, "follower", targets).await;
            let mut first = 1;
            for (of_source, source_axis) in layouts.clone() {
                let source = of_source(source_axis, length(source_axis), sources as u64);
                for (of_target, axis) in layouts.clone() {
                    let target = of_target(axis, length(axis), targets as u64);
                    change_by_deltas((&publishers, &source), (&followers, &target), first).await;
                    first += 10;
                }
            }
            for worker in followers.into_iter().chain(publishers) {
                worker.shutdown().await;
            }
        }
    });
}
