//! The background task of one connection: it does what nobody else is there to do.
//!
//! Whoever awaits an operation makes progress by itself, on whatever the socket has; the driver alone waits for
//! readiness, and it alone clears it, after its own call found the socket empty or full. So no readiness is
//! lost, whoever consumed the bytes that it announced.

use std::{
    future::poll_fn,
    net::Shutdown,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures::FutureExt;

use super::{
    link::{EndState, Progress, TcpLink},
    sender::Sent,
};
use crate::{BoxFuture, Runtime};

/// How long the farewell may take, and the peer's end of the stream after it. Closing before the peer has ended
/// would answer its last bytes with a reset, and a reset throws away a farewell that is still on its way.
const LINGER: Duration = Duration::from_secs(2);

/// Bytes thrown away in one turn while lingering.
const DISCARD_BYTES: usize = 256 << 10;

pub(super) struct Driver {
    link: Arc<TcpLink>,
    runtime: Arc<dyn Runtime>,
    linger: Option<BoxFuture<'static, ()>>,
    /// The peer sends nothing more.
    peer_ended: bool,
}

impl Driver {
    pub(super) fn new(link: Arc<TcpLink>, runtime: Arc<dyn Runtime>) -> Self {
        Self { link, runtime, linger: None, peer_ended: false }
    }

    /// Drives the connection to its end.
    pub(super) async fn run(mut self) {
        poll_fn(|context| self.poll(context)).await;
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.link.waker().register(context.waker());
        if self.link.wants_settling() && self.link.receive() == Progress::Busy {
            context.waker().wake_by_ref();
        }
        while !self.peer_ended {
            // `Pending` here means that readiness will wake us.
            if self.poll_receive(context).is_pending() {
                break;
            }
        }
        let _ = self.poll_send(context);
        self.poll_end(context)
    }

    /// One turn of receiving, when there is something to receive.
    fn poll_receive(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let Ok(mut guard) = ready!(self.link.socket().poll_read_ready(context)) else {
            return self.lose_reactor();
        };
        let progress = match self.link.receive() {
            Progress::Stopped => discard(&self.link),
            progress => progress,
        };
        match progress {
            Progress::Drained => {
                guard.clear_ready();
                Poll::Ready(())
            }
            Progress::More | Progress::Busy => {
                context.waker().wake_by_ref();
                Poll::Pending
            }
            Progress::Stopped => {
                self.peer_ended = true;
                Poll::Ready(())
            }
        }
    }

    /// One turn of sending, when the socket takes something.
    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            match self.link.sending() {
                Sent::Idle | Sent::Broken | Sent::Finished => return Poll::Ready(()),
                Sent::More | Sent::Blocked => {}
            }
            let Ok(mut guard) = ready!(self.link.socket().poll_write_ready(context)) else {
                return self.lose_reactor();
            };
            match self.link.send_again() {
                Some(Sent::Blocked) => guard.clear_ready(),
                Some(Sent::Idle | Sent::Broken | Sent::Finished) => {}
                Some(Sent::More) | None => {
                    context.waker().wake_by_ref();
                    return Poll::Pending;
                }
            }
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
    fn lose_reactor(&mut self) -> Poll<()> {
        self.peer_ended = true;
        self.link.abandon();
        Poll::Ready(())
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
