//! Bare signals between two processes: words in shared memory. A process that polls reads them, and one that sleeps is
//! woken by an eventfd in epoll.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::atomic::Ordering,
    time::Duration,
};

use rustix::{
    buffer::spare_capacity,
    event::{EventfdFlags, Timespec, epoll, eventfd},
};
use tensorwire::fabric::Runtime;

use super::{LimitWait, shared_memory::SharedMemory};
use crate::error::{BenchError, system};

const DURING: &str = "waiting for its bell";
/// How long one answer may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Looks between two readings of the clock.
const LOOKS: u32 = 1 << 14;
const BELL: u64 = 1;

/// A new bell.
pub(crate) fn bell() -> Result<OwnedFd, BenchError> {
    eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(system("eventfd"))
}

/// One process's side: the bell that it waits for, and the one that it rings. Bells are edge-triggered and never read: a
/// read would be one more system call.
#[derive(Debug)]
pub(crate) struct Bells {
    epoll: OwnedFd,
    theirs: OwnedFd,
    // Stays open, because the epoll set contains its descriptor.
    _mine: OwnedFd,
}

impl Bells {
    /// Waits for `mine`, or for the hang-up of `peer`: a stream to the other process.
    pub(crate) fn new(mine: OwnedFd, theirs: OwnedFd, peer: BorrowedFd<'_>) -> Result<Self, BenchError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("epoll_create"))?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, &mine, epoll::EventData::new_u64(BELL), flags).map_err(system("epoll_ctl"))?;
        // epoll always reports hang-ups.
        epoll::add(&epoll, peer, epoll::EventData::new_u64(0), epoll::EventFlags::empty())
            .map_err(system("epoll_ctl"))?;
        Ok(Self { epoll, theirs, _mine: mine })
    }

    /// Rings the other process's bell.
    pub(crate) fn ring(&self) -> Result<(), BenchError> {
        rustix::io::write(self.theirs.as_fd(), &1_u64.to_ne_bytes()).map(drop).map_err(system("write"))
    }

    /// Waits for a ring, asleep.
    pub(crate) fn wait(&self) -> Result<(), BenchError> {
        let limit = Timespec { tv_sec: ANSWER_LIMIT.as_secs().cast_signed(), tv_nsec: 0 };
        let mut events = Vec::with_capacity(2);
        loop {
            match epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&limit)) {
                Ok(0) => return Err(BenchError::PeerSilent { during: DURING, limit: ANSWER_LIMIT }),
                Ok(_) if events.iter().any(|event| event.data.u64() == BELL) => return Ok(()),
                Ok(_) => return Err(BenchError::PeerGone { during: DURING }),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(system("epoll_wait")(error)),
            }
        }
    }
}

/// Signals that can be under way at once.
pub(crate) const SIGNALS_MAX: usize = 64;
/// Bytes of shared memory for the words; contents follow them.
pub(crate) const WORDS_BYTES: usize = 64 << 10;
/// Words in use: two for each signal, and one more.
const WORDS: usize = 2 * SIGNALS_MAX + 1;

/// The word that the first process writes for its signal `number`; the second one's answer is the word after it.
fn word_of(number: usize) -> usize {
    2 * number
}

/// The word in which the second process counts the copies that it has finished.
const COPIED_WORD: usize = 2 * SIGNALS_MAX;

/// One process's side of words in shared memory. Each word has one writer. A process that sleeps is rung after a write.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Signals<'peer> {
    memory: &'peer SharedMemory,
    bells: &'peer Bells,
    clock: &'peer dyn Runtime,
    wait: LimitWait,
    first: bool,
}

impl<'peer> Signals<'peer> {
    /// The side of the first process if `first`, otherwise that of the second.
    pub(crate) fn new(
        memory: &'peer SharedMemory,
        bells: &'peer Bells,
        clock: &'peer dyn Runtime,
        wait: LimitWait,
        first: bool,
    ) -> Self {
        Self { memory, bells, clock, wait, first }
    }

    /// Sets all words to 0, while the other process writes nothing.
    pub(crate) fn reset(&self) {
        for index in 0..WORDS {
            self.store(index, 0);
        }
    }

    /// Writes `value` as this process's signal `number`, and rings unless more signals follow at once.
    pub(crate) fn send(&self, number: usize, value: u64, more: bool) -> Result<(), BenchError> {
        self.store(word_of(number) + usize::from(!self.first), value);
        self.ring(more)
    }

    /// Waits until the other process's signal `number` has `value`.
    pub(crate) fn receive(&self, number: usize, value: u64) -> Result<(), BenchError> {
        self.await_value(word_of(number) + usize::from(self.first), value)
    }

    /// Reports that the second process has finished copy `value`.
    pub(crate) fn send_copied(&self, value: u64) -> Result<(), BenchError> {
        self.store(COPIED_WORD, value);
        self.ring(false)
    }

    /// Waits until the second process has finished copy `value`.
    pub(crate) fn receive_copied(&self, value: u64) -> Result<(), BenchError> {
        self.await_value(COPIED_WORD, value)
    }

    fn store(&self, index: usize, value: u64) {
        if let Some(word) = self.memory.word(index) {
            word.store(value, Ordering::Release);
        }
    }

    fn ring(&self, more: bool) -> Result<(), BenchError> {
        if self.wait == LimitWait::Sleep && !more { self.bells.ring() } else { Ok(()) }
    }

    fn await_value(&self, index: usize, value: u64) -> Result<(), BenchError> {
        let Some(word) = self.memory.word(index) else {
            return Err(BenchError::Unexpected("shared memory without words".to_owned()));
        };
        let arrived = || word.load(Ordering::Acquire) == value;
        if self.wait != LimitWait::Sleep {
            return look(self.wait, self.clock, arrived);
        }
        // A ring for an earlier word only causes one more look.
        while !arrived() {
            self.bells.wait()?;
        }
        Ok(())
    }
}

/// Polls until `arrived` returns true, for a bounded time.
pub(crate) fn look(
    wait: LimitWait,
    clock: &dyn Runtime,
    mut arrived: impl FnMut() -> bool,
) -> Result<(), BenchError> {
    let looks = if wait == LimitWait::LookInTurns { 1 } else { LOOKS };
    let (mut begin, mut turns) = (None, 0_u32);
    loop {
        for _ in 0..looks {
            if arrived() {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        // The other process may run on this CPU, by choice or because the machine is busy.
        std::thread::yield_now();
        turns = turns.wrapping_add(1);
        if wait == LimitWait::LookInTurns && turns % LOOKS != 0 {
            continue;
        }
        let begin = *begin.get_or_insert_with(|| clock.now());
        if clock.now().saturating_sub(begin) > ANSWER_LIMIT {
            return Err(BenchError::PeerSilent { during: "watching its word", limit: ANSWER_LIMIT });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{SharedMemory, WORDS, WORDS_BYTES};

    #[test]
    fn words_end_before_the_contents() {
        let memory = SharedMemory::create(WORDS_BYTES).unwrap();
        assert!(memory.word(WORDS - 1).is_some());
    }
}
