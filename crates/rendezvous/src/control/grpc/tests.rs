//! The plane alone, without the handshake. A watchdog bounds every test.

mod hostile;
mod life;
#[path = "../../../tests/watchdog.rs"]
mod watchdog;

use std::time::Duration;

use tensorwire_protocol::limits::CONTROL_FRAME_BYTES_MAX;

use super::{GrpcConfig, GrpcPlane};
use crate::control::{ControlError, ControlPlane, ControlSession};

pub(in crate::control) use watchdog::bounded;

pub(super) fn config() -> GrpcConfig {
    GrpcConfig::new("127.0.0.1:0")
}

pub(super) fn plane() -> GrpcPlane {
    GrpcPlane::bind(config()).unwrap()
}

/// A session between the two planes: the dialler's end, the acceptor's end.
pub(super) async fn connect(dialler: &GrpcPlane, acceptor: &GrpcPlane) -> (ControlSession, ControlSession) {
    let (dialled, accepted) =
        futures::future::join(dialler.dial(&acceptor.local_address()), acceptor.accept()).await;
    (dialled.unwrap(), accepted.unwrap())
}

/// Like [`connect`], after sessions that have ended meanwhile: a plane may still offer such a session until it notices
/// the end. Such sessions end at once.
pub(super) async fn connect_past_the_dead(
    dialler: &GrpcPlane,
    acceptor: &GrpcPlane,
) -> (ControlSession, ControlSession) {
    let (dialled, mut accepted) = connect(dialler, acceptor).await;
    dialled.sender.send(b"first".to_vec()).await.unwrap();
    loop {
        match accepted.receiver.recv().await {
            Ok(Some(frame)) => {
                assert_eq!(frame, b"first");
                return (dialled, accepted);
            }
            Ok(None) | Err(_) => accepted = acceptor.accept().await.unwrap(),
        }
    }
}

/// Asserts that frames arrive in both directions.
pub(super) async fn assert_works(one: &mut ControlSession, other: &mut ControlSession) {
    for (sender, receiver) in [(&one.sender, &mut other.receiver), (&other.sender, &mut one.receiver)] {
        sender.send(b"ping".to_vec()).await.unwrap();
        assert_eq!(receiver.recv().await.unwrap().as_deref(), Some(&b"ping"[..]));
    }
}

fn frame(index: usize) -> Vec<u8> {
    let length = (index * 37) % 3000;
    let mut frame = index.to_le_bytes().to_vec();
    frame.resize(8 + length, index as u8);
    frame
}

#[test]
fn frames_arrive_whole_and_in_order_both_ways() {
    bounded(|| async {
        let (a, b) = (plane(), plane());
        let (one, other) = connect(&a, &b).await;
        other.sender.admitted();
        let exchange = |mine: ControlSession| async move {
            let (sender, mut receiver) = (mine.sender, mine.receiver);
            let sending = async {
                for index in 0..2000 {
                    sender.send(frame(index)).await.unwrap();
                }
            };
            let receiving = async {
                for index in 0..2000 {
                    assert_eq!(receiver.recv().await.unwrap(), Some(frame(index)));
                }
            };
            futures::future::join(sending, receiving).await;
            (sender, receiver)
        };
        let (here, there) = (one.addresses.unwrap(), other.addresses.unwrap());
        assert_eq!((here.own, here.peer), (there.peer, there.own));
        assert_eq!((here.peer.to_string(), one.peer_host()), (b.local_address(), other.peer_host()));
        // Both sessions stay open until both exchanges are done.
        let _kept = futures::future::join(exchange(one), exchange(other)).await;
    });
}

#[test]
fn empty_and_largest_frames_pass_and_a_larger_one_is_refused() {
    bounded(|| async {
        let (a, b) = (plane(), plane());
        let (mut one, mut other) = connect(&a, &b).await;
        for length in [0, 1, CONTROL_FRAME_BYTES_MAX - 1, CONTROL_FRAME_BYTES_MAX] {
            other.sender.admitted();
            let sent = vec![7; length];
            let (sending, received) =
                futures::future::join(one.sender.send(sent.clone()), other.receiver.recv()).await;
            sending.unwrap();
            assert!(received.unwrap().unwrap() == sent, "{length} bytes");
            let (sending, received) =
                futures::future::join(other.sender.send(sent.clone()), one.receiver.recv()).await;
            sending.unwrap();
            assert!(received.unwrap().unwrap() == sent, "{length} bytes back");
        }
        let refused = one.sender.send(vec![0; CONTROL_FRAME_BYTES_MAX + 1]).await;
        assert!(matches!(refused, Err(ControlError::FrameTooLarge { bytes }) if bytes == (1 << 20) + 1));
        assert_works(&mut one, &mut other).await;
    });
}

#[test]
fn a_slow_reader_holds_its_sender_back() {
    bounded(|| async {
        let (a, b) = (plane(), plane());
        let (one, mut other) = connect(&a, &b).await;
        other.sender.admitted();
        let sent = std::sync::atomic::AtomicUsize::new(0);
        let sending = async {
            for index in 0..400_usize {
                one.sender.send(vec![index as u8; 64 << 10]).await.unwrap();
                sent.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
        };
        let reading = async {
            for index in 0..400_usize {
                let frame = other.receiver.recv().await.unwrap().unwrap();
                assert!(frame.iter().all(|byte| *byte == index as u8));
                // 16 frames in the two queues, the rest in windows and sockets, mainly in the kernel.
                let ahead = sent.load(std::sync::atomic::Ordering::Relaxed) - index;
                assert!(ahead < 250, "{ahead} frames of 64 KiB are buffered");
            }
        };
        futures::future::join(sending, reading).await;
    });
}

#[test]
fn each_direction_ends_in_order_and_on_its_own() {
    bounded(|| async {
        let (a, b) = (plane(), plane());
        for swap in [false, true] {
            let (one, other) = connect(&a, &b).await;
            let (one, mut other) = if swap { (other, one) } else { (one, other) };
            one.sender.send(b"last".to_vec()).await.unwrap();
            let ControlSession { sender, mut receiver, .. } = one;
            drop(sender);
            assert_eq!(other.receiver.recv().await.unwrap().as_deref(), Some(&b"last"[..]));
            assert_eq!(other.receiver.recv().await.unwrap(), None);
            assert_eq!(other.receiver.recv().await.unwrap(), None, "asked again");
            other.sender.send(b"still here".to_vec()).await.unwrap();
            assert_eq!(receiver.recv().await.unwrap().as_deref(), Some(&b"still here"[..]));
            drop(other);
            assert_eq!(receiver.recv().await.unwrap(), None);
        }
    });
}

#[test]
fn a_dropped_session_delivers_what_was_sent_and_then_ends_in_order() {
    bounded(|| async {
        let (a, b) = (plane(), plane());
        for swap in [false, true] {
            let (one, other) = connect(&a, &b).await;
            let (one, mut other) = if swap { (other, one) } else { (one, other) };
            for index in 0..5 {
                one.sender.send(frame(index)).await.unwrap();
            }
            drop(one);
            for index in 0..5 {
                assert_eq!(other.receiver.recv().await.unwrap(), Some(frame(index)));
            }
            assert_eq!(other.receiver.recv().await.unwrap(), None);
            while other.sender.send(b"anyone?".to_vec()).await.is_ok() {}
            let refused = other.sender.send(b"anyone?".to_vec()).await;
            assert!(matches!(refused, Err(ControlError::Lost { .. })), "{refused:?}");
        }
    });
}

#[test]
fn dial_says_why_a_worker_is_unreachable() {
    bounded(|| async {
        let plane = GrpcPlane::bind(config().dial_limit(Duration::from_millis(300))).unwrap();
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let error = plane.dial(&free).await.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, ControlError::Unreachable { .. }), "{text}");
        assert!(text.contains(&free) && text.contains("refused") && text.contains("is the worker running"));

        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let error = plane.dial(&silent.local_addr().unwrap().to_string()).await.unwrap_err();
        assert!(error.to_string().contains("no answer within 0.3 s"), "{error}");

        for bad in ["", "nonsense", "host:", ":1", "host:65536", "host:-1", "::1:80", "[::1:80", "a b:1"] {
            let error = plane.dial(bad).await.unwrap_err();
            assert!(matches!(error, ControlError::BadAddress { .. }), "{bad}: {error}");
        }
    });
}

#[test]
fn an_address_beyond_loopback_needs_a_secret() {
    bounded(|| async {
        for address in ["0.0.0.0:0", "[::]:0"] {
            let refused = GrpcPlane::bind(GrpcConfig::new(address)).unwrap_err();
            assert!(matches!(refused, ControlError::SecretNeeded { .. }), "{refused}");
        }
        let secret = crate::control::Secret::new(*b"0123456789abcdef");
        assert!(secret.is_some());
        let bound = GrpcPlane::bind(GrpcConfig::new("0.0.0.0:0").secret(secret)).unwrap();
        assert!(bound.secret().is_some());
        let open = GrpcPlane::dangerous_bind_without_secret(GrpcConfig::new("0.0.0.0:0")).unwrap();
        assert!(open.secret().is_none());
    });
}

#[test]
fn an_address_in_use_is_named() {
    bounded(|| async {
        let first = plane();
        let error = GrpcPlane::bind(GrpcConfig::new(first.local_address())).unwrap_err();
        assert!(matches!(error, ControlError::Bind { .. }), "{error}");
        assert!(error.to_string().contains(&first.local_address()));
        assert!(error.to_string().ends_with("use another port, or 0 for any free one"), "{error}");
        // An address reserved for documentation, which no host has.
        let secret = crate::control::Secret::new(*b"0123456789abcdef");
        let error = GrpcPlane::bind(GrpcConfig::new("192.0.2.1:0").secret(secret)).unwrap_err();
        assert!(error.to_string().contains("use an address of this host"), "{error}");
    });
}
