//! The limit of waking: two bare processes that ring each other's eventfd and wait in epoll; and of not sleeping:
//! two that watch a word of each other.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::atomic::Ordering,
    time::Duration,
};

use rustix::{
    buffer::spare_capacity,
    event::{EventfdFlags, Timespec, epoll, eventfd},
};
use tensorwire::Runtime;
use tensorwire_fabric_shm::bare::BareMemory;

use crate::bench::error::{BenchError, system};

const DURING: &str = "waiting for its bell";
/// How long one answer may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Polls of a word between two looks at the clock.
const POLLS: u32 = 1 << 14;
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
    // In the epoll set by its descriptor, so it must stay open.
    _mine: OwnedFd,
}

impl Bells {
    /// Waits for `mine`, or for the hang-up of `peer`: a stream to the other process.
    pub(crate) fn new(mine: OwnedFd, theirs: OwnedFd, peer: BorrowedFd<'_>) -> Result<Self, BenchError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("epoll_create"))?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, &mine, epoll::EventData::new_u64(BELL), flags).map_err(system("epoll_ctl"))?;
        // epoll reports hang-ups always.
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

/// One process's side of two shared words: it writes one and watches the other.
#[derive(Debug)]
pub(crate) struct Words<'memory> {
    memory: &'memory BareMemory,
    mine: usize,
    theirs: usize,
}

impl<'memory> Words<'memory> {
    /// `first` is whether this is the first of the two processes.
    pub(crate) fn new(memory: &'memory BareMemory, first: bool) -> Self {
        Self { memory, mine: usize::from(!first), theirs: usize::from(first) }
    }

    /// Sets both words to 0, while the other process writes nothing.
    pub(crate) fn reset(&self) {
        for index in [self.mine, self.theirs] {
            if let Some(word) = self.memory.word(index) {
                word.store(0, Ordering::Release);
            }
        }
    }

    /// Writes `value`.
    pub(crate) fn store(&self, value: u64) {
        if let Some(word) = self.memory.word(self.mine) {
            word.store(value, Ordering::Release);
        }
    }

    /// Waits until the other process writes `value`.
    pub(crate) fn await_value(&self, value: u64, clock: &dyn Runtime) -> Result<(), BenchError> {
        let Some(word) = self.memory.word(self.theirs) else {
            return Err(BenchError::Unexpected("shared memory without words".to_owned()));
        };
        let mut begin = None;
        loop {
            for _ in 0..POLLS {
                if word.load(Ordering::Acquire) == value {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
            // On a shared CPU the other process cannot write before this one yields.
            std::thread::yield_now();
            let begin = *begin.get_or_insert_with(|| clock.now());
            if clock.now().saturating_sub(begin) > ANSWER_LIMIT {
                return Err(BenchError::PeerSilent { during: "watching its word", limit: ANSWER_LIMIT });
            }
        }
    }
}
