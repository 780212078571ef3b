//! The background half of a connection: takes completions when nobody awaits the queue pair, and sees it to its
//! end.
//!
//! Order: poll; let those run whom that woke; look again, as the fabric's way of waiting wants it; arm; poll again; sleep.
//! Users' tasks poll too.

use std::{
    io, mem,
    os::fd::{AsRawFd, RawFd},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use futures::future::{Either, select};
use tokio::io::{Interest, unix::AsyncFd};

use crate::{
    BoxFuture, FabricError, FabricKind, LossCause, Runtime,
    wait::{Idle, Patience, Spinner},
};

use super::{
    VerbsError,
    completion::CompletionQueue,
    error::fabric_error,
    link::{TURN, VerbsLink},
};

/// How long work may take to come back once a connection ends. Longer than the device's own retries; after it
/// the queue pair is destroyed with whatever is outstanding.
const DRAIN_LIMIT: Duration = Duration::from_secs(20);

/// Looks in one go: each is a poll of the completion queue, some 50 ns.
const LOOKS: u32 = 40;

/// Through a channel of completions, a wake-up costs an interrupt, an event of the kernel's and a read of it. This is until
/// the first round trip of the device was timed.
const BUDGET_MAX: Duration = Duration::from_micros(100);

/// The completion channel, open as long as it is registered with the runtime.
struct Readable(Arc<CompletionQueue>);

impl AsRawFd for Readable {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Runs until the connection is drained. If its task is dropped before, as when the runtime is, the connection
/// ends at once.
pub(super) struct Driver {
    link: Arc<VerbsLink>,
    runtime: Arc<dyn Runtime>,
    channel: AsyncFd<Readable>,
    armed: bool,
    patience: Patience,
    /// What [`VerbsLink::finds`] was at the latest turn.
    finds: u64,
    /// What [`Glances::hits`](super::glance::Glances::hits) was.
    hits: u64,
    /// Looking found something.
    looked_up: bool,
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
    pub(super) fn new(
        link: Arc<VerbsLink>,
        runtime: Arc<dyn Runtime>,
        spinner: Arc<Spinner>,
    ) -> Result<Self, FabricError> {
        let failed =
            |source| FabricError::device(FabricKind::VERBS, "watching the completion channel", source);
        if tokio::runtime::Handle::try_current().is_err() {
            return Err(failed(io::Error::other("verbs connect on a tokio runtime only")));
        }
        let completions = link.completions().ok_or_else(|| link.failure())?;
        let channel = Readable(completions);
        // SAFETY: the descriptor belongs to the completion queue, which `channel` keeps, and never changes.
        let channel = unsafe { AsyncFd::register_with_interest(channel, Interest::READABLE) };
        let channel = channel.map_err(|error| failed(error.into_parts().1))?;
        let patience =
            Patience::new(spinner, runtime.clone()).with_looks(LOOKS).with_budgets_up_to(BUDGET_MAX);
        Ok(Self {
            link,
            runtime,
            channel,
            armed: false,
            patience,
            finds: 0,
            hits: 0,
            looked_up: false,
            limit: None,
        })
    }

    pub(super) async fn run(mut self) {
        while !self.link.is_drained() {
            if let Err(error) = self.turn().await {
                self.link.abandon(&fabric_error(&error));
            }
        }
    }

    /// Polls until there is nothing, then waits until there is something. A completion between the last poll and
    /// arming makes no event, hence the poll after it; if that one finds something, the queue stays armed and its
    /// event wakes us once for nothing.
    ///
    /// Those whom a completion woke go first: it is what they wait for, and the completion of what they post may come at
    /// once. Armed before, the queue would make an event of it that wakes us for nothing. Only if completions are to
    /// come anyway we arm at once.
    async fn turn(&mut self) -> Result<(), VerbsError> {
        let found = self.collect().await | mem::take(&mut self.looked_up);
        self.learn();
        let arms_at_once = self.patience.rests() && (self.armed || self.link.is_sending());
        if self.link.is_drained() {
            return Ok(());
        } else if found && !arms_at_once {
            tokio::task::yield_now().await;
            return Ok(());
        } else if self.looks_again().await {
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
                log!(WARN, limit = ?DRAIN_LIMIT, "a queue pair did not drain and is destroyed");
                self.link.abandon(&FabricError::Closed);
            }
        }
        Ok(())
    }

    /// Hands on what there is; whether there was anything.
    async fn collect(&mut self) -> bool {
        let mut batches = 0;
        while self.link.progress() {
            batches += 1;
            if batches % TURN == 0 {
                tokio::task::yield_now().await;
            }
        }
        batches > 0
    }

    /// Ends the present wait if anyone found completions.
    fn learn(&mut self) {
        let (finds, hits) = (self.link.finds(), self.link.glances().hits());
        if mem::replace(&mut self.finds, finds) == finds {
            return;
        }
        if mem::replace(&mut self.hits, hits) != hits {
            self.patience.turn_was_used();
        }
        if let Some(round_trip) = self.link.glances().round_trip() {
            self.patience.follow(round_trip);
        }
        self.patience.worked();
    }

    /// Whether to poll again before sleeping. A connection that ends is not worth looking for.
    async fn looks_again(&mut self) -> bool {
        let link = &self.link;
        if link.is_ending() {
            link.glances().allow(false);
            return false;
        }
        let idle = self.patience.idle(false, || link.progress());
        // Whoever awaits looks too as long as we do.
        link.glances().allow(idle != Idle::Sleep && self.patience.is_looking());
        match idle {
            Idle::Work => self.looked_up = true,
            Idle::GiveWay => {
                std::thread::yield_now();
                tokio::task::yield_now().await;
            }
            Idle::Sleep => return false,
        }
        true
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
                kind: FabricKind::VERBS,
                cause: LossCause::DeviceLost,
                detail: "the runtime that drove the connection is gone".to_owned(),
            });
        }
        self.link.release();
    }
}
