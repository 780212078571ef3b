//! The words of a board.

use std::collections::VecDeque;

use tensorwire_fabric::BOARD_WORDS;

/// What one side has stored.
#[derive(Debug, Default)]
pub(crate) struct Words {
    /// The words that the peer sees. While this is empty, all words are 0.
    visible: Vec<u64>,
    /// Stores that it does not see yet, oldest first.
    hidden: VecDeque<(usize, Box<[u64]>)>,
}

impl Words {
    pub(crate) fn store(&mut self, at: usize, words: &[u64]) {
        self.hidden.push_back((at, words.into()));
    }

    pub(crate) fn is_hidden(&self) -> bool {
        !self.hidden.is_empty()
    }

    pub(crate) fn show_oldest(&mut self) {
        let Some((at, words)) = self.hidden.pop_front() else { return };
        self.visible.resize(BOARD_WORDS, 0);
        for (index, word) in words.iter().enumerate() {
            self.visible[(at + index) % BOARD_WORDS] = *word;
        }
    }

    pub(crate) fn show_all(&mut self) {
        while self.is_hidden() {
            self.show_oldest();
        }
    }

    /// A word, as the peer sees it.
    pub(crate) fn at(&self, at: usize) -> u64 {
        self.visible.get(at % BOARD_WORDS).copied().unwrap_or_default()
    }
}
