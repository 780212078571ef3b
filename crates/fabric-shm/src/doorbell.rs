//! Waking the peer's driver: one eventfd per direction.
//!
//! The sleeper registers its eventfd edge-triggered and never reads it; every write is an edge. Before it sleeps
//! it stores a new *epoch* on its own page and looks for work once more. The ringer, after publishing work, looks
//! at the epoch and writes the eventfd once per epoch, so a burst costs one system call and an awake sleeper
//! none. There is an epoch and not a flag that the ringer clears, because each page has one writer.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    thread,
};

use tensorwire_fabric::PeerViolation;

use crate::{import::ImportError, ring::PeerPage, sys};

/// The ringing end of a doorbell.
///
/// The peer holds the same open file and may do anything to it. A full counter answers EAGAIN. That counts as woken,
/// because filling the counter made an edge. If a peer clears `O_NONBLOCK`, the next ring detects that first, and the
/// connection ends. A peer that fills the counter and clears the flag between that check and the write blocks the
/// writing thread until [`free`](Self::free) is called, as closing the connection does.
///
/// Bells that cannot be made to block are slower: on one CPU a wake-up through a pipe (`vmsplice` with
/// `SPLICE_F_NONBLOCK`) takes 1.2 times as long, and one through a socket (`MSG_DONTWAIT`) 1.6 times.
#[derive(Debug)]
pub(super) struct Ringer {
    bell: OwnedFd,
    /// The epoch that was rung last.
    rung: AtomicU64,
    spoilt: AtomicBool,
    /// Threads that are writing the bell.
    ringing: AtomicU32,
}

/// How often [`Ringer::free`] yields before it treats a ringing thread as blocked.
const PATIENCE: u32 = 64;

/// How often it frees a blocked thread, which the peer may block again.
const FREEINGS_MAX: u32 = 10_000;

impl Ringer {
    /// Takes the peer's eventfd, after checking that it is one and does not block.
    pub(super) fn import(bell: OwnedFd) -> Result<Self, ImportError> {
        let kind = sys::describe(bell.as_fd())?;
        if kind.as_os_str() != "anon_inode:[eventfd]" || !sys::is_non_blocking(bell.as_fd())? {
            return Err(PeerViolation::Malformed.into());
        }
        Ok(Self { bell, rung: AtomicU64::new(0), spoilt: AtomicBool::new(false), ringing: AtomicU32::new(0) })
    }

    /// Wakes the peer if it sleeps and was not rung since it fell asleep. Call after publishing work.
    pub(super) fn ring_if_asleep(&self, peer: &PeerPage) {
        if peer.must_be_rung(&self.rung) {
            self.ring();
        }
    }

    /// As [`ring_if_asleep`](Self::ring_if_asleep), after the release of a lease. Does nothing unless the peer waits for
    /// releases.
    pub(super) fn ring_for_release(&self, peer: &PeerPage) {
        if peer.must_be_rung_for_release(&self.rung) {
            self.ring();
        }
    }

    /// Whether the peer has made the bell blocking, so that it is not rung any more.
    pub(super) fn is_spoilt(&self) -> bool {
        self.spoilt.load(Ordering::Relaxed)
    }

    /// Whether a thread is writing the bell.
    #[cfg(test)]
    pub(super) fn is_ringing(&self) -> bool {
        self.ringing.load(Ordering::Relaxed) > 0
    }

    fn ring(&self) {
        if !sys::is_non_blocking(self.bell.as_fd()).unwrap_or(false) {
            self.spoilt.store(true, Ordering::Relaxed);
        }
        if self.is_spoilt() {
            return;
        }
        self.strike();
    }

    /// Writes the bell without checking it.
    pub(super) fn strike(&self) {
        self.ringing.fetch_add(1, Ordering::Relaxed);
        let written = sys::signal(self.bell.as_fd());
        self.ringing.fetch_sub(1, Ordering::Relaxed);
        match written {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // The driver watches the socket for the end of the peer.
            Err(error) => log!(DEBUG, %error, "shm: could not wake the peer"),
        }
    }

    /// Frees threads that the peer blocks inside a ring. The peer may lose its wake-up by that, so this is for
    /// connections that are to end. Takes a bounded time, and none if no thread rings.
    pub(super) fn free(&self) {
        for attempt in 0..PATIENCE + FREEINGS_MAX {
            if self.ringing.load(Ordering::Relaxed) == 0 {
                return;
            }
            if attempt >= PATIENCE {
                self.spoilt.store(true, Ordering::Relaxed);
                // Empty already, or the kernel cannot drain it: then the thread stays blocked.
                let _ = sys::drain_eventfd(self.bell.as_fd());
            }
            thread::yield_now();
        }
        log!(
            WARN,
            "shm: the peer made its eventfd block, which holds a thread of this process in a write; releasing it"
        );
    }
}
