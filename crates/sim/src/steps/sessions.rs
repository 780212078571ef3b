//! Control sessions: they are opened, their frames are delivered in order per direction, they end.

use std::task::Waker;

use tensorwire_rendezvous::control::ControlError;

use crate::{
    ids::{NodeId, SessionId},
    shared::Shared,
    state::{Action, Over, SessionSide, State},
    trace::Event,
};

/// Sessions dialled and not yet accepted, before further ones are refused.
const BACKLOG_MAX: usize = 16;

pub(crate) fn wake(wakers: Vec<Waker>) {
    wakers.into_iter().for_each(Waker::wake);
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

    /// The sessions and the listener of a dead node. Some of the frames in flight to a peer arrive.
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

    /// Loses some of the frames in flight to `id`, which later sees that the session is lost.
    fn break_session(&self, state: &mut State, id: SessionId) {
        let at = self.now() + state.rng.duration(self.swarm.detection_max);
        let State { rng, control, agenda, .. } = state;
        if let Some(end) = control.end(id) {
            end.wire.truncate(rng.below(end.wire.len() + 1));
            end.peer_ended = false;
        }
        agenda.plan(at, Action::LoseSession(id));
    }

    pub(crate) fn open_session(&self, node: NodeId, address: &str) -> Result<SessionId, ControlError> {
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
        control.ends.push(SessionSide::new(node, theirs));
        control.ends.push(SessionSide::new(peer, own));
        drop(state);
        self.record(Event::Dialled { session: own, node, peer: Some(peer), crossed });
        wake(waker.into_iter().collect());
        Ok(own)
    }
}
