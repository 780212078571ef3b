//! A second core for long copies. One thread per process, the helper, copies chunks from the back of a payload while
//! the connection's task copies them from the front. Two cores copy at about twice the speed of one. The payload may
//! consist of segments, which lie anywhere: those of a vectored write.
//!
//! The helper's affinity excludes the CPU of the task. It wakes while the task is about to copy and the peer's process
//! still polls on the next core, so no core is idle. Otherwise the kernel may queue it behind the task, where it waits
//! until the copy is over.
//!
//! The task does not wait for the helper to begin: if no core is idle, the helper starts late and finds nothing left to
//! do. The task waits for a chunk that the helper has begun, because a completion means that every byte has landed. If
//! that wait is long, other work needs the cores, and the next copies are not shared.

use std::{
    num::NonZeroUsize,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
};

use rustix::thread::CpuSet;
use tensorwire_fabric::PeerViolation;
use tensorwire_memory::{
    MemoryError, RemoteTarget,
    copy::{CopyReason, copy_raw, copy_raw_past_caches},
};

use crate::{
    chunks::Chunks,
    limits::{CHUNK_BYTES, HELP_BYTES, HELP_PAUSE, HELP_QUEUE, HELP_WAITS},
    sys::{self, Mapping},
};

/// `None` if the process has one core only, or if the thread could not be started.
static HELPER: OnceLock<Option<Helper>> = OnceLock::new();

/// How many of the next copies are not shared, because one had to wait long for the helper.
static PAUSE: AtomicU32 = AtomicU32::new(0);

/// The helper thread, and its queue.
#[derive(Debug)]
struct Helper {
    copies: SyncSender<Arc<SharedCopy>>,
    place: Arc<Place>,
}

/// The CPUs of the helper.
#[derive(Debug)]
struct Place {
    /// The helper's thread; 0 until it has begun.
    thread: AtomicI32,
    /// 1 + the CPU that its affinity excludes; 0 until there is one.
    off: AtomicU32,
}

impl Place {
    /// Restricts the helper to the CPUs that this thread may use, without the present one. False if there are no
    /// others. If the system does not report them, the helper runs anywhere.
    fn leave_this_cpu(&self) -> bool {
        let (cpu, thread) = (sys::current_cpu(), self.thread.load(Ordering::Relaxed));
        if self.off.load(Ordering::Relaxed) == cpu + 1 {
            return true;
        }
        let Ok(mut others) = rustix::thread::sched_getaffinity(None) else { return true };
        if (cpu as usize) < CpuSet::MAX_CPU {
            others.unset(cpu as usize);
        }
        if others.count() == 0 {
            return false;
        }
        if thread != 0 {
            self.off.store(cpu + 1, Ordering::Relaxed);
            sys::run_on(thread, &others);
        }
        true
    }
}

/// A part of a payload: bytes of the peer's memory, and the granted memory into which they go.
#[derive(Debug)]
pub(super) struct Segment {
    source: Arc<Mapping>,
    /// The first byte in `source`; all of them lie inside it.
    offset: usize,
    destination: RemoteTarget,
}

impl Segment {
    /// `None` if `source` has fewer bytes from `offset` on than `destination` takes.
    pub(super) fn new(source: Arc<Mapping>, offset: usize, destination: RemoteTarget) -> Option<Self> {
        let end = offset.checked_add(destination.length())?;
        (end <= source.length()).then_some(Self { source, offset, destination })
    }

    pub(super) fn length(&self) -> usize {
        self.destination.length()
    }

    /// Whether both go to a byte of the same memory.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        self.destination.overlaps(&other.destination)
    }
}

/// A copy of a payload from the peer's memory into granted memory.
#[derive(Debug)]
pub(super) struct SharedCopy {
    /// They go to different bytes.
    segments: Vec<Segment>,
    /// Where each chunk begins: the segment, and the offset in that.
    starts: Vec<(usize, usize)>,
    reason: CopyReason,
    is_past_caches: bool,
    chunks: Chunks,
    /// The grant ended while the helper copied.
    refused: AtomicBool,
}

impl SharedCopy {
    /// Of segments that go to different bytes. `None` if there are more chunks than can be counted.
    pub(super) fn new(segments: Vec<Segment>, (reason, is_past_caches): (CopyReason, bool)) -> Option<Self> {
        let chunks_of = |(at, segment): (usize, &Segment)| {
            (0..segment.length()).step_by(CHUNK_BYTES).map(move |start| (at, start))
        };
        let starts: Vec<_> = segments.iter().enumerate().flat_map(chunks_of).collect();
        let chunks = Chunks::new(u32::try_from(starts.len()).ok()?);
        Some(Self { segments, starts, reason, is_past_caches, chunks, refused: AtomicBool::new(false) })
    }

    /// Copies one chunk, and returns its length.
    fn copy(&self, chunk: u32) -> Result<usize, MemoryError> {
        let start = self.starts.get(chunk as usize);
        let Some((segment, start)) = start.and_then(|&(at, start)| Some((self.segments.get(at)?, start)))
        else {
            return Ok(0);
        };
        let length = CHUNK_BYTES.min(segment.length().saturating_sub(start));
        let access = segment.destination.access(start, length)?;
        let copy = if self.is_past_caches { copy_raw_past_caches } else { copy_raw };
        // SAFETY: `Segment::new` has checked that the bytes lie inside the mapping, which `self` keeps; every page of a
        // sealed block is allocated, so that reading cannot fault. `access` covers `length` bytes of a live grant that
        // no slice of this process aliases. `chunks` gives each chunk to one thread only, and chunks have different bytes of
        // the destination: segments do not overlap, by `new`'s caller. The peer may change the source meanwhile: the target reads its `closed` word before it reports the write.
        unsafe {
            let source = segment.source.base().as_ptr().add(segment.offset + start);
            copy(access.pointer(), source, length, self.reason);
        }
        Ok(length)
    }

    /// Copies chunks from the back until none is left. Called by the helper.
    pub(super) fn help(&self) {
        while let Some(chunk) = self.chunks.take_back() {
            if self.copy(chunk).is_err() {
                self.refused.store(true, Ordering::Relaxed);
            }
            self.chunks.helped();
        }
    }
}

/// The result of one step of a shared copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shared {
    /// This step copied so many bytes.
    Copied(usize),
    /// All chunks are taken, and the helper still copies one.
    HelperIsAtIt,
    /// All bytes are copied.
    Done,
}

/// The task's half of a shared copy. Dropping it waits until the helper no longer touches the memory, which takes at
/// most as long as one chunk.
#[derive(Debug)]
pub(super) struct HelpedCopy {
    copy: Arc<SharedCopy>,
    /// Steps that found the helper still copying.
    waits: u32,
}

impl HelpedCopy {
    /// Shares the copy with the helper; it goes past the caches if `is_past_caches`. `None` if it is too short, or if the helper is absent,
    /// busy or paused.
    pub(super) fn begin(
        segments: Vec<Segment>,
        (reason, is_past_caches): (CopyReason, bool),
    ) -> Option<Self> {
        if segments.iter().map(Segment::length).sum::<usize>() < HELP_BYTES || is_paused() {
            return None;
        }
        let helper = HELPER.get_or_init(start).as_ref().filter(|helper| helper.place.leave_this_cpu())?;
        let copy = Arc::new(SharedCopy::new(segments, (reason, is_past_caches))?);
        helper.copies.try_send(copy.clone()).ok()?;
        Some(Self::of(copy))
    }

    /// The task's half of `copy`.
    pub(super) fn of(copy: Arc<SharedCopy>) -> Self {
        Self { copy, waits: 0 }
    }

    /// Copies chunks for about `limit` bytes. Returns how many they were, and whether all bytes are copied.
    ///
    /// # Errors
    /// [`PeerViolation::NotGranted`] once the grant has ended.
    pub(super) fn steps(&mut self, limit: usize) -> Result<(usize, bool), PeerViolation> {
        let mut bytes = 0;
        while bytes < limit {
            match self.step()? {
                Shared::Copied(length) => bytes += length,
                Shared::HelperIsAtIt => return Ok((bytes, false)),
                Shared::Done => return Ok((bytes, true)),
            }
        }
        Ok((bytes, false))
    }

    /// Copies the next chunk.
    ///
    /// # Errors
    /// [`PeerViolation::NotGranted`] once the grant has ended.
    pub(super) fn step(&mut self) -> Result<Shared, PeerViolation> {
        if let Some(chunk) = self.copy.chunks.take_front() {
            let copied = self.copy.copy(chunk);
            return copied.map(Shared::Copied).map_err(|_| PeerViolation::NotGranted);
        }
        if !self.copy.chunks.all_left() {
            self.waits = self.waits.saturating_add(1);
            if self.waits == HELP_WAITS {
                PAUSE.store(HELP_PAUSE, Ordering::Relaxed);
            }
            thread::yield_now();
            return Ok(Shared::HelperIsAtIt);
        }
        match self.copy.refused.load(Ordering::Relaxed) {
            true => Err(PeerViolation::NotGranted),
            false => Ok(Shared::Done),
        }
    }
}

impl Drop for HelpedCopy {
    fn drop(&mut self) {
        self.copy.chunks.stop();
        while !self.copy.chunks.all_left() {
            thread::yield_now();
        }
    }
}

fn is_paused() -> bool {
    let paused = PAUSE.load(Ordering::Relaxed);
    if paused > 0 {
        PAUSE.store(paused - 1, Ordering::Relaxed);
    }
    paused > 0
}

fn start() -> Option<Helper> {
    thread::available_parallelism().ok().filter(|cores| *cores > NonZeroUsize::MIN)?;
    let (copies, queue) = sync_channel(HELP_QUEUE);
    let place = Arc::new(Place { thread: AtomicI32::new(0), off: AtomicU32::new(0) });
    let (name, own) = ("tensorwire-copy".to_owned(), place.clone());
    let started = thread::Builder::new().name(name).spawn(move || {
        own.thread.store(rustix::thread::gettid().as_raw_pid(), Ordering::Relaxed);
        serve(&queue);
    });
    started.is_ok().then_some(Helper { copies, place })
}

fn serve(copies: &Receiver<Arc<SharedCopy>>) {
    for copy in copies {
        copy.help();
    }
}
