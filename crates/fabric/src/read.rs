//! Destinations of one-sided reads.

use std::sync::{Arc, PoisonError};

use tensorwire_memory::{Block, BufMut, GrantEnd, Granted, RemoteTarget};
use tensorwire_testpoints::sync::Mutex;

use crate::{FabricError, FabricKind, RemoteRange};

/// The memory that a read fills. The operation's slot owns it until the completion: bytes that arrive after the future
/// was dropped still land in memory that nothing else uses.
#[derive(Debug, Clone)]
pub struct ReadDestination(Arc<Destination>);

#[derive(Debug)]
struct Destination {
    length: u64,
    granted: Mutex<Option<Granted>>,
}

impl Destination {
    fn take(&self) -> Option<Granted> {
        self.granted.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for Destination {
    fn drop(&mut self) {
        // No future and no slot refers to the read any more: it has completed, or was never posted.
        if let Some(Err(error)) = self.take().map(|granted| granted.end(GrantEnd::ReadCompleted)) {
            log!(WARN, %error, "cannot give back the destination of a read: its memory is leaked");
        }
    }
}

impl ReadDestination {
    /// Grants `into` to a read.
    pub fn new(into: BufMut) -> Self {
        let length = into.len() as u64;
        Self(Arc::new(Destination { length, granted: Mutex::new(Some(into.grant())) }))
    }

    /// Length in bytes.
    pub fn length(&self) -> u64 {
        self.0.length
    }

    /// First byte inside the block; `None` once the read is over.
    pub fn offset(&self) -> Option<usize> {
        let granted = self.0.granted.lock().unwrap_or_else(PoisonError::into_inner);
        granted.as_ref().map(Granted::offset)
    }

    /// Where a fabric puts the bytes, and the block that contains them; `None` for an empty destination.
    ///
    /// # Errors
    /// [`FabricError::Closed`] once the read is over.
    pub fn target(&self) -> Result<Option<(Block, RemoteTarget)>, FabricError> {
        let granted = self.0.granted.lock().unwrap_or_else(PoisonError::into_inner);
        let granted = granted.as_ref().ok_or(FabricError::Closed)?;
        let Some(block) = granted.block() else { return Ok(None) };
        let target = block.remote_target(granted.offset() as u64, self.0.length);
        Ok(Some((block.clone(), target.map_err(|_| FabricError::Closed)?)))
    }

    /// Gives the memory back after the read's completion.
    pub(crate) fn finish(&self, kind: FabricKind) -> Result<BufMut, FabricError> {
        let granted = self.0.take().ok_or(FabricError::Closed)?;
        let ended = granted.end(GrantEnd::ReadCompleted);
        ended.map_err(|error| FabricError::device(kind, "ending a read", std::io::Error::other(error)))
    }
}

/// The segments of a read of one range into many buffers, in their order, for
/// [`QueuePair::read_vectored`](crate::QueuePair::read_vectored).
///
/// ```no_run
/// use tensorwire_memory::{BufMut, Pool};
/// use tensorwire_fabric::{FabricError, QueuePair, RemoteRange, scattered};
///
/// /// Reads a table of the peer with one operation, each row into a buffer of its own.
/// async fn rows(
///     peer: &QueuePair,
///     table: RemoteRange,
///     row_bytes: usize,
///     pool: &Pool,
/// ) -> Result<Vec<BufMut>, Box<dyn std::error::Error>> {
///     let count = table.length as usize / row_bytes;
///     let rows = (0..count).map(|_| pool.try_alloc(row_bytes)).collect::<Result<Vec<_>, _>>()?;
///     Ok(peer.read_vectored(scattered(table, rows)?).await?)
/// }
/// ```
///
/// # Errors
/// [`FabricError::LengthMismatch`] when the buffers together are not as long as the range.
pub fn scattered(remote: RemoteRange, into: Vec<BufMut>) -> Result<Vec<(RemoteRange, BufMut)>, FabricError> {
    let local: u64 = into.iter().map(|buffer| buffer.len() as u64).sum();
    if local != remote.length {
        return Err(FabricError::LengthMismatch { local, remote: remote.length });
    }
    let mut offset = remote.offset;
    let segment = |buffer: BufMut| {
        let length = buffer.len() as u64;
        let part = RemoteRange { offset, length, ..remote };
        // An offset that saturates lies outside every region, so the read is refused.
        offset = offset.saturating_add(length);
        (part, buffer)
    };
    Ok(into.into_iter().map(segment).collect())
}
