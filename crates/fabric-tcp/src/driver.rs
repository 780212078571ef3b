//! The background task of one connection: makes progress when no task awaits an operation.
//!
//! A task that awaits an operation makes progress by itself, on whatever the socket has. The driver alone waits for
//! readiness, and it alone clears it, after its own call found the socket empty or full. So no readiness is lost,
//! whichever task consumed the bytes that it announced.
//!
//! Order: take what readiness announced, until a wait for the next one has begun; look again, by reads that do not
//! wait, as the fabric's way of waiting wants it; sleep. What comes after the first step is announced anew.

use std::{
    future::poll_fn,
    mem,
    net::Shutdown,
    pin::pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::FutureExt;
use tensorwire_verbs_reactor::{
    BoxFuture, Capabilities, Connected, FabricError, Idle, Patience, QueuePairConfig, RegionTable, Runtime,
    Spinner,
};
use tokio::runtime::{Handle, RuntimeFlavor};

use crate::{
    link::{EndState, Progress, TcpLink},
    protection::Stream,
    sender::Sent,
};

/// How long the farewell may take, and the peer's end of the stream after it. Closing before the peer has ended
/// would answer its last bytes with a reset, and a reset throws away a farewell that is still on its way.
const LINGER: Duration = Duration::from_secs(2);

/// Bytes thrown away in one turn while lingering.
const DISCARD_BYTES: usize = 256 << 10;

/// What a turn of one half left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// Nothing that readiness does not announce.
    Done,
    /// There may be more; give others a turn first.
    Again,
}

/// Looks in one go: each is a system call of some 100 ns.
const LOOKS: u32 = 6;

/// Over loopback an answer takes 20 to 25 µs when nobody sleeps. Two sides that both sleep meet awake only if one looks
/// for as long as the other takes to wake up and to answer, which on idle cores of a virtual machine is 60 to 90 µs.
const BUDGET_MAX: Duration = Duration::from_micros(100);

pub(super) struct Driver {
    link: Arc<TcpLink>,
    runtime: Arc<dyn Runtime>,
    linger: Option<BoxFuture<'static, ()>>,
    /// The peer sends nothing more.
    peer_ended: bool,
    /// `None` once the connection is over: what remains is not worth looking for.
    patience: Option<Patience>,
    /// What [`TcpLink::finds`] was at the latest poll.
    finds: u64,
    /// The runtime has many workers, and waking itself would make another one steal this task.
    many_workers: bool,
}

impl Driver {
    /// Turns a greeted stream into a queue pair.
    ///
    /// # Errors
    /// [`FabricError::Device`] when the stream cannot be registered with tokio's reactor.
    pub(super) fn start(
        runtime: &Arc<dyn Runtime>,
        table: Arc<RegionTable>,
        config: QueuePairConfig,
        capabilities: Capabilities,
        spinner: Arc<Spinner>,
        stream: Stream,
    ) -> Result<Connected, FabricError> {
        let (link, queue_pair) = TcpLink::new(table, config, capabilities, stream)?;
        let driver = Self::new(link, runtime.clone(), spinner);
        Ok(Connected { queue_pair, driver: Box::pin(driver.run()) })
    }

    pub(super) fn new(link: Arc<TcpLink>, runtime: Arc<dyn Runtime>, spinner: Arc<Spinner>) -> Self {
        let flavor = Handle::try_current().map(|handle| handle.runtime_flavor());
        Self {
            link,
            linger: None,
            peer_ended: false,
            patience: Some(
                Patience::new(spinner, runtime.clone()).with_looks(LOOKS).with_budgets_up_to(BUDGET_MAX),
            ),
            finds: 0,
            many_workers: !matches!(flavor, Ok(RuntimeFlavor::CurrentThread)),
            runtime,
        }
    }

    /// Drives the connection to its end.
    pub(super) async fn run(mut self) {
        poll_fn(|context| self.poll(context)).await;
    }

    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.link.waker().register(context.waker());
        // Taken first: a turn that leaves bytes from here on sets it again, and wakes this task.
        let holds_bytes = self.link.take_held_bytes();
        let unsettled = (holds_bytes || self.link.wants_settling())
            && !matches!(self.link.receive(), Progress::Drained | Progress::Stopped);
        let receiving = self.receive(context);
        let sending = self.send(context);
        if self.poll_end(context).is_ready() {
            return Poll::Ready(());
        }
        self.learn();
        if unsettled || receiving == Turn::Again || sending == Turn::Again {
            context.waker().wake_by_ref();
        } else {
            self.wait(context);
        }
        Poll::Pending
    }

    /// Receives what readiness has announced.
    fn receive(&mut self, context: &mut Context<'_>) -> Turn {
        while !self.peer_ended {
            let Poll::Ready(readiness) = self.link.socket().poll_read_ready(context) else { break };
            let Ok(mut guard) = readiness else {
                self.lose_reactor();
                break;
            };
            let progress = match self.link.receive() {
                Progress::Stopped => discard(&self.link),
                progress => progress,
            };
            match progress {
                Progress::Drained => guard.clear_ready(),
                Progress::More | Progress::Busy => return Turn::Again,
                Progress::Stopped => self.peer_ended = true,
            }
        }
        Turn::Done
    }

    /// One turn of sending, when the socket takes something.
    fn send(&mut self, context: &mut Context<'_>) -> Turn {
        while matches!(self.link.sending(), Sent::More | Sent::Blocked) {
            let Poll::Ready(readiness) = self.link.socket().poll_write_ready(context) else { break };
            let Ok(mut guard) = readiness else {
                self.lose_reactor();
                break;
            };
            match self.link.send_again() {
                Some(Sent::Blocked) => guard.clear_ready(),
                Some(Sent::Idle | Sent::Broken | Sent::Finished) => {}
                Some(Sent::More) | None => return Turn::Again,
            }
        }
        Turn::Done
    }

    /// Ends the present wait if anyone found something.
    fn learn(&mut self) {
        let finds = self.link.finds();
        if mem::replace(&mut self.finds, finds) != finds
            && let Some(patience) = &mut self.patience
        {
            patience.worked();
        }
    }

    /// Readiness will wake us. Looks whether something comes before that.
    fn wait(&mut self, context: &mut Context<'_>) {
        if self.link.end_state() != EndState::Open {
            self.patience = None;
        }
        let Some(patience) = &mut self.patience else { return };
        // Such a connection waits for writability, which no read shows.
        let in_vain = self.link.sending() == Sent::Blocked;
        match patience.idle(in_vain, || self.link.look()) {
            // The tasks that were woken run first.
            Idle::Work if self.many_workers => give_way(context),
            Idle::Work => context.waker().wake_by_ref(),
            Idle::GiveWay => {
                std::thread::yield_now();
                give_way(context);
            }
            Idle::Sleep => {}
        }
    }

    /// Ready when nothing is left to do for a connection that is over.
    fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<()> {
        match self.link.end_state() {
            EndState::Open => return Poll::Pending,
            EndState::Silent => return Poll::Ready(()),
            EndState::Lingering => {}
        }
        let told = matches!(self.link.sending(), Sent::Finished | Sent::Broken);
        if told && self.peer_ended {
            return Poll::Ready(());
        }
        let runtime = &self.runtime;
        self.linger.get_or_insert_with(|| runtime.sleep(LINGER)).poll_unpin(context)
    }

    /// Tokio's reactor is shutting down.
    fn lose_reactor(&mut self) {
        self.peer_ended = true;
        self.link.abandon();
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.link.abandon();
        self.link.cut();
        self.link.socket().get_ref().shutdown(Shutdown::Both);
    }
}

/// Throws away what the peer still sends; `Stopped` when it sends nothing more.
fn discard(link: &TcpLink) -> Progress {
    match link.socket().get_ref().discard(DISCARD_BYTES) {
        Ok(0) => Progress::Stopped,
        Ok(_) => Progress::More,
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Progress::Drained,
        Err(_) => Progress::Stopped,
    }
}

/// Wakes this task again after the runtime's other tasks and its IO have had a turn.
fn give_way(context: &mut Context<'_>) {
    // The first poll of this future only asks for that; it needs to live no longer.
    let turn = pin!(tokio::task::yield_now());
    let _always_pending = turn.poll(context);
}
