//! A connection's driver, which polls the socket and sleeps on its readiness.
//!
//! A task that awaits an operation makes progress itself, with the bytes that the socket has. Only the driver waits for
//! readiness, and only the driver clears it, after its own call found the socket empty or full. So no readiness is
//! lost, whichever task consumed the bytes that it announced.
//!
//! The driver first receives what readiness has announced, until a wait for the next readiness has begun. From then
//! on new bytes are announced again, and the driver polls by reads that do not wait for readiness.

use std::{
    net::Shutdown,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::FutureExt;
use tensorwire_fabric::{
    BoxFuture, Capabilities, Connected, Driven, Driver, FabricError, Link, Look, Patience, QueuePairConfig,
    QueuePairCore, RegionTable, Runtime, Spinner,
};

use crate::{
    link::{EndState, TcpLink},
    protection::Stream,
    sender::Sent,
};

/// How long sending the farewell and then receiving the end of the peer's stream may take. Closing before the peer has
/// ended its stream would answer its last bytes with a reset, and a reset discards a farewell in flight.
const LINGER: Duration = Duration::from_secs(2);

/// Bytes discarded in one turn while lingering.
const DISCARD_BYTES: usize = 256 << 10;

/// What is left after a turn of one half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// Nothing, or only bytes that readiness will announce.
    Done,
    /// There may be more. Other tasks get a turn first.
    Again,
}

/// Looks in one round. Each is a system call of some 100 ns.
const LOOKS: u32 = 6;

/// The longest budget. Over loopback an answer takes 20 to 25 µs when neither side sleeps. If both sleep, they are
/// awake at the same time only if one polls for as long as the other takes to wake up and answer: 60 to 90 µs on idle
/// cores of a virtual machine.
const BUDGET_MAX: Duration = Duration::from_micros(100);

/// See the module's documentation.
pub(super) struct TcpDriven {
    link: Arc<TcpLink>,
    runtime: Arc<dyn Runtime>,
    linger: Option<BoxFuture<'static, ()>>,
    /// Whether the peer has ended its stream.
    peer_ended: bool,
}

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
    let driver = TcpDriven::start(link, runtime.clone(), spinner);
    Ok(Connected { queue_pair, driver: Box::pin(driver) })
}

impl TcpDriven {
    pub(super) fn start(
        link: Arc<TcpLink>,
        runtime: Arc<dyn Runtime>,
        spinner: Arc<Spinner>,
    ) -> Driver<Self> {
        let patience =
            Patience::new(spinner, runtime.clone()).with_looks(LOOKS).with_budgets_up_to(BUDGET_MAX);
        Driver::new(Self { link, runtime, linger: None, peer_ended: false }, patience)
    }

    /// Receives what readiness has announced.
    fn receive(&mut self, context: &mut Context<'_>) -> Turn {
        while !self.peer_ended {
            let Poll::Ready(readiness) = self.link.socket().poll_read_ready(context) else { break };
            let Ok(mut guard) = readiness else {
                self.lose_reactor();
                break;
            };
            let look = match self.link.receive() {
                Look::Over => discard(&self.link),
                look => look,
            };
            match look {
                Look::Idle | Look::InVain | Look::Worked => guard.clear_ready(),
                Look::More | Look::Busy => return Turn::Again,
                Look::Over => self.peer_ended = true,
            }
        }
        Turn::Done
    }

    /// One turn of sending, if the socket is writable.
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

    /// Ready when a connection that is over has nothing left to do.
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

    /// Ends the connection because tokio's reactor is shutting down.
    fn lose_reactor(&mut self) {
        self.peer_ended = true;
        self.link.abandon();
    }
}

impl Driven for TcpDriven {
    fn link(&self) -> &dyn Link {
        &*self.link
    }

    fn core(&self) -> &QueuePairCore {
        self.link.core()
    }

    fn begin(&mut self, context: &mut Context<'_>) {
        self.link.waker().register(context.waker());
    }

    /// Receives the bytes that readiness has announced, until the waker is registered for the next time. So this also
    /// arms.
    fn look(&mut self, context: &mut Context<'_>) -> Look {
        let before = self.link.finds();
        self.link.flush();
        // Taken first: a later turn that leaves bytes sets it again and wakes this task.
        let holds_bytes = self.link.take_held_bytes();
        // A task that always has more to send keeps the runtime from asking the kernel for readiness for many turns.
        let has_sent = self.link.take_long_turn();
        let unsettled = (holds_bytes || has_sent || self.link.wants_settling())
            && matches!(self.link.receive(), Look::More | Look::Busy);
        let receiving = self.receive(context);
        let sending = self.send(context);
        if self.poll_end(context).is_ready() {
            return Look::Over;
        }
        if unsettled || receiving == Turn::Again || sending == Turn::Again {
            return Look::More;
        }
        self.link.rest();
        if self.link.finds() == before { Look::Idle } else { Look::Worked }
    }

    fn finds(&self) -> u64 {
        self.link.finds()
    }

    fn arm(&mut self, _context: &mut Context<'_>) {
        self.link.arm();
    }

    fn arms_at_once(&self) -> bool {
        true
    }

    fn is_ending(&self) -> bool {
        self.link.end_state() != EndState::Open
    }
}

impl Drop for TcpDriven {
    fn drop(&mut self) {
        self.link.abandon();
        self.link.cut();
        self.link.socket().get_ref().shutdown(Shutdown::Both);
    }
}

/// Discards bytes that the peer still sends. `Over` when it has ended its stream.
fn discard(link: &TcpLink) -> Look {
    match link.socket().get_ref().discard(DISCARD_BYTES) {
        Ok(0) => Look::Over,
        Ok(_) => Look::More,
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Look::Idle,
        Err(_) => Look::Over,
    }
}
