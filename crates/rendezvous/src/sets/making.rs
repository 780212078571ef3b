//! Makes a tensor of a sharded set of its pieces.

use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use futures::{TryFutureExt as _, TryStreamExt as _, stream::FuturesUnordered};
use tensorwire_memory::{BufMut, Pool};
use tensorwire_protocol::{SetContent, slice::Slice};
use tokio::sync::OnceCell;

use crate::{
    error::WorkerError,
    sets::{
        fetching::{Link, NotMoved, PeerSet, Volume},
        room::{Needs, in_pool},
        shard_plan::{Piece, Planned},
        slices::entry,
        snapshot::{Origin, Snapshot},
    },
    values::{
        cut::{Cut, Place},
        sets::manifest::{Manifest, ManifestEntry},
        tensor::Tensor,
    },
    worker::fetch::slice::unfit,
};

/// A version of one publisher.
pub(super) struct Part<'a> {
    pub(super) set: &'a PeerSet,
    pub(super) link: Link,
    pub(super) edition: u64,
    pub(super) manifest: Manifest,
    /// Requests for its contents that are not made yet.
    pub(super) unasked: AtomicUsize,
}

impl Part<'_> {
    /// Whether the request that is made now is the last one, at which the publisher stops holding the version. Requests arrive in the
    /// order in which they are made, and one that the publisher has taken holds the memory of its content until that is sent. But a
    /// request that waits for memory is made later: then the publisher holds the version until it is asked for another.
    fn asks_last(&self) -> bool {
        self.unasked.fetch_sub(1, Relaxed) == 1 && self.set.peer.worker.receive_pool().stats().waiting == 0
    }
}

/// A tensor of a version.
pub(super) struct Made {
    pub(super) tensor: Tensor,
    /// Of its pieces.
    pub(super) origins: Vec<Origin>,
    pub(super) is_changed: bool,
    pub(super) volume: Volume,
}

/// A tensor of a version that is to be made.
pub(super) struct Making<'a> {
    parts: &'a [Part<'a>],
    name: &'a str,
    planned: &'a Planned,
    /// Of its pieces.
    origins: Vec<Origin>,
    /// The same tensor of the version that this worker has, if it has the same shape, and the origins of its pieces.
    held: Option<(&'a Tensor, &'a [Origin])>,
    /// Memory for the result, if it is made of several pieces.
    result: Option<BufMut>,
    /// The same tensor of each publisher that has lent it.
    lent: Vec<OnceCell<Tensor>>,
}

impl<'a> Making<'a> {
    pub(super) fn new(
        parts: &'a [Part<'a>],
        (name, planned): (&'a str, &'a Planned),
        held: Option<&'a Snapshot>,
    ) -> Self {
        let origins = planned.pieces.iter().filter_map(|piece| {
            let (part, _, entry) = offered(parts, name, piece)?;
            Some(Origin { incarnation: part.manifest.incarnation, stamp: entry.stamp, piece: piece.clone() })
        });
        let origins = origins.collect();
        let held = held.and_then(|held| held.with_origins(name));
        let held = held.filter(|(tensor, _)| *tensor.metadata() == planned.metadata);
        let lent = parts.iter().map(|_| OnceCell::new()).collect();
        let making = Self { parts, name, planned, origins, held, result: None, lent };
        making.count_requests();
        making
    }

    /// Counts its requests: one for each piece that is moved, or for all pieces of a tensor that is lent.
    fn count_requests(&self) {
        if self.unchanged().is_some() {
            return;
        }
        let is_whole = self.only_piece().is_some();
        let moved = self.origins.iter().filter(|origin| is_whole || !self.is_held(origin));
        let mut lenders = BTreeSet::new();
        let asked = moved.map(|origin| &origin.piece);
        let asked = asked.filter(|piece| !self.is_lent(piece) || lenders.insert(piece.publisher));
        for part in asked.filter_map(|piece| self.parts.get(piece.publisher)) {
            part.unasked.fetch_add(1, Relaxed);
        }
    }

    /// Takes the memory for the result. All results of a version take theirs before any piece comes: pieces that are freed between them
    /// would leave gaps that are too short for a result.
    pub(super) async fn reserve(&mut self, pool: &Pool) -> Result<(), WorkerError> {
        if self.unchanged().is_none() && self.only_piece().is_none() {
            self.result = Some(pool.alloc(self.planned.metadata.byte_length as usize).await?);
        }
        Ok(())
    }

    /// The held tensor, if it is this one.
    fn unchanged(&self) -> Option<&Tensor> {
        self.held.filter(|(_, before)| *before == self.origins).map(|(tensor, _)| tensor)
    }

    /// The only piece, if it is the whole tensor.
    fn only_piece(&self) -> Option<&'a Piece> {
        match &*self.planned.pieces {
            [piece] if piece.into == Slice::whole(self.planned.metadata.shape.dimensions()) => Some(piece),
            _ => None,
        }
    }

    fn is_held(&self, origin: &Origin) -> bool {
        self.held.is_some_and(|(_, before)| before.contains(origin))
    }

    /// The room that it needs in the receive pool.
    pub(super) fn needs(&self) -> Needs {
        let result = self.planned.metadata.byte_length;
        if self.unchanged().is_some() {
            return Needs::default();
        }
        if let Some(piece) = self.only_piece() {
            return Needs { result: if self.is_view(piece) { 0 } else { in_pool(result) }, piece: 0 };
        }
        let bytes = |piece: &Piece| {
            let element = self.planned.metadata.dtype.bits() / 8;
            piece.into.lengths().into_iter().fold(element, u64::saturating_mul)
        };
        let moved =
            self.origins.iter().filter(|origin| !self.is_held(origin) && !self.is_lent(&origin.piece));
        let longest = moved.map(|origin| in_pool(bytes(&origin.piece))).max();
        Needs { result, piece: longest.unwrap_or_default() }
    }

    /// Whether the publisher lends the tensor that has this piece.
    fn is_lent(&self, piece: &Piece) -> bool {
        self.parts.get(piece.publisher).is_some_and(|part| part.link.lends(part.set.sharing))
    }

    /// Whether the piece is a view.
    fn is_view(&self, piece: &Piece) -> bool {
        let offered = offered(self.parts, self.name, piece);
        self.is_lent(piece)
            && offered.is_some_and(|(_, _, entry)| {
                piece.from.contiguous(entry.metadata.shape.dimensions()).is_some()
            })
    }

    /// Makes it, in memory of `pool`.
    pub(super) async fn made(mut self, pool: &Pool) -> Result<Made, NotMoved> {
        if let Some(tensor) = self.unchanged().cloned() {
            return Ok(Made { tensor, origins: self.origins, is_changed: false, volume: Volume::default() });
        }
        let (tensor, volume) = if let Some(piece) = self.only_piece() {
            let (cut, volume) = self.moved_piece(piece).await?;
            (cut.made(pool).await.map_err(WorkerError::from)?, volume)
        } else {
            let result = self.result.take().ok_or_else(WorkerError::handed_out)?;
            self.assembled(result).await?
        };
        let volume = volume.and(self.lent_volume());
        Ok(Made { tensor, origins: self.origins, is_changed: true, volume })
    }

    /// Makes it of several pieces, in `buffer`.
    async fn assembled(&self, mut buffer: BufMut) -> Result<(Tensor, Volume), NotMoved> {
        let metadata = &self.planned.metadata;
        let shape = metadata.shape.dimensions();
        let (kept, changed): (Vec<_>, Vec<_>) = self.origins.iter().partition(|origin| self.is_held(origin));
        let pieces = changed.into_iter().map(|Origin { piece, .. }| {
            self.moved_piece(piece).map_ok(|moved| (moved, Place { slice: &piece.into, shape }))
        });
        let mut pieces: FuturesUnordered<_> = pieces.collect();
        let mut volume = Volume::default();
        // Each is copied while the others are on their way.
        while let Some(((cut, moved), place)) = pieces.try_next().await? {
            volume = volume.and(moved);
            cut.copied(&mut buffer, place).await;
        }
        drop(pieces);
        for Origin { piece, .. } in kept {
            if let Some((tensor, _)) = self.held {
                let cut = Cut::new(tensor, &piece.into).map_err(|invalid| unfit(&piece.into, &invalid))?;
                cut.copied(&mut buffer, Place { slice: &piece.into, shape }).await;
            }
        }
        Ok((Tensor::received(metadata.clone(), buffer.freeze(), None), volume))
    }

    /// A piece, and what was moved if it was not cut out of a lent tensor.
    async fn moved_piece(&self, piece: &Piece) -> Result<(Cut, Volume), NotMoved> {
        let offered = offered(self.parts, self.name, piece).zip(self.lent.get(piece.publisher));
        let ((part, number, entry), lent) = offered.ok_or(NotMoved::Superseded)?;
        let content = || SetContent { edition: part.edition, number, is_last: part.asks_last() };
        let cut = part.set.part(&part.link, (content, &entry.metadata), &piece.from, lent).await?;
        let volume = match lent.get() {
            Some(_) => Volume::default(),
            None => Volume::of((part.set, &part.link), cut.source()),
        };
        Ok((cut, volume))
    }

    /// What was moved for tensors that publishers have lent: nothing, up to the limit of views.
    fn lent_volume(&self) -> Volume {
        let lent = self.parts.iter().zip(&self.lent);
        let lent =
            lent.filter_map(|(part, content)| Some(Volume::of((part.set, &part.link), content.get()?)));
        lent.fold(Volume::default(), Volume::and)
    }
}

/// The version that has a piece of the tensor called `name`, and the tensor's number and entry there.
fn offered<'a>(
    parts: &'a [Part<'a>],
    name: &str,
    piece: &Piece,
) -> Option<(&'a Part<'a>, u32, &'a ManifestEntry)> {
    let part = parts.get(piece.publisher)?;
    let (number, entry) = entry(&part.manifest, name)?;
    Some((part, number, entry))
}
