//! Programs that user code starts while its workers move tensors: they disturb nothing and inherit nothing. A child that
//! forks and goes on without starting a program must not use its parent's workers (see `tensorwire_verbs_reactor`).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    collections::BTreeSet,
    os::unix::{fs::MetadataExt, process::CommandExt},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use crate::{
    fabrics::{assert_moves_over, kinds, over, over_verbs},
    rdma::patient,
};
use tensorwire_fabric::FabricKind;
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{Tensor, Worker};

const BYTES: usize = 4 << 20;
const FETCHES: usize = 12;
const FABRICS: &[FabricKind] = &[FabricKind::SHM, FabricKind::TCP];

fn content(version: usize) -> Vec<u8> {
    (0..BYTES).map(|index| (index * 31 + version * 7 + index / 4096) as u8).collect()
}

/// Starts one program by fork and exec. Naming the user, who stays the same, keeps the standard library from `vfork`,
/// which would not share pages with the child as `fork` does.
fn start_program() {
    let user = std::fs::metadata("/proc/self").unwrap().uid();
    let mut program = Command::new("true");
    program.uid(user).stdin(Stdio::null()).stdout(Stdio::null());
    assert!(program.status().unwrap().success());
}

async fn fetches_are_whole(kind: FabricKind) {
    let server = over(Worker::builder("/job:ps/replica:0/task:0"), kind).start().await.unwrap();
    let client = over(Worker::builder("/job:worker/replica:0/task:0"), kind).start().await.unwrap();
    let peer = client.peer_at(server.address()).await.unwrap();
    for version in 0..FETCHES {
        let wanted = content(version);
        let mut buffer = server.pool().alloc(BYTES).await.unwrap();
        buffer.copy_from_slice(&wanted);
        server.publish("t", Tensor::new(buffer, DataType::U8, &[BYTES as u64]).unwrap()).unwrap();
        let limit = patient(Duration::from_secs(20));
        let got = peer.fetch("t").timeout(limit).await.unwrap();
        assert!(got.bytes() == wanted, "version {version} over {kind}");
    }
    assert_moves_over(&client, kind);
    client.shutdown().await;
    server.shutdown().await;
}

#[test]
fn d_fork_programs_started_in_mid_transfer_disturb_nothing() {
    let _turn = crate::turn();
    for kind in kinds(FABRICS) {
        let over = Arc::new(AtomicBool::new(false));
        let starter = thread::spawn({
            let over = over.clone();
            move || {
                let mut started = 0;
                while !over.load(Ordering::SeqCst) {
                    start_program();
                    started += 1;
                }
                started
            }
        });
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(fetches_are_whole(*kind));
        over.store(true, Ordering::SeqCst);
        assert!(starter.join().unwrap() > 0);
    }
}

/// What a program that is started now has open, apart from what it opened to see that.
fn inherited() -> BTreeSet<String> {
    let look = "for each in /proc/self/fd/*; do readlink $each; done";
    let seen = Command::new("sh").args(["-c", look]).stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8(seen.stdout).unwrap();
    text.lines()
        .filter(|line| !line.starts_with("/proc/") && !line.starts_with("pipe:"))
        .map(str::to_owned)
        .collect()
}

#[test]
fn d_fork_a_started_program_inherits_no_descriptor() {
    let _turn = crate::turn();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for kind in kinds(FABRICS) {
        let before = inherited();
        runtime.block_on(async {
            let server = over(Worker::builder("/job:ps/replica:0/task:0"), *kind).start().await.unwrap();
            let client = over(Worker::builder("/job:worker/replica:0/task:0"), *kind).start().await.unwrap();
            let peer = client.peer_at(server.address()).await.unwrap();
            let buffer = server.pool().alloc(BYTES).await.unwrap();
            server.publish("t", Tensor::new(buffer, DataType::U8, &[BYTES as u64]).unwrap()).unwrap();
            peer.fetch("t").await.unwrap();
            let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
            assert!(
                descriptors > before.len() + 5,
                "two workers have sockets and blocks open: {descriptors}"
            );
            assert_eq!(inherited(), before, "over {kind}");
            client.shutdown().await;
            server.shutdown().await;
        });
    }
}

over_verbs! {
    d_fork_programs_started_in_mid_transfer_disturb_nothing
    d_fork_a_started_program_inherits_no_descriptor
}
