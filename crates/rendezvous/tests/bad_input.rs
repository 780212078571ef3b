//! What users get wrong: each gives an error that names the field, the value and the remedy, and nothing panics.
//!
//! Two cases are elsewhere: too little locked memory in `crates/memory/tests/limits.rs`, because that needs limits of the
//! process, and a checkpoint that was cut short in the tests of the command.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    io::{self, Write},
    net::TcpListener,
    sync::Arc,
    time::Duration,
};

use tensorwire_fabric::{BoxFuture, FabricKind, Runtime, TokioRuntime};
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{ClusterSpec, Tensor, Worker, WorkerError};

use crate::bounded::bounded;

const LIMIT: Duration = Duration::from_secs(60);
const SERVER: &str = "/job:ps/replica:0/task:0";
const CLIENT: &str = "/job:worker/replica:0/task:0";
const SERVER_CPU: &str = "/job:ps/replica:0/task:0/device:CPU:0";
const CLIENT_CPU: &str = "/job:worker/replica:0/task:0/device:CPU:0";

async fn start(name: &str) -> Worker {
    Worker::builder(name).timeout(Duration::from_secs(20)).start().await.unwrap()
}

/// The text of `error` has all of `words`.
fn assert_says(error: &impl std::fmt::Display, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "`{word}` is missing in: {text}");
    }
}

#[test]
fn bad_input_01_malformed_key() {
    bounded(LIMIT, async {
        let worker = start(CLIENT).await;
        let device = "/job:ps/replica:zero/task:0/device:CPU:0";
        let error = worker.key(device, CLIENT_CPU, "edge").unwrap_err();
        assert!(matches!(error, WorkerError::BadKey { .. }), "{error}");
        assert_says(&error, &["key", device, "one looks like /job:worker/replica:0/task:1/device:CPU:0"]);
        for edge in ["", "a;b"] {
            let error = worker.key(SERVER_CPU, CLIENT_CPU, edge).unwrap_err();
            assert!(matches!(error, WorkerError::BadKey { .. }), "{error}");
            assert_says(&error, &["key", SERVER_CPU]);
        }
        worker.shutdown().await;
    });
}

#[test]
fn e_names_that_act_on_what_shows_them_are_refused_with_field_value_and_remedy() {
    const ACTIVE: &str = "w\u{1b}[2J\n\u{202e}";
    let refused = |field: &str, error: WorkerError| {
        assert_says(&error, &[field, r"w\u{1b}[2J\n\u{202e}"]);
        let shown = format!("{error} {error:?}");
        assert!(!shown.contains(tensorwire_protocol::text::is_active), "{shown:?}");
    };
    bounded(LIMIT, async {
        let (server, client) = (start(SERVER).await, start(CLIENT).await);
        let peer = client.peer_at(server.address()).await.unwrap();
        let tensor = || Tensor::from_values(server.pool(), &[1], &[1u8]).unwrap();
        let device = format!("/job:{ACTIVE}/replica:0/task:0/device:CPU:0");
        let unmade = client.key(SERVER_CPU, CLIENT_CPU, ACTIVE).unwrap_err();
        assert_says(&unmade, &["leave out control characters"]);
        refused("key", unmade);
        refused("key", client.key(&device, CLIENT_CPU, "edge").unwrap_err());
        let unpublished = server.publish(ACTIVE, tensor()).unwrap_err();
        assert_says(&unpublished, &["leave out control characters"]);
        refused("published name", unpublished);
        refused("published name", peer.fetch(ACTIVE).await.unwrap_err());
        refused("published name", peer.fetch_many(["a", ACTIVE]).await.unwrap_err());
        refused("worker", client.peer(ACTIVE).unwrap_err());
        refused("cluster", client.set_address(ACTIVE, "127.0.0.1:1").unwrap_err());
        refused(
            "cluster",
            client.set_address("/job:a/replica:0/task:0", &format!("{ACTIVE}:1")).unwrap_err(),
        );
        refused("address", client.peer_at(&format!("{ACTIVE}:1")).await.unwrap_err());
        let named = Worker::builder(ACTIVE).start().await.unwrap_err();
        assert_says(&named, &["leave out control characters"]);
        refused("name", named);
        // Nothing of it went to the peer: the connection is what it was.
        server.publish("plain", tensor()).unwrap();
        peer.fetch("plain").await.unwrap();
        client.shutdown().await;
        server.shutdown().await;
    });
}

#[test]
fn bad_input_02_unknown_worker() {
    bounded(LIMIT, async {
        let cluster = ClusterSpec::new().worker(SERVER, "127.0.0.1:4242");
        let worker = Worker::builder(CLIENT).cluster(cluster).start().await.unwrap();
        let stranger = "/job:ps/replica:0/task:7";
        let error = worker.peer(stranger).unwrap_err();
        assert!(matches!(error, WorkerError::UnknownWorker { .. }), "{error}");
        assert_says(&error, &["worker", stranger, SERVER, "Add it to the cluster"]);
        let key = worker.key(&format!("{stranger}/device:CPU:0"), CLIENT_CPU, "edge").unwrap();
        let error = worker.shared_step(1).recv(&key).await.unwrap_err();
        assert_says(&error, &["worker", stranger, "Add it to the cluster"]);
        worker.shutdown().await;
    });
}

#[test]
fn bad_input_03_recv_into_another_type_or_size() {
    bounded(LIMIT, async {
        let (server, client) = (start(SERVER).await, start(CLIENT).await);
        client.peer_at(server.address()).await.unwrap();
        let key = client.key(SERVER_CPU, CLIENT_CPU, "edge").unwrap();
        let own = server.key(SERVER_CPU, CLIENT_CPU, "edge").unwrap();
        let tensor = Tensor::from_values(server.pool(), &[4], &[1.0f32, 2.0, 3.0, 4.0]).unwrap();
        server.shared_step(1).send(&own, tensor).unwrap();

        let buffer = client.receive_pool().alloc(16).await.unwrap();
        let failed =
            client.shared_step(1).recv(&key).into_buffer(buffer).dtype(DataType::F64).await.unwrap_err();
        assert_says(&failed.error, &["edge", "element type is f32", "the buffer accepts f64"]);
        let short = client.receive_pool().alloc(15).await.unwrap();
        let failed =
            client.shared_step(1).recv(&key).into_buffer(short).dtype(DataType::F32).await.unwrap_err();
        assert_says(&failed.error, &["edge", "16 bytes", "at most 15 bytes"]);

        let buffer = client.receive_pool().alloc(16).await.unwrap();
        let filled = client.shared_step(1).recv(&key).into_buffer(buffer).dtype(DataType::F32).await.unwrap();
        assert_eq!(filled.bytes().len(), 16, "the value was not lost");
        client.shutdown().await;
        server.shutdown().await;
    });
}

#[test]
fn bad_input_04_an_address_twice_in_the_cluster() {
    bounded(LIMIT, async {
        let cluster = ClusterSpec::new().worker(SERVER, "127.0.0.1:4242").worker(CLIENT, "127.0.0.1:4242");
        let error = Worker::builder(CLIENT).cluster(cluster).start().await.unwrap_err();
        assert_says(&error, &["cluster", "127.0.0.1:4242", SERVER, CLIENT, "its own address"]);
    });
}

/// A runtime on a system that gives no random numbers.
#[derive(Debug)]
struct NoEntropy(TokioRuntime);

impl Runtime for NoEntropy {
    fn spawn(&self, name: &'static str, task: BoxFuture<'static, ()>) {
        self.0.spawn(name, task);
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        self.0.sleep(duration)
    }

    fn now(&self) -> Duration {
        self.0.now()
    }

    fn random(&self) -> u64 {
        panic!("asked for a number that there is not")
    }

    fn check_random(&self) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(rustix::io::Errno::PERM.raw_os_error()))
    }
}

#[test]
fn e_a_worker_does_not_start_without_random_numbers() {
    bounded(LIMIT, async {
        let runtime = Arc::new(NoEntropy(TokioRuntime::current().unwrap()));
        let error = Worker::builder(CLIENT).runtime(runtime).start().await.unwrap_err();
        assert_says(&error, &["runtime", "NoEntropy", "random numbers", "not permitted", "/dev/urandom"]);
    });
}

#[test]
fn bad_input_06_nobody_listens_there() {
    bounded(LIMIT, async {
        let worker = start(CLIENT).await;
        // A port that was free a moment ago, and stays taken by nobody who accepts.
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let error = worker.peer_at(&address).await.unwrap_err();
        assert_says(&error, &["cannot reach the worker", &address]);
        for text in ["", "nonsense", "127.0.0.1", "127.0.0.1:70000"] {
            let error = worker.peer_at(text).await.unwrap_err();
            assert_says(&error, &[&format!("`{text}`"), "HOST:PORT"]);
        }
        worker.shutdown().await;
    });
}

#[test]
fn bad_input_07_the_wrong_secret() {
    bounded(LIMIT, async {
        let file = |text: &str| {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(text.as_bytes()).unwrap();
            file
        };
        let (one, other, short) =
            (file("a secret of the cluster"), file("another one, of others"), file("short"));
        let server = Worker::builder(SERVER).secret_file(one.path()).start().await.unwrap();
        let client = Worker::builder(CLIENT).secret_file(other.path()).start().await.unwrap();
        let error = client.peer_at(server.address()).await.unwrap_err();
        assert_says(&error, &[server.address(), "does not know the secret", "the same secret file"]);
        let error = Worker::builder(CLIENT).secret_file(short.path()).start().await.unwrap_err();
        assert_says(&error, &[&short.path().display().to_string()]);
        client.shutdown().await;
        server.shutdown().await;
    });
}

#[test]
fn bad_input_09_verbs_required_without_a_device() {
    bounded(LIMIT, async {
        let devices = std::fs::read_dir("/sys/class/infiniband").map_or(0, Iterator::count);
        if devices > 0 {
            println!("skipped: this machine has an RDMA device");
            return;
        }
        let error = Worker::builder(CLIENT).require(FabricKind::VERBS).start().await.unwrap_err();
        assert!(matches!(error, WorkerError::Config { .. }), "{error}");
        assert_says(&error, &["require", "`verbs`"]);
        // What is missing depends on the machine: the library, or only a device for it.
        let text = error.to_string();
        let names = |what| text.contains(what);
        assert!(names("device") || names("libibverbs.so.1") && names("install rdma-core"), "{text}");
    });
}

/// Variables of a process are its own: the cases run in a child.
const RDMA_CHILD: &str = "TENSORWIRE_TEST_BAD_RDMA";

/// What starting a worker in a process with these variables prints.
fn started_with(variables: &[(&str, &str)]) -> String {
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "bad_input::bad_input_rdma_settings", "--nocapture"]).env(RDMA_CHILD, "1");
    let output = child.envs(variables.iter().copied()).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn bad_input_rdma_settings() {
    let builder = || Worker::builder(CLIENT).fabrics([FabricKind::VERBS, FabricKind::TCP]);
    if std::env::var_os(RDMA_CHILD).is_some() {
        return bounded(LIMIT, async {
            match builder().start().await {
                Ok(worker) => {
                    println!("started");
                    worker.shutdown().await;
                }
                Err(error) => println!("refused: {error}"),
            }
        });
    }
    assert!(started_with(&[]).contains("started"));
    let wrong = started_with(&[("RDMA_QP_MTU", "9000")]);
    assert_says(&wrong, &["refused", "RDMA_QP_MTU", "9000", "2048 or 4096"]);
    let torn = started_with(&[("RDMA_SL", "1"), ("RDMA_QP_SL", "2")]);
    assert_says(&torn, &["refused", "RDMA_SL", "RDMA_QP_SL", "TENSORWIRE_RDMA_SERVICE_LEVEL"]);
    let settled = [("RDMA_SL", "1"), ("RDMA_QP_SL", "2"), ("TENSORWIRE_RDMA_SERVICE_LEVEL", "0")];
    assert!(started_with(&settled).contains("started"));
    // In code it goes the same way.
    bounded(LIMIT, async {
        let error = builder().rdma(|rdma| rdma.timeout = Some(0)).start().await.unwrap_err();
        assert!(matches!(error, WorkerError::Config { field: "timeout", .. }), "{error}");
        assert_says(&error, &["timeout", "0", "1 to 31"]);
        // Not where RDMA is not wanted.
        let tcp = Worker::builder(CLIENT).fabrics([FabricKind::TCP]).rdma(|rdma| rdma.timeout = Some(0));
        tcp.start().await.unwrap().shutdown().await;
    });
}
