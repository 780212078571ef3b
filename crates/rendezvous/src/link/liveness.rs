//! Whether a peer's process still runs.
//!
//! A process that is stopped keeps its sockets and its adapter answering, so only its own answers count: frames on
//! the control session, and data that arrives. The session is served on a thread of its own, so user code that
//! blocks its runtime is no silence.

use std::{pin::pin, sync::Arc, time::Duration};

use futures::future::join;
use tensorwire_protocol::wire::control::ControlFrame;
use tensorwire_verbs_reactor::timeout;

use crate::{
    error::{Lost, PeerLoss},
    link::{node::Node, session::Session},
    values::end_signal::unless,
};

/// The liveness bound is watched in this many steps, so a silent peer is noticed within a tenth of the bound.
const STEPS: u32 = 10;

/// How long a worker may take to answer when another one comes by its name.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

impl Node {
    /// Pings the peer when it is silent, and ends the session when it stays so for the liveness bound.
    ///
    /// Silence is counted in steps, not read off a clock: a worker that was itself stopped for long finds one long
    /// step behind it, and still asks before it judges.
    pub(crate) async fn watch_over(self: Arc<Self>, session: Arc<Session>) {
        let (mut seen, mut silent) = (session.signs_of_life(), 0);
        while unless(session.ended(), self.step_and_ping(&session, silent > 0)).await.is_some() {
            let now = session.signs_of_life();
            silent = if now == seen { silent + 1 } else { 0 };
            seen = now;
            if silent >= STEPS {
                return session.condemn(self.unresponsive());
            }
        }
    }

    /// Whether the peer answers on this session now: whether its process runs and can be reached.
    ///
    /// Counted in steps as silence is. What came before the question is no answer.
    pub(crate) async fn answers(&self, session: &Session) -> bool {
        let runtime = &*self.control_runtime;
        let nonce = runtime.random();
        let answered = session.expect_pong(nonce);
        let asking =
            async { session.send(ControlFrame::Ping { nonce }).await.is_ok() && answered.await.is_ok() };
        let mut asking = pin!(unless(session.ended(), asking));
        for _ in 0..STEPS {
            let step = self.liveness.min(ANSWER_LIMIT) / STEPS;
            if let Ok(ended) = timeout(runtime, step, asking.as_mut()).await {
                return ended == Some(true);
            }
        }
        false
    }

    async fn step_and_ping(&self, session: &Session, ask: bool) {
        let runtime = &*self.control_runtime;
        let step = self.liveness / STEPS;
        let ping = async {
            if ask && !tensorwire_testpoints::planted!("a silent peer is not asked whether it lives") {
                // A peer that reads nothing must not keep the watch from going on.
                let ping = ControlFrame::Ping { nonce: runtime.random() };
                let _ = timeout(runtime, step, session.send(ping)).await;
            }
        };
        join(ping, runtime.sleep(step)).await;
    }

    fn unresponsive(&self) -> Lost {
        let detail = format!(
            "it has answered none of {} pings and moved no data for {} ms",
            STEPS - 1,
            self.liveness.as_millis()
        );
        Lost::new(PeerLoss::Unresponsive, detail)
    }
}
