//! The background half of a connection: takes completions when nobody awaits the queue pair, and sees it to its
//! end.

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use futures::future::{Either, select};
use tokio::io::{Interest, unix::AsyncFd};

use crate::{BoxFuture, FabricError, FabricKind, LossCause, Runtime};

use super::{
    VerbsError,
    completion::CompletionQueue,
    error::fabric_error,
    link::{TURN, VerbsLink},
};

/// How long work may take to come back once a connection ends. Longer than the device's own retries; after it
/// the queue pair is destroyed with whatever is outstanding.
const DRAIN_LIMIT: Duration = Duration::from_secs(20);

/// The completion channel, open as long as it is registered with the runtime.
struct Channel(Arc<CompletionQueue>);

impl AsRawFd for Channel {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Runs until the connection is drained. If its task is dropped before, as when the runtime is, the connection
/// ends at once.
pub(super) struct Driver {
    link: Arc<VerbsLink>,
    runtime: Arc<dyn Runtime>,
    channel: AsyncFd<Channel>,
    armed: bool,
    /// Runs once the connection is ending.
    limit: Option<BoxFuture<'static, ()>>,
}

/// Why the driver stopped waiting.
enum Woken {
    /// The channel may hold an event.
    Event,
    /// The connection began to end.
    Ending,
    /// It took too long.
    Limit,
}

impl Driver {
    /// Registers the completion channel with tokio.
    ///
    /// # Errors
    /// Outside a tokio runtime, or when its descriptor cannot be watched.
    pub(super) fn new(link: Arc<VerbsLink>, runtime: Arc<dyn Runtime>) -> Result<Self, FabricError> {
        let failed =
            |source| FabricError::device(FabricKind::Verbs, "watching the completion channel", source);
        if tokio::runtime::Handle::try_current().is_err() {
            return Err(failed(io::Error::other("verbs connect on a tokio runtime only")));
        }
        let completions = link.completions().ok_or_else(|| link.failure())?;
        let channel = Channel(completions);
        // SAFETY: the descriptor belongs to the completion queue, which `channel` keeps, and never changes.
        let channel = unsafe { AsyncFd::register_with_interest(channel, Interest::READABLE) };
        let channel = channel.map_err(|error| failed(error.into_parts().1))?;
        Ok(Self { link, runtime, channel, armed: false, limit: None })
    }

    pub(super) async fn run(mut self) {
        while !self.link.is_drained() {
            if let Err(error) = self.turn().await {
                self.link.abandon(&fabric_error(&error));
            }
        }
    }

    /// Polls until there is nothing, then sleeps until there is something. A completion between the last poll and
    /// arming makes no event, hence the poll after it; if that one finds something, the queue stays armed and its
    /// event wakes us once for nothing.
    async fn turn(&mut self) -> Result<(), VerbsError> {
        let mut batches = 0;
        while self.link.progress() {
            batches += 1;
            if batches == TURN {
                tokio::task::yield_now().await;
                batches = 0;
            }
        }
        if self.link.is_drained() {
            return Ok(());
        }
        if !self.armed {
            self.channel.get_ref().0.arm()?;
            self.armed = true;
            return Ok(());
        }
        match self.wait().await? {
            Woken::Event => {}
            Woken::Ending if self.limit.is_none() => self.limit = Some(self.runtime.sleep(DRAIN_LIMIT)),
            Woken::Ending => {}
            Woken::Limit => {
                tracing::warn!(limit = ?DRAIN_LIMIT, "a queue pair did not drain and is destroyed");
                self.link.abandon(&FabricError::Closed);
            }
        }
        Ok(())
    }

    async fn wait(&mut self) -> Result<Woken, VerbsError> {
        let ending = self.link.ending().notified();
        let other = async {
            let Some(limit) = &mut self.limit else {
                ending.await;
                return Woken::Ending;
            };
            match select(limit, pin!(ending)).await {
                Either::Left(_) => Woken::Limit,
                Either::Right(_) => Woken::Ending,
            }
        };
        let mut ready = match select(pin!(self.channel.readable()), pin!(other)).await {
            Either::Left((ready, _)) => {
                ready.map_err(|error| super::error::refused(error, "epoll_wait", "completion channel"))?
            }
            Either::Right((woken, _)) => return Ok(woken),
        };
        // One queue on the channel, armed once: no second event can be behind the first.
        if self.channel.get_ref().0.take_event()? {
            self.armed = false;
        }
        ready.clear_ready();
        Ok(Woken::Event)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if !self.link.is_drained() {
            self.link.abandon(&FabricError::PeerLost {
                kind: FabricKind::Verbs,
                cause: LossCause::DeviceLost,
                detail: "the runtime that drove the connection is gone".to_owned(),
            });
        }
        self.link.release();
    }
}
