//! Makes a tensor of a sharded set of its pieces.

use std::{mem, ops::Range, ptr};

use futures::{TryFutureExt as _, TryStreamExt as _, future::try_join_all, stream::FuturesUnordered};
use tensorwire_memory::{
    BufMut, Pool,
    copy::{copy_bytes, copy_of},
};
use tensorwire_protocol::{Checksums, Metadata, SetContent, Validation, slice::Slice};

use crate::{
    error::WorkerError,
    peer_memory::import::yield_once,
    sets::{
        deriving::Derived,
        fetching::{NotMoved, Volume},
        part::Part,
        room::{Needs, in_pool},
        shard_plan::{Piece, Planned},
        slices::entry,
        snapshot::Snapshot,
        tasks::TensorWork,
    },
    values::{
        cut::{Cut, Place},
        sets::{manifest::ManifestEntry, reading::Problem},
        tensor::Tensor,
    },
    worker::{fetch::slice::unfit, metrics::count_whole_content},
};

/// A tensor of a version.
pub(super) struct Made {
    pub(super) form: Form,
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
    /// The same tensor of the version that this worker has, if it has the same shape.
    held: Option<&'a Tensor>,
    /// The pieces that `held` has in the same places.
    kept: Vec<&'a Piece>,
    /// Pieces that are made of what `held` has in the same places.
    derived: Vec<Derived<'a>>,
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
        let held = held.and_then(|held| Held::new(held, name, planned));
        let tensor = held.as_ref().map(|held| held.tensor);
        let (kept, derived, missing) = (Vec::new(), Vec::new(), Vec::new());
        let mut making =
            Self { parts, name, planned, held: tensor, kept, derived, missing, view: None, result: None };
        for piece in &planned.pieces {
            match held.as_ref().and_then(|held| held.reuse(parts, piece)) {
                Some(Reuse::Kept) => making.kept.push(piece),
                Some(Reuse::Derived(derived)) => making.derive(derived),
                None => making.missing.push(piece),
            }
        }
        making.derive_what_is_less();
        making
    }

    /// Adds a piece to those of the same publisher's tensor, which have the same deltas.
    fn derive(&mut self, derived: Derived<'a>) {
        let same = self.derived.iter_mut().find(|other| ptr::eq(other.part, derived.part));
        match same {
            Some(same) => same.pieces.extend(derived.pieces),
            None => self.derived.push(derived),
        }
    }

    /// Leaves out deltas that cost more than the pieces that they make.
    fn derive_what_is_less(&mut self) {
        for mut derived in mem::take(&mut self.derived) {
            derived.sort();
            let bytes = derived.pieces.iter().map(|piece| self.piece_bytes(piece));
            match derived.bytes_read() < bytes.fold(0, u64::saturating_add) {
                true => self.derived.push(derived),
                false => self.missing.extend(derived.pieces),
            }
        }
    }

    /// Leaves out all deltas, for which there is no room.
    pub(super) fn derive_nothing(&mut self) {
        self.missing.extend(mem::take(&mut self.derived).into_iter().flat_map(|derived| derived.pieces));
    }

    /// The publishers of what this worker does not have.
    pub(super) fn publishers(&self) -> impl Iterator<Item = usize> {
        self.missing.iter().map(|piece| piece.publisher)
    }

    /// Finds the result in what publishers have lent.
    pub(super) fn borrowed(&mut self) {
        self.view = self.view_of_lent();
    }

    /// Counts what is left to request.
    pub(super) fn count_requests(&self) {
        for part in self.asked().filter_map(|piece| self.parts.get(piece.publisher)) {
            part.count_requests(1);
        }
        for Derived { part, deltas, .. } in &self.derived {
            part.count_requests(deltas.len());
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
        self.held.filter(|_| self.missing.is_empty() && self.derived.is_empty())
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
            Some(piece) if self.derived.is_empty() => self.lent(piece).is_some() && self.view.is_none(),
            _ => true,
        }
    }

    /// The room that it needs in the receive pool.
    pub(super) fn needs(&self) -> Needs {
        let result = self.planned.metadata.byte_length;
        if self.is_put_together() {
            // If there is any doubt of the deltas, the pieces come, of which runs of bytes need no room of their own.
            let derived = self.derived.iter().flat_map(|derived| derived.pieces.iter().copied());
            let pieces = self.asked().chain(derived.filter(|piece| self.run(piece).is_none()));
            let pieces = pieces.map(|piece| in_pool(self.piece_bytes(piece)));
            let bytes = pieces.chain(self.derived.iter().map(Derived::room));
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
            self.put_together(result, &mut volume).await?
        } else {
            let piece = self.only_piece().ok_or_else(WorkerError::handed_out)?;
            let tensor = self.received(piece).await?;
            let part = self.parts.get(piece.publisher);
            volume = part.map(|part| Volume::of((part.set, &part.link), &tensor)).unwrap_or_default();
            Form::Ready(tensor)
        };
        let is_changed = self.unchanged().is_none();
        Ok(Made { form, is_changed, volume })
    }

    /// What is moved for the pieces that are put together. Pieces of what is lent for views count nothing.
    fn volume(&self) -> Volume {
        let moved = self.missing.iter().filter(|piece| !matches!(self.lent(piece), Some((_, true))));
        moved.map(|piece| self.piece_volume(piece)).fold(Volume::default(), Volume::and)
    }

    fn piece_volume(&self, piece: &Piece) -> Volume {
        Volume { bytes: self.piece_bytes(piece), copies: 1 }
    }

    async fn put_together(&self, result: BufMut, volume: &mut Volume) -> Result<Form, NotMoved> {
        let asked: Vec<_> = self.asked().collect();
        let buffer = self.with_received(result, &asked).await?;
        let buffer = self.with_derived(buffer, volume).await?;
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

    /// Receives pieces.
    async fn with_received(&self, result: BufMut, asked: &[&Piece]) -> Result<BufMut, NotMoved> {
        let runs = asked.iter().map(|piece| self.run(piece)).collect::<Option<Vec<_>>>();
        match runs {
            Some(runs) if !asked.is_empty() => self.received_in_place(result, asked, runs).await,
            _ => self.received_and_copied(result, asked).await,
        }
    }

    /// Makes pieces of what is held and of deltas, each while the next ones are on their way. Receives the pieces of a tensor if there is
    /// any doubt of its deltas.
    async fn with_derived(&self, mut result: BufMut, volume: &mut Volume) -> Result<BufMut, NotMoved> {
        let Some(held) = self.held.filter(|_| !self.derived.is_empty()) else { return Ok(result) };
        for derived in &self.derived {
            derived.copy_held((&mut result, self.shape()), held).await?;
        }
        let mut received: FuturesUnordered<_> =
            self.derived.iter().map(|derived| derived.received(0)).collect();
        let mut doubtful = Vec::new();
        while let Some((derived, number, delta)) = received.try_next().await? {
            let left = derived.deltas.len() - (number + 1);
            match self.apply((derived, delta), (&mut result, volume), left).await {
                Ok(()) if left > 0 => received.push(derived.received(number + 1)),
                Ok(()) => {
                    tensorwire_testpoints::mark!("a piece of a sharded set is made of deltas");
                }
                Err(problem) => {
                    let peer = derived.part.set.peer.name();
                    log!(DEBUG, peer, name = self.name, problem, "a delta is not used");
                    count_whole_content("delta");
                    derived.part.count_requests(derived.pieces.len());
                    derived.part.leave_out_requests(left);
                    doubtful.extend_from_slice(&derived.pieces);
                }
            }
        }
        drop(received);
        *volume = doubtful.iter().map(|piece| self.piece_volume(piece)).fold(*volume, Volume::and);
        self.with_received(result, &doubtful).await
    }

    /// Changes the pieces of a tensor by a delta. If none is `left`, and the tensor is in one run of bytes, its checksum is compared.
    async fn apply(
        &self,
        (derived, delta): (&Derived<'a>, Result<Tensor, Problem>),
        (result, volume): (&mut BufMut, &mut Volume),
        left: usize,
    ) -> Result<(), Problem> {
        let delta = delta?;
        *volume = volume.and(Volume { bytes: delta.bytes().len() as u64, copies: 1 });
        derived.apply(&delta, (result, self.shape())).await?;
        let ([piece], 0) = (&*derived.pieces, left) else { return Ok(()) };
        let whole = self.run(piece).filter(|run| run.len() as u64 == derived.entry.metadata.byte_length);
        let Some(whole) = whole.and_then(|run| result.get(run)) else { return Ok(()) };
        let sum = Checksums::default().sum(Validation::Xxh3, whole).await;
        if sum == derived.entry.checksum { Ok(()) } else { Err("the checksum of the result differs") }
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

/// A tensor of the version that this worker has.
struct Held<'a> {
    version: &'a Snapshot,
    name: &'a str,
    tensor: &'a Tensor,
    pieces: &'a [Piece],
}

/// How a piece is made without being received.
enum Reuse<'a> {
    Kept,
    Derived(Derived<'a>),
}

impl<'a> Held<'a> {
    /// `None` if it is not as planned.
    fn new(version: &'a Snapshot, name: &'a str, planned: &Planned) -> Option<Self> {
        let (tensor, pieces) = version.with_pieces(name)?;
        (*tensor.metadata() == planned.metadata).then_some(Self { version, name, tensor, pieces })
    }

    /// How a piece is made of the one that the version has in the same place, if that is from the same publisher.
    fn reuse(&self, parts: &'a [Part<'a>], piece: &'a Piece) -> Option<Reuse<'a>> {
        let (part, _, entry) = offered(parts, self.name, piece)?;
        let before = self.version.manifest_of(piece.publisher)?;
        if before.incarnation != part.manifest.incarnation || !self.pieces.contains(piece) {
            return None;
        }
        if before.entries.get(before.place(self.name)?)?.stamp == entry.stamp {
            return Some(Reuse::Kept);
        }
        let has_slices = piece.from.metadata(&entry.metadata).is_ok();
        let deltas = part.deltas(self.name).filter(|_| has_slices && entry.checksum.is_some())?;
        Some(Reuse::Derived(Derived { part, entry, deltas, pieces: vec![piece] }))
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
