//! A process whose ranks need more descriptors than it may have.

use std::{fs, sync::Arc, time::Duration};

use futures::future::join_all;
use rustix::process::{Resource, Rlimit, setrlimit};
use tensorwire_collective::{Group, GroupError, store::MemoryStore};
use tensorwire_fabric::FabricKind;
use tensorwire_rendezvous::Worker;

use crate::{
    child::{failed, say},
    harness::{LIMIT, STEP, Test, test},
    rdma::patient,
};

const RANKS: usize = 16;

/// In a child: joins a group of [`RANKS`] ranks in a process that has `left` descriptors more than its workers need, and makes a call with
/// them. Reports the first error.
pub(crate) async fn run(fabric: FabricKind, left: u64) {
    let mut workers = Vec::new();
    for rank in 0..RANKS {
        workers.push(Worker::builder(&format!("rank_{rank}")).require(fabric).start().await.unwrap());
    }
    let used = fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    let most = Some(used + left);
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }).unwrap();
    let store = Arc::new(MemoryStore::new(workers[0].runtime().clone()));
    let ended = join_all(workers.iter().enumerate().map(async |(rank, worker)| {
        let group = Group::builder(store.clone(), rank, RANKS).timeout(patient(LIMIT)).join(worker).await?;
        group.all_reduce(&mut [1f32; 1 << 16]).await
    }));
    let errors: Vec<GroupError> = ended.await.into_iter().filter_map(Result::err).collect();
    assert!(!errors.is_empty(), "{left} descriptors were enough");
    for error in &errors {
        say(&failed(error));
    }
    say("ended");
}

fn is_named(name: &'static str, fabric: &'static str) {
    test(name, fabric, patient(Duration::from_secs(10)), |test: Test| {
        for left in [8, 40, 120] {
            let child = test.crowded(left);
            let end = std::time::Instant::now() + patient(STEP);
            let (mut line, mut is_limit_named) = (child.hear_until(end), false);
            while line != "ended" {
                is_limit_named |= line.contains("open files of this process") && line.contains("`ulimit -n`");
                // Ranks that wait for one which has failed run out of time.
                assert!(!line.contains("connection refused"), "{left} descriptors over {fabric}: {line}");
                line = child.hear_until(end);
            }
            assert!(is_limit_named, "{left} descriptors over {fabric}");
        }
    });
}

#[test]
fn an_error_names_the_limit_over_shm() {
    is_named("descriptors::an_error_names_the_limit_over_shm", "shm");
}

#[test]
fn an_error_names_the_limit_over_tcp() {
    is_named("descriptors::an_error_names_the_limit_over_tcp", "tcp");
}
