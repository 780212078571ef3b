//! Which peers get a connection, and which are refused.

use std::{
    io::{Read, Write},
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixStream},
    },
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::future::join;
use tensorwire_fabric::{
    ConnectParams, Connected, ConnectionData, Domain, FabricError, Immediate, LossCause, PeerViolation,
    Prepared, QueuePair, Role, Runtime, TokioRuntime,
};

use super::SETUP;
use crate::contract::{
    Flavour, bounded,
    pair::{DEPTHS, STEP_LIMIT, step, yield_once},
};

const SHORT: Duration = Duration::from_millis(300);

fn domain(runtime: &Arc<dyn Runtime>) -> Arc<dyn Domain> {
    (SETUP.fabric)(runtime.clone()).open_domain().unwrap()
}

fn params(peer: ConnectionData, role: Role, limit: Duration) -> ConnectParams {
    ConnectParams { peer, role, peer_address: None, limit }
}

async fn connect(
    dialer: Box<dyn Prepared>,
    acceptor: Box<dyn Prepared>,
) -> (Result<QueuePair, FabricError>, Result<QueuePair, FabricError>) {
    let dial = params(acceptor.connection_data(), Role::Dialer, STEP_LIMIT);
    let accept = params(dialer.connection_data(), Role::Acceptor, STEP_LIMIT);
    let (dialed, accepted) = join(dialer.connect(dial), acceptor.connect(accept)).await;
    let runtime = TokioRuntime::current().unwrap();
    let spawn = |connected: Connected| connected.spawn(&runtime);
    (dialed.map(spawn), accepted.map(spawn))
}

/// `data` with one bit of its last byte changed: the name stays, the token differs.
fn tampered(data: &ConnectionData) -> ConnectionData {
    let mut bytes = data.0.clone();
    *bytes.last_mut().unwrap() ^= 1;
    ConnectionData(bytes)
}

fn assert_bad_token(error: &FabricError) {
    let bad = PeerViolation::BadToken;
    assert!(
        matches!(error, FabricError::PeerMisbehaved { violation, .. } if *violation == bad),
        "unexpected: {error}"
    );
}

#[test]
fn nobody_dials_and_the_acceptor_gives_up_in_time() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let domain = domain(&runtime);
        let (acceptor, absent) = (domain.prepare(DEPTHS).unwrap(), domain.prepare(DEPTHS).unwrap());
        let start = runtime.now();
        let accepting = acceptor.connect(params(absent.connection_data(), Role::Acceptor, SHORT));
        let error = step(&runtime, "accepting", accepting).await.unwrap_err();
        assert!(matches!(error, FabricError::ConnectTimeout { limit_ms: 300, .. }), "unexpected: {error}");
        let waited = runtime.now() - start;
        assert!((SHORT..SHORT * 10).contains(&waited), "{waited:?}");
    });
}

#[test]
fn nobody_accepts_and_the_dialer_gives_up_in_time() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let domain = domain(&runtime);
        let (dialer, idle) = (domain.prepare(DEPTHS).unwrap(), domain.prepare(DEPTHS).unwrap());
        let dialing = dialer.connect(params(idle.connection_data(), Role::Dialer, SHORT));
        let error = step(&runtime, "dialing", dialing).await.unwrap_err();
        assert!(matches!(error, FabricError::ConnectTimeout { .. }), "unexpected: {error}");
    });
}

#[test]
fn an_acceptor_that_is_gone_is_told_at_once() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let domain = domain(&runtime);
        let (dialer, gone) = (domain.prepare(DEPTHS).unwrap(), domain.prepare(DEPTHS).unwrap());
        let data = gone.connection_data();
        drop(gone);
        let dialing = dialer.connect(params(data, Role::Dialer, STEP_LIMIT));
        let error = step(&runtime, "dialing", dialing).await.unwrap_err();
        assert!(matches!(error, FabricError::Connect { .. }), "unexpected: {error}");
    });
}

#[test]
fn a_dialer_with_a_wrong_token_is_turned_away() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let domain = domain(&runtime);
        let (dialer, acceptor) = (domain.prepare(DEPTHS).unwrap(), domain.prepare(DEPTHS).unwrap());
        let dial = params(tampered(&acceptor.connection_data()), Role::Dialer, STEP_LIMIT);
        let accept = params(dialer.connection_data(), Role::Acceptor, SHORT);
        let (dialed, accepted) =
            step(&runtime, "both", join(dialer.connect(dial), acceptor.connect(accept))).await;
        let error = dialed.unwrap_err();
        let cause = LossCause::EndOfFile;
        assert!(
            matches!(error, FabricError::PeerLost { cause: seen, .. } if seen == cause),
            "unexpected: {error}"
        );
        assert_bad_token(&accepted.unwrap_err());
    });
}

#[test]
fn an_acceptor_with_a_wrong_token_is_not_trusted() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let domain = domain(&runtime);
        let (dialer, acceptor) = (domain.prepare(DEPTHS).unwrap(), domain.prepare(DEPTHS).unwrap());
        let dial = params(acceptor.connection_data(), Role::Dialer, STEP_LIMIT);
        let accept = params(tampered(&dialer.connection_data()), Role::Acceptor, STEP_LIMIT);
        let (dialed, accepted) =
            step(&runtime, "both", join(dialer.connect(dial), acceptor.connect(accept))).await;
        assert_bad_token(&dialed.unwrap_err());
        assert!(accepted.is_err());
    });
}

#[test]
fn a_token_works_once() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let domain = domain(&runtime);
        let prepare = || domain.prepare(DEPTHS).unwrap();
        let (dialer, acceptor, late) = (prepare(), prepare(), prepare());
        let used = acceptor.connection_data();
        let (dialed, accepted) = step(&runtime, "the first", connect(dialer, acceptor)).await;
        let (dialed, accepted) = (dialed.unwrap(), accepted.unwrap());
        let again = late.connect(params(used, Role::Dialer, SHORT));
        let error = step(&runtime, "the second", again).await.unwrap_err();
        assert!(matches!(error, FabricError::Connect { .. }), "unexpected: {error}");
        let (sent, arrived) = join(dialed.notify(Immediate(1)), accepted.next_arrival()).await;
        sent.unwrap();
        arrived.unwrap();
    });
}

#[test]
fn connection_data_of_another_kind_is_refused_before_anything_is_tried() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let domain = domain(&runtime);
        for bytes in [Vec::new(), vec![0], vec![1, b't', 0, 0], vec![1, b's'], vec![2, b's'], vec![7; 1000]] {
            for role in [Role::Dialer, Role::Acceptor] {
                let prepared = domain.prepare(DEPTHS).unwrap();
                let connecting = prepared.connect(params(ConnectionData(bytes.clone()), role, STEP_LIMIT));
                let error = step(&runtime, "connecting", connecting).await.unwrap_err();
                assert!(matches!(error, FabricError::Connect { .. }), "unexpected: {error}");
            }
        }
    });
}

/// A raw socket to the side that `data` describes.
fn stranger(data: &ConnectionData) -> std::io::Result<OwnedFd> {
    let hex: String = data.0[2..18].iter().map(|byte| format!("{byte:02x}")).collect();
    let name = format!("tensorwire-shm-{hex}");
    // SAFETY: no pointers are involved; the descriptor is new and owned by nobody.
    let socket = unsafe { OwnedFd::from_raw_fd(libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0)) };
    // SAFETY: all-zero is a valid `sockaddr_un`.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (to, from) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    let length = (std::mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len()) as libc::socklen_t;
    // SAFETY: `address` is readable for `length` bytes.
    let connected = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) };
    if connected == 0 { Ok(socket) } else { Err(std::io::Error::last_os_error()) }
}

#[test]
fn strangers_at_the_socket_do_not_keep_the_right_one_out() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let domain = domain(&runtime);
        let (dialer, acceptor) = (domain.prepare(DEPTHS).unwrap(), domain.prepare(DEPTHS).unwrap());
        let data = acceptor.connection_data();
        // One leaves without sending, one sends garbage, one sends a packet that is far too long.
        drop(stranger(&data).unwrap());
        for garbage in [vec![0xFF; 20], vec![0; 5000]] {
            let mut socket = std::fs::File::from(stranger(&data).unwrap());
            socket.write_all(&garbage).unwrap();
        }
        let (dialed, accepted) = step(&runtime, "the right one", connect(dialer, acceptor)).await;
        dialed.unwrap();
        accepted.unwrap();
    });
}

/// Counts the lines of the log by level.
#[derive(Default, Clone)]
struct Lines(Arc<Mutex<Vec<tracing::Level>>>);

impl tracing::Subscriber for Lines {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn event(&self, event: &tracing::Event<'_>) {
        self.0.lock().unwrap().push(*event.metadata().level());
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn s4_strangers_at_the_socket_write_no_line_of_the_log_that_is_on_by_default() {
    const STRANGERS: usize = 6;
    bounded(Flavour::CurrentThread, |runtime| async move {
        let lines = Lines::default();
        let _kept = tracing::subscriber::set_default(lines.clone());
        let domain = domain(&runtime);
        let (dialer, acceptor) = (domain.prepare(DEPTHS).unwrap(), domain.prepare(DEPTHS).unwrap());
        let data = acceptor.connection_data();
        for _ in 0..STRANGERS {
            let mut socket = std::fs::File::from(stranger(&data).unwrap());
            socket.write_all(&[0xFF; 20]).unwrap();
        }
        let (dialed, accepted) = step(&runtime, "the right one", connect(dialer, acceptor)).await;
        dialed.unwrap();
        accepted.unwrap();
        let lines = lines.0.lock().unwrap();
        let refusals = lines.iter().filter(|level| **level == tracing::Level::DEBUG).count();
        assert!(refusals >= STRANGERS, "{lines:?}");
        assert!(lines.iter().all(|level| *level >= tracing::Level::DEBUG), "{lines:?}");
    });
}

#[test]
fn a_stranger_who_only_waits_costs_a_share_of_the_time() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let domain = domain(&runtime);
        let (dialer, acceptor) = (domain.prepare(DEPTHS).unwrap(), domain.prepare(DEPTHS).unwrap());
        let silent = stranger(&acceptor.connection_data()).unwrap();
        let limit = Duration::from_secs(2);
        let dial = params(acceptor.connection_data(), Role::Dialer, limit);
        let accept = params(dialer.connection_data(), Role::Acceptor, limit);
        let (dialed, accepted) = join(dialer.connect(dial), acceptor.connect(accept)).await;
        dialed.unwrap();
        accepted.unwrap();
        drop(silent);
    });
}

/// The first message of a dialler that has the token of `data`, with descriptors of the right kinds.
fn say_hello(socket: &OwnedFd, data: &ConnectionData) {
    const HELLO: u8 = 1;
    let (version, token) = (data.0[0], &data.0[18..]);
    let depths = 8_u64 << 32 | 8;
    let hello = [b"TWSF", &[version, HELLO][..], token, &depths.to_le_bytes()].concat();
    let page = rustix::fs::memfd_create("page", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let fds = [page.as_fd(), bell.as_fd(), page.as_fd()];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = rustix::net::SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(rustix::net::SendAncillaryMessage::ScmRights(&fds)));
    let (parts, flags) = ([std::io::IoSlice::new(&hello)], rustix::net::SendFlags::NOSIGNAL);
    assert_eq!(rustix::net::sendmsg(socket, &parts, &mut ancillary, flags).unwrap(), hello.len());
}

#[test]
fn another_user_is_turned_away() {
    // SAFETY: no pointers are involved.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: only root can become another user");
        return;
    }
    bounded(Flavour::CurrentThread, |runtime| async move {
        let domain = domain(&runtime);
        let (dialer, acceptor) = (domain.prepare(DEPTHS).unwrap(), domain.prepare(DEPTHS).unwrap());
        let data = acceptor.connection_data();
        let (connected, waiting) = std::sync::mpsc::channel();
        let other = std::thread::spawn(move || {
            // The bare system call changes this thread alone.
            // SAFETY: no pointers are involved.
            assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) }, 0);
            let socket = stranger(&data).unwrap();
            say_hello(&socket, &data);
            connected.send(()).unwrap();
            let mut answer = [0; 1];
            // The fabric refuses it although it has the token: end of file.
            std::fs::File::from(socket).read(&mut answer).unwrap_or(0)
        });
        waiting.recv_timeout(STEP_LIMIT).unwrap();
        let (dialed, accepted) = step(&runtime, "the right one", connect(dialer, acceptor)).await;
        dialed.unwrap();
        accepted.unwrap();
        assert_eq!(other.join().unwrap(), 0);
    });
}

#[test]
fn names_are_random_and_gone_with_their_end() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let domain = domain(&runtime);
        let listening = |data: &ConnectionData| {
            let hex: String = data.0[2..18].iter().map(|byte| format!("{byte:02x}")).collect();
            let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
            sockets.contains(&format!("@tensorwire-shm-{hex}"))
        };
        let (one, other) = (domain.prepare(DEPTHS).unwrap(), domain.prepare(DEPTHS).unwrap());
        let (data, unlike) = (one.connection_data(), other.connection_data());
        assert_ne!(data, unlike);
        assert!(listening(&data) && listening(&unlike));
        let (dialed, accepted) = step(&runtime, "connecting", connect(one, other)).await;
        assert!(!listening(&data), "the dialer's listener outlived the handshake");
        drop((dialed, accepted));
        // A stream socket can't reach a packet socket even if it knows the name.
        let idle = domain.prepare(DEPTHS).unwrap();
        let hex: String = idle.connection_data().0[2..18].iter().map(|byte| format!("{byte:02x}")).collect();
        let address = SocketAddr::from_abstract_name(format!("tensorwire-shm-{hex}")).unwrap();
        assert!(UnixStream::connect_addr(&address).is_err());
        yield_once().await;
    });
}

#[test]
fn reach_is_the_same_within_a_process_and_names_the_user() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let (one, other) = ((SETUP.fabric)(runtime.clone()), (SETUP.fabric)(runtime));
        assert_eq!(one.reach(), other.reach());
        let text = String::from_utf8(one.reach()).unwrap();
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        // SAFETY: no pointers are involved.
        let uid = unsafe { libc::geteuid() };
        assert!(text.contains(boot.trim()) && text.ends_with(&format!(".{uid}")), "{text}");
    });
}

#[test]
fn depths_of_zero_or_without_end_are_refused() {
    bounded(Flavour::CurrentThread, |runtime| async move {
        let domain = domain(&runtime);
        for (send_depth, receive_depth) in [(0, 1), (1, 0), (65537, 1), (u32::MAX, 1)] {
            let config = tensorwire_fabric::QueuePairConfig { send_depth, receive_depth };
            let error = domain.prepare(config).unwrap_err();
            assert!(matches!(error, FabricError::Unsupported { .. }), "unexpected: {error}");
        }
    });
}
