//! Makes a tensor of a sharded set of its pieces.

use std::{
    ops::Range,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use futures::{TryFutureExt as _, TryStreamExt as _, future::try_join_all, stream::FuturesUnordered};
use tensorwire_memory::{
    BufMut, Pool,
    copy::{copy_bytes, copy_of},
};
use tensorwire_protocol::{Metadata, SetContent, slice::Slice};

use crate::{
    error::WorkerError,
    peer_memory::import::yield_once,
    sets::{
        fetching::{Link, Move, NotMoved, PeerSet, Volume},
        room::{Needs, in_pool},
        shard_plan::{Piece, Planned},
        slices::entry,
        snapshot::{Origin, Snapshot},
        tasks::TensorWork,
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
    /// Its tensors in the order of the manifest, as far as the publisher has lent them.
    lent: OnceLock<Vec<Option<Tensor>>>,
    /// Requests for its contents that are not made yet.
    unasked: AtomicUsize,
}

impl<'a> Part<'a> {
    pub(super) fn new(set: &'a PeerSet, link: Link, edition: u64, manifest: Manifest) -> Self {
        Self { set, link, edition, manifest, lent: OnceLock::new(), unasked: AtomicUsize::default() }
    }

    /// Borrows its tensors, if the publisher lends them.
    pub(super) async fn borrow(&self) -> Result<(), NotMoved> {
        let lent = Move::new(self.set, &self.link).lent(self.edition, &self.manifest).await?;
        // Nobody else sets it.
        let _ = self.lent.set(lent);
        Ok(())
    }

    fn lent(&self, name: &str) -> Option<&Tensor> {
        self.lent.get()?.get(self.manifest.place(name)?)?.as_ref()
    }

    /// Whether the results share the memory of what is lent.
    fn may_share(&self) -> bool {
        self.link.lends(self.set.sharing)
    }

    /// Whether the request that is made now is the last one, at which the publisher stops holding the version. Requests arrive in the
    /// order in which they are made, and one that the publisher has taken holds the memory of its content until that is sent. But a
    /// request that waits for memory is made later: then the publisher holds the version until it is asked for another.
    fn asks_last(&self) -> bool {
        self.unasked.fetch_sub(1, Relaxed) == 1 && self.set.peer.worker.receive_pool().stats().waiting == 0
    }
}

/// A tensor of a version.
pub(super) struct Made {
    pub(super) form: Form,
    /// Of its pieces.
    pub(super) origins: Vec<Origin>,
    pub(super) is_changed: bool,
    pub(super) volume: Volume,
}

/// How far a tensor is.
pub(super) enum Form {
    Ready(Tensor),
    /// What is left is to copy pieces that are here.
    Copies(Copies),
}

/// A tensor of a version that is to be made.
pub(super) struct Making<'a> {
    parts: &'a [Part<'a>],
    name: &'a str,
    planned: &'a Planned,
    /// Of its pieces.
    origins: Vec<Origin>,
    /// The same tensor of the version that this worker has, if it has the same shape.
    held: Option<&'a Tensor>,
    /// The pieces that `held` has in the same places.
    kept: Vec<&'a Piece>,
    missing: Vec<&'a Piece>,
    /// The result, if it is one run of bytes of a lent tensor.
    view: Option<Tensor>,
    /// Memory for the result, if its pieces are put together.
    result: Option<BufMut>,
}

impl<'a> Making<'a> {
    pub(super) fn new(
        parts: &'a [Part<'a>],
        (name, planned): (&'a str, &'a Planned),
        held: Option<&'a Snapshot>,
    ) -> Self {
        let held = held.and_then(|held| held.with_origins(name));
        let held = held.filter(|(tensor, _)| *tensor.metadata() == planned.metadata);
        let is_held = |origin: &Origin| held.is_some_and(|(_, before)| before.contains(origin));
        let (mut origins, mut kept, mut missing) = (Vec::new(), Vec::new(), Vec::new());
        for piece in &planned.pieces {
            let origin = offered(parts, name, piece).map(|(part, _, entry)| {
                let (incarnation, stamp) = (part.manifest.incarnation, entry.stamp);
                Origin { incarnation, stamp, piece: piece.clone() }
            });
            if origin.as_ref().is_some_and(is_held) { &mut kept } else { &mut missing }.push(piece);
            origins.extend(origin);
        }
        let held = held.map(|(tensor, _)| tensor);
        Self { parts, name, planned, origins, held, kept, missing, view: None, result: None }
    }

    /// The publishers of what this worker does not have.
    pub(super) fn publishers(&self) -> impl Iterator<Item = usize> {
        self.missing.iter().map(|piece| piece.publisher)
    }

    /// Finds out what is left to request, after publishers have lent what they lend.
    pub(super) fn borrowed(&mut self) {
        self.view = self.view_of_lent();
        for part in self.asked().filter_map(|piece| self.parts.get(piece.publisher)) {
            part.unasked.fetch_add(1, Relaxed);
        }
    }

    /// The pieces that are requested.
    fn asked(&self) -> impl Iterator<Item = &'a Piece> {
        self.missing.iter().copied().filter(|piece| self.lent(piece).is_none())
    }

    /// The publisher's tensor that has this piece, and whether the result may share its memory.
    fn lent(&self, piece: &Piece) -> Option<(&'a Tensor, bool)> {
        let part = self.parts.get(piece.publisher)?;
        Some((part.lent(self.name)?, part.may_share()))
    }

    /// The held tensor, if it is this one.
    fn unchanged(&self) -> Option<&'a Tensor> {
        self.held.filter(|_| self.missing.is_empty())
    }

    /// The only piece, if it is the whole tensor.
    fn only_piece(&self) -> Option<&'a Piece> {
        match &*self.planned.pieces {
            [piece] if piece.into == Slice::whole(self.shape()) => Some(piece),
            _ => None,
        }
    }

    fn shape(&self) -> &'a [u64] {
        self.planned.metadata.shape.dimensions()
    }

    fn view_of_lent(&self) -> Option<Tensor> {
        let piece = self.only_piece()?;
        let (lent, _) = self.lent(piece).filter(|(_, may_share)| *may_share)?;
        Cut::new(lent, &piece.from).ok()?.shared()
    }

    /// Whether pieces are put together in memory of their own.
    fn is_put_together(&self) -> bool {
        match self.only_piece() {
            _ if self.unchanged().is_some() => false,
            Some(piece) => self.lent(piece).is_some() && self.view.is_none(),
            None => true,
        }
    }

    /// The room that it needs in the receive pool.
    pub(super) fn needs(&self) -> Needs {
        let result = self.planned.metadata.byte_length;
        if self.is_put_together() {
            let bytes = self.asked().map(|piece| in_pool(self.piece_bytes(piece)));
            return Needs { result, piece: bytes.max().unwrap_or_default() };
        }
        let is_asked = self.asked().next().is_some();
        Needs { result: if is_asked { in_pool(result) } else { 0 }, piece: 0 }
    }

    fn piece_bytes(&self, piece: &Piece) -> u64 {
        if self.only_piece().is_some() {
            // Its elements may have no fixed size.
            return self.planned.metadata.byte_length;
        }
        piece.into.lengths().into_iter().fold(self.element_bytes(), u64::saturating_mul)
    }

    fn element_bytes(&self) -> u64 {
        self.planned.metadata.dtype.bits() / 8
    }

    /// Takes the memory for the result. All results of a version take theirs before any piece comes: pieces that are freed between them
    /// would leave gaps that are too short for a result.
    pub(super) async fn reserve(&mut self, pool: &Pool) -> Result<(), WorkerError> {
        if self.is_put_together() {
            self.result = Some(pool.alloc(self.planned.metadata.byte_length as usize).await?);
        }
        Ok(())
    }

    /// Receives what was not lent.
    pub(super) async fn made(mut self) -> Result<Made, NotMoved> {
        let mut volume = self.volume();
        // Of an unchanged tensor, too: the view that is held keeps all of the version before.
        let form = if let Some(tensor) = self.view.take().or_else(|| self.unchanged().cloned()) {
            Form::Ready(tensor)
        } else if let Some(result) = self.result.take() {
            self.put_together(result).await?
        } else {
            let piece = self.only_piece().ok_or_else(WorkerError::handed_out)?;
            let tensor = self.received(piece).await?;
            let part = self.parts.get(piece.publisher);
            volume = part.map(|part| Volume::of((part.set, &part.link), &tensor)).unwrap_or_default();
            Form::Ready(tensor)
        };
        let is_changed = self.unchanged().is_none();
        Ok(Made { form, origins: self.origins, is_changed, volume })
    }

    /// What is moved for the pieces that are put together. Pieces of what is lent for views count nothing.
    fn volume(&self) -> Volume {
        let moved = self.missing.iter().filter(|piece| !matches!(self.lent(piece), Some((_, true))));
        moved
            .map(|piece| Volume { bytes: self.piece_bytes(piece), copies: 1 })
            .fold(Volume::default(), Volume::and)
    }

    async fn put_together(&self, result: BufMut) -> Result<Form, NotMoved> {
        let asked: Vec<_> = self.asked().collect();
        let runs = asked.iter().map(|piece| self.run(piece)).collect::<Option<Vec<_>>>();
        let buffer = match runs {
            Some(runs) if !asked.is_empty() => self.received_in_place(result, &asked, runs).await?,
            _ => self.received_and_copied(result, &asked).await?,
        };
        let lent =
            self.missing.iter().filter_map(|piece| Some((self.lent(piece)?.0, &piece.from, &piece.into)));
        let kept = self.kept.iter().filter_map(|piece| Some((self.held?, &piece.into, &piece.into)));
        let cuts = lent.chain(kept).map(|(tensor, from, into)| {
            let cut = Cut::new(tensor, from).map_err(|invalid| unfit(from, &invalid))?;
            Ok::<_, WorkerError>((cut, into.clone()))
        });
        let copies =
            Copies { metadata: self.planned.metadata.clone(), buffer, cuts: cuts.collect::<Result<_, _>>()? };
        Ok(if copies.cuts.is_empty() { Form::Ready(copies.finished()) } else { Form::Copies(copies) })
    }

    /// The bytes of the result that are this piece, if they are one run.
    fn run(&self, piece: &Piece) -> Option<Range<usize>> {
        let run = piece.into.contiguous(self.shape())?;
        let bytes = self.element_bytes();
        Some((run.start * bytes) as usize..(run.end * bytes) as usize)
    }

    /// Receives pieces into their places.
    async fn received_in_place(
        &self,
        result: BufMut,
        asked: &[&Piece],
        runs: Vec<Range<usize>>,
    ) -> Result<BufMut, NotMoved> {
        let mut pieces: Vec<_> = runs.into_iter().zip(asked).collect();
        pieces.sort_by_key(|(run, _)| run.start);
        let cuts: Vec<_> = pieces.iter().flat_map(|(run, _)| [run.start, run.end]).collect();
        let (divided, places) = result.divide(&cuts).ok_or_else(WorkerError::handed_out)?;
        // Every second part is what is between two pieces.
        let places = places.into_iter().skip(1).step_by(2);
        let received = places.zip(pieces).map(|(place, (_, piece))| self.received_into(piece, place));
        try_join_all(received).await?;
        Ok(divided.joined().map_err(|_| WorkerError::handed_out())?)
    }

    /// Receives pieces, and copies each to its places while the others are on their way.
    async fn received_and_copied(&self, mut result: BufMut, asked: &[&Piece]) -> Result<BufMut, NotMoved> {
        let received =
            asked.iter().map(|piece| self.received(piece).map_ok(move |tensor| (tensor, &piece.into)));
        let mut received: FuturesUnordered<_> = received.collect();
        while let Some((tensor, slice)) = received.try_next().await? {
            Cut::all(tensor).copied(&mut result, Place { slice, shape: self.shape() }, copy_bytes).await;
        }
        drop(received);
        Ok(result)
    }

    async fn received(&self, piece: &Piece) -> Result<Tensor, NotMoved> {
        let (part, content, metadata) = self.request(piece)?;
        part.set.part(&part.link, (content, metadata), &piece.from).await
    }

    async fn received_into(&self, piece: &Piece, place: BufMut) -> Result<(), NotMoved> {
        let (part, content, metadata) = self.request(piece)?;
        part.set.part_into(&part.link, (content, metadata), &piece.from, place).await
    }

    fn request(&self, piece: &Piece) -> Result<(&'a Part<'a>, SetContent, &'a Metadata), NotMoved> {
        let (part, number, entry) = offered(self.parts, self.name, piece).ok_or(NotMoved::Superseded)?;
        let content = SetContent { edition: part.edition, number, is_last: part.asks_last() };
        Ok((part, content, &entry.metadata))
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

/// Pieces of lent and held tensors, which are copied to their places in another.
pub(super) struct Copies {
    metadata: Metadata,
    buffer: BufMut,
    cuts: Vec<(Cut, Slice)>,
}

impl Copies {
    fn finished(self) -> Tensor {
        Tensor::received(self.metadata, self.buffer.freeze(), None)
    }
}

impl TensorWork for Copies {
    type Done = Tensor;

    const NAME: &'static str = "copies of pieces";

    fn bytes(&self) -> usize {
        let lengths = self.cuts.iter().map(|(cut, _)| cut.length());
        usize::try_from(lengths.fold(0, u64::saturating_add)).unwrap_or(usize::MAX)
    }

    async fn work(mut self, all: usize) -> Tensor {
        for (cut, slice) in &self.cuts {
            let place = Place { slice, shape: self.metadata.shape.dimensions() };
            cut.copied(&mut self.buffer, place, copy_of(all)).await;
        }
        yield_once().await;
        self.finished()
    }
}
