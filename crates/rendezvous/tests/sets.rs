//! Sets over shm and tcp, between workers of one process.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod deltas;

use std::{future::Future, time::Duration};

use tensorwire_fabric::FabricKind;
use tensorwire_protocol::{Code, DataType, Mode, Sharing, Validation};
use tensorwire_rendezvous::{
    Tensor, Trust, Worker, WorkerBuilder, WorkerError,
    sets::{Follow, Policy, Snapshot, Staged},
};

use crate::{
    bounded::bounded,
    fabrics::{assert_moves_over, kinds, over, over_verbs},
    rdma::patient,
    two::Two,
};

const LIMIT: Duration = Duration::from_secs(20);
pub(crate) const USUAL: &[FabricKind] = &[FabricKind::SHM, FabricKind::TCP];
pub(crate) const SET: &str = "policy";

pub(crate) fn run(test: impl Future<Output = ()>) {
    bounded(patient(Duration::from_secs(60)), test);
}

pub(crate) fn on(kind: FabricKind, name: &str) -> WorkerBuilder {
    over(Worker::builder(name), kind).timeout(patient(LIMIT))
}

async fn two(kind: FabricKind) -> Two {
    Two::of(|name| on(kind, name)).await
}

/// Bytes of the larger tensors.
const BYTES: usize = 100_000;

fn filled(worker: &Worker, seed: u8) -> Tensor {
    let mut buffer = worker.pool().try_alloc(BYTES).unwrap();
    buffer.fill(seed);
    Tensor::new(buffer, DataType::U8, &[BYTES as u64]).unwrap()
}

fn values(worker: &Worker, values: &[u16]) -> Tensor {
    Tensor::from_values(worker.pool(), &[values.len() as u64], values).unwrap()
}

/// Commits two tensors whose content is the version.
async fn commit(worker: &Worker, version: u64) {
    let seed = version as u8;
    let small = values(worker, &[u16::from(seed)]);
    worker.set(SET).commit(version, [("large", filled(worker, seed)), ("small", small)]).await.unwrap();
}

/// Whether all contents are those of the snapshot's version, as [`commit`] makes them.
fn is_whole(snapshot: &Snapshot) -> bool {
    let seed = snapshot.version() as u8;
    let large = snapshot.get("large").unwrap().bytes();
    let small = snapshot.get("small").unwrap().values::<u16>().unwrap();
    large.len() == BYTES && large.iter().all(|byte| *byte == seed) && small == [u16::from(seed)]
}

async fn next(versions: &mut Follow) -> Staged {
    versions.next().await.unwrap().unwrap()
}

/// Bytes that went over the wire between both, in both directions.
pub(crate) fn wire_bytes(two: &Two) -> u64 {
    let of = |worker: &Worker| worker.peers().iter().map(|peer| peer.fabric.bytes_sent).sum::<u64>();
    of(&two.client) + of(&two.server)
}

fn problem(result: Result<(), WorkerError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn a_fetch_sees_one_version_and_the_next_one_another() {
    for kind in kinds(USUAL) {
        run(async {
            let two = two(*kind).await;
            let set = two.peer.set(SET);
            let missing = set.fetch().await.unwrap_err();
            assert!(
                matches!(missing, WorkerError::Remote { ref status, .. } if status.code == Code::NotFound)
            );
            commit(&two.server, 3).await;
            let first = set.fetch().await.unwrap();
            assert!(
                is_whole(&first) && first.version() == 3 && first.len() == 2 && first.get("other").is_none()
            );
            commit(&two.server, 4).await;
            let second = set.fetch().await.unwrap();
            assert!(is_whole(&second) && second.version() == 4);
            assert!(is_whole(&first), "what was fetched stays");
            assert_eq!(second.iter().map(|(name, _)| name).collect::<Vec<_>>(), ["large", "small"]);
            let is_view = first.get("large").unwrap().buf().is_foreign();
            assert_eq!(is_view, *kind == FabricKind::SHM, "on one host it is a view");
            let copy = set.clone().sharing(Sharing::Copy).fetch().await.unwrap();
            assert!(is_whole(&copy) && !copy.get("large").unwrap().buf().is_foreign());
            assert!(two.peer.fetch("large").await.is_err(), "its tensors have no names of their own");
            assert_moves_over(&two.client, *kind);
            two.end().await;
        });
    }
}

/// On one host: the tensors of a version come by one loan, and older versions are not held for those that have not changed.
#[test]
fn a_version_is_lent_as_a_whole() {
    const MANY: usize = 40;
    run(async {
        let two = two(FabricKind::SHM).await;
        let tensors: Vec<_> = (0..MANY).map(|at| filled(&two.server, at as u8)).collect();
        let foreign = Tensor::from_vec(two.server.user_memory(), &[3], vec![7u16, 8, 9]).unwrap();
        let commit = async |version: u64| {
            let mut named: Vec<_> =
                tensors.iter().enumerate().map(|(at, t)| (format!("{at}"), t.clone())).collect();
            named.push(("changes".to_owned(), filled(&two.server, version as u8)));
            named.push(("foreign".to_owned(), foreign.clone()));
            named.push((
                "nothing".to_owned(),
                Tensor::from_values::<u16>(two.server.pool(), &[0], &[]).unwrap(),
            ));
            two.server.set(SET).commit(version, named).await.unwrap();
        };
        let loans = || two.server.peers().iter().map(|peer| peer.counters.loans_sent).sum::<u64>();
        let mut versions = two.peer.set(SET).follow(Policy::Every);
        let mut used = Vec::new();
        for version in 1..10 {
            commit(version).await;
            let before = loans();
            let staged = next(&mut versions).await;
            assert!(
                loans() - before <= 2,
                "{} loans: of the table, and of what is not in the pool",
                loans() - before
            );
            let snapshot = staged.apply();
            for at in 0..MANY {
                let bytes = snapshot.get(&format!("{at}")).unwrap().bytes();
                assert!(bytes.len() == BYTES && bytes.iter().all(|byte| usize::from(*byte) == at));
            }
            assert!(snapshot.get("changes").unwrap().bytes().iter().all(|byte| u64::from(*byte) == version));
            assert_eq!(snapshot.get("foreign").unwrap().values::<u16>().unwrap(), [7, 8, 9]);
            assert!(snapshot.get("nothing").unwrap().bytes().is_empty());
            used.push(two.server.pool().stats().used_bytes);
        }
        let most = used.iter().max().unwrap();
        assert!(*most < ((MANY + 5) * (BYTES + 8192)) as u64, "memory of older versions: {used:?}");
        two.end().await;
    });
}

#[test]
fn names_shapes_and_types_change_with_a_version() {
    for kind in kinds(USUAL) {
        run(async {
            let two = two(*kind).await;
            let set = two.server.set(SET);
            let mut versions = two.peer.set(SET).follow(Policy::Every);
            let worker = &two.server;
            set.commit(1, [("a", values(worker, &[1])), ("b", values(worker, &[2, 3]))]).await.unwrap();
            assert_eq!(next(&mut versions).await.apply().len(), 2);
            let strings = Tensor::from_strings(worker.pool(), &[2], &["x", "yz"]).unwrap();
            let floats = Tensor::from_values(worker.pool(), &[2, 1], &[1.5f32, 2.5]).unwrap();
            set.commit(2, [("b", floats), ("0", strings)]).await.unwrap();
            let staged = next(&mut versions).await;
            assert_eq!(staged.changed().collect::<Vec<_>>(), ["0", "b"]);
            let snapshot = staged.apply();
            assert!(snapshot.get("a").is_none());
            assert_eq!(snapshot.get("0").unwrap().strings().unwrap(), ["x", "yz"]);
            assert_eq!(snapshot.get("b").unwrap().shape(), [2, 1]);
            set.commit(3, [] as [(&str, Tensor); 0]).await.unwrap();
            assert!(next(&mut versions).await.apply().is_empty());
            set.commit(4, [("a", values(worker, &[7]))]).await.unwrap();
            assert_eq!(next(&mut versions).await.apply().get("a").unwrap().values::<u16>().unwrap(), [7]);
            two.end().await;
        });
    }
}

#[test]
fn a_follower_gets_each_version_and_shares_what_has_not_changed() {
    for kind in kinds(USUAL) {
        run(async {
            let two = two(*kind).await;
            let mut versions = two.peer.set(SET).follow(Policy::Every);
            let fixed = filled(&two.server, 9);
            let mut before: Option<Tensor> = None;
            for version in 1..20 {
                let tensors = [("fixed", fixed.clone()), ("step", values(&two.server, &[version; 50]))];
                two.server.set(SET).commit(version.into(), tensors).await.unwrap();
                let staged = next(&mut versions).await;
                assert_eq!(staged.version(), u64::from(version));
                let snapshot = staged.apply();
                assert_eq!(snapshot.get("step").unwrap().values::<u16>().unwrap(), [version; 50]);
                let kept = snapshot.get("fixed").unwrap();
                assert!(before.is_none_or(|before| before.bytes().as_ptr() == kept.bytes().as_ptr()));
                before = Some(kept.clone());
                assert_eq!(versions.current().unwrap().version(), u64::from(version));
            }
            two.end().await;
        });
    }
}

#[test]
fn commits_that_cannot_be_are_refused_by_name_and_change_nothing() {
    run(async {
        let kind = FabricKind::TCP;
        let most = 5 * BYTES as u64;
        let two = Two::of(|name| on(kind, name).set_bytes(most)).await;
        let (set, worker) = (two.server.set(SET), &two.server);
        commit(worker, 5).await;
        let one = |seed| vec![("w", filled(worker, seed))];
        assert!(problem(set.commit(5, one(1)).await).contains("the newest version of `policy` is 5"));
        let twice = [("w", filled(worker, 1)), ("w", filled(worker, 2))];
        assert!(problem(set.commit(6, twice).await).contains("occurs twice"));
        assert!(problem(set.commit(6, [("", filled(worker, 1))]).await).contains("published name"));
        let dead = Tensor::dead(DataType::U8, &[1]).unwrap();
        assert!(problem(set.commit(6, [("w", dead)]).await).contains("dead"));
        assert!(problem(worker.set("").commit(1, one(1)).await).contains("published name"));
        assert!(problem(set.readers(["ps"]).map(drop)).contains("TLS"));
        let large = (0..5_u8).map(|at| (format!("w{at}"), filled(worker, at)));
        let refused = set.commit(6, large).await;
        assert!(matches!(refused, Err(WorkerError::SetTooLarge { version: 6, cap, .. }) if cap == most));
        assert!(problem(refused).contains("set_bytes"));
        assert_eq!(set.version(), Some(5));
        assert!(is_whole(&two.peer.set(SET).fetch().await.unwrap()));
        // The second version takes the place of the one before the last.
        for version in 6..20 {
            commit(worker, version).await;
        }
        two.end().await;
    });
}

#[test]
fn sets_are_listed_apart_from_published_tensors() {
    for kind in kinds(USUAL) {
        run(async {
            let two = two(*kind).await;
            assert!(two.peer.list_sets().await.unwrap().is_empty());
            two.server.publish("single", values(&two.server, &[1])).unwrap();
            commit(&two.server, 4).await;
            two.server.set("other").commit(7, [] as [(&str, Tensor); 0]).await.unwrap();
            let own = two.server.peer(two.server.name()).unwrap();
            for peer in [&two.peer, &own] {
                let sets = peer.list_sets().await.unwrap();
                let sets: Vec<_> =
                    sets.iter().map(|set| (&*set.name, set.version, set.tensors, set.bytes)).collect();
                assert_eq!(sets, [("other", 7, 0, 0), (SET, 4, 2, BYTES as u64 + 2)]);
                let tensors = peer.list().await.unwrap();
                assert_eq!(tensors.iter().map(|tensor| &*tensor.name).collect::<Vec<_>>(), ["single"]);
            }
            two.end().await;
        });
    }
}

#[test]
fn s4_a_worker_holds_two_versions_and_the_rest_is_free() {
    for kind in kinds(USUAL) {
        run(async {
            let two = two(*kind).await;
            let mut versions = two.peer.set(SET).follow(Policy::Latest);
            for version in 1..50 {
                commit(&two.server, version).await;
                assert!(is_whole(&next(&mut versions).await.apply()));
            }
            // The follower holds one more on one host, as a view.
            let used = two.server.pool().stats().used_bytes;
            assert!(used <= 3 * BYTES as u64 + 4096, "{used} bytes");
            assert!(two.client.receive_memory().used_bytes <= 2 * BYTES as u64 + 4096);
            drop(versions);
            two.end().await;
        });
    }
}

#[test]
fn a_slow_follower_of_every_version_is_superseded_and_then_has_the_newest() {
    run(async {
        let two = two(FabricKind::TCP).await;
        let peer = two.peer.set(SET);
        let (mut every, mut latest) = (peer.follow(Policy::Every), peer.follow(Policy::Latest));
        commit(&two.server, 1).await;
        assert!(next(&mut every).await.version() == 1 && next(&mut latest).await.version() == 1);
        commit(&two.server, 2).await;
        commit(&two.server, 3).await;
        let versions = [next(&mut every).await, next(&mut every).await].map(|staged| staged.version());
        assert_eq!((versions, next(&mut latest).await.version()), ([2, 3], 3));
        for version in [4, 5, 6] {
            commit(&two.server, version).await;
        }
        let superseded = every.next().await.unwrap().unwrap_err();
        assert!(matches!(superseded, WorkerError::Superseded { held: 3, newest: 6, .. }), "{superseded}");
        let staged = next(&mut every).await;
        assert!(is_whole(staged.snapshot()) && staged.version() == 6);
        commit(&two.server, 7).await;
        assert_eq!((next(&mut every).await.version(), next(&mut latest).await.version()), (7, 7));
        two.end().await;
    });
}

#[test]
fn a_publisher_that_comes_back_below_is_followed_only_when_the_program_accepts_that() {
    for kind in kinds(USUAL) {
        run(async {
            let two = two(*kind).await;
            let mut versions = two.peer.set(SET).follow(Policy::Latest);
            commit(&two.server, 5).await;
            let held = next(&mut versions).await.apply();
            let again = async |address: String| on(*kind, "server").bind(address).start().await.unwrap();
            let address = two.server.address().to_owned();
            two.server.shutdown().await;
            let server = again(address.clone()).await;
            commit(&server, 2).await;
            let back = versions.next().await.unwrap().unwrap_err();
            assert!(matches!(back, WorkerError::WentBack { held: 5, offered: 2, .. }), "{back}");
            assert!(is_whole(&held));
            // A version above the held one is followed without a word of the program.
            commit(&server, 6).await;
            assert!(is_whole(next(&mut versions).await.snapshot()));
            server.shutdown().await;
            let server = again(address).await;
            commit(&server, 1).await;
            let back = versions.next().await.unwrap().unwrap_err();
            assert!(matches!(back, WorkerError::WentBack { held: 6, offered: 1, .. }), "{back}");
            versions.accept_restart();
            let staged = next(&mut versions).await;
            assert!(is_whole(staged.snapshot()) && staged.version() == 1);
            two.client.shutdown().await;
            assert!(matches!(versions.next().await, Some(Err(WorkerError::ShutDown))));
            assert!(versions.next().await.is_none());
            server.shutdown().await;
        });
    }
}

#[test]
fn a_worker_follows_its_own_set_without_a_connection() {
    run(async {
        let worker = on(FabricKind::TCP, "server").start().await.unwrap();
        let own = worker.peer(worker.name()).unwrap().set(SET);
        assert!(own.fetch().await.is_err());
        let mut versions = own.follow(Policy::Every);
        for version in 1..5 {
            assert!(futures::poll!(versions.next()).is_pending());
            commit(&worker, version).await;
            let staged = next(&mut versions).await;
            assert!(is_whole(staged.snapshot()) && is_whole(&own.fetch().await.unwrap()));
            assert_eq!((staged.version(), staged.copied()), (version, 0));
        }
        assert!(futures::poll!(versions.next()).is_pending());
        worker.shutdown().await;
        assert!(matches!(versions.next().await, Some(Err(WorkerError::ShutDown))));
    });
}

/// Fetches of three workers that stop after their first contents, while the publisher goes on.
#[test]
fn s4_two_versions_that_are_being_fetched_stay_and_a_third_is_superseded() {
    run(async {
        let server = on(FabricKind::TCP, "server").start().await.unwrap();
        let commit = async |version: u64| {
            let tensors = (0..20).map(|at| (format!("{at}"), filled(&server, version as u8)));
            server.set(SET).commit(version, tensors).await.unwrap();
        };
        let start =
            async |name| on(FabricKind::TCP, name).flow(|flow| flow.requests_max = 1).start().await.unwrap();
        let clients = [start("one").await, start("two").await, start("three").await];
        let mut fetches = Vec::new();
        for (client, version) in clients.iter().zip([1, 3, 5]) {
            commit(version).await;
            let set = client.peer_at(server.address()).await.unwrap().set(SET);
            let mut fetch = Box::pin(async move { set.fetch().await });
            let begun = || {
                let peers = server.peers();
                let peer = peers.iter().find(|peer| peer.name == client.name());
                peer.is_some_and(|peer| peer.counters.contents_sent > 0)
            };
            while !begun() {
                assert!(futures::poll!(&mut fetch).is_pending());
                tokio::task::yield_now().await;
            }
            fetches.push(fetch);
            commit(version + 1).await;
        }
        commit(7).await;
        // Each version has a table of its tensors.
        let used = |versions: u64| versions * (20 * BYTES as u64 + 8192);
        assert!(server.pool().stats().used_bytes <= used(4), "{:?}", server.pool().stats());
        let mut versions = Vec::new();
        for fetch in fetches {
            let snapshot = fetch.await.unwrap();
            let seed = snapshot.version() as u8;
            assert!(snapshot.iter().all(|(_, tensor)| tensor.bytes().iter().all(|byte| *byte == seed)));
            versions.push(snapshot.version());
        }
        assert_eq!(versions, [7, 3, 5]);
        for client in clients {
            client.shutdown().await;
        }
        // Nothing of what was fetched is held any more.
        while server.pool().stats().used_bytes > used(2) {
            tokio::task::yield_now().await;
        }
        server.shutdown().await;
    });
}

/// A server, and a client whose receive pool has room for `tensors` tensors of [`BYTES`] bytes and a half.
async fn with_room_for(tensors: u64) -> Two {
    let bytes = BYTES as u64 * (2 * tensors + 1) / 2;
    Two::of(|name| on(FabricKind::TCP, name).memory(|memory| memory.receive_bytes = bytes)).await
}

/// Commits `version` of so many tensors of [`BYTES`] bytes, all of which are the version.
async fn commit_many(worker: &Worker, version: u64, tensors: usize) {
    let tensors = (0..tensors).map(|at| (format!("{at}"), filled(worker, version as u8)));
    worker.set(SET).commit(version, tensors).await.unwrap();
}

#[test]
fn a_version_that_does_not_fit_into_the_receive_pool_is_refused_at_once() {
    run(async {
        let two = with_room_for(3).await;
        let set = two.peer.set(SET).timeout(Duration::MAX);
        let mut versions = set.follow(Policy::Latest);
        commit_many(&two.server, 1, 4).await;
        for refused in [set.fetch().await.map(drop), versions.next().await.unwrap().map(drop)] {
            let cap = BYTES as u64 * 7 / 2;
            let is_named = |error: &WorkerError| {
                matches!(error, WorkerError::VersionTooLarge { version: 1, bytes, held: 0, cap: found, .. }
                    if *bytes == 4 * BYTES as u64 && *found == cap)
            };
            let error = refused.unwrap_err();
            assert!(is_named(&error) && error.code() == Code::ResourceExhausted, "{error}");
            let text = error.to_string();
            assert!(text.contains("`policy`") && text.contains("400000 bytes"), "{text}");
            assert!(text.contains("350000 bytes") && text.contains("receive_bytes"), "{text}");
        }
        // Two tensors fit, and two more beside them do not.
        commit_many(&two.server, 2, 2).await;
        let held = next(&mut versions).await.apply();
        commit_many(&two.server, 3, 2).await;
        let error = versions.next().await.unwrap().unwrap_err();
        let is_named = matches!(error, WorkerError::VersionTooLarge { version: 3, bytes, held, .. }
            if [bytes, held] == [2 * BYTES as u64; 2]);
        assert!(is_named, "{error}");
        // One beside them fits.
        commit_many(&two.server, 4, 1).await;
        assert_eq!(next(&mut versions).await.version(), 4);
        assert_eq!((held.version(), held.get("1").unwrap().bytes()[0]), (2, 2));
        two.end().await;
    });
}

#[test]
fn a_version_that_fits_to_the_byte_is_moved() {
    run(async {
        let two = Two::of(|name| {
            on(FabricKind::TCP, name).memory(|memory| memory.receive_bytes = 2 * (BYTES as u64 / 64 + 1) * 64)
        });
        let two = two.await;
        commit_many(&two.server, 1, 2).await;
        assert_eq!(two.peer.set(SET).fetch().await.unwrap().len(), 2);
        two.end().await;
    });
}

#[test]
fn a_version_that_waits_for_memory_of_others_ends_with_a_message() {
    run(async {
        let two = with_room_for(3).await;
        let others = two.client.receive_pool().try_alloc(2 * BYTES).unwrap();
        commit_many(&two.server, 1, 2).await;
        let set = two.peer.set(SET).timeout(Duration::from_millis(100));
        let mut versions = set.follow(Policy::Latest);
        for waited in [set.fetch().await.map(drop), versions.next().await.unwrap().map(drop)] {
            let error = waited.unwrap_err();
            assert!(matches!(error, WorkerError::DeadlineExceeded { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains("`policy`") && text.contains("350000 bytes"), "{text}");
            assert!(text.contains("wait for memory") && text.contains("receive_bytes"), "{text}");
        }
        drop(others);
        assert_eq!(next(&mut versions).await.version(), 1);
        two.end().await;
    });
}

/// Versions of which the newer one changes in part, under other settings of both workers.
async fn versions_under(set_up: impl Fn(WorkerBuilder) -> WorkerBuilder) {
    let two = Two::of(|name| set_up(on(FabricKind::TCP, name))).await;
    let (set, mut versions) = (two.server.set(SET), two.peer.set(SET).follow(Policy::Every));
    let mut elements: Vec<u16> = (0..20_000).collect();
    for version in 1..8 {
        elements[usize::from(version) * 1000] ^= 7;
        let tensors = [("w", values(&two.server, &elements)), ("v", values(&two.server, &[version; 9000]))];
        set.commit(version.into(), tensors).await.unwrap();
        let snapshot = next(&mut versions).await.apply();
        assert_eq!(snapshot.get("w").unwrap().values::<u16>().unwrap(), elements);
        assert_eq!(snapshot.get("v").unwrap().values::<u16>().unwrap(), [version; 9000]);
    }
    two.end().await;
}

#[test]
fn sets_move_in_mode_original_validated_and_from_untrusted_peers() {
    run(async {
        versions_under(|builder| builder.flow(|flow| flow.mode = Mode::Original)).await;
        versions_under(|builder| builder.validation(Validation::Xxh3)).await;
        versions_under(|builder| builder.flow(|flow| flow.eager_bytes_max = 0)).await;
        versions_under(|builder| builder.trust(Trust::Hostile)).await;
        versions_under(|builder| builder.flow(|flow| flow.requests_max = 2)).await;
    });
}

over_verbs! { a_fetch_sees_one_version_and_the_next_one_another a_follower_gets_each_version_and_shares_what_has_not_changed }
