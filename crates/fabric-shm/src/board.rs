//! The boards of both sides, on their page sets.

use std::sync::Arc;

use tensorwire_fabric::Board;

use crate::{
    ring::{OwnPage, PeerPage},
    sync::{Ordering, fence},
    words,
};

#[derive(Debug)]
pub(super) struct ShmBoard {
    own: Arc<OwnPage>,
    peer: Arc<PeerPage>,
}

impl ShmBoard {
    pub(super) fn new(own: Arc<OwnPage>, peer: Arc<PeerPage>) -> Self {
        Self { own, peer }
    }
}

impl Board for ShmBoard {
    fn publish(&self, at: usize, words: &[u64]) {
        let Some((first, rest)) = words.split_first() else { return };
        let place = |(index, word): (usize, &u64)| (self.own.board(at + 1 + index), *word);
        // A thread of the peer may still read the words that these replace, because another one has taken them. If it reads one of
        // these, it also sees that.
        fence(Ordering::Release);
        words::publish(self.own.board(at), rest.iter().enumerate().map(place), *first);
    }

    fn announce(&self, at: usize, word: u64) {
        words::fall_asleep(self.own.board(at), word);
    }

    fn peer(&self, at: usize) -> u64 {
        words::load(self.peer.board(at))
    }

    fn peer_after_own(&self, at: usize) -> u64 {
        words::announced(self.peer.board(at))
    }
}
