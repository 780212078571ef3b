//! Two sides of a handshake, and attackers between them or instead of one of them.
mod words;

use std::{
    slice::from_ref,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use proptest::prelude::*;
use tensorwire_fabric::{BoxFuture, TokioRuntime};
use tokio::sync::mpsc;

use super::{super::grpc::tests::bounded, *};
use crate::control::{FrameReceiver, FrameSender, ProvenPeer, TlsNames};

const LIMIT: Duration = Duration::from_secs(20);

/// One half of an in-memory session.
#[derive(Debug)]
struct Sender {
    frames: mpsc::UnboundedSender<Vec<u8>>,
    admitted: Arc<AtomicBool>,
    proven: Option<ProvenPeer>,
}

impl FrameSender for Sender {
    fn send(&self, frame: Vec<u8>) -> BoxFuture<'_, Result<(), ControlError>> {
        let sent = self.frames.send(frame).map_err(|_| ControlError::Lost { detail: "gone".into() });
        Box::pin(std::future::ready(sent))
    }

    fn admitted(&self) {
        self.admitted.store(true, Ordering::Relaxed);
    }

    fn proven(&self) -> Option<&ProvenPeer> {
        self.proven.as_ref()
    }
}

#[derive(Debug)]
struct Receiver(mpsc::UnboundedReceiver<Vec<u8>>);

impl FrameReceiver for Receiver {
    fn recv(&mut self) -> BoxFuture<'_, Result<Option<Vec<u8>>, ControlError>> {
        Box::pin(async { Ok(self.0.recv().await) })
    }
}

/// An in-memory session whose peer is played by a test.
struct TestSession {
    session: ControlSession,
    /// The frames that the session's end sends.
    from: mpsc::UnboundedReceiver<Vec<u8>>,
    /// Frames for the session's end.
    to: mpsc::UnboundedSender<Vec<u8>>,
    admitted: Arc<AtomicBool>,
}

/// What one side of a session knows about its connection.
#[derive(Clone, Default)]
struct Connection {
    addresses: Option<Addresses>,
    proven: Option<ProvenPeer>,
}

impl Connection {
    fn between(own: &str, peer: &str) -> Self {
        let addresses = Addresses { own: own.parse().unwrap(), peer: peer.parse().unwrap() };
        Self { addresses: Some(addresses), proven: None }
    }

    fn under_tls(self, channel: u8) -> Self {
        let (channel, uris, host) = ([channel; 32], Vec::new(), Ok(()));
        Self { proven: Some(ProvenPeer { channel, uris, host, names: TlsNames::AnyMember }), ..self }
    }
}

fn wire() -> TestSession {
    wire_over(Connection::between("192.0.2.1:4242", "192.0.2.7:50000"))
}

fn wire_over(connection: Connection) -> TestSession {
    let (frames, from) = mpsc::unbounded_channel();
    let (to, receiver) = mpsc::unbounded_channel();
    let admitted = Arc::<AtomicBool>::default();
    let Connection { addresses, proven } = connection;
    let sender = Arc::new(Sender { frames, admitted: admitted.clone(), proven });
    let session = ControlSession { sender, receiver: Box::new(Receiver(receiver)), addresses };
    TestSession { session, from, to, admitted }
}

fn worker(name: &str) -> Introduction {
    Introduction {
        worker: name.to_owned(),
        incarnation: 0x1234_5678,
        listen_address: Some(format!("{name}:4242")),
        fabrics: vec![(2, vec![1, 2, 3]), (3, Vec::new())],
    }
}

fn secret(text: &str) -> Option<Secret> {
    Secret::new(text)
}

fn good() -> Option<Secret> {
    secret("the secret of this cluster")
}

type Met = Result<Introduction, ControlError>;

async fn dialling(mut session: ControlSession, secret: Option<Secret>, limit: Duration) -> Met {
    let runtime = TokioRuntime::current().unwrap();
    dial(&mut session, &worker("dialler"), secret.as_ref(), &runtime, limit, "peer:4242").await
}

async fn accepting(mut session: ControlSession, secret: Option<Secret>, limit: Duration) -> Met {
    let runtime = TokioRuntime::current().unwrap();
    accept(&mut session, &worker("acceptor"), secret.as_ref(), &runtime, limit).await
}

/// The frames that passed, in order; true marks those of the dialling end.
type Seen = Arc<Mutex<Vec<(bool, Vec<u8>)>>>;

/// A handshake with an attacker between both sides. The attacker sees every frame and may change it. Returns both results, the
/// seen frames, and whether the acceptor admitted its peer.
async fn between(
    secrets: [Option<Secret>; 2],
    alter: impl Fn(bool, ControlFrame) -> ControlFrame,
) -> (Met, Met, Vec<(bool, Vec<u8>)>, bool) {
    relayed(secrets, [wire(), wire()], alter).await
}

/// The same over two connections, each to the attacker.
async fn relayed(
    secrets: [Option<Secret>; 2],
    [mut dialler, mut acceptor]: [TestSession; 2],
    alter: impl Fn(bool, ControlFrame) -> ControlFrame,
) -> (Met, Met, Vec<(bool, Vec<u8>)>, bool) {
    let seen = Seen::default();
    let [dial_secret, accept_secret] = secrets;
    let relay = |from_dialler: bool, frame: Vec<u8>| {
        seen.lock().unwrap().push((from_dialler, frame.clone()));
        match ControlFrame::decode(&frame) {
            Ok(decoded) => alter(from_dialler, decoded).encode(),
            Err(_) => frame,
        }
    };
    let there = async {
        while let Some(frame) = dialler.from.recv().await {
            let _ = acceptor.to.send(relay(true, frame));
        }
        drop(acceptor.to);
    };
    let back = async {
        while let Some(frame) = acceptor.from.recv().await {
            let _ = dialler.to.send(relay(false, frame));
        }
        drop(dialler.to);
    };
    let (dialled, accepted, (), ()) = futures::join!(
        dialling(dialler.session, dial_secret, LIMIT),
        accepting(acceptor.session, accept_secret, LIMIT),
        there,
        back
    );
    let admitted = acceptor.admitted.load(Ordering::Relaxed);
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    (dialled, accepted, seen, admitted)
}

fn unchanged(_: bool, frame: ControlFrame) -> ControlFrame {
    frame
}

/// The answers of one side to `frames`, and the result of its handshake.
async fn fed(
    frames: &[Vec<u8>],
    end: impl AsyncFnOnce(ControlSession) -> Met,
) -> (Met, Vec<ControlFrame>, bool) {
    let TestSession { session, mut from, to, admitted } = wire();
    frames.iter().for_each(|frame| to.send(frame.clone()).unwrap());
    drop(to);
    let met = end(session).await;
    let mut answers = Vec::new();
    while let Some(frame) = from.recv().await {
        answers.push(ControlFrame::decode(&frame).unwrap());
    }
    (met, answers, admitted.load(Ordering::Relaxed))
}

async fn feed_acceptor(frames: &[Vec<u8>]) -> (Met, Vec<ControlFrame>, bool) {
    fed(frames, async |session| accepting(session, good(), LIMIT).await).await
}

async fn feed_dialler(frames: &[Vec<u8>]) -> (Met, Vec<ControlFrame>, bool) {
    fed(frames, async |session| dialling(session, good(), LIMIT).await).await
}

fn hello(name: &str, wire_version: u16) -> Vec<u8> {
    let (worker, listen_address) = (name.to_owned(), None);
    ControlFrame::Hello { wire_version, worker, incarnation: 5, listen_address, nonce: [9; 32] }.encode()
}

fn of_dialler(seen: &[(bool, Vec<u8>)], from_dialler: bool) -> Vec<Vec<u8>> {
    seen.iter().filter(|(from, _)| *from == from_dialler).map(|(_, frame)| frame.clone()).collect()
}

#[test]
fn ends_with_one_secret_learn_who_the_other_is() {
    bounded(|| async {
        let (dialled, accepted, seen, admitted) = between([good(), good()], unchanged).await;
        assert_eq!(dialled.unwrap(), worker("acceptor"));
        assert_eq!(accepted.unwrap(), worker("dialler"));
        assert!(admitted);
        assert_eq!(seen.len(), 5);
        let secret = good().unwrap();
        let contains_secret =
            |frame: &[u8]| frame.windows(8).any(|part| secret.expose().windows(8).any(|it| it == part));
        assert!(!seen.iter().any(|(_, frame)| contains_secret(frame)), "a part of the secret was sent");
    });
}

#[test]
fn without_secrets_nobody_is_authenticated() {
    bounded(|| async {
        let (dialled, accepted, ..) = between([None, None], unchanged).await;
        assert_eq!(dialled.unwrap(), worker("acceptor"));
        assert_eq!(accepted.unwrap(), worker("dialler"));
    });
}

#[test]
fn e_a_wrong_secret_is_told_to_both_ends() {
    bounded(|| async {
        let wrong = || secret("the secret of this clusteR");
        for secrets in [[good(), wrong()], [wrong(), good()]] {
            let (dialled, accepted, seen, admitted) = between(secrets, unchanged).await;
            let error = dialled.unwrap_err();
            assert!(
                matches!(&error, ControlError::WrongSecret { address } if address == "peer:4242"),
                "{error}"
            );
            let error = accepted.unwrap_err();
            assert!(
                matches!(&error, ControlError::WrongSecret { address } if address == "192.0.2.7"),
                "{error}"
            );
            assert!(!admitted);
            // The accepting end sent no proof on which guesses could be tested.
            let proofs = of_dialler(&seen, false).iter().any(|frame| {
                matches!(
                    ControlFrame::decode(frame),
                    Ok(ControlFrame::Proof { .. } | ControlFrame::Welcome { .. })
                )
            });
            assert!(!proofs);
        }
    });
}

#[test]
fn e_no_secret_on_one_end_is_no_way_in() {
    bounded(|| async {
        let (dialled, accepted, ..) = between([None, good()], unchanged).await;
        assert!(matches!(dialled.unwrap_err(), ControlError::NoSecret { .. }));
        assert!(matches!(accepted.unwrap_err(), ControlError::WrongSecret { .. }));
        let (dialled, accepted, ..) = between([good(), None], unchanged).await;
        assert!(matches!(dialled.unwrap_err(), ControlError::WrongSecret { .. }));
        assert!(matches!(accepted.unwrap_err(), ControlError::NoSecret { .. }));
    });
}

#[test]
fn e_a_recorded_handshake_cannot_be_replayed() {
    bounded(|| async {
        let (_, _, seen, _) = between([good(), good()], unchanged).await;
        let (met, answers, admitted) = feed_acceptor(&of_dialler(&seen, true)).await;
        assert!(matches!(met.unwrap_err(), ControlError::WrongSecret { .. }));
        assert!(!admitted);
        let [ControlFrame::Hello { .. }, ControlFrame::Goodbye { status }] = &answers[..] else {
            panic!("{answers:?}")
        };
        assert_eq!(status.code, Code::Unauthenticated);
        let (met, ..) = feed_dialler(&of_dialler(&seen, false)).await;
        assert!(matches!(met.unwrap_err(), ControlError::WrongSecret { .. }));
    });
}

#[test]
fn e_a_workers_own_proof_is_of_no_use_to_it() {
    bounded(|| async {
        // The attacker sends every frame back, under another name, with the dialling end's own nonce, and its proof
        // when one is required.
        let TestSession { session, mut from, to, .. } = wire();
        let reflecting = async {
            while let Some(frame) = from.recv().await {
                let mut frame = ControlFrame::decode(&frame).unwrap();
                match &mut frame {
                    ControlFrame::Hello { worker, .. } => "somebody else".clone_into(worker),
                    ControlFrame::Proof { proof } => {
                        frame = ControlFrame::Welcome { fabrics: Vec::new(), proof: *proof };
                    }
                    _ => {}
                }
                let _ = to.send(frame.encode());
            }
        };
        let (met, ()) = futures::join!(dialling(session, good(), LIMIT), reflecting);
        assert!(matches!(met.unwrap_err(), ControlError::WrongSecret { .. }));
    });
}

#[test]
fn e_a_worker_cannot_be_led_to_itself() {
    bounded(|| async {
        let (mut one, mut other) = (wire(), wire());
        let runtime = TokioRuntime::current().unwrap();
        let (me, key) = (worker("narcissus"), good());
        let there = async {
            while let Some(frame) = one.from.recv().await {
                let _ = other.to.send(frame);
            }
        };
        let back = async {
            while let Some(frame) = other.from.recv().await {
                let _ = one.to.send(frame);
            }
        };
        let ends = async {
            let (mut dialler, mut acceptor) = (one.session, other.session);
            let dialled = dial(&mut dialler, &me, key.as_ref(), &runtime, LIMIT, "me");
            let accepted = accept(&mut acceptor, &me, key.as_ref(), &runtime, LIMIT);
            futures::join!(dialled, accepted)
        };
        let ((dialled, accepted), (), ()) = futures::join!(ends, there, back);
        for met in [dialled, accepted] {
            let error = met.unwrap_err();
            assert!(error.to_string().contains("this worker itself"), "{error}");
        }
    });
}

#[test]
fn e_every_field_of_hello_is_proven() {
    bounded(|| async {
        for (field, dialler) in (0..5).flat_map(|field| [(field, true), (field, false)]) {
            let (dialled, accepted, _, admitted) = between([good(), good()], |from_dialler, mut frame| {
                if let ControlFrame::Hello { worker, incarnation, listen_address, nonce, .. } = &mut frame
                    && from_dialler == dialler
                {
                    match field {
                        0 => worker.push('!'),
                        1 => *incarnation += 1,
                        2 => *listen_address = None,
                        3 => *listen_address = Some("evil:1".to_owned()),
                        _ => nonce[31] ^= 1,
                    }
                }
                frame
            })
            .await;
            assert!(matches!(dialled.unwrap_err(), ControlError::WrongSecret { .. }), "field {field}");
            assert!(matches!(accepted.unwrap_err(), ControlError::WrongSecret { .. }), "field {field}");
            assert!(!admitted);
        }
    });
}

/// A change of a Welcome on its way.
type Change = fn(&mut Vec<FabricOffer>, &mut [u8; PROOF_BYTES]);

#[test]
fn e_every_field_of_welcome_is_proven() {
    bounded(|| async {
        // An attacker in between wants the workers to use no fabric, or fabrics of its choice.
        let changes: [Change; 6] = [
            |fabrics, _| fabrics.clear(),
            |fabrics, _| drop(fabrics.remove(0)),
            |fabrics, _| fabrics.swap(0, 1),
            |fabrics, _| fabrics[0].kind += 1,
            |fabrics, _| fabrics[0].reach[2] ^= 1,
            |_, proof| proof[31] ^= 1,
        ];
        for (number, change) in changes.into_iter().enumerate() {
            for of_dialler in [true, false] {
                let changed = |from_dialler, mut frame| {
                    if let ControlFrame::Welcome { fabrics, proof } = &mut frame
                        && from_dialler == of_dialler
                    {
                        change(fabrics, proof);
                    }
                    frame
                };
                let (dialled, accepted, _, admitted) = between([good(), good()], changed).await;
                let is_wrong = |met: &Met| matches!(met, Err(ControlError::WrongSecret { .. }));
                assert!(is_wrong(&accepted) && !admitted, "change {number} of {of_dialler}: {accepted:?}");
                // The dialler sends the last message, and the session shows whether it was accepted.
                assert_eq!(is_wrong(&dialled), !of_dialler, "change {number}: {dialled:?}");
            }
        }
    });
}

/// A secret that a plane has generated and hands over.
fn handed_over() -> Option<Secret> {
    let bytes = [b"the secret of this cluster------", &b"127.0.0.1:4242"[..]].concat();
    Some(Secret::from_handed_over(&bytes).unwrap())
}

/// Whether a handshake succeeds between two ends with this knowledge of their connections.
async fn meets(secrets: [Option<Secret>; 2], [dialler, acceptor]: [&Connection; 2]) -> bool {
    let wires = [wire_over(dialler.clone()), wire_over(acceptor.clone())];
    let (dialled, accepted, _, admitted) = relayed(secrets, wires, unchanged).await;
    let is_refused = |met: &Met| matches!(met, Err(ControlError::WrongSecret { .. }));
    if admitted {
        assert!(dialled.is_ok() && accepted.is_ok());
    } else {
        assert!(is_refused(&dialled) && is_refused(&accepted), "{dialled:?}, {accepted:?}");
    }
    admitted
}

#[test]
fn e_a_secret_that_was_handed_over_is_proven_for_one_connection() {
    bounded(|| async {
        let over = Connection::between;
        let dialler = over("127.0.0.1:50000", "127.0.0.1:4242");
        for acceptor in [
            over("127.0.0.1:4242", "127.0.0.1:50000"),
            // The same addresses.
            over("[::ffff:127.0.0.1]:4242", "[::ffff:127.0.0.1]:50000"),
        ] {
            assert!(meets([handed_over(), handed_over()], [&dialler, &acceptor]).await);
        }
        for acceptor in [
            // A relay on another address, from another port, on another port, and one that swaps the addresses.
            over("127.0.0.2:4242", "127.0.0.1:50000"),
            over("[::1]:4242", "[::1]:50000"),
            over("127.0.0.1:4242", "127.0.0.1:50001"),
            over("127.0.0.1:4243", "127.0.0.1:50000"),
            over("127.0.0.1:50000", "127.0.0.1:4242"),
            Connection::default(),
        ] {
            assert!(!meets([handed_over(), handed_over()], [&dialler, &acceptor]).await);
            // A user's secret works through port forwards.
            assert!(meets([good(), good()], [&dialler, &acceptor]).await);
        }
        // An end that does not know its own connection cannot prove anything.
        let wires = [wire_over(Connection::default()), wire_over(Connection::default())];
        let (dialled, _, seen, admitted) = relayed([handed_over(), handed_over()], wires, unchanged).await;
        assert!(matches!(dialled.unwrap_err(), ControlError::WrongSecret { .. }) && !admitted);
        assert_eq!(seen.len(), 2, "two Hellos");
    });
}

#[test]
fn e_both_ends_must_say_the_same_of_their_connection() {
    bounded(|| async {
        let [dialler, acceptor] =
            [("127.0.0.1:50000", "127.0.0.1:4242"), ("127.0.0.1:4242", "127.0.0.1:50000")]
                .map(|(own, peer)| Connection::between(own, peer));
        let given = || Secret::new(handed_over().unwrap().expose());
        assert!(meets([given(), given()], [&dialler, &acceptor]).await);
        // The same bytes: a user's secret on one side, handed over to the other.
        assert!(!meets([given(), handed_over()], [&dialler, &acceptor]).await);
        assert!(!meets([handed_over(), given()], [&dialler, &acceptor]).await);
        // Under TLS, the TLS connection counts.
        let tls = |end: &Connection, channel| end.clone().under_tls(channel);
        for secret in [None, given(), handed_over()] {
            let secrets = || [secret.clone(), secret.clone()];
            assert!(meets(secrets(), [&tls(&dialler, 1), &tls(&acceptor, 1)]).await);
            assert!(meets(secrets(), [&tls(&dialler, 1), &tls(&dialler, 1)]).await);
        }
        for secret in [given(), handed_over()] {
            let secrets = || [secret.clone(), secret.clone()];
            assert!(!meets(secrets(), [&tls(&dialler, 1), &tls(&acceptor, 2)]).await);
            assert!(!meets(secrets(), [&tls(&dialler, 1), &acceptor]).await);
            assert!(!meets(secrets(), [&dialler, &tls(&acceptor, 1)]).await);
        }
    });
}

#[test]
fn another_wire_version_is_refused_with_both_named() {
    bounded(|| async {
        let other = WIRE_VERSION + 1;
        for (met, answers, _) in
            [feed_acceptor(&[hello("x", other)]).await, feed_dialler(&[hello("x", other)]).await]
        {
            let error = met.unwrap_err().to_string();
            assert!(error.contains(&format!("version {other}")), "{error}");
            assert!(error.contains(&format!("this side {WIRE_VERSION}")), "{error}");
            // The answer names the local version, so that the peer can print the same error.
            assert!(matches!(answers[..], [ControlFrame::Hello { wire_version: WIRE_VERSION, .. }]));
        }
    });
}

#[test]
fn e_a_frame_that_does_not_belong_ends_the_handshake() {
    bounded(|| async {
        let ping = ControlFrame::Ping { nonce: 1 }.encode();
        let proof = ControlFrame::Proof { proof: [0; 32] }.encode();
        let welcome = ControlFrame::Welcome { fabrics: vec![], proof: [0; 32] }.encode();
        for first in [&ping, &proof, &welcome] {
            for (met, _, admitted) in
                [feed_acceptor(from_ref(first)).await, feed_dialler(from_ref(first)).await]
            {
                assert!(matches!(met.unwrap_err(), ControlError::Misbehaved { .. }));
                assert!(!admitted);
            }
        }
        for second in [&ping, &welcome, &proof, &hello("y", WIRE_VERSION)] {
            let frames = [hello("x", WIRE_VERSION), second.clone()];
            // Each end accepts one kind as the expected frame, and checks its proof.
            for (kind, (met, _, admitted)) in
                [(&proof, feed_acceptor(&frames).await), (&welcome, feed_dialler(&frames).await)]
            {
                let error = met.unwrap_err();
                let is_due = second == kind;
                assert_eq!(matches!(error, ControlError::WrongSecret { .. }), is_due, "{error}");
                assert_eq!(matches!(error, ControlError::Misbehaved { .. }), !is_due, "{error}");
                assert!(!admitted);
            }
        }
    });
}

#[test]
fn a_peer_that_hangs_up_is_lost() {
    bounded(|| async {
        for frames in [vec![], vec![hello("x", WIRE_VERSION)]] {
            for (met, ..) in [feed_acceptor(&frames).await, feed_dialler(&frames).await] {
                assert!(matches!(met.unwrap_err(), ControlError::Lost { .. }));
            }
        }
    });
}

#[test]
fn e_every_wait_is_bounded() {
    bounded(|| async {
        let short = Duration::from_millis(50);
        for frames in [vec![], vec![hello("x", WIRE_VERSION)]] {
            let (dialler, acceptor) = (wire(), wire());
            for to in [&dialler.to, &acceptor.to] {
                frames.iter().for_each(|frame| to.send(frame.clone()).unwrap());
            }
            let error = dialling(dialler.session, good(), short).await.unwrap_err();
            assert!(matches!(error, ControlError::Unreachable { .. }), "{error}");
            assert!(error.to_string().contains("50 ms"), "{error}");
            let error = accepting(acceptor.session, good(), short).await.unwrap_err();
            assert!(matches!(error, ControlError::Lost { .. }), "{error}");
            assert!(error.to_string().contains("50 ms"), "{error}");
        }
    });
}

#[test]
fn a_worker_that_listens_everywhere_is_dialled_where_it_came_from() {
    let (four, six) = (Some("192.0.2.7".parse().unwrap()), Some("2001:db8::7".parse().unwrap()));
    let mapped = Some("::ffff:192.0.2.7".parse().unwrap());
    for (address, host, expected) in [
        ("0.0.0.0:4242", four, "192.0.2.7:4242"),
        ("[::]:4242", four, "192.0.2.7:4242"),
        ("[::]:4242", mapped, "192.0.2.7:4242"),
        ("0.0.0.0:4242", six, "[2001:db8::7]:4242"),
        ("0.0.0.0:4242", None, "0.0.0.0:4242"),
        ("10.0.0.1:4242", four, "10.0.0.1:4242"),
        ("host.example:4242", six, "host.example:4242"),
    ] {
        assert_eq!(dialable(address, host.map(|host| SocketAddr::new(host, 9))), expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn e_no_bytes_of_a_stranger_get_past_the_handshake(
        frames in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 0..4),
        start in any::<bool>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut frames = frames;
        if start {
            frames.insert(0, hello("x", WIRE_VERSION));
        }
        let (met, _, admitted) = runtime.block_on(feed_acceptor(&frames));
        prop_assert!(met.is_err() && !admitted);
        let (met, ..) = runtime.block_on(feed_dialler(&frames));
        prop_assert!(met.is_err());
    }
}
