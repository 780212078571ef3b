//! Room in the receive pool for the contents of a version.

use std::{future::Future, pin::Pin};

use futures::future::{Either, select};
use tensorwire_protocol::limits::EAGER_BYTES_MAX;

use crate::{
    error::WorkerError,
    sets::{
        fetching::{Link, NotMoved, PeerSet},
        plan::Way,
        snapshot::Snapshot,
    },
    values::sets::manifest::Manifest,
};

/// Bytes of the receive pool that a tensor of a sharded version takes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Needs {
    /// For as long as the version exists.
    pub(super) result: u64,
    /// For the longest of the pieces, while the tensor is made.
    pub(super) piece: u64,
}

impl PeerSet {
    /// Checks that the receive pool can hold what comes in these ways, beside the contents of `held`.
    ///
    /// # Errors
    /// [`WorkerError::VersionTooLarge`]. A version that passes may still have to wait for memory that others hold.
    pub(super) fn check_room(
        &self,
        version: u64,
        (manifest, ways): (&Manifest, &[Way]),
        held: Option<&Snapshot>,
    ) -> Result<(), WorkerError> {
        self.check_bytes(version, pool_bytes(manifest, ways), held)
    }

    /// As [`check_room`](Self::check_room), for the tensors of a sharded version.
    pub(super) fn check_room_for_shards(
        &self,
        version: u64,
        needs: impl Iterator<Item = Needs>,
        held: Option<&Snapshot>,
    ) -> Result<(), WorkerError> {
        let all = needs.fold(Needs::default(), |all, Needs { result, piece }| Needs {
            result: all.result.saturating_add(result),
            piece: all.piece.max(piece),
        });
        // Pieces are copied and freed as they arrive, so room for the longest one is enough.
        self.check_bytes(version, all.result.saturating_add(all.piece), held)
    }

    fn check_bytes(&self, version: u64, bytes: u64, held: Option<&Snapshot>) -> Result<(), WorkerError> {
        let held = held.map_or(0, held_bytes);
        let cap = self.peer.worker.receive_pool().cap_bytes();
        if bytes == 0 || bytes.saturating_add(held) <= cap {
            return Ok(());
        }
        Err(WorkerError::VersionTooLarge { transfer: self.transfer().name(), version, bytes, held, cap })
    }

    /// Awaits `contents` for as long as bytes arrive over `links`, or memory is free.
    ///
    /// # Errors
    /// Those of `contents`; [`WorkerError::DeadlineExceeded`] if a request has waited for memory during the deadline of the set, and
    /// nothing has arrived meanwhile.
    pub(super) async fn unless_starved<T>(
        &self,
        links: &[&Link],
        contents: Pin<&mut (impl Future<Output = Result<T, NotMoved>> + Send)>,
    ) -> Result<T, NotMoved> {
        let starved = Box::pin(self.starved(links));
        match select(contents, starved).await {
            Either::Left((contents, _)) => contents,
            Either::Right((error, _)) => Err(error.into()),
        }
    }

    async fn starved(&self, links: &[&Link]) -> WorkerError {
        let arrived_over = |link: &&Link| match link {
            Link::Own => 0,
            Link::Connected(connection) => connection.queue_pair.stats().bytes_received,
        };
        let arrived = || links.iter().map(arrived_over).fold(0, u64::wrapping_add);
        let mut before = arrived();
        let mut waited = false;
        loop {
            self.peer.worker.runtime().sleep(self.limit).await;
            let (now, lack) = (arrived(), self.lack());
            if let Some(lack) = lack.as_ref().filter(|_| waited && now == before) {
                let (what, limit) = (format!("following the set {}{lack}", self.transfer()), self.limit);
                let hint = "drop older versions and other received tensors";
                return WorkerError::DeadlineExceeded { what, limit, hint };
            }
            (before, waited) = (now, lack.is_some());
        }
    }

    /// Describes the lack of memory, if a request of this worker waits for memory now.
    pub(super) fn lack(&self) -> Option<String> {
        let pool = self.peer.worker.receive_pool();
        let stats = pool.stats();
        let (used, cap) = (stats.used_bytes, pool.cap_bytes());
        (stats.waiting > 0).then(|| {
            format!(
                " (its contents wait for memory: {used} of {cap} bytes of the receive pool are in use; the setting \
                 `receive_bytes` allows more)"
            )
        })
    }
}

/// Bytes that the receive pool must have at the same time for what comes in these ways: for the contents that are requested at once, and
/// for the tensors that they become.
fn pool_bytes(manifest: &Manifest, ways: &[Way]) -> u64 {
    let (mut requested, mut made) = (0_u64, 0_u64);
    for (entry, way) in manifest.entries.iter().zip(ways) {
        let whole = in_pool(entry.metadata.byte_length);
        let contents = match way {
            Way::Held(_) => continue,
            Way::Whole(_) => whole,
            Way::Deltas(_, parts) => {
                parts.iter().fold(0, |bytes: u64, part| bytes.saturating_add(in_pool(part.bytes)))
            }
        };
        (requested, made) = (requested.saturating_add(contents), made.saturating_add(whole));
    }
    requested.max(made)
}

/// Bytes of the receive pool that the tensors of `held` take for as long as the stream has them.
fn held_bytes(held: &Snapshot) -> u64 {
    let lengths = held.tensors().iter().filter(|tensor| !tensor.buf().is_foreign());
    lengths.map(|tensor| in_pool(tensor.bytes().len() as u64)).fold(0, u64::saturating_add)
}

/// Short contents may arrive inside messages, and then take no memory of the pool.
pub(super) fn in_pool(bytes: u64) -> u64 {
    if bytes > EAGER_BYTES_MAX.into() { bytes } else { 0 }
}
