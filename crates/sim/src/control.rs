//! The control plane in memory: frames are delivered by the scheduler, in order per direction.

use std::{
    collections::VecDeque,
    fmt,
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
};

use tensorwire_fabric::{BoxFuture, Runtime};
use tensorwire_protocol::limits::CONTROL_FRAME_BYTES_MAX;
use tensorwire_rendezvous::control::{
    ControlError, ControlPlane, ControlSession, FrameReceiver, FrameSender, Secret, host_and_port,
};

use crate::{
    SimRuntime,
    ids::{NodeId, SessionId},
    rng::mix,
    shared::Shared,
    state::{Listener, Over},
    steps::wake,
    trace::{Event, Fnv},
};

/// Frames that a direction holds before its sender waits.
const FRAMES_MAX: usize = 8;

/// The control plane of one node.
#[derive(Debug)]
pub struct SimControl {
    shared: Arc<Shared>,
    node: NodeId,
    address: String,
}

impl SimControl {
    pub(crate) fn new(shared: Arc<Shared>, node: NodeId, address: &str) -> Self {
        let listener = Listener { node, backlog: VecDeque::new(), waker: None, closed: false };
        let mut state = shared.state();
        if state.is_alive(node) {
            state.control.listeners.insert(address.to_owned(), listener);
        }
        drop(state);
        Self { shared, node, address: address.to_owned() }
    }

    fn poll_accept(&self, context: &Context<'_>) -> Poll<Result<SessionId, ControlError>> {
        let mut state = self.shared.state();
        let listener = state.control.listeners.get_mut(&self.address).filter(|l| l.node == self.node);
        let Some(listener) = listener.filter(|listener| !listener.closed) else {
            return Poll::Ready(Err(ControlError::Closed));
        };
        match listener.backlog.pop_front() {
            Some(id) => Poll::Ready(Ok(id)),
            None => {
                let before = listener.waker.replace(context.waker().clone());
                drop(state);
                drop(before);
                Poll::Pending
            }
        }
    }

    fn stop(&self) {
        let mut wakers = Vec::new();
        let mut state = self.shared.state();
        let node = self.node;
        if let Some(listener) = state.control.listeners.get_mut(&self.address).filter(|l| l.node == node) {
            listener.closed = true;
            wakers.extend(listener.waker.take());
        }
        let own: Vec<_> = {
            let numbered = state.control.ends.iter().enumerate().filter(|(_, end)| end.node == node);
            numbered.map(|(number, _)| SessionId(number as u32)).collect()
        };
        own.into_iter().for_each(|id| wakers.extend(state.control.finish(id, Over::Closed)));
        drop(state);
        wake(wakers);
    }
}

impl ControlPlane for SimControl {
    fn local_address(&self) -> String {
        self.address.clone()
    }

    fn dial(&self, address: &str) -> BoxFuture<'static, Result<ControlSession, ControlError>> {
        let (shared, node, address) = (self.shared.clone(), self.node, address.to_owned());
        Box::pin(async move {
            if host_and_port(&address).is_err() {
                return Err(ControlError::BadAddress { address });
            }
            let delay = shared.state().rng.duration(shared.swarm.control_latency_max);
            SimRuntime::new(shared.clone(), node).sleep(delay).await;
            let id = shared.open_session(node, &address)?;
            Ok(session(&shared, id))
        })
    }

    fn accept(&self) -> BoxFuture<'_, Result<ControlSession, ControlError>> {
        Box::pin(async move {
            let id = poll_fn(|context| self.poll_accept(context)).await?;
            Ok(session(&self.shared, id))
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.stop();
        Box::pin(std::future::ready(()))
    }

    fn ambient_secret(&self, _address: &str) -> BoxFuture<'static, Result<Option<Secret>, ControlError>> {
        let words = [mix(self.shared.seed), mix(!self.shared.seed)];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        Box::pin(std::future::ready(Ok(Secret::new(bytes))))
    }
}

/// Both halves of side `id`.
fn session(shared: &Arc<Shared>, id: SessionId) -> ControlSession {
    let half = || Half { shared: shared.clone(), id };
    ControlSession {
        sender: Arc::new(SimSender(half())),
        receiver: Box::new(SimReceiver(half())),
        addresses: None,
    }
}

fn gone() -> ControlError {
    ControlError::Lost { detail: "the peer's side of the session is gone".into() }
}

/// One half of one side; the session ends when both halves are gone.
struct Half {
    shared: Arc<Shared>,
    id: SessionId,
}

impl fmt::Debug for Half {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.id.fmt(f)
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        let Some(end) = state.control.end(self.id) else { return };
        end.halves -= 1;
        let last = end.halves == 0;
        let wakers = if last { state.control.finish(self.id, Over::Closed) } else { Vec::new() };
        drop(state);
        wake(wakers);
    }
}

#[derive(Debug)]
struct SimSender(Half);

impl SimSender {
    fn poll_send(&self, frame: &mut Vec<u8>, context: &Context<'_>) -> Poll<Result<(), ControlError>> {
        let Half { shared, id } = &self.0;
        let mut state = shared.state();
        let delay = shared.swarm.delay(&mut state.rng, shared.swarm.control_latency_max);
        let Some(own) = state.control.end(*id) else { return Poll::Ready(Err(ControlError::Closed)) };
        match own.over {
            Some(Over::Closed) => return Poll::Ready(Err(ControlError::Closed)),
            Some(Over::Orderly | Over::Lost) => return Poll::Ready(Err(gone())),
            None if own.peer_ended => return Poll::Ready(Err(gone())),
            None => {}
        }
        let peer = own.peer;
        let Some(there) = state.control.end(peer) else { return Poll::Ready(Err(gone())) };
        if there.wire.len() + there.inbox.len() >= FRAMES_MAX {
            if let Some(own) = state.control.end(*id)
                && !own.writers.iter().any(|known| known.will_wake(context.waker()))
            {
                own.writers.push(context.waker().clone());
            }
            return Poll::Pending;
        }
        if there.wire.is_empty() {
            there.deliver_at = shared.now() + delay;
        }
        let (length, content) = (frame.len(), Fnv::of(frame));
        there.wire.push_back(std::mem::take(frame));
        drop(state);
        shared.record(Event::ControlSent { session: *id, length, content });
        Poll::Ready(Ok(()))
    }
}

impl FrameSender for SimSender {
    fn send(&self, mut frame: Vec<u8>) -> BoxFuture<'_, Result<(), ControlError>> {
        Box::pin(async move {
            if frame.len() > CONTROL_FRAME_BYTES_MAX {
                let detail =
                    format!("a frame of {} bytes; {CONTROL_FRAME_BYTES_MAX} is the most", frame.len());
                return Err(ControlError::Lost { detail });
            }
            poll_fn(|context| self.poll_send(&mut frame, context)).await
        })
    }
}

#[derive(Debug)]
struct SimReceiver(Half);

impl SimReceiver {
    fn poll_recv(&self, context: &Context<'_>) -> Poll<Result<Option<Vec<u8>>, ControlError>> {
        let Half { shared, id } = &self.0;
        let mut state = shared.state();
        let Some(own) = state.control.end(*id) else { return Poll::Ready(Err(ControlError::Closed)) };
        if let Some(frame) = own.inbox.pop_front() {
            let peer = own.peer;
            let writers = state.control.end(peer).map(|peer| std::mem::take(&mut peer.writers));
            drop(state);
            wake(writers.unwrap_or_default());
            return Poll::Ready(Ok(Some(frame)));
        }
        match own.over {
            Some(Over::Orderly) => Poll::Ready(Ok(None)),
            Some(Over::Lost) => Poll::Ready(Err(gone())),
            Some(Over::Closed) => Poll::Ready(Err(ControlError::Closed)),
            None => {
                let before = own.reader.replace(context.waker().clone());
                drop(state);
                drop(before);
                Poll::Pending
            }
        }
    }
}

impl FrameReceiver for SimReceiver {
    fn recv(&mut self) -> BoxFuture<'_, Result<Option<Vec<u8>>, ControlError>> {
        Box::pin(poll_fn(|context| self.poll_recv(context)))
    }
}
