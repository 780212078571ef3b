//! Views of a buffer that do not know its pool.

use std::{fmt, ptr::NonNull, sync::Arc, task::Poll};

use super::Buf;
use crate::{ForeignMemory, Place};

/// A buffer's bytes as a view: a foreign buffer over this does not know the pool or block of the bytes. For fabrics
/// whose two sides are in one process: they lend memory without a copy and without `unsafe`.
///
/// A callback runs once, when the last view is dropped, of the buffer or of one that is attached to it.
pub struct Loan {
    // Before the buffers: they are held until it has run.
    end: Arc<End>,
    bytes: Buf,
    /// The buffer that was lent, to which others are attached.
    lent: Buf,
}

struct End(Option<Box<dyn FnOnce() + Send + Sync>>);

impl Loan {
    /// Holds `bytes` until it is dropped, and calls `ended` then. `ended` runs in whatever thread drops the last view, so it
    /// must not wait, nor take a lock under which buffers are dropped.
    pub fn new(bytes: Buf, ended: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self { lent: bytes.clone(), bytes, end: Arc::new(End(Some(Box::new(ended)))) }
    }
}

impl fmt::Debug for Loan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loan").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

// SAFETY: a `Buf` shows the same immutable, initialised bytes for as long as it lives, which is as long as this value
// does; the buffer types of this crate let no code write them.
unsafe impl ForeignMemory for Loan {
    fn base(&self) -> NonNull<u8> {
        NonNull::from(&*self.bytes).cast()
    }

    fn length(&self) -> usize {
        self.bytes.len()
    }

    fn attached_at(&self, place: &Place) -> Poll<Option<Arc<dyn ForeignMemory>>> {
        let found = self.lent.attached().find(|attached| attached.place() == Some(*place));
        let loan = |bytes| Self { end: self.end.clone(), bytes, lent: self.lent.clone() };
        Poll::Ready(found.map(|bytes| Arc::new(loan(bytes)) as _))
    }
}

impl Drop for End {
    fn drop(&mut self) {
        if let Some(ended) = self.0.take() {
            ended();
        }
    }
}
