//! Copies of users' memory, for fabrics that cannot send it in place.

use std::{future::poll_fn, sync::Arc, task::Poll};

use tensorwire_fabric::FabricKind;
use tensorwire_memory::{Buf, MemoryError, Pool, copy::CopyReason, copy::copy_bytes};
use tensorwire_protocol::{Code, Status};

use crate::peer_memory::enclosure::Enclosure;

/// Bytes that are copied before the task yields.
pub(crate) const PIECE_BYTES: usize = 256 << 10;

/// Copies users' memory into a pool.
#[derive(Debug, Clone)]
pub(crate) struct Import {
    pub(crate) pool: Pool,
    /// The memory that the fabric can send from.
    pub(crate) enclosure: Arc<Enclosure>,
}

impl Import {
    /// Whether a fabric of this kind cannot send `bytes` in place. Shared memory needs a block that the peer can map,
    /// verbs any block. No fabric can send from a block that is not registered with this worker.
    pub(crate) fn needs(&self, kind: FabricKind, bytes: &Buf) -> bool {
        if bytes.is_empty() {
            return false;
        }
        if tensorwire_testpoints::chance!("a value that could be sent without a copy is copied") {
            return true;
        }
        match (kind, bytes.block()) {
            (FabricKind::SHM | FabricKind::VERBS, None) => true,
            (_, None) => false,
            (FabricKind::SHM, Some(block)) if !block.shareable() => true,
            (_, Some(block)) => !self.enclosure.regions.contains(block.id()),
        }
    }

    /// Copies `bytes` into the pool. Waits while the pool is full.
    pub(crate) async fn copy_of(&self, bytes: &Buf) -> Result<Buf, Status> {
        let failed = |error| {
            let text = format!("cannot copy users' memory into a pool that can be sent from: {error}");
            Status::new(Code::ResourceExhausted, text)
        };
        let copy = |into: &mut [u8], from: &[u8]| copy_bytes(into, from, CopyReason::Import);
        copied(&self.pool, bytes, copy).await.map_err(failed)
    }
}

/// A copy of `bytes` in `pool`, made by `copy` piece by piece. Waits while the pool is full; other tasks have their turn after each piece.
pub(crate) async fn copied(
    pool: &Pool,
    bytes: &[u8],
    copy: impl Fn(&mut [u8], &[u8]) -> usize,
) -> Result<Buf, MemoryError> {
    let mut buffer = pool.alloc(bytes.len()).await?;
    for (into, from) in buffer.chunks_mut(PIECE_BYTES).zip(bytes.chunks(PIECE_BYTES)) {
        copy(into, from);
        yield_once().await;
    }
    Ok(buffer.freeze())
}

/// Yields to other tasks once.
pub(crate) async fn yield_once() {
    let mut had_theirs = false;
    poll_fn(|context| {
        if had_theirs {
            return Poll::Ready(());
        }
        had_theirs = true;
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
