//! The lookups of a name: one at a time, at an interval, and earlier if a peer was lost.

use std::{fmt, sync::Arc, time::Duration};

use tensorwire_fabric::BoxFuture;

use crate::{control::ControlError, session::node::Node};

/// The shortest time between two lookups of one name, even if peers are lost without end.
const SPACING: Duration = Duration::from_millis(100);

type Answer = Result<Vec<String>, ControlError>;

/// The lookups of one name.
pub(super) struct Lookup {
    node: Arc<Node>,
    name: Arc<str>,
    pub(super) every: Duration,
    stage: Stage,
    /// When the last lookup began.
    asked: Option<Duration>,
    /// A peer was lost during the lookup, whose answer may be older.
    is_hurried: bool,
    is_failing: bool,
}

enum Stage {
    Waiting(BoxFuture<'static, ()>),
    Asking(BoxFuture<'static, Answer>),
}

impl fmt::Debug for Lookup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lookup").field("name", &self.name).field("every", &self.every).finish_non_exhaustive()
    }
}

impl Lookup {
    /// The first lookup begins at once.
    pub(super) fn new(node: &Arc<Node>, name: &str, every: Duration) -> Self {
        let stage = Stage::Waiting(Box::pin(std::future::ready(())));
        let (node, name) = (node.clone(), Arc::from(name));
        Self { node, name, every, stage, asked: None, is_hurried: false, is_failing: false }
    }

    pub(super) fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// The addresses of the name, at the next lookup. `None` if it failed.
    ///
    /// # Cancel safety
    /// Cancel-safe: the next call goes on.
    pub(super) async fn answer(&mut self) -> Option<Vec<String>> {
        loop {
            match &mut self.stage {
                Stage::Waiting(pause) => {
                    pause.await;
                    self.asked = Some(self.node.runtime().now());
                    self.is_hurried = false;
                    self.stage = Stage::Asking(self.node.resolve(&self.name));
                }
                Stage::Asking(asked) => {
                    let answer = asked.await;
                    let pause = if self.is_hurried { self.spacing() } else { self.every };
                    self.wait(pause);
                    return self.noted(answer);
                }
            }
        }
    }

    /// Looks the name up as soon as possible.
    pub(super) fn hurry(&mut self) {
        self.is_hurried = true;
        if matches!(self.stage, Stage::Waiting(_)) {
            self.wait(self.spacing());
        }
    }

    /// How long the next lookup must wait because of the last one.
    fn spacing(&self) -> Duration {
        let since = |asked| self.node.runtime().now().saturating_sub(asked);
        self.asked.map_or(Duration::ZERO, |asked| SPACING.min(self.every).saturating_sub(since(asked)))
    }

    fn wait(&mut self, pause: Duration) {
        self.stage = Stage::Waiting(self.node.runtime().sleep(pause));
    }

    /// Logs the first failure, and the first answer after it.
    fn noted(&mut self, answer: Answer) -> Option<Vec<String>> {
        let was_failing = std::mem::replace(&mut self.is_failing, answer.is_err());
        match answer {
            Ok(addresses) => {
                if was_failing {
                    log!(INFO, name = &*self.name, addresses = addresses.len(), "the name resolves again");
                }
                Some(addresses)
            }
            Err(error) => {
                if !was_failing {
                    log!(WARN, name = &*self.name, %error, every = ?self.every, "the name does not resolve; asking again");
                }
                None
            }
        }
    }
}
