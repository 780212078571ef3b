//! The driver of a connection. It polls the completion queue, sleeps on the queue's channel, and runs until the
//! connection is drained.

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::FutureExt;
use tokio::io::{Interest, unix::AsyncFd};

use tensorwire_fabric::{
    BoxFuture, Driven, Driver, FabricError, FabricKind, Link, Look, LossCause, Patience, QueuePairCore,
    Runtime, Spinner,
};

use super::{
    VerbsError,
    completion::CompletionQueue,
    error::{fabric_error, refused},
    link::{TURN, VerbsLink, found},
};

/// How long outstanding work may take to complete once a connection ends. Longer than the device's own retries. After
/// this time the queue pair is destroyed even if work is outstanding.
const DRAIN_LIMIT: Duration = Duration::from_secs(20);

/// Polls of the completion queue in one round. Each takes about 50 ns.
const LOOKS: u32 = 40;

/// The longest budget until the first round trip of the device is measured. A wake-up through a completion channel
/// costs an interrupt, a kernel event and a read of the event.
const BUDGET_MAX: Duration = Duration::from_micros(100);

/// The completion channel, which stays open as long as it is registered with the runtime.
struct Readable(Arc<CompletionQueue>);

impl AsRawFd for Readable {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// See the module's documentation. If it is dropped before the connection is drained, for example with its runtime, the
/// connection ends at once.
pub(super) struct VerbsDriven {
    link: Arc<VerbsLink>,
    runtime: Arc<dyn Runtime>,
    channel: AsyncFd<Readable>,
    /// Whether the next completion creates an event, or has created one.
    armed: bool,
    /// The time limit for draining. Runs once the connection is ending.
    limit: Option<BoxFuture<'static, ()>>,
}

/// Registers the completion channel with tokio.
///
/// # Errors
/// Outside a tokio runtime, or when its descriptor cannot be watched.
pub(super) fn start(
    link: Arc<VerbsLink>,
    runtime: Arc<dyn Runtime>,
    spinner: Arc<Spinner>,
) -> Result<Driver<VerbsDriven>, FabricError> {
    let failed = |source| FabricError::device(FabricKind::VERBS, "watching the completion channel", source);
    if tokio::runtime::Handle::try_current().is_err() {
        return Err(failed(io::Error::other("verbs queue pairs can only be connected on a tokio runtime")));
    }
    let completions = link.completions().ok_or_else(|| link.failure())?;
    let channel = Readable(completions);
    // SAFETY: the descriptor never changes, and belongs to the completion queue, which `channel` keeps alive.
    let channel = unsafe { AsyncFd::register_with_interest(channel, Interest::READABLE) };
    let channel = channel.map_err(|error| failed(error.into_parts().1))?;
    let patience = Patience::new(spinner, runtime.clone()).with_looks(LOOKS).with_budgets_up_to(BUDGET_MAX);
    Ok(Driver::new(VerbsDriven { link, runtime, channel, armed: false, limit: None }, patience))
}

impl VerbsDriven {
    /// Consumes the event that woke this task, if there is one, and registers the waker for the next.
    fn take_event(&mut self, context: &mut Context<'_>) -> Result<(), VerbsError> {
        while let Poll::Ready(ready) = self.channel.poll_read_ready(context) {
            let mut ready = ready.map_err(|error| refused(error, "epoll_wait", "completion channel"))?;
            // The channel has one queue, armed once, so no second event can follow the first.
            if self.channel.get_ref().0.take_event()? {
                self.armed = false;
            }
            ready.clear_ready();
        }
        Ok(())
    }

    /// Requests an event for the next completion.
    fn arm_queue(&mut self) -> Result<(), VerbsError> {
        if !self.armed {
            self.channel.get_ref().0.arm()?;
            self.armed = true;
        }
        Ok(())
    }

    /// Ends the connection if the device has failed.
    fn check(&self, result: Result<(), VerbsError>) {
        if let Err(error) = result {
            self.link.abandon(&fabric_error(&error));
        }
    }
}

impl Driven for VerbsDriven {
    fn link(&self) -> &dyn Link {
        &*self.link
    }

    fn core(&self) -> &QueuePairCore {
        self.link.core()
    }

    fn begin(&mut self, context: &mut Context<'_>) {
        self.link.waker().register(context.waker());
        if self.armed {
            let taken = self.take_event(context);
            self.check(taken);
        }
        if !self.link.is_ending() {
            return;
        }
        let limit = self.limit.get_or_insert_with(|| self.runtime.sleep(DRAIN_LIMIT));
        if limit.poll_unpin(context).is_ready() {
            log!(WARN, limit = ?DRAIN_LIMIT, "a queue pair did not drain and is destroyed");
            self.link.abandon(&FabricError::Closed);
        }
    }

    fn look(&mut self, _: &mut Context<'_>) -> Look {
        if self.link.is_drained() {
            return Look::Over;
        }
        found((0..TURN).take_while(|_| self.link.take_batch()).count())
    }

    fn finds(&self) -> u64 {
        self.link.finds()
    }

    fn advise(&self, patience: &mut Patience) {
        if let Some(round_trip) = self.link.round_trip() {
            patience.follow(round_trip);
        }
    }

    /// A completion between the latest look and this call creates no event, so the driver looks again afterwards. If
    /// that look finds something, the queue stays armed, and its event wakes this task once without work.
    ///
    /// The tasks that a completion woke run before this call: their posts may complete at once, and an armed queue
    /// would create an event for them.
    fn arm(&mut self, context: &mut Context<'_>) {
        let armed = self.take_event(context).and_then(|()| self.arm_queue());
        self.check(armed);
    }

    fn arms_at_once(&self) -> bool {
        // Another completion will come in any case.
        self.armed || self.link.is_sending()
    }

    fn is_ending(&self) -> bool {
        self.link.is_ending()
    }
}

impl Drop for VerbsDriven {
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
