//! Detection of peers whose process has stopped.
//!
//! The kernel and the adapter of a stopped process still answer, so only what the process itself sends counts as a sign
//! of life: frames on the control session, and data. Sessions are served on a separate thread, so a worker whose user
//! code blocks its runtime still answers.
//!
//! The path of a data connection may be lost alone. The kernel of the peer's host must acknowledge data on it, which it does even
//! while the peer's process does not read.

use std::{pin::pin, sync::Arc, time::Duration};

use futures::future::join;
use tensorwire_fabric::timeout;
use tensorwire_protocol::wire::control::ControlFrame;

use crate::{
    error::{Lost, PeerLoss},
    session::{Session, node::Node},
    values::end_signal::unless,
};

/// The liveness bound is divided into this many intervals, so a silent peer is detected at most a tenth of the bound
/// late.
const STEPS: u32 = 10;

/// How long a worker may take to answer if another worker of the same name connects.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

impl Node {
    /// Pings the peer when it is silent, and ends the session when the silence lasts for the liveness bound.
    ///
    /// Silence is counted in intervals and not read from a clock. A worker that was itself stopped for long sees one
    /// long interval, and still pings before it decides.
    pub(crate) async fn watch_over(self: Arc<Self>, session: Arc<Session>) {
        let (mut seen, mut silent) = (session.signs_of_life(), 0);
        while unless(session.ended(), self.step_and_ping(&session, silent > 0)).await.is_some() {
            let now = session.signs_of_life();
            silent = if now == seen { silent + 1 } else { 0 };
            seen = now;
            if silent >= STEPS {
                return session.condemn(self.unresponsive());
            }
            session.watch_paths(self.settings.liveness / STEPS, self.settings.liveness);
        }
    }

    /// Whether the peer answers a ping on this session, so that its process runs and can be reached.
    ///
    /// Counted in intervals, as silence is. Only the answer to this ping counts.
    pub(crate) async fn answers(&self, session: &Session) -> bool {
        let runtime = &*self.settings.control_runtime;
        let nonce = runtime.random();
        let answered = session.expect_pong(nonce);
        let asking =
            async { session.send(ControlFrame::Ping { nonce }).await.is_ok() && answered.await.is_ok() };
        let mut asking = pin!(unless(session.ended(), asking));
        for _ in 0..STEPS {
            let step = self.settings.liveness.min(ANSWER_LIMIT) / STEPS;
            if let Ok(ended) = timeout(runtime, step, asking.as_mut()).await {
                return ended == Some(true);
            }
        }
        false
    }

    async fn step_and_ping(&self, session: &Session, ask: bool) {
        let runtime = &*self.settings.control_runtime;
        let step = self.settings.liveness / STEPS;
        let ping = async {
            if ask && !tensorwire_testpoints::planted!("a silent peer is not pinged") {
                // The limit is for a peer that reads nothing, which must not stop the watch.
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
            self.settings.liveness.as_millis()
        );
        Lost::new(PeerLoss::Unresponsive, detail)
    }
}
