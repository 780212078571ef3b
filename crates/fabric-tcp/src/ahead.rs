//! Bytes that are read from the stream before their meaning is known: headers, small payloads, and the beginning of a
//! larger one. One read brings many small frames.

use tensorwire_memory::{
    RemoteAccess,
    copy::{CopyReason, copy_raw},
};

use crate::frame::{HEADER_BYTES, Header};

/// Maximum number of bytes read ahead. At most this many bytes of a payload are copied; the kernel puts the rest into
/// its destination.
pub(super) const AHEAD_BYTES: usize = 4 << 10;

/// See the module's documentation.
pub(super) struct Ahead {
    bytes: Box<[u8; AHEAD_BYTES]>,
    /// The range of `bytes` that is not handled yet.
    start: usize,
    end: usize,
}

impl Ahead {
    pub(super) fn new() -> Self {
        Self { bytes: Box::new([0; AHEAD_BYTES]), start: 0, end: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// The next header, if all of it was read.
    pub(super) fn take_header(&mut self) -> Option<Header> {
        let header = *self.unhandled().first_chunk::<HEADER_BYTES>()?;
        self.start += HEADER_BYTES;
        Some(header)
    }

    /// Bytes that the next payload can take.
    pub(super) fn payload(&self) -> usize {
        self.end - self.start
    }

    /// Copies payload bytes over all of `access`, which is at most [`payload`](Self::payload) long.
    pub(super) fn copy_out(&mut self, access: &RemoteAccess<'_>) {
        let bytes = access.length().min(self.payload());
        let source = self.unhandled().as_ptr();
        // SAFETY: a `RemoteAccess` is writable for its length while it lives, which is beyond the call; the source is this
        // side's own memory, and both have `bytes` bytes.
        unsafe { copy_raw(access.pointer(), source, bytes, CopyReason::TcpSmall) };
        self.start += bytes;
    }

    /// The free room after the bytes read so far.
    pub(super) fn room(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.bytes[self.end..]
    }

    /// Records that `bytes` bytes were read to the [room](Self::room).
    pub(super) fn filled(&mut self, bytes: usize) {
        self.end = (self.end + bytes).min(AHEAD_BYTES);
    }

    fn unhandled(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }
}
