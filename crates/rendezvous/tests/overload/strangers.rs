//! Peers that don't know the secret, and one that has listened to somebody who does.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{StreamExt, stream};
use tensorwire_fabric::{BoxFuture, FabricKind, Runtime, TokioRuntime};
use tensorwire_protocol::{Code, wire::control::ControlFrame};
use tensorwire_rendezvous::control::{
    ControlError, ControlPlane, ControlSession, FrameSender, GrpcConfig, GrpcPlane, Secret, handshake,
};

use crate::{
    harness::{Other, bounded, parents_lines, role, say, step},
    stage::{
        HONEST, SECRET, SERVER, builder, fetch, held, one_honest_visit, publish, raise_descriptor_limit, size,
    },
};

const LIMIT: Duration = Duration::from_secs(20);

/// How much a worker's process may grow under attack, and what stays of it.
const GROWTH_MAX: u64 = 32 << 20;

/// Connections of strangers that may be open, and those that are being accepted.
const STRANGERS_MAX: usize = 64 + 24;

fn me(name: &str) -> handshake::Introduction {
    let (worker, listen_address) = (name.to_owned(), None);
    handshake::Introduction { worker, incarnation: 7, listen_address, fabrics: Vec::new() }
}

fn plane() -> GrpcPlane {
    GrpcPlane::bind(GrpcConfig::new("127.0.0.1:0").secret(Secret::new(SECRET))).unwrap()
}

async fn greet(
    plane: &GrpcPlane,
    address: &str,
    secret: &Secret,
    session: &mut ControlSession,
) -> Result<(), ControlError> {
    let runtime = TokioRuntime::current().unwrap();
    let me =
        me(&format!("/job:stranger/replica:0/task:{}", plane.local_address().rsplit(':').next().unwrap()));
    handshake::dial(session, &me, Some(secret), &runtime, LIMIT, address).await.map(drop)
}

/// Comes with a wrong secret again and again, several times at once.
async fn guess(words: Vec<String>) {
    raise_descriptor_limit();
    let (address, count) = (words[1].as_str(), words[2].parse::<usize>().unwrap());
    let plane = plane();
    say("flooding");
    let guesses = stream::iter(0..count).map(|number| {
        let plane = &plane;
        async move {
            let wrong = Secret::new(format!("a wrong secret, {number:08}")).unwrap();
            let Ok(mut session) = plane.dial(address).await else { return None };
            Some(greet(plane, address, &wrong, &mut session).await.unwrap_err())
        }
    });
    let answers: Vec<_> = guesses.buffer_unordered(32).collect().await;
    let refused = |answer: &&Option<ControlError>| matches!(answer, Some(ControlError::WrongSecret { .. }));
    say(&format!("refused {}", answers.iter().filter(refused).count()));
    parents_lines().recv().await;
}

#[test]
fn e_a_storm_of_wrong_secrets_is_refused_and_keeps_nobody_out() {
    const TEST: &str = "strangers::e_a_storm_of_wrong_secrets_is_refused_and_keeps_nobody_out";
    if let Some(words) = role() {
        return bounded(Duration::from_secs(300), |_| guess(words));
    }
    let _turn = crate::stage::alone();
    let count = size("TENSORWIRE_DIALS", 200);
    bounded(Duration::from_secs(300), |_| async move {
        let server = builder(SERVER, FabricKind::TCP).start().await.unwrap();
        publish(&server, 1);
        let address = server.address().to_owned();
        let honest = builder(HONEST, FabricKind::TCP).start().await.unwrap();
        step("the first fetch", fetch(&honest, &address, 1)).await.unwrap();
        one_honest_visit(&address, FabricKind::TCP).await;
        let before = held();
        let mut attackers = Other::start(TEST, &format!("guess {address} {count}"));
        assert_eq!(attackers.hear().await, "flooding");
        for _ in 0..3 {
            step("a fetch under attack", fetch(&honest, &address, 1)).await.unwrap();
            one_honest_visit(&address, FabricKind::TCP).await;
            before.assert_at_most(GROWTH_MAX, STRANGERS_MAX, "under attack");
        }
        let said = attackers.hear().await;
        let refused: usize = said.strip_prefix("refused ").unwrap().parse().unwrap();
        // Some may have been pushed out before the refusal was sent.
        assert!(refused > count / 2 && refused <= count, "{said} of {count}");
        attackers.kill();
        before.until_closed("the strangers' end").await;
        before.assert_at_most(GROWTH_MAX, 0, "after the attack");
        assert!(server.peers().iter().all(|peer| !peer.name.contains("stranger")));
        honest.shutdown().await;
        server.shutdown().await;
    });
}

/// Keeps what is sent.
#[derive(Debug)]
struct Recorder {
    sender: Arc<dyn FrameSender>,
    sent: Mutex<Vec<Vec<u8>>>,
}

impl FrameSender for Recorder {
    fn send(&self, frame: Vec<u8>) -> BoxFuture<'_, Result<(), ControlError>> {
        self.sent.lock().unwrap().push(frame.clone());
        self.sender.send(frame)
    }

    fn admitted(&self) {
        self.sender.admitted();
    }
}

#[test]
fn e_a_replayed_handshake_is_refused_by_a_worker() {
    let _turn = crate::stage::alone();
    bounded(LIMIT, |runtime: Arc<dyn Runtime>| async move {
        let server = builder(SERVER, FabricKind::TCP).start().await.unwrap();
        let (address, plane) = (server.address().to_owned(), plane());
        let mut session = plane.dial(&address).await.unwrap();
        let recorder = Arc::new(Recorder { sender: session.sender.clone(), sent: Mutex::default() });
        session.sender = recorder.clone();
        greet(&plane, &address, &Secret::new(SECRET).unwrap(), &mut session).await.unwrap();
        drop(session);
        let recorded = recorder.sent.lock().unwrap().clone();
        assert_eq!(recorded.len(), 3, "Hello, Proof and Welcome");
        // From another session, as often as one likes.
        for _ in 0..3 {
            let mut session = plane.dial(&address).await.unwrap();
            for frame in &recorded {
                let _may_be_over = session.sender.send(frame.clone()).await;
            }
            let mut refused = false;
            while let Ok(Some(bytes)) = session.receiver.recv().await {
                match ControlFrame::decode(&bytes).unwrap() {
                    ControlFrame::Goodbye { status } => refused = status.code == Code::Unauthenticated,
                    frame => assert!(matches!(frame, ControlFrame::Hello { .. }), "{frame:?}"),
                }
            }
            assert!(refused);
        }
        assert!(server.peers().iter().all(|peer| peer.transport.is_none()));
        drop(runtime);
        server.shutdown().await;
    });
}
