//! All copies of payload bytes.
//!
//! Every copy names its [`CopyReason`]; calls and bytes are counted per reason for the whole process. Pointer
//! copies elsewhere are banned by the workspace's `clippy.toml`.

#[cfg(target_arch = "x86_64")]
mod stream;

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering},
};

#[cfg(target_arch = "x86_64")]
use self::stream::{LINE, stream_lines};

/// Why bytes were copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CopyReason {
    /// A user's own memory was copied into a pool buffer.
    Import,
    /// A shared-memory write of tensor bytes, executed by its target.
    ShmPayload,
    /// A shared-memory read, out of the peer's exposed bytes, by the process that reads.
    ShmRead,
    /// A shared-memory write into a message ring, executed by its target.
    ShmMessage,
    /// A tiny payload staged in a shared-memory ring or catalogue by the process that sends it.
    ShmInline,
    /// Bytes of a published tensor or of a set, read out of a neighbour's catalogue or memory by the process that fetches them.
    Catalogue,
    /// A piece of a simulated write.
    SimPiece,
    /// Bytes that reached a message ring over TCP or verbs, or were read out of one.
    Message,
    /// Bytes of tensors copied from one buffer to another of the same process.
    Local,
    /// A small tensor's bytes copied into a message that carries them, or out of one.
    Eager,
    /// A tensor's bytes, copied from memory that its sender could write to memory that the sender never could.
    Bounce,
    /// Bytes copied out of the records of an encrypted TCP connection.
    Decrypted,
    /// Small payloads of TCP writes: gathered for one system call, or read by one together with neighbouring bytes.
    TcpSmall,
}

const REASONS: [CopyReason; 13] = [
    CopyReason::Import,
    CopyReason::ShmPayload,
    CopyReason::ShmRead,
    CopyReason::ShmMessage,
    CopyReason::ShmInline,
    CopyReason::Catalogue,
    CopyReason::SimPiece,
    CopyReason::Message,
    CopyReason::Local,
    CopyReason::Eager,
    CopyReason::Bounce,
    CopyReason::Decrypted,
    CopyReason::TcpSmall,
];

#[derive(Debug)]
struct Counter {
    calls: AtomicU64,
    bytes: AtomicU64,
}

type Counters = [Counter; REASONS.len()];

const fn zeros() -> Counters {
    [const { Counter { calls: AtomicU64::new(0), bytes: AtomicU64::new(0) } }; REASONS.len()]
}

/// Counts of threads that have ended.
static OF_ENDED: Counters = zeros();

/// Counts of each running thread.
static OF_RUNNING: Mutex<Vec<Arc<Counters>>> = Mutex::new(Vec::new());

thread_local! {
    static OWN: Own = Own::new();
}

/// The counters that this thread alone changes, so that counting needs no atomic addition, which costs as much as a
/// lock.
struct Own(Arc<Counters>);

impl Own {
    fn new() -> Self {
        let own = Arc::new(zeros());
        running().push(own.clone());
        Self(own)
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let mut running = running();
        running.retain(|other| !Arc::ptr_eq(other, &self.0));
        for (all, own) in OF_ENDED.iter().zip(&*self.0) {
            all.add(own.calls.load(Ordering::Relaxed), own.bytes.load(Ordering::Relaxed));
        }
    }
}

impl Counter {
    /// Adds to a counter that several threads change.
    fn add(&self, calls: u64, bytes: u64) {
        self.calls.fetch_add(calls, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Adds one copy to a counter that only this thread changes.
    fn count(&self, bytes: u64) {
        self.calls.store(self.calls.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        self.bytes.store(self.bytes.load(Ordering::Relaxed).wrapping_add(bytes), Ordering::Relaxed);
    }
}

fn running() -> MutexGuard<'static, Vec<Arc<Counters>>> {
    OF_RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How often, and how many bytes, were copied for one reason since the process started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopyCount {
    /// Calls.
    pub calls: u64,
    /// Bytes.
    pub bytes: u64,
}

/// The count for `reason`.
pub fn count(reason: CopyReason) -> CopyCount {
    let running = running();
    let all = running.iter().map(|counters| &**counters).chain([&OF_ENDED]);
    all.map(|counters| &counters[reason as usize]).fold(CopyCount::default(), |sum, counter| CopyCount {
        calls: sum.calls + counter.calls.load(Ordering::Relaxed),
        bytes: sum.bytes + counter.bytes.load(Ordering::Relaxed),
    })
}

/// Copies `source` over the first `source.len()` bytes of `destination` and counts it.
///
/// Copies the shorter of the two lengths and returns it.
pub fn copy_bytes(destination: &mut [u8], source: &[u8], reason: CopyReason) -> usize {
    let length = destination.len().min(source.len());
    // SAFETY: both slices are valid for `length` bytes, and `&mut` excludes overlap.
    unsafe { copy_raw(destination.as_mut_ptr(), source.as_ptr(), length, reason) };
    length
}

/// From so many bytes on that are copied one after another, copies go [past the caches](copy_past_caches): their first bytes have left the
/// caches before the last ones are there. With the reading of the result, 4 MiB that way take 0.8 of the time of a plain copy, and 1 MiB
/// as much.
pub const PAST_CACHES_BYTES: usize = 4 << 20;

/// As [`copy_bytes`], but past the processor's caches where it can do that (x86-64): the caches keep their content, and
/// the written lines need not be read first. For bytes that are not read soon: a reader finds them in memory, and not
/// in a cache.
pub fn copy_past_caches(destination: &mut [u8], source: &[u8], reason: CopyReason) -> usize {
    let length = destination.len().min(source.len());
    // SAFETY: both slices are valid for `length` bytes, and `&mut` excludes overlap.
    unsafe { copy_raw_past_caches(destination.as_mut_ptr(), source.as_ptr(), length, reason) };
    length
}

/// A function that copies as many bytes as both slices have, and returns how many.
pub type CopyBytes = fn(&mut [u8], &[u8], CopyReason) -> usize;

/// The copy for payloads of `bytes` bytes in all: [past the caches](copy_past_caches) from [`PAST_CACHES_BYTES`] on.
pub fn copy_of(bytes: usize) -> CopyBytes {
    if bytes >= PAST_CACHES_BYTES { copy_past_caches } else { copy_bytes }
}

/// As [`copy_raw`], but past the caches, as [`copy_past_caches`].
///
/// # Safety
/// That of [`copy_raw`].
pub unsafe fn copy_raw_past_caches(
    destination: *mut u8,
    source: *const u8,
    length: usize,
    reason: CopyReason,
) {
    record(reason, length);
    // SAFETY: the caller's contract is exactly that of this call.
    unsafe { stream(destination, source, length) };
}

/// # Safety
/// That of [`copy_raw`].
#[cfg(target_arch = "x86_64")]
#[allow(clippy::disallowed_methods)] // called by the counted copy
unsafe fn stream(destination: *mut u8, source: *const u8, length: usize) {
    let before = destination.align_offset(LINE).min(length);
    let lines = (length - before) / LINE;
    let streamed = before + lines * LINE;
    // SAFETY: all three parts are within the `length` bytes that the caller promises. The lines begin where `destination` is aligned: only
    // if there are none, `before` may be too short for that.
    unsafe {
        std::ptr::copy_nonoverlapping(source, destination, before);
        stream_lines(destination.add(before), source.add(before), lines);
        std::ptr::copy_nonoverlapping(source.add(streamed), destination.add(streamed), length - streamed);
    }
}

/// # Safety
/// That of [`copy_raw`].
#[cfg(not(target_arch = "x86_64"))]
#[allow(clippy::disallowed_methods)] // called by the counted copy
unsafe fn stream(destination: *mut u8, source: *const u8, length: usize) {
    // SAFETY: the caller's contract is exactly that of this call.
    unsafe { std::ptr::copy_nonoverlapping(source, destination, length) };
}

/// Copies `length` bytes between raw ranges and counts it.
///
/// # Safety
/// `source` is readable and `destination` writable for `length` bytes, and they do not overlap. Where another
/// process can write `source` meanwhile, the caller must not trust the bytes until it has checked that the
/// source was still valid: over shared memory, that the peer's `closed` word is not set; for bytes that a catalogue
/// names, that their cell was not replaced.
#[allow(clippy::disallowed_methods)] // the counted copy itself
pub unsafe fn copy_raw(destination: *mut u8, source: *const u8, length: usize, reason: CopyReason) {
    record(reason, length);
    // SAFETY: the caller's contract is exactly that of this call.
    unsafe { std::ptr::copy_nonoverlapping(source, destination, length) };
}

fn record(reason: CopyReason, length: usize) {
    let counted = OWN.try_with(|own| own.0[reason as usize].count(length as u64));
    if counted.is_err() {
        // The thread is ending, and its counters are dropped already.
        OF_ENDED[reason as usize].add(1, length as u64);
    }
}
