//! A worker under the limits of the operating system.

use std::{fs, fs::File, time::Duration};

use rustix::{
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::{CapabilitySet, capabilities, set_capabilities},
};
use tensorwire_fabric::FabricKind;
use tensorwire_protocol::Code;
use tensorwire_rendezvous::{Sharing, Worker, WorkerBuilder, WorkerError};

use crate::{
    harness::{Other, bounded, builder, info, is_version, kind, parents_lines, role, say, step, tensor},
    rdma::{End, over_at},
};

const SERVER: &str = "/job:server/replica:0/task:0";
const CLIENT: &str = "/job:client/replica:0/task:0";

/// What this process may open in the test.
const FILES: u64 = 96;

async fn fetch_once(server: &Worker, client: &Worker) -> Result<(), String> {
    let peer = client.peer_at(server.address()).await.map_err(|error| error.to_string())?;
    let got = peer.fetch("x").await.map_err(|error| error.to_string())?;
    assert!(is_version(got.bytes(), 1) && info(client, &peer).transport.is_some());
    Ok(())
}

/// Opens files until no more can be.
fn use_up() -> Vec<File> {
    std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
}

fn names_the_limit(error: &str) -> bool {
    ["RLIMIT_NOFILE", &format!("is {FILES}:"), "ulimit -n"].iter().all(|word| error.contains(word))
}

async fn starved(fabric: FabricKind) {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(FILES), maximum: limit.maximum }).unwrap();
    let server = builder(SERVER, fabric).start().await.unwrap();
    server.publish("x", tensor(&server, 100_000, 1).await).unwrap();
    // A worker that can't start returns the reason.
    let mut held = use_up();
    let refused = builder(CLIENT, fabric).start().await.map(drop).unwrap_err().to_string();
    assert!(names_the_limit(&refused), "{refused}");
    drop(held);
    // One that can't connect does too.
    let client = builder(CLIENT, fabric).timeout(Duration::from_secs(3)).start().await.unwrap();
    held = use_up();
    let refused = fetch_once(&server, &client).await.unwrap_err();
    assert!(names_the_limit(&refused), "{refused}");
    // With descriptors to be had again, the same workers go on.
    drop(held);
    fetch_once(&server, &client).await.unwrap();
    client.shutdown().await;
    server.shutdown().await;
    say("done");
}

#[test]
fn d_a_worker_without_file_descriptors_names_the_limit_and_works_after_release() {
    const TEST: &str = "limits::d_a_worker_without_file_descriptors_names_the_limit_and_works_after_release";
    if let Some(words) = role() {
        return bounded(Duration::from_secs(40), |_| starved(kind(&words[0])));
    }
    bounded(Duration::from_secs(90), |_| async {
        for fabric in ["shm", "tcp"] {
            // The limit is the process's, so it is a process of its own.
            let mut other = Other::start(TEST, fabric);
            assert_eq!(other.hear().await, "done");
        }
    });
}

/// Lowers or raises what is enforced; what may be set later stays.
fn set_limit(resource: Resource, bytes: Option<u64>) {
    let maximum = getrlimit(resource).maximum;
    setrlimit(resource, Rlimit { current: bytes.or(maximum), maximum }).unwrap();
}

/// A server that others use. It opens all descriptors, and closes them, at the parent's lines.
async fn starving(fabric: FabricKind) {
    let server = builder(SERVER, fabric).start().await.unwrap();
    server.publish("x", tensor(&server, 100_000, 1).await).unwrap();
    say(server.address());
    let mut lines = parents_lines();
    let mut held = Vec::new();
    while let Some(line) = lines.recv().await {
        held.clear();
        if line == "starve" {
            set_limit(Resource::Nofile, Some(FILES));
            held = use_up();
        }
        say("done");
    }
}

async fn beside_a_starving_server(test: &str, fabric: &str) {
    let mut server = Other::start(test, fabric);
    let address = server.hear().await;
    let worker = |name: &str| builder(name, kind(fabric)).timeout(Duration::from_secs(5));
    let fetch = async |client: &Worker| {
        let peer = client.peer_at(&address).await.map_err(|error| error.to_string())?;
        let got = step("a fetch", peer.fetch("x").into_future()).await.map_err(|error| error.to_string())?;
        assert!(is_version(got.bytes(), 1));
        Ok::<(), String>(())
    };
    let known = worker("/job:known/replica:0/task:0").start().await.unwrap();
    for _ in 0..3 {
        fetch(&known).await.unwrap();
    }
    // One whose next message comes from memory that the server has not seen yet.
    let recent = worker("/job:recent/replica:0/task:0").start().await.unwrap();
    fetch(&recent).await.unwrap();
    server.tell("starve");
    assert_eq!(server.hear().await, "done");
    // Whoever has what it needs goes on. Whoever has not gets an error in time, and is not blamed.
    fetch(&known).await.unwrap();
    if let Err(refused) = fetch(&recent).await {
        assert!(refused.contains("Too many open files") && !refused.contains("contract"), "{refused}");
    }
    let new = worker(CLIENT).start().await.unwrap();
    let refused = step("a refusal", fetch(&new)).await.unwrap_err();
    assert!(!refused.is_empty());
    fetch(&known).await.unwrap();
    server.tell("release");
    assert_eq!(server.hear().await, "done");
    for client in [new, recent, known] {
        fetch(&client).await.unwrap();
        client.shutdown().await;
    }
}

#[test]
fn d_a_server_without_file_descriptors_serves_who_is_connected_and_others_after_release() {
    const TEST: &str =
        "limits::d_a_server_without_file_descriptors_serves_who_is_connected_and_others_after_release";
    if let Some(words) = role() {
        return bounded(Duration::from_secs(60), |_| starving(kind(&words[0])));
    }
    bounded(Duration::from_secs(90), |_| async {
        for fabric in ["shm", "tcp"] {
            beside_a_starving_server(TEST, fabric).await;
        }
    });
}

/// Of a value that there is no address space for, in bytes; and what there is for everything else.
const HUGE: usize = 256 << 20;
const SPACE: u64 = 64 << 20;

async fn without_address_space(fabric: FabricKind) {
    let server = builder(SERVER, fabric).start().await.unwrap();
    let client = builder(CLIENT, fabric).start().await.unwrap();
    let huge = tensor(&server, HUGE, 2).await;
    server.publish("x", tensor(&server, 100_000, 1).await).unwrap();
    fetch_once(&server, &client).await.unwrap();
    let used = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = used.split_ascii_whitespace().next().unwrap().parse().unwrap();
    let limit = pages * rustix::param::page_size() as u64 + SPACE;
    set_limit(Resource::As, Some(limit));
    // Where neighbours map each other's memory, there is no room for this value's.
    server.publish("huge", huge).unwrap();
    let peer = client.peer(SERVER).unwrap();
    let error = peer.fetch("huge").await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    assert_names_space(&error, limit);
    // What there is room for goes on.
    fetch_once(&server, &client).await.unwrap();
    let error = peer.fetch("huge").sharing(Sharing::View).await.unwrap_err();
    assert_names_space(&error, limit);
    fetch_once(&server, &client).await.unwrap();
    // With more room so does the rest.
    set_limit(Resource::As, None);
    for sharing in [Sharing::View, Sharing::Copy] {
        assert!(is_version(peer.fetch("huge").sharing(sharing).await.unwrap().bytes(), 2));
    }
    assert_eq!(client.receive_memory().leaked_bytes, 0);
    client.shutdown().await;
    server.shutdown().await;
    say("done");
}

fn assert_names_space(error: &WorkerError, limit: u64) {
    for word in ["RLIMIT_AS", &limit.to_string(), "ulimit -v"] {
        assert!(error.to_string().contains(word), "no `{word}`: {error}");
    }
}

#[test]
fn d_memory_exhaustion_a_receive_without_address_space_names_the_limit_and_works_after_release() {
    const TEST: &str =
        "limits::d_memory_exhaustion_a_receive_without_address_space_names_the_limit_and_works_after_release";
    if let Some(words) = role() {
        return bounded(Duration::from_secs(60), |_| without_address_space(kind(&words[0])));
    }
    // The sanitizer needs address space of its own at any moment.
    if cfg!(asan) {
        return;
    }
    bounded(Duration::from_secs(90), |_| async {
        for fabric in ["tcp", "shm"] {
            let mut other = Other::start(TEST, fabric);
            assert_eq!(other.hear().await, "done");
        }
    });
}

/// Less than a block of any pool, in bytes.
const LOCKED: u64 = 256 << 10;

async fn without_locked_memory() {
    // Whoever may lock anything has no limit. Threads started from here on are as this one.
    let mut sets = capabilities(None).unwrap();
    for set in [&mut sets.effective, &mut sets.permitted, &mut sets.inheritable] {
        set.remove(CapabilitySet::IPC_LOCK);
    }
    set_capabilities(None, sets).unwrap();
    let worker = |name: &str, end: End| -> WorkerBuilder {
        over_at(Worker::builder(name), FabricKind::VERBS, end).memory(|memory| memory.block_bytes = 1 << 20)
    };
    let transfer = async || {
        let server = worker(SERVER, End::Left).start().await.map_err(|error| error.to_string())?;
        let client = worker(CLIENT, End::Right).start().await.map_err(|error| error.to_string())?;
        // Its first memory: the pool hands each block to the device.
        server.pool().alloc(100_000).await.map(drop).map_err(|error| error.to_string())?;
        server.publish("x", tensor(&server, 100_000, 1).await).map_err(|error| error.to_string())?;
        fetch_once(&server, &client).await?;
        client.shutdown().await;
        server.shutdown().await;
        Ok::<(), String>(())
    };
    let limit = getrlimit(Resource::Memlock);
    setrlimit(Resource::Memlock, Rlimit { current: Some(LOCKED), maximum: limit.maximum }).unwrap();
    let refused = transfer().await.unwrap_err();
    for word in ["locked memory", "256 KiB", "ulimit -l"] {
        assert!(refused.contains(word), "no `{word}`: {refused}");
    }
    setrlimit(Resource::Memlock, limit).unwrap();
    transfer().await.unwrap();
    say("done");
}

#[test]
#[ignore = "needs an RDMA device: scripts/rxe-vm/suite has some"]
fn d_memory_exhaustion_a_worker_without_locked_memory_names_the_limit_and_works_after_release() {
    const TEST: &str =
        "limits::d_memory_exhaustion_a_worker_without_locked_memory_names_the_limit_and_works_after_release";
    if role().is_some() {
        return bounded(Duration::from_secs(40), |_| without_locked_memory());
    }
    bounded(Duration::from_secs(60), |_| async {
        let mut other = Other::start(TEST, "verbs");
        assert_eq!(other.hear().await, "done");
    });
}
