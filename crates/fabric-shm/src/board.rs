//! The boards of both sides, on their page sets.

use std::sync::Arc;

use tensorwire_fabric::Board;

use crate::{
    ring::{OwnPage, PeerPage},
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
