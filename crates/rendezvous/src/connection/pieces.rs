//! Long contents, which are written in pieces that other writes come between.
//!
//! A queue pair executes writes in their order. So what is posted behind a long write waits for all of it: a value of 64 KiB behind one
//! of a gigabyte waits most of a second. Of a long content, everything but the last piece is therefore written ahead, piece by piece,
//! before its turn comes. A connection has two of these pieces under way at a time, whichever contents they belong to: while one is sent,
//! the next is posted, and everything else waits for two pieces at most. Long contents take turns.

use std::{future::poll_fn, sync::Arc, task::Poll};

use tensorwire_fabric::{FabricError, Operation, QueuePair, RemoteRange, WorkRequest};
use tensorwire_memory::Buf;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How many pieces of a connection are under way.
const PIECES: usize = 2;

/// The turns of a connection's pieces.
#[derive(Debug)]
pub(crate) struct Pieces {
    turns: Arc<Semaphore>,
    /// As of [`Agreed::piece_bytes`](tensorwire_protocol::Agreed::piece_bytes).
    piece_bytes: Option<u32>,
}

impl Pieces {
    pub(crate) fn new(piece_bytes: Option<u32>) -> Self {
        Self { turns: Arc::new(Semaphore::new(PIECES)), piece_bytes }
    }

    /// Writes all of a content but its last piece. Returns how many bytes those are: 0 if it has only one. The last piece follows them on
    /// the same queue pair, so they have landed when it has.
    ///
    /// # Cancel safety
    /// If it is dropped, the pieces that were posted still land, before everything that is posted later.
    pub(super) async fn write_ahead(
        &self,
        queue_pair: &QueuePair,
        bytes: &Buf,
        remote: RemoteRange,
    ) -> Result<u64, FabricError> {
        let Some(piece) = self.piece_bytes.map(|bytes| bytes as usize).filter(|piece| *piece < bytes.len())
        else {
            return Ok(0);
        };
        tensorwire_testpoints::mark!("a content was written in pieces");
        let ahead = (bytes.len() - 1) / piece * piece;
        let mut before = None;
        for start in (0..ahead).step_by(piece) {
            let turn = match self.turns.clone().try_acquire_owned() {
                Ok(turn) => turn,
                Err(_) => {
                    // The piece before has a turn. If each of two contents kept one while it waits for another, neither would get it.
                    ended(before.take()).await?;
                    // It is never closed.
                    self.turns.clone().acquire_owned().await.map_err(|_| FabricError::Closed)?
                }
            };
            let local = bytes.slice(start..start + piece).unwrap_or_else(Buf::empty);
            let at = RemoteRange { offset: remote.offset + start as u64, length: piece as u64, ..remote };
            let request = WorkRequest::Write { local, remote: Some(at), immediate: None };
            ended(before.replace((queue_pair.post(&request)?, turn))).await?;
            others().await;
        }
        // The last of them is not awaited: its slot owns the bytes, and its failure fails the connection.
        Ok(ahead as u64)
    }
}

/// Waits for the end of a piece, and gives its turn back.
async fn ended(piece: Option<(Operation, OwnedSemaphorePermit)>) -> Result<(), FabricError> {
    let Some((operation, _turn)) = piece else { return Ok(()) };
    operation.await
}

/// Lets the connection handle what has come meanwhile: a piece may end as soon as it is posted.
async fn others() {
    let mut was_polled = false;
    poll_fn(|context| {
        if std::mem::replace(&mut was_polled, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
