//! Workers over TLS: who gets in, which errors others get, and that nothing falls back or leaks.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a failed test

mod names;
mod sets;
mod strangers;
mod way;

use std::{sync::OnceLock, time::Duration};

use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tensorwire_fabric::FabricKind;
use tensorwire_memory::copy::{CopyReason, count};
use tensorwire_rendezvous::{
    Tensor, Worker, WorkerBuilder, WorkerError,
    control::{ControlError, Secret},
    tls::{
        TlsIdentity,
        test_certificates::{Authority, Wanted},
    },
};

use crate::watchdog::bounded;

const SERVER: &str = "/job:ps/replica:0/task:0";
const CLIENT: &str = "/job:worker/replica:0/task:0";

/// What the server publishes it under.
const KEY: &str = "the-name-of-the-published-tensor";

/// The CA that all honest workers trust.
fn authority() -> &'static Authority {
    static AUTHORITY: OnceLock<Authority> = OnceLock::new();
    AUTHORITY.get_or_init(|| Authority::new().unwrap())
}

fn identity(name: &str) -> TlsIdentity {
    authority().issue(&Wanted::worker(name)).unwrap().identity().unwrap()
}

/// Without TLS.
fn plain(name: &str, kind: FabricKind) -> WorkerBuilder {
    Worker::builder(name).require(kind).timeout(Duration::from_secs(20))
}

fn builder(name: &str, kind: FabricKind) -> WorkerBuilder {
    plain(name, kind).tls(identity(name))
}

/// A value that is no likely part of anything else.
fn values() -> Vec<u32> {
    (0..100_000_u32).map(|index| index.wrapping_mul(0x9E37_79B9) ^ 0x5BD1_E995).collect()
}

async fn serve(builder: WorkerBuilder) -> Worker {
    let server = builder.start().await.unwrap();
    let values = values();
    let tensor = Tensor::from_values(server.pool(), &[values.len() as u64], &values).unwrap();
    server.publish(KEY, tensor).unwrap();
    server
}

async fn fetch(client: &Worker, address: &str) -> Result<Vec<u32>, WorkerError> {
    let peer = client.peer_at(address).await?;
    Ok(peer.fetch(KEY).await?.values::<u32>()?.to_vec())
}

/// That the server has the client in, and serves it.
async fn assert_served(server: WorkerBuilder, client: WorkerBuilder) {
    let (server, client) = (serve(server).await, client.start().await.unwrap());
    assert_eq!(fetch(&client, server.address()).await.unwrap(), values());
    client.shutdown().await;
    server.shutdown().await;
}

/// The control plane's error at the client, when no session is opened.
async fn refusal(server: WorkerBuilder, client: WorkerBuilder) -> ControlError {
    let (server, client) = (serve(server).await, client.start().await.unwrap());
    let refused = fetch(&client, server.address()).await.unwrap_err();
    assert!(server.peers().is_empty(), "{:?}", server.peers());
    assert!(client.peers().is_empty(), "{:?}", client.peers());
    client.shutdown().await;
    server.shutdown().await;
    match refused {
        WorkerError::Control(error) => error,
        other => panic!("{other}"),
    }
}

#[test]
fn e_what_moves_is_encrypted_and_is_known_to_be() {
    for (kind, encrypted) in [(FabricKind::TCP, true), (FabricKind::SHM, false)] {
        bounded(move || async move {
            let (server, client) =
                (serve(builder(SERVER, kind)).await, builder(CLIENT, kind).start().await.unwrap());
            assert_eq!(fetch(&client, server.address()).await.unwrap(), values());
            for worker in [&client, &server] {
                let peer = worker.peers().pop().unwrap();
                assert_eq!((peer.transport, peer.encrypted), (Some(kind), Some(encrypted)), "{peer:?}");
            }
            client.shutdown().await;
            server.shutdown().await;
        });
    }
}

/// A figure of the recorder, by name and one label.
fn figure(snapshotter: &Snapshotter, name: &str, label: (&str, &str)) -> u64 {
    let snapshot = snapshotter.snapshot().into_vec().into_iter();
    let has_label =
        |key: &metrics_util::CompositeKey| key.key().labels().any(|it| (it.key(), it.value()) == label);
    let found = snapshot.filter(|(key, ..)| key.key().name() == name && has_label(key));
    found.map(|(.., value)| if let DebugValue::Counter(value) = value { value } else { 0 }).sum()
}

#[test]
fn e_encrypted_connections_and_their_copies_are_counted() {
    bounded(|| async {
        let recorder = DebuggingRecorder::new();
        let snapshotter = recorder.snapshotter();
        let _recording = metrics::set_default_local_recorder(&recorder);
        let (server, client) = (
            serve(builder(SERVER, FabricKind::TCP)).await,
            builder(CLIENT, FabricKind::TCP).start().await.unwrap(),
        );
        let before = count(CopyReason::Decrypted).bytes;
        assert_eq!(fetch(&client, server.address()).await.unwrap(), values());
        // Other tests of this process may copy meanwhile.
        let copied = count(CopyReason::Decrypted).bytes - before;
        assert!(copied >= 4 * values().len() as u64, "{copied} bytes were copied");
        client.record_metrics();
        let connects = ("tensorwire_encrypted_connects_total", ("transport", "tcp"));
        assert!(figure(&snapshotter, connects.0, connects.1) >= 1);
        client.shutdown().await;
        server.shutdown().await;
    });
}

#[test]
fn e_without_tls_nothing_is_encrypted() {
    bounded(|| async {
        let kind = FabricKind::TCP;
        let (server, client) = (serve(plain(SERVER, kind)).await, plain(CLIENT, kind).start().await.unwrap());
        assert_eq!(fetch(&client, server.address()).await.unwrap(), values());
        assert_eq!(client.peers().pop().unwrap().encrypted, Some(false));
        client.shutdown().await;
        server.shutdown().await;
    });
}

#[test]
fn e_an_address_beyond_loopback_needs_no_secret_under_tls() {
    bounded(|| async {
        let server = serve(builder(SERVER, FabricKind::TCP).bind("0.0.0.0:0")).await;
        let client = builder(CLIENT, FabricKind::TCP).start().await.unwrap();
        let port = server.address().rsplit(':').next().unwrap();
        assert_eq!(fetch(&client, &format!("127.0.0.1:{port}")).await.unwrap(), values());
        client.shutdown().await;
        server.shutdown().await;
        let refused = plain(SERVER, FabricKind::TCP).bind("0.0.0.0:0").start().await.unwrap_err().to_string();
        assert!(refused.contains("no secret is set") && refused.contains("TLS"), "{refused}");
    });
}

#[test]
fn e_a_secret_must_hold_under_tls_too() {
    let secret = |byte: u8| Secret::new([byte; 32]).unwrap();
    bounded(move || async move {
        let tcp = |name| builder(name, FabricKind::TCP);
        assert_served(tcp(SERVER).secret(secret(1)), tcp(CLIENT).secret(secret(1))).await;
        for (server, client) in [
            (tcp(SERVER).secret(secret(1)), tcp(CLIENT).secret(secret(2))),
            (tcp(SERVER).secret(secret(1)), tcp(CLIENT)),
            (tcp(SERVER), tcp(CLIENT).secret(secret(1))),
        ] {
            let refused = refusal(server, client).await;
            let is_of_the_secret =
                matches!(refused, ControlError::WrongSecret { .. } | ControlError::NoSecret { .. });
            assert!(is_of_the_secret, "{refused}");
        }
    });
}

#[test]
fn e_nothing_is_handed_over_on_loopback_under_tls() {
    use std::os::{linux::net::SocketAddrExt, unix::net};
    bounded(|| async {
        let port_of = |worker: &Worker| worker.address().rsplit(':').next().unwrap().to_owned();
        let ask = |port: String| {
            let name = net::SocketAddr::from_abstract_name(format!("tensorwire-{port}")).unwrap();
            net::UnixStream::connect_addr(&name)
        };
        let server = builder(SERVER, FabricKind::TCP).start().await.unwrap();
        assert_eq!(ask(port_of(&server)).unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
        server.shutdown().await;
        let server = plain(SERVER, FabricKind::TCP).start().await.unwrap();
        ask(port_of(&server)).unwrap();
        server.shutdown().await;
    });
}

#[test]
fn e_unencrypted_rdma_is_used_only_when_told() {
    bounded(|| async {
        let refused = builder(SERVER, FabricKind::VERBS).start().await.unwrap_err().to_string();
        assert!(
            refused.contains("does not encrypt") && refused.contains("`require_encryption` at false"),
            "{refused}"
        );
        // Told so, it depends on the machine: without a device it is another error, or none.
        let told = builder(SERVER, FabricKind::VERBS).require_encryption(false).start().await;
        if let Err(error) = &told {
            assert!(!error.to_string().contains("does not encrypt"), "{error}");
        }
        let kinds = [FabricKind::VERBS, FabricKind::TCP];
        let server = serve(builder(SERVER, FabricKind::TCP)).await;
        let client = builder(CLIENT, FabricKind::TCP).fabrics(kinds).start().await.unwrap();
        assert_eq!(fetch(&client, server.address()).await.unwrap(), values());
        let peer = client.peers().pop().unwrap();
        let not_used = peer.not_used.join("; ");
        assert!(not_used.contains("verbs") && not_used.contains("does not encrypt"), "{not_used}");
        client.shutdown().await;
        server.shutdown().await;
    });
}

#[test]
fn settings_that_contradict_each_other_are_refused() {
    bounded(|| async {
        let needs_tls = plain(SERVER, FabricKind::TCP).require_encryption(true).start().await.unwrap_err();
        assert!(needs_tls.to_string().contains("the setting `tls`"), "{needs_tls}");
        let other =
            plain(SERVER, FabricKind::TCP).tls(identity(CLIENT)).start().await.unwrap_err().to_string();
        for part in ["tls = ", CLIENT, SERVER, "subjectAltName"] {
            assert!(other.contains(part), "{other}");
        }
    });
}
