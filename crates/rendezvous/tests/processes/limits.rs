//! A worker under the limits of the operating system.

use std::{fs::File, time::Duration};

use rendezvous::Worker;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use verbs_reactor::FabricKind;

use crate::harness::{Other, bounded, builder, info, is_version, kind, role, say, tensor};

const SERVER: &str = "/job:server/replica:0/task:0";
const CLIENT: &str = "/job:client/replica:0/task:0";

/// What this process may open in the test.
const FILES: u64 = 96;

async fn fetch_once(server: &Worker, client: &Worker) -> Result<(), String> {
    let peer = client.peer_at(server.address()).await.map_err(|error| error.to_string())?;
    let got = client.fetch(&peer, "x").await.map_err(|error| error.to_string())?;
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
    // A worker that can't start says why.
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
