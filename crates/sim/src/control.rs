//! The control plane in memory: frames are delivered by the scheduler, in order per direction.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use protocol::limits::CONTROL_FRAME_BYTES_MAX;
use rendezvous::control::{
    ControlError, ControlPlane, ControlSession, FrameReceiver, FrameSender, Secret, host_and_port,
};
use verbs_reactor::{BoxFuture, Runtime};

use crate::{
    SimRuntime,
    clock::Action,
    ids::{NodeId, SessionId},
    rng::mix,
    trace::{Event, Fnv},
    world::{Shared, State},
};

/// Frames that a direction holds before its sender waits.
const FRAMES_MAX: usize = 8;

/// Sessions dialled and not yet accepted, before further ones are refused.
const BACKLOG_MAX: usize = 16;

#[derive(Debug, Default)]
pub(crate) struct ControlState {
    /// By address.
    listeners: BTreeMap<String, Listener>,
    ends: Vec<End>,
}

#[derive(Debug)]
struct Listener {
    node: NodeId,
    backlog: VecDeque<SessionId>,
    waker: Option<Waker>,
    closed: bool,
}

/// Why a side receives nothing more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Over {
    /// The peer ended the session.
    Orderly,
    /// The peer is gone, or cannot be reached.
    Lost,
    /// This side closed its plane.
    Closed,
}

/// One side of a session.
#[derive(Debug)]
struct End {
    node: NodeId,
    peer: SessionId,
    /// Frames that the peer has sent and that are under way.
    wire: VecDeque<Vec<u8>>,
    /// Whether the peer has ended the session; visible after the last frame.
    peer_ended: bool,
    /// Frames that are delivered and not yet received.
    inbox: VecDeque<Vec<u8>>,
    deliver_at: Duration,
    over: Option<Over>,
    reader: Option<Waker>,
    /// Senders of this side that wait for room at the peer.
    writers: Vec<Waker>,
    /// Halves of this side that still exist (sender, receiver).
    halves: u8,
}

impl ControlState {
    /// Offers the sides to which a frame, or the end of the session, can be delivered.
    pub(crate) fn offers(&self, mut offer: impl FnMut(SessionId, Duration)) {
        for (number, end) in self.ends.iter().enumerate() {
            if end.over.is_none() && (end.peer_ended || !end.wire.is_empty()) {
                offer(SessionId(number as u32), end.deliver_at);
            }
        }
    }

    /// Whether there is a session that `dialler` opened to `listener`. The end that dialled comes first.
    fn has_dialled(&self, dialler: NodeId, listener: NodeId) -> bool {
        let mut sessions = self.ends.chunks_exact(2);
        sessions.any(|ends| {
            let [one, other] = ends else { return false };
            one.node == dialler && other.node == listener && one.over.is_none() && other.over.is_none()
        })
    }

    /// Sides of sessions that `node` has.
    pub(crate) fn held_by(&self, node: NodeId) -> usize {
        self.ends.iter().filter(|end| end.node == node && end.halves > 0 && end.over.is_none()).count()
    }

    fn end(&mut self, id: SessionId) -> Option<&mut End> {
        self.ends.get_mut(id.index())
    }

    /// Ends `id`'s side: the peer sees an orderly end after the frames under way.
    fn finish(&mut self, id: SessionId, over: Over) -> Vec<Waker> {
        let Some(end) = self.end(id) else { return Vec::new() };
        if end.over.is_some() {
            return Vec::new();
        }
        end.over = Some(over);
        let peer = end.peer;
        let mut wakers = end.wake_all();
        if let Some(peer) = self.end(peer) {
            peer.peer_ended = true;
            // Its senders see that the receiver is gone.
            wakers.append(&mut peer.writers);
        }
        wakers
    }
}

impl End {
    fn new(node: NodeId, peer: SessionId) -> Self {
        Self {
            node,
            peer,
            wire: VecDeque::new(),
            peer_ended: false,
            inbox: VecDeque::new(),
            deliver_at: Duration::ZERO,
            over: None,
            reader: None,
            writers: Vec::new(),
            halves: 2,
        }
    }

    fn wake_all(&mut self) -> Vec<Waker> {
        let mut wakers = std::mem::take(&mut self.writers);
        wakers.extend(self.reader.take());
        wakers
    }
}

fn wake(wakers: Vec<Waker>) {
    wakers.into_iter().for_each(Waker::wake);
}

fn gone() -> ControlError {
    ControlError::Lost { detail: "the peer's end of the session is gone".into() }
}

impl Shared {
    /// Delivers the next frame, or the end of the session, to `id`.
    pub(crate) fn deliver_frame(&self, id: SessionId) {
        let mut state = self.state();
        let later = self.now() + self.swarm.delay(&mut state.rng, self.swarm.control_latency_max);
        let Some(end) = state.control.end(id) else { return };
        end.deliver_at = later;
        let event = match end.wire.pop_front() {
            Some(frame) => {
                let length = frame.len();
                end.inbox.push_back(frame);
                Event::ControlDelivered { session: id, length }
            }
            None => {
                end.over = Some(Over::Orderly);
                Event::ControlEnded { session: id, orderly: true }
            }
        };
        let wakers = end.wake_all();
        drop(state);
        self.record(event);
        wake(wakers);
    }

    /// `id` sees that the other side is gone or cannot be reached. Frames under way are lost.
    pub(crate) fn lose_session(&self, id: SessionId) {
        let wakers = {
            let mut state = self.state();
            let Some(end) = state.control.end(id).filter(|end| end.over.is_none()) else { return };
            end.over = Some(Over::Lost);
            end.wire.clear();
            end.wake_all()
        };
        self.record(Event::ControlEnded { session: id, orderly: false });
        wake(wakers);
    }

    /// The sessions and the listener of a dead node. Of the frames under way to a peer, some arrive.
    pub(crate) fn kill_sessions(&self, state: &mut State, node: NodeId) {
        state.control.listeners.retain(|_, listener| listener.node != node);
        for index in 0..state.control.ends.len() {
            let end = &mut state.control.ends[index];
            if end.node == node && end.over.is_none() {
                end.over = Some(Over::Lost);
                end.wire.clear();
                end.inbox.clear();
                let peer = end.peer;
                self.break_session(state, peer);
            }
        }
    }

    pub(crate) fn lose_sessions(&self, one: NodeId, other: NodeId) {
        let mut state = self.state();
        for index in 0..state.control.ends.len() {
            let end = &state.control.ends[index];
            let ends = (end.node, state.control.ends[end.peer.index()].node);
            if end.over.is_none() && (ends == (one, other) || ends == (other, one)) {
                self.break_session(&mut state, SessionId(index as u32));
            }
        }
    }

    /// Some of the frames under way to `id` are lost, and in a while it sees that the session is.
    fn break_session(&self, state: &mut State, id: SessionId) {
        let at = self.now() + state.rng.duration(self.swarm.detection_max);
        let State { rng, control, agenda, .. } = state;
        if let Some(end) = control.end(id) {
            end.wire.truncate(rng.below(end.wire.len() + 1));
            end.peer_ended = false;
        }
        agenda.plan(at, Action::LoseSession(id));
    }

    fn open_session(&self, node: NodeId, address: &str) -> Result<SessionId, ControlError> {
        let unreachable = |detail: &str| ControlError::Unreachable {
            address: address.to_owned(),
            detail: detail.to_owned(),
        };
        let mut state = self.state();
        if !state.is_alive(node) {
            return Err(ControlError::Closed);
        }
        let State { control, .. } = &mut *state;
        let listener = control.listeners.get_mut(address).filter(|listener| !listener.closed);
        let listener = listener.ok_or_else(|| unreachable("connection refused"))?;
        if listener.backlog.len() >= BACKLOG_MAX {
            return Err(unreachable("too many sessions wait to be accepted"));
        }
        let own = SessionId(control.ends.len() as u32);
        let theirs = SessionId(own.0 + 1);
        listener.backlog.push_back(theirs);
        let waker = listener.waker.take();
        let peer = listener.node;
        let crossed = control.has_dialled(peer, node);
        control.ends.push(End::new(node, theirs));
        control.ends.push(End::new(peer, own));
        drop(state);
        self.record(Event::Dialled { session: own, node, peer: Some(peer), crossed });
        wake(waker.into_iter().collect());
        Ok(own)
    }

    fn session(self: &Arc<Self>, id: SessionId) -> ControlSession {
        let half = |shared: &Arc<Self>| Half { shared: shared.clone(), id };
        ControlSession {
            sender: Arc::new(SimSender(half(self))),
            receiver: Box::new(SimReceiver(half(self))),
            addresses: None,
        }
    }
}

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
            Ok(shared.session(id))
        })
    }

    fn accept(&self) -> BoxFuture<'_, Result<ControlSession, ControlError>> {
        Box::pin(async move {
            let id = poll_fn(|context| self.poll_accept(context)).await?;
            Ok(self.shared.session(id))
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
