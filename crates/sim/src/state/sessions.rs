//! The control sessions of a world: listeners, and the two sides of each session.

use std::{
    collections::{BTreeMap, VecDeque},
    task::Waker,
    time::Duration,
};

use crate::ids::{NodeId, SessionId};

#[derive(Debug, Default)]
pub(crate) struct ControlState {
    /// By address.
    pub(crate) listeners: BTreeMap<String, Listener>,
    pub(crate) ends: Vec<SessionSide>,
}

#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) node: NodeId,
    pub(crate) backlog: VecDeque<SessionId>,
    pub(crate) waker: Option<Waker>,
    pub(crate) closed: bool,
}

/// Why a side receives nothing more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Over {
    /// The peer ended the session.
    Orderly,
    /// The peer is gone, or cannot be reached.
    Lost,
    /// This side closed its plane.
    Closed,
}

/// One side of a session.
#[derive(Debug)]
pub(crate) struct SessionSide {
    pub(crate) node: NodeId,
    pub(crate) peer: SessionId,
    /// Frames of the peer that are in flight.
    pub(crate) wire: VecDeque<Vec<u8>>,
    /// Whether the peer has ended the session; visible after the last frame.
    pub(crate) peer_ended: bool,
    /// Delivered frames that this side has not received yet.
    pub(crate) inbox: VecDeque<Vec<u8>>,
    pub(crate) deliver_at: Duration,
    pub(crate) over: Option<Over>,
    pub(crate) reader: Option<Waker>,
    /// Senders of this side that wait for room at the peer.
    pub(crate) writers: Vec<Waker>,
    /// Halves of this side that still exist (sender, receiver).
    pub(crate) halves: u8,
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

    /// Whether there is a session that `dialler` opened to `listener`. The side that dialled comes first.
    pub(crate) fn has_dialled(&self, dialler: NodeId, listener: NodeId) -> bool {
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

    pub(crate) fn end(&mut self, id: SessionId) -> Option<&mut SessionSide> {
        self.ends.get_mut(id.index())
    }

    /// Ends `id`'s side: the peer sees an orderly end after the frames under way.
    pub(crate) fn finish(&mut self, id: SessionId, over: Over) -> Vec<Waker> {
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

impl SessionSide {
    pub(crate) fn new(node: NodeId, peer: SessionId) -> Self {
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

    pub(crate) fn wake_all(&mut self) -> Vec<Waker> {
        let mut wakers = std::mem::take(&mut self.writers);
        wakers.extend(self.reader.take());
        wakers
    }
}
