//! Fuzzing of a handshake with a peer that sends arbitrary frames, with or without knowledge of the secret.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a finding

use std::{
    collections::VecDeque,
    net::IpAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use futures::FutureExt;
use tensorwire_fabric::BoxFuture;

use super::*;
use crate::{
    control::{FrameReceiver, FrameSender},
    fuzzing::input::{Input, framed},
};

/// Frames of one input.
const FRAMES_MAX: usize = 8;
/// Maximum number of frames that an honest side sends in a handshake.
const SENT_MAX: usize = 3;
const NAMES: [&str; 3] = ["/job:ps/replica:0/task:0", "/job:worker/replica:0/task:1", ""];

#[derive(Debug, Default)]
struct SentFrames {
    frames: Mutex<Vec<Vec<u8>>>,
    admitted: AtomicBool,
}

impl FrameSender for SentFrames {
    fn send(&self, frame: Vec<u8>) -> BoxFuture<'_, Result<(), ControlError>> {
        self.frames.lock().unwrap().push(frame);
        Box::pin(std::future::ready(Ok(())))
    }

    fn admitted(&self) {
        self.admitted.store(true, Ordering::Relaxed);
    }
}

#[derive(Debug)]
struct Script(VecDeque<Vec<u8>>);

impl FrameReceiver for Script {
    fn recv(&mut self) -> BoxFuture<'_, Result<Option<Vec<u8>>, ControlError>> {
        Box::pin(std::future::ready(Ok(self.0.pop_front())))
    }
}

/// A runtime whose time stands still and whose numbers are known.
#[derive(Debug)]
struct Still;

impl Runtime for Still {
    fn spawn(&self, _: &'static str, _: BoxFuture<'static, ()>) {}

    fn sleep(&self, _: Duration) -> BoxFuture<'static, ()> {
        Box::pin(std::future::pending())
    }

    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn random(&self) -> u64 {
        7
    }
}

/// One end of a handshake with such a peer. A peer that does not know the secret is never admitted, and gets few
/// frames.
pub fn handshake(data: &[u8]) {
    let mut input = Input::new(data);
    let role = input.pick(&[Role::Dialling, Role::Accepting]);
    let knows = input.flag();
    let secret = Secret::new("the secret of this cluster").unwrap();
    let me = Introduction {
        worker: NAMES[0].to_owned(),
        incarnation: 5,
        listen_address: Some("10.0.0.1:2222".to_owned()),
        fabrics: vec![(1, b"reach".to_vec())],
    };
    let sent = Arc::<SentFrames>::default();
    let mut session =
        ControlSession { sender: sent.clone(), receiver: Box::new(Script(VecDeque::new())), addresses: None };
    let transcript = Transcript::new(role, &session, Some(&secret));
    let frames = ScriptedPeer { role, knows, me: &me, transcript }.frames(&mut input);
    session.receiver = Box::new(Script(frames));
    let peer = |host: [u8; 16]| SocketAddr::new(IpAddr::from(host), 4242);
    session.addresses = input.flag().then(|| Addresses { own: peer([0; 16]), peer: peer(input.array()) });
    let limit = Duration::from_secs(1);
    let met = match role {
        Role::Dialling => dial(&mut session, &me, Some(&secret), &Still, limit, "peer").now_or_never(),
        Role::Accepting => accept(&mut session, &me, Some(&secret), &Still, limit).now_or_never(),
    };
    match met.expect("all frames are there") {
        Ok(_) => assert!(knows, "a stranger got in"),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    assert!(knows || !sent.admitted.load(Ordering::Relaxed), "a stranger was admitted");
    let frames = sent.frames.lock().unwrap();
    assert!(frames.len() <= SENT_MAX);
    for frame in frames.iter().map(|frame| ControlFrame::decode(frame).unwrap()) {
        assert!(knows || !matches!(frame, ControlFrame::Welcome { .. }), "a stranger was told of fabrics");
        let is_proof = matches!(frame, ControlFrame::Proof { .. });
        assert!(role == Role::Dialling || !is_proof, "only the dialling side sends a Proof");
    }
}

/// The peer of the side under test.
struct ScriptedPeer<'a> {
    /// The role of the side under test.
    role: Role,
    knows: bool,
    me: &'a Introduction,
    /// The transcript since the peer's latest Hello.
    transcript: Transcript<'a>,
}

impl ScriptedPeer<'_> {
    fn frames(mut self, input: &mut Input<'_>) -> VecDeque<Vec<u8>> {
        let count = input.below(FRAMES_MAX + 1);
        (0..count).map(|_| self.frame(input)).collect()
    }

    fn frame(&mut self, input: &mut Input<'_>) -> Vec<u8> {
        let worker = input.pick(&NAMES).to_owned();
        let incarnation = u64::from(input.u8() & 7);
        match input.below(8) {
            0 | 1 => {
                let listen_address =
                    input.flag().then(|| String::from_utf8_lossy(input.bytes(30)).into_owned());
                let wire_version = if input.below(8) > 0 { WIRE_VERSION } else { input.u16() };
                let nonce = input.array();
                let hello = ControlFrame::Hello { wire_version, worker, incarnation, listen_address, nonce };
                self.begin(hello.encode())
            }
            2 | 3 if self.knows => self.proven(&ControlFrame::Proof { proof: NO_PROOF }),
            2 | 3 => ControlFrame::Proof { proof: input.array() }.encode(),
            4 => {
                let fabrics = vec![FabricOffer { kind: input.u8(), reach: input.bytes(20).to_vec() }];
                match self.knows {
                    true => self.proven(&ControlFrame::Welcome { fabrics, proof: NO_PROOF }),
                    false => ControlFrame::Welcome { fabrics, proof: input.array() }.encode(),
                }
            }
            5 => {
                let code = Code::from_number(input.u8().into()).unwrap_or(Code::Unauthenticated);
                ControlFrame::Goodbye { status: Status::new(code, "no") }.encode()
            }
            6 => framed(input.bytes(200)),
            _ => input.bytes(200).to_vec(),
        }
    }

    /// Begins the transcript of a handshake with this Hello, up to the peer's next turn.
    fn begin(&mut self, theirs: Vec<u8>) -> Vec<u8> {
        let mine = hello(self.me, nonce(&Still)).encode();
        self.transcript.frames = match self.role {
            Role::Dialling => [&mine[..], &theirs].concat(),
            Role::Accepting => [&theirs[..], &mine].concat(),
        };
        if self.role == Role::Dialling {
            self.say(self.role, &ControlFrame::Proof { proof: NO_PROOF });
        }
        theirs
    }

    /// `frame` with the correct proof. Adds the answer of the side under test to the transcript.
    fn proven(&mut self, frame: &ControlFrame) -> Vec<u8> {
        let proven = self.say(self.role.other(), frame);
        self.say(self.role, &welcome(self.me));
        proven
    }

    fn say(&mut self, role: Role, frame: &ControlFrame) -> Vec<u8> {
        let proven = self.transcript.prove(role, frame).unwrap();
        self.transcript.frames.extend_from_slice(&proven);
        proven
    }
}
