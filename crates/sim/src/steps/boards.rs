//! Boards: words of each side of a connection of kind shm that the other side reads directly.
//!
//! The rules are those of mapped memory. Stored words stay when the connection is over, and when the process that
//! stored them is dead. Stores become visible in order; each time the peer reads, the seed decides how many it sees.
//! All are visible once their side announces something, or reads what the peer has announced.
//!
//! The peer's process runs at the same time: before each access the seed may let it poll some of its tasks, in the
//! middle of a poll of this side's. Tasks of a third process, or of this one, wait.

use std::{
    hash::{Hash, Hasher},
    sync::Arc,
};

use tensorwire_fabric::{Board, FabricKind};

use crate::{
    ids::{EndpointId, TaskId},
    shared::Shared,
    trace::{Event, Fnv},
};

#[derive(Debug)]
struct SimBoard {
    shared: Arc<Shared>,
    own: EndpointId,
    peer: EndpointId,
}

impl Shared {
    /// The boards of `id`, which is connected, and of its peer.
    pub(crate) fn board(&self, id: EndpointId) -> Option<Arc<dyn Board>> {
        let (kind, peer) = {
            let state = self.state();
            let endpoint = state.endpoints.get(id.index())?;
            (endpoint.domain.kind, endpoint.peer?)
        };
        let shared = self.strong().filter(|_| kind == FabricKind::SHM)?;
        Some(Arc::new(SimBoard { shared, own: id, peer }))
    }
}

impl SimBoard {
    /// Lets the peer's process run, while this side is in the middle of a poll.
    fn let_peer_run(&self) {
        while let Some(task) = self.begin_turn() {
            self.shared.record(Event::RanMeanwhile { endpoint: self.own, task });
            self.shared.poll_task(task);
            self.shared.state().is_in_turn = false;
        }
    }

    fn begin_turn(&self) -> Option<TaskId> {
        let chance = self.shared.swarm.turns_of_256;
        let mut state = self.shared.state();
        let node_of = |id: EndpointId| Some(state.endpoints.get(id.index())?.node);
        let (own, peer) = node_of(self.own).zip(node_of(self.peer))?;
        if state.is_in_turn || own == peer || !state.is_alive(own) {
            return None;
        }
        let task = state.take_task_of(peer, chance)?;
        state.is_in_turn = true;
        Some(task)
    }

    fn store(&self, at: usize, words: &[u64], is_announced: bool) {
        self.let_peer_run();
        let mut state = self.shared.state();
        // Destructors of a dead process run too, and change nothing on the board.
        let is_alive = state.endpoints.get(self.own.index()).is_some_and(|own| state.is_alive(own.node));
        let Some(own) = state.endpoints.get_mut(self.own.index()).filter(|_| is_alive) else { return };
        own.words.store(at, words);
        if is_announced {
            own.words.show_all();
        }
        drop(state);
        let mut content = Fnv::new();
        words.hash(&mut content);
        self.shared.record(Event::Stored { endpoint: self.own, at, content: content.finish() });
    }
}

impl Board for SimBoard {
    fn publish(&self, at: usize, words: &[u64]) {
        self.store(at, words, false);
    }

    fn announce(&self, at: usize, word: u64) {
        self.store(at, &[word], true);
    }

    fn peer(&self, at: usize) -> u64 {
        self.let_peer_run();
        let state = &mut *self.shared.state();
        // After the run there is no peer.
        let Some(peer) = state.endpoints.get_mut(self.peer.index()) else { return 0 };
        while peer.words.is_hidden() && state.rng.chance(1, 2) {
            peer.words.show_oldest();
        }
        peer.words.at(at)
    }

    fn peer_after_own(&self, at: usize) -> u64 {
        self.let_peer_run();
        if let Some(own) = self.shared.state().endpoints.get_mut(self.own.index()) {
            own.words.show_all();
        }
        self.peer(at)
    }
}
