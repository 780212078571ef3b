//! Long contents, which are written in pieces that other writes come between.
//!
//! A queue pair executes writes in their order. So what is posted behind a long write waits for all of it: a value of 64 KiB behind one
//! of a gigabyte waits most of a second. Of a long content, everything but the last piece is therefore written ahead, piece by piece,
//! before its turn comes. A connection has two of these pieces under way at a time, whichever contents they belong to: while one is sent,
//! the next is posted. Contents take turns, piece by piece.

use std::collections::VecDeque;

use tensorwire_fabric::{FabricError, Operation, QueuePair, RemoteRange, WorkRequest};
use tensorwire_memory::Buf;
use tensorwire_protocol::limits::PIECES_MAX;
use tokio::sync::Mutex;

use crate::peer_memory::import::yield_once;

/// The pieces of one connection.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    /// Those under way, oldest first, and perhaps some that have ended. Locked, in turns, while the oldest is awaited: a piece counts until
    /// it has ended, also if nobody wants its content any more.
    under_way: Mutex<VecDeque<Operation>>,
}

impl Pieces {
    /// Writes all pieces of a content but its last. Returns how many bytes those are. The last piece follows them on the same queue
    /// pair, so they have landed when it has.
    ///
    /// # Cancel safety
    /// If it is dropped, the pieces that were posted still land, before everything that is posted later.
    pub(super) async fn write_ahead(
        &self,
        queue_pair: &QueuePair,
        bytes: &Buf,
        remote: RemoteRange,
        piece_bytes: usize,
    ) -> Result<u64, FabricError> {
        let mut buffers = vec![(bytes.clone(), 0)];
        let remote = |place, length| RemoteRange { offset: remote.offset + place, length, ..remote };
        self.write_list_ahead(queue_pair, &mut buffers, remote, piece_bytes).await?;
        Ok(buffers.first().map_or(0, |(_, place)| *place))
    }

    /// The same of a content that consists of buffers without gaps between them, each with its place, of which `remote` makes a range of the
    /// peer's memory. Leaves in `buffers` what is in the last piece.
    ///
    /// # Cancel safety
    /// As [`write_ahead`](Self::write_ahead).
    pub(super) async fn write_list_ahead(
        &self,
        queue_pair: &QueuePair,
        buffers: &mut Vec<(Buf, u64)>,
        remote: impl Fn(u64, u64) -> RemoteRange,
        piece_bytes: usize,
    ) -> Result<(), FabricError> {
        tensorwire_testpoints::mark!("a content was written in pieces");
        let length = buffers.last().map_or(0, |(buffer, place)| place + buffer.len() as u64);
        let ahead = length.saturating_sub(1) / piece_bytes as u64 * piece_bytes as u64;
        let mut rest = Vec::new();
        for (mut buffer, mut place) in buffers.drain(..) {
            while place < ahead && !buffer.is_empty() {
                let some = (ahead - place).min(piece_bytes as u64).min(buffer.len() as u64);
                let local = buffer.slice(0..some as usize).unwrap_or_else(Buf::empty);
                let remote = Some(remote(place, some));
                self.post(queue_pair, &WorkRequest::Write { local, remote, immediate: None }).await?;
                buffer = buffer.slice(some as usize..buffer.len()).unwrap_or_else(Buf::empty);
                place += some;
                // A piece may end as soon as it is posted. What has come meanwhile is handled before the next.
                yield_once().await;
            }
            if !buffer.is_empty() {
                rest.push((buffer, place));
            }
        }
        *buffers = rest;
        Ok(())
    }

    /// Posts a piece once so few are under way.
    async fn post(&self, queue_pair: &QueuePair, piece: &WorkRequest) -> Result<(), FabricError> {
        let mut under_way = self.under_way.lock().await;
        while under_way.len() >= PIECES_MAX {
            if let Some(oldest) = under_way.front_mut() {
                oldest.await?;
            }
            under_way.pop_front();
        }
        under_way.push_back(queue_pair.post(piece)?);
        Ok(())
    }
}
