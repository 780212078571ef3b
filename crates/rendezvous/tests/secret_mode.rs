//! Secret mode over real sockets: who gets in, which errors others get, and that nothing of a secret is ever logged.
//! Every line that this process logs, at every level, is stored, and searched when the tests are over.

#![allow(clippy::unwrap_used, clippy::panic)] // a helper of tests fails by panicking, as a test does

mod watchdog;

use std::{
    future::Future,
    io::{Read, Write},
    net::{TcpListener, TcpStream, ToSocketAddrs},
    os::{linux::net::SocketAddrExt, unix::net},
    path::PathBuf,
    sync::{Mutex, Once},
    time::Duration,
};

use tensorwire_fabric::{FabricKind, TokioRuntime};
use tensorwire_rendezvous::{
    Tensor, Worker, WorkerBuilder, WorkerError,
    control::{ControlError, ControlPlane, GrpcConfig, GrpcPlane, Secret, handshake},
};

static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());
static LOGGING: Once = Once::new();

/// Logged by the test itself at the lowest level.
const MARK: &str = "logging works";

struct Log;

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LOG.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Runs `test` on a thread of its own, within a minute, with everything logged to [`LOG`].
fn bounded<F: Future<Output = ()> + 'static>(test: impl FnOnce() -> F + Send + 'static) {
    LOGGING.call_once(|| {
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
            .with_ansi(false)
            .with_writer(|| Log);
        subscriber.init();
    });
    watchdog::bounded(|| async {
        tracing::trace!("{MARK}");
        test().await;
    });
}

/// Asserts that nothing that was logged shows `secret`, or twelve bytes of it, in any usual form.
fn assert_not_logged(secret: &[u8]) {
    let log = String::from_utf8_lossy(&LOG.lock().unwrap()).to_ascii_lowercase();
    assert!(log.contains(MARK), "nothing was logged: the search proves nothing");
    for part in secret.windows(8).step_by(4) {
        let listed =
            |format: fn(&u8) -> String, by: &str| part.iter().map(format).collect::<Vec<_>>().join(by);
        let forms = [
            String::from_utf8_lossy(part).to_ascii_lowercase(),
            part.escape_ascii().to_string().to_ascii_lowercase(),
            listed(|byte| format!("{byte:02x}"), ""),
            listed(|byte| format!("{byte:02x}"), " "),
            listed(|byte| format!("{byte}"), ", "),
        ];
        for form in forms.iter().filter(|form| form.len() >= 8) {
            assert!(!log.contains(form), "a secret was logged");
        }
    }
}

fn me(plane: &GrpcPlane, name: &str) -> handshake::Introduction {
    handshake::Introduction {
        worker: name.to_owned(),
        incarnation: 7,
        listen_address: Some(plane.local_address()),
        fabrics: vec![(3, b"reach".to_vec())],
    }
}

type Met = Result<handshake::Introduction, ControlError>;

/// Dials and shakes hands, both sides with the secrets given.
async fn meet(
    dialler: &GrpcPlane,
    acceptor: &GrpcPlane,
    dial: Option<Secret>,
    accept: Option<Secret>,
) -> (Met, Met) {
    meet_at(&acceptor.local_address(), dialler, acceptor, dial, accept).await
}

/// The same by an address that leads to `acceptor`.
async fn meet_at(
    address: &str,
    dialler: &GrpcPlane,
    acceptor: &GrpcPlane,
    dial: Option<Secret>,
    accept: Option<Secret>,
) -> (Met, Met) {
    let limit = Duration::from_secs(10);
    let runtime = TokioRuntime::current().unwrap();
    let dialling = async {
        let mut session = dialler.dial(address).await.unwrap();
        handshake::dial(&mut session, &me(dialler, "one"), dial.as_ref(), &runtime, limit, address).await
    };
    let accepting = async {
        let mut session = acceptor.accept().await.unwrap();
        handshake::accept(&mut session, &me(acceptor, "other"), accept.as_ref(), &runtime, limit).await
    };
    futures::join!(dialling, accepting)
}

fn plane() -> GrpcPlane {
    GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0")).unwrap()
}

fn secret_file(content: &str) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("secret");
    std::fs::write(&path, content).unwrap();
    (directory, path)
}

fn builder(name: &str) -> WorkerBuilder {
    Worker::builder(name).require(FabricKind::TCP).timeout(Duration::from_secs(20))
}

#[test]
fn e_on_loopback_the_secret_is_handed_over_to_the_same_user() {
    bounded(|| async {
        let (a, b) = (plane(), plane());
        let asked = a.ambient_secret(&b.local_address()).await.unwrap().unwrap();
        assert_eq!(Some(&asked), b.secret());
        assert_eq!(b.ambient_secret(&b.local_address()).await.unwrap().as_ref(), b.secret());
        assert_ne!(a.secret(), b.secret());
        let (dialled, accepted) = meet(&a, &b, Some(asked.clone()), b.secret().cloned()).await;
        assert_eq!(dialled.unwrap(), me(&b, "other"));
        assert_eq!(accepted.unwrap(), me(&a, "one"));

        // Who connects and reads nothing holds nobody up.
        let port = b.local_address().rsplit(':').next().unwrap().to_owned();
        let name = net::SocketAddr::from_abstract_name(format!("tensorwire-{port}")).unwrap();
        let _idle: Vec<_> = (0..20).map(|_| net::UnixStream::connect_addr(&name).unwrap()).collect();
        assert_eq!(a.ambient_secret(&b.local_address()).await.unwrap().as_ref(), Some(&asked));

        b.close().await;
        let gone = a.ambient_secret(&b.local_address()).await.unwrap_err();
        assert!(matches!(gone, ControlError::NoSecret { .. }), "{gone}");
        assert_not_logged(asked.expose());
    });
}

/// An address that leads to `to`, once.
fn relay(to: String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        let (client, server) = (listener.accept().unwrap().0, TcpStream::connect(to).unwrap());
        let (mut from, mut into) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut from, &mut into));
        let _ = std::io::copy(&mut &server, &mut &client);
        let _ = client.shutdown(std::net::Shutdown::Both);
    });
    address
}

#[test]
fn e_a_secret_that_was_handed_over_is_of_no_use_to_a_relay_and_a_given_one_passes() {
    bounded(|| async {
        let given = Secret::new("Yq7-chosen-by-the-user-0Wz");
        let (a, b) = (plane(), plane());
        let c = GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0").secret(given.clone())).unwrap();
        let asked = a.ambient_secret(&b.local_address()).await.unwrap();
        assert_eq!(asked.as_ref().unwrap().listening_address().unwrap().to_string(), b.local_address());
        let through = |of: &GrpcPlane| relay(of.local_address());
        let (dialled, accepted) = meet_at(&through(&b), &a, &b, asked.clone(), b.secret().cloned()).await;
        assert!(matches!(dialled.unwrap_err(), ControlError::WrongSecret { .. }));
        assert!(matches!(accepted.unwrap_err(), ControlError::WrongSecret { .. }));
        let (dialled, accepted) = meet_at(&through(&c), &a, &c, given.clone(), given).await;
        assert!(dialled.is_ok() && accepted.is_ok());
        // Without anybody between it was right.
        let (dialled, accepted) = meet(&a, &b, asked, b.secret().cloned()).await;
        assert!(dialled.is_ok() && accepted.is_ok());
    });
}

/// Whoever asks for localhost finds the first of its addresses first, and there is a stranger. Also an address of the loopback
/// with the same port that is still free.
fn stranger() -> (TcpListener, u16, &'static str) {
    let first = ("localhost", 0).to_socket_addrs().unwrap().next().unwrap().ip();
    let stranger = TcpListener::bind((first, 0)).unwrap();
    stranger.set_nonblocking(true).unwrap();
    let port = stranger.local_addr().unwrap().port();
    (stranger, port, if first.is_ipv6() { "127.0.0.1" } else { "127.0.0.2" })
}

fn assert_nobody_came(stranger: &TcpListener) {
    let came = stranger.accept().unwrap_err();
    assert_eq!(came.kind(), std::io::ErrorKind::WouldBlock, "a stranger was dialled");
}

#[test]
fn e_on_loopback_the_address_is_dialled_that_came_with_the_secret() {
    bounded(|| async {
        let (stranger, port, own) = stranger();
        let server = Worker::builder("/job:ps/replica:0/task:0").bind(format!("{own}:{port}"));
        let server = server.start().await.unwrap();
        server.publish("x", Tensor::from_values(server.pool(), &[1], &[1.5f32]).unwrap()).unwrap();
        for (number, fabric) in [FabricKind::TCP, FabricKind::SHM].into_iter().enumerate() {
            let client = Worker::builder(&format!("/job:worker/replica:0/task:{number}")).require(fabric);
            let client = client.timeout(Duration::from_secs(20)).start().await.unwrap();
            let peer = client.peer_at(&format!("localhost:{port}")).await.unwrap();
            assert_eq!(peer.fetch("x").await.unwrap().values::<f32>().unwrap(), [1.5], "{fabric}");
            // The same peer, and no second session.
            client.peer_at(&format!("localhost:{port}")).await.unwrap();
            let error = client.peer_at(&format!("127.0.0.9:{port}")).await.unwrap_err().to_string();
            assert!(error.contains(&format!("listens on {own}:{port}: use that address")), "{error}");
            client.shutdown().await;
        }
        assert_nobody_came(&stranger);
        server.shutdown().await;
    });
}

#[test]
fn e_a_data_connection_goes_where_the_session_does() {
    bounded(|| async {
        let (stranger, port, own) = stranger();
        let tcp = |name| Worker::builder(name).require(FabricKind::TCP).timeout(Duration::from_secs(20));
        let (name, server) = ("/job:worker/replica:0/task:0", tcp("/job:ps/replica:0/task:0"));
        let client = tcp(name).bind(format!("{own}:{port}")).start().await.unwrap();
        client.publish("x", Tensor::from_values(client.pool(), &[1], &[1.5f32]).unwrap()).unwrap();
        let server = server.start().await.unwrap();
        let peer = server.set_address(name, &format!("localhost:{port}")).unwrap();
        // The client opened the session, so the server dials the address that this session proves, not the one that was set.
        client.peer_at(server.address()).await.unwrap();
        server.wait_for_peer(name).await.unwrap();
        assert_eq!(peer.fetch("x").await.unwrap().values::<f32>().unwrap(), [1.5]);
        assert_nobody_came(&stranger);
        client.shutdown().await;
        server.shutdown().await;
    });
}

#[test]
fn e_a_secret_of_the_users_is_never_handed_over() {
    bounded(|| async {
        let secret = Secret::new("Yq7-chosen-by-the-user-0Wz").unwrap();
        let config = GrpcConfig::new("127.0.0.1:0").secret(Some(secret.clone()));
        let (a, b) = (plane(), GrpcPlane::bind(config).unwrap());
        let refused = a.ambient_secret(&b.local_address()).await.unwrap_err();
        assert!(matches!(refused, ControlError::NoSecret { .. }), "{refused}");
        for beyond in ["192.0.2.1:4242", "example.org:4242"] {
            let refused = a.ambient_secret(beyond).await.unwrap_err();
            assert!(matches!(refused, ControlError::NoSecret { .. }), "{refused}");
        }
        assert_not_logged(secret.expose());
    });
}

#[test]
fn e_a_taken_hand_over_name_is_an_error_that_says_so() {
    bounded(|| async {
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = tcp.local_addr().unwrap();
        drop(tcp);
        let name = format!("tensorwire-{}", address.port());
        let _squatter =
            net::UnixListener::bind_addr(&net::SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        let error = GrpcPlane::bind(GrpcConfig::new(address.to_string())).unwrap_err();
        assert!(matches!(error, ControlError::Bind { .. }), "{error}");
        assert!(error.to_string().contains(&name) && error.to_string().contains("secret file"), "{error}");
        // With a secret, the name is not needed.
        let secret = Secret::new("Yq7-chosen-by-the-user-0Wz");
        GrpcPlane::bind(GrpcConfig::new(address.to_string()).secret(secret)).unwrap();
    });
}

#[test]
fn e_wrong_and_missing_secrets_are_told_to_both_ends() {
    bounded(|| async {
        let right = Secret::new("Kd3vR8wLq2-right-1Zx").unwrap();
        let wrong = Secret::new("Mh5tB6nPs9-wrong-4Cj").unwrap();
        let (a, b) = (plane(), plane());
        let (dialled, accepted) = meet(&a, &b, Some(wrong.clone()), Some(right.clone())).await;
        assert!(matches!(dialled.unwrap_err(), ControlError::WrongSecret { .. }));
        assert!(matches!(accepted.unwrap_err(), ControlError::WrongSecret { .. }));
        let (dialled, accepted) = meet(&a, &b, None, Some(right.clone())).await;
        assert!(matches!(dialled.unwrap_err(), ControlError::NoSecret { .. }));
        assert!(matches!(accepted.unwrap_err(), ControlError::WrongSecret { .. }));
        let (dialled, accepted) = meet(&a, &b, Some(right.clone()), Some(right.clone())).await;
        assert!(dialled.is_ok() && accepted.is_ok());
        assert_not_logged(right.expose());
        assert_not_logged(wrong.expose());
        for shown in [
            format!("{right:?}"),
            format!("{b:?}"),
            format!("{:?}", GrpcConfig::new("x:1").secret(Some(right))),
        ] {
            assert!(!shown.contains("right") && !shown.contains("75, 100"), "{shown}");
        }
    });
}

#[test]
fn e_workers_need_the_same_secret_file() {
    bounded(|| async {
        let (_keep, path) = secret_file("uF2-jR7-cluster-9Tz4k\n");
        let (_keep_other, other) = secret_file("Gx8-pQ3-another-5Vb1m\n");
        let server = builder("/job:ps/replica:0/task:0").bind("0.0.0.0:0").secret_file(&path);
        let server = server.start().await.unwrap();
        server.publish("x", Tensor::from_values(server.pool(), &[1], &[1.5f32]).unwrap()).unwrap();
        let address = server.address().replace("0.0.0.0", "127.0.0.1");

        let client = builder("/job:worker/replica:0/task:0").secret_file(&path).start().await.unwrap();
        let peer = client.peer_at(&address).await.unwrap();
        assert_eq!(peer.fetch("x").await.unwrap().values::<f32>().unwrap(), [1.5]);

        let stranger = builder("/job:worker/replica:0/task:1").secret_file(&other).start().await.unwrap();
        let error = stranger.peer_at(&address).await.unwrap_err();
        assert!(matches!(error, WorkerError::Control(ControlError::WrongSecret { .. })), "{error}");
        let guest = builder("/job:worker/replica:0/task:2").start().await.unwrap();
        let error = guest.peer_at(&address).await.unwrap_err();
        assert!(matches!(error, WorkerError::Control(ControlError::NoSecret { .. })), "{error}");
        let error =
            builder("/job:worker/replica:0/task:3").secret_file("/no/such").start().await.unwrap_err();
        assert!(error.to_string().contains("`/no/such`"), "{error}");

        for worker in [client, stranger, guest, server] {
            worker.shutdown().await;
        }
        assert_not_logged(b"uF2-jR7-cluster-9Tz4k");
        assert_not_logged(b"Gx8-pQ3-another-5Vb1m");
    });
}

#[test]
fn e_an_exposed_secret_file_is_warned_about() {
    use std::os::unix::fs::PermissionsExt;
    bounded(|| async {
        let (_keep, path) = secret_file("Lw4-exposed-to-all-6Ny");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        tensorwire_rendezvous::control::secret::read_secret_file(&path).unwrap();
        let log = String::from_utf8_lossy(&LOG.lock().unwrap()).into_owned();
        let warned = log.lines().any(|line| {
            line.contains("WARN") && line.contains("chmod 600") && line.contains(&path.display().to_string())
        });
        assert!(warned);
        assert_not_logged(b"Lw4-exposed-to-all-6Ny");
    });
}

#[test]
fn e_half_a_handshake_keeps_nobody_else_out() {
    bounded(|| async {
        let (a, b) = (plane(), plane());
        // More sessions than the limit of strangers, all opened and never introduced.
        let mut silent = Vec::new();
        for _ in 0..100 {
            silent.push(a.dial(&b.local_address()).await.unwrap());
            silent.push(b.accept().await.unwrap());
        }
        let asked = a.ambient_secret(&b.local_address()).await.unwrap();
        let (dialled, accepted) = meet(&a, &b, asked, b.secret().cloned()).await;
        assert!(dialled.is_ok() && accepted.is_ok());
    });
}

#[test]
fn e_plain_text_on_the_hand_over_socket_is_not_read() {
    bounded(|| async {
        let b = plane();
        let port = b.local_address().rsplit(':').next().unwrap().to_owned();
        let name = net::SocketAddr::from_abstract_name(format!("tensorwire-{port}")).unwrap();
        let mut stream = net::UnixStream::connect_addr(&name).unwrap();
        let _ = stream.write_all(&[0xff; 4096]);
        let mut bytes = Vec::new();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let _ = stream.read_to_end(&mut bytes);
        assert_eq!(bytes, [b.secret().unwrap().expose(), b.local_address().as_bytes()].concat());
    });
}
