//! What moves of a version: deltas and manifests.

use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::{
    Worker,
    sets::{Follow, OwnSet, Policy},
};

use super::{SET, next, run, two, values, wire_bytes};
use crate::two::Two;

/// Commits `version` of one tensor of 16-bit elements, and returns it.
async fn commit_elements(set: &OwnSet, worker: &Worker, version: u64, elements: &[u16]) {
    set.commit(version, [("w", values(worker, elements))]).await.unwrap();
}

#[test]
fn a_hundredth_of_the_elements_moves_a_fortieth_of_the_bytes() {
    const ELEMENTS: usize = 1 << 18;
    run(async {
        let two = two(FabricKind::TCP).await;
        let (set, mut versions) = (two.server.set(SET), two.peer.set(SET).follow(Policy::Latest));
        let mut elements: Vec<u16> = (0..ELEMENTS).map(|at| at as u16).collect();
        commit_elements(&set, &two.server, 1, &elements).await;
        let first = next(&mut versions).await;
        assert!(first.bytes_moved() as usize >= 2 * ELEMENTS);
        drop(first);
        for version in 2..12_u64 {
            asked(&two, &mut versions).await;
            for at in (0..ELEMENTS).filter(|at| (at * 7919 + version as usize).is_multiple_of(100)) {
                elements[at] ^= 1;
            }
            commit_elements(&set, &two.server, version, &elements).await;
            let staged = next(&mut versions).await;
            assert!(staged.bytes_moved() as usize * 40 <= 2 * ELEMENTS, "{} bytes", staged.bytes_moved());
            assert_eq!(staged.changed().collect::<Vec<_>>(), ["w"]);
            assert_eq!(staged.apply().get("w").unwrap().values::<u16>().unwrap(), elements);
        }
        two.end().await;
    });
}

/// Elements in so many pieces, changed alone and in runs that cross the ends of pieces, in one version and in two at once.
#[test]
fn runs_across_pieces_lead_to_the_content_also_over_two_versions() {
    const PIECE: usize = (256 << 10) / 2;
    run(async {
        let two = two(FabricKind::TCP).await;
        let (set, mut versions) = (two.server.set(SET), two.peer.set(SET).follow(Policy::Latest));
        let mut elements: Vec<u16> = (0..4 * PIECE + 77).map(|at| at as u16).collect();
        commit_elements(&set, &two.server, 1, &elements).await;
        drop(next(&mut versions).await);
        for version in 2..12_u64 {
            if version % 3 == 1 {
                asked(&two, &mut versions).await;
            }
            let length = 7 * version as usize;
            for begin in [0, PIECE - 3, 2 * PIECE - length, 3 * PIECE, 4 * PIECE + 77 - length] {
                elements[begin..begin + length].iter_mut().for_each(|element| *element ^= version as u16);
            }
            commit_elements(&set, &two.server, version, &elements).await;
            if version % 3 == 2 {
                continue;
            }
            let staged = next(&mut versions).await;
            assert!(staged.bytes_moved() < 10_000, "{} bytes of version {version}", staged.bytes_moved());
            assert_eq!(staged.apply().get("w").unwrap().values::<u16>().unwrap(), elements);
        }
        two.end().await;
    });
}

/// Several tasks compare these tensors.
#[test]
fn many_tensors_are_compared_each_with_its_own_predecessor() {
    const ELEMENTS: usize = 1 << 20;
    run(async {
        let two = two(FabricKind::TCP).await;
        let (set, mut versions) = (two.server.set(SET), two.peer.set(SET).follow(Policy::Every));
        let mut contents: Vec<Vec<u16>> = (0..12).map(|seed| vec![seed; ELEMENTS]).collect();
        for version in 1..4_u64 {
            for (at, content) in contents.iter_mut().enumerate().filter(|(at, _)| at % 3 > 0) {
                content[at * version as usize] ^= 9;
            }
            if version > 1 {
                asked(&two, &mut versions).await;
            }
            let tensors = contents.iter().enumerate();
            let tensors = tensors.map(|(at, content)| (format!("{at:02}"), values(&two.server, content)));
            set.commit(version, tensors).await.unwrap();
            let staged = next(&mut versions).await;
            if version > 1 {
                assert_eq!(staged.changed().len(), 8);
                assert!(staged.bytes_moved() < 10_000, "{} bytes", staged.bytes_moved());
            }
            for ((_, tensor), content) in staged.apply().iter().zip(&contents) {
                assert!(tensor.values::<u16>().unwrap() == *content);
            }
        }
        two.end().await;
    });
}

/// Polls `versions` until the server has its request for the next version.
async fn asked(two: &Two, versions: &mut Follow) {
    let requests =
        || two.server.peers().iter().map(|peer| peer.counters.received.tensor_request).sum::<u64>();
    let before = requests();
    while requests() == before {
        assert!(futures::poll!(versions.next()).is_pending());
        tokio::task::yield_now().await;
    }
}

#[test]
fn a_version_of_300_tensors_that_changes_nothing_moves_less_than_1_kib() {
    run(async {
        let two = two(FabricKind::TCP).await;
        let (set, mut versions) = (two.server.set(SET), two.peer.set(SET).follow(Policy::Every));
        let tensors = || (0..300).map(|at| (format!("layer.{at}.weight"), values(&two.server, &[at; 1000])));
        set.commit(1, tensors()).await.unwrap();
        assert_eq!(next(&mut versions).await.apply().len(), 300);
        for version in 2..6 {
            asked(&two, &mut versions).await;
            let before = wire_bytes(&two);
            set.commit(version, tensors()).await.unwrap();
            let staged = next(&mut versions).await;
            assert_eq!((staged.changed().len(), staged.version()), (0, version));
            let bytes = wire_bytes(&two) - before;
            assert!(bytes <= 1024, "{bytes} bytes for version {version}");
            drop(staged);
        }
        two.end().await;
    });
}
