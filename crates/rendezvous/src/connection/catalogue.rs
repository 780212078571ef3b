//! Fetches out of the peer's catalogue: on one host, a published tensor is read without a message to the peer.

use std::sync::Arc;

use tensorwire_fabric::{CellReading, PeerCatalogue};
use tensorwire_memory::{Buf, BufMut, copy::CopyReason};
use tensorwire_protocol::{DataType, Metadata, ReceiveOptions, Scope, Sharing};
use tracing::Instrument as _;

use crate::{
    connection::{DataConnection, meter::receive_span},
    error::{Transfer, WorkerError},
    peer_memory::{
        import::{PIECE_BYTES, yield_once},
        target::Target,
    },
    values::{catalogue, published::Version, tensor::Tensor},
};

/// Copies that are begun before the peer is asked. A copy that is overtaken by a new publication is useless.
const COPIES: usize = 3;

/// Contents of so many bytes are not copied out of a catalogue. The fabric copies them faster, with a second thread where a
/// core is idle.
const COPY_BYTES_MAX: usize = 2 << 20;

/// A tensor, and its version if that was asked for.
type Found = (Tensor, Option<Version>);

/// The content was replaced before all of it was copied.
struct Overtaken;

impl DataConnection {
    /// The published tensor, if all of it can be taken out of the peer's catalogue at once: no content but a view is longer
    /// than what is copied before other tasks have their turn.
    pub(crate) fn take_at_once(&self, scope: Scope, name: Transfer<'_>, sharing: Sharing) -> Option<Found> {
        let (peers, reading) = self.reading(scope, name)?;
        let (version, metadata) = catalogue::parse(&reading)?;
        let bytes = match in_cell(&reading) {
            Some(bytes) => bytes,
            None if sharing == Sharing::View => peers.view(&reading)?,
            None => {
                let length = usize::try_from(reading.length).ok().filter(|length| *length <= PIECE_BYTES)?;
                let mut into = self.allocator.pool.try_alloc(length).ok()?;
                peers.copy(&reading, 0, &mut into).then(|| into.freeze())?
            }
        };
        let version = self.taken(scope, name, version, &metadata)?;
        Some((Tensor::received(metadata, bytes, None), version))
    }

    /// As [`take_at_once`](Self::take_at_once), into `buffer`, if it fits and has the type `dtype`.
    pub(crate) fn fill_at_once(
        &self,
        scope: Scope,
        name: Transfer<'_>,
        (dtype, buffer): (Option<DataType>, &mut BufMut),
    ) -> Option<(Metadata, Option<Version>)> {
        let (peers, reading) = self.reading(scope, name)?;
        let (version, metadata) = catalogue::parse(&reading)?;
        let length = usize::try_from(reading.length).ok().filter(|length| *length <= PIECE_BYTES)?;
        let part = buffer.get_mut(..length)?;
        let is_wanted = dtype.is_none_or(|dtype| dtype == metadata.dtype);
        if !is_wanted || !peers.copy(&reading, 0, part) {
            return None;
        }
        let version = self.taken(scope, name, version, &metadata)?;
        Some((metadata, version))
    }

    /// Counts a content that was taken, and returns its version if that was asked for. `None` if the connection ended
    /// meanwhile.
    fn taken(
        &self,
        scope: Scope,
        name: Transfer<'_>,
        version: u64,
        metadata: &Metadata,
    ) -> Option<Option<Version>> {
        if self.is_over() {
            return None;
        }
        self.meter.ended(&receive_span(name, self.kind), Ok(metadata.byte_length));
        Some(self.version_of(scope, version))
    }

    /// Fetches one published tensor: out of the peer's catalogue if possible, else by asking the peer.
    ///
    /// # Cancel safety
    /// Cancel-safe: a published tensor stays published.
    pub(crate) async fn fetch(
        &self,
        scope: &Scope,
        name: &Transfer<'_>,
        options: &ReceiveOptions,
    ) -> Result<Found, WorkerError> {
        if let Some(reading) = self.reading(*scope, *name)
            // Boxed, because otherwise the future of every fetch has room for this one.
            && let Some(found) = Box::pin(self.look_up(reading, *scope, *name, *options)).await
        {
            return Ok(found);
        }
        self.receive(scope, name, options).await
    }

    /// The published tensor, out of the peer's catalogue. `None` if the peer must be asked, which gives all errors.
    async fn look_up(
        &self,
        (peers, reading): (&dyn PeerCatalogue, CellReading),
        scope: Scope,
        name: Transfer<'_>,
        options: ReceiveOptions,
    ) -> Option<Found> {
        let span = receive_span(name, self.kind);
        let found = self.found(peers, (scope, name), (reading, options.sharing));
        let CellContent { version, metadata, bytes } = found.instrument(span.clone()).await?;
        self.meter.ended(&span, Ok(metadata.byte_length));
        Some((Tensor::received(metadata, bytes, None), self.version_of(scope, version)))
    }

    /// As [`fetch`](Self::fetch), out of the peer's catalogue alone, and into the buffer of `target`. Returns the tensor's
    /// metadata, and its version if that was asked for. `None` if the peer must be asked.
    ///
    /// # Cancel safety
    /// Cancel-safe: the buffer stays in `target`.
    pub(crate) async fn fill(
        &self,
        scope: Scope,
        name: Transfer<'_>,
        target: &Target,
    ) -> Option<Result<(Metadata, Option<Version>), WorkerError>> {
        let (peers, reading) = self.reading(scope, name)?;
        let span = receive_span(name, self.kind);
        let filled = self.filled(peers, (scope, name), (reading, target)).instrument(span.clone()).await?;
        self.meter.ended(&span, filled.as_ref().map(|(_, metadata)| metadata.byte_length));
        Some(filled.map(|(version, metadata)| (metadata, self.version_of(scope, version))))
    }

    /// The version of a tensor that was found, if it was asked for.
    fn version_of(&self, scope: Scope, number: u64) -> Option<Version> {
        let version = Version { incarnation: self.peer_incarnation, number };
        matches!(scope, Scope::Versioned(_)).then_some(version)
    }

    /// Version and metadata of `name` at one moment, at which the connection was up, with the content in the buffer of
    /// `target`.
    async fn filled(
        &self,
        peers: &dyn PeerCatalogue,
        (scope, name): (Scope, Transfer<'_>),
        (first, target): (CellReading, &Target),
    ) -> Option<Result<(u64, Metadata), WorkerError>> {
        let mut first = Some(first);
        for _ in 0..COPIES {
            let reading = first.take().or_else(|| self.read(peers, scope, name))?;
            let (version, metadata) = catalogue::parse(&reading)?;
            if metadata.byte_length >= COPY_BYTES_MAX as u64 {
                return None;
            }
            if !target.fits(&metadata) {
                return Some(Err(target.refusal(name, &metadata)));
            }
            let read =
                |offset, into: &mut [u8]| peers.copy(&reading, offset, into).then_some(()).ok_or(Overtaken);
            let copied = target.copy(&metadata, read).await;
            if self.is_over() {
                return None;
            }
            if let Ok(()) = copied {
                return Some(Ok((version, metadata)));
            }
        }
        None
    }

    /// The peer's catalogue and what it has under the name now, if that may answer a fetch of this scope.
    fn reading(&self, scope: Scope, name: Transfer<'_>) -> Option<(&dyn PeerCatalogue, CellReading)> {
        let peers = &**self.usable_catalogue()?;
        Some((peers, self.read(peers, scope, name)?))
    }

    /// What the peer's catalogue has now, if that may answer a fetch of this scope.
    fn read(&self, peers: &dyn PeerCatalogue, scope: Scope, name: Transfer<'_>) -> Option<CellReading> {
        let incarnation = self.peer_incarnation;
        let (reading, wanted) = match scope {
            Scope::Step(_)
            | Scope::StepNow(_)
            | Scope::Set(_)
            | Scope::SetContent(_)
            | Scope::Slice
            | Scope::SetSlice(_)
            | Scope::Pages(_)
            | Scope::PageWrite(_)
            | Scope::Call(_)
            | Scope::Arguments(_) => return None,
            Scope::Published => return peers.find(name.key),
            Scope::Versioned(wanted) => (peers.find(name.key)?, wanted),
            Scope::Offered(offered) => {
                let reading = peers.find_nameless(offered.cell)?;
                let is_offered =
                    (incarnation, catalogue::version(&reading)) == (offered.incarnation, offered.edition);
                return is_offered.then_some(reading);
            }
        };
        wanted.is_met_by(incarnation, catalogue::version(&reading)).then_some(reading)
    }

    /// The peer's catalogue, if it may answer fetches. Contents that are validated come from the peer with their checksums.
    fn usable_catalogue(&self) -> Option<&Arc<dyn PeerCatalogue>> {
        let is_validated = || self.protocol.agreed().validation.is_on();
        self.catalogue.as_ref().filter(|_| !is_validated() && !self.is_over())
    }

    /// Whether something is published under the name, and may be read out of the peer's catalogue.
    pub(crate) fn lists(&self, name: Transfer<'_>) -> bool {
        self.reading(Scope::Published, name).is_some()
    }

    /// Version, metadata and content of `name` at one moment, at which the connection was up.
    async fn found(
        &self,
        peers: &dyn PeerCatalogue,
        (scope, name): (Scope, Transfer<'_>),
        (first, sharing): (CellReading, Sharing),
    ) -> Option<CellContent> {
        let (mut spare, mut first) = (None, Some(first));
        for _ in 0..COPIES {
            let reading = first.take().or_else(|| self.read(peers, scope, name))?;
            let (version, metadata) = catalogue::parse(&reading)?;
            let small = in_cell(&reading);
            let bytes = match usize::try_from(reading.length).ok()? {
                _ if small.is_some() => small,
                // If it cannot be viewed this way, the peer may lend it.
                _ if sharing == Sharing::View => peers.view(&reading),
                length if length >= COPY_BYTES_MAX => return None,
                length => {
                    let into = match spare.take().filter(|spare: &BufMut| spare.len() == length) {
                        Some(into) => into,
                        // If there is no memory, asking the peer gives the error.
                        None => self.allocator.pool.alloc(length).await.ok()?,
                    };
                    let copied = copy_in_pieces(peers, &reading, into).await;
                    copied.map_err(|overtaken| spare = Some(overtaken)).ok()
                }
            };
            if self.is_over() {
                return None;
            }
            if let Some(bytes) = bytes {
                return Some(CellContent { version, metadata, bytes });
            }
        }
        None
    }
}

/// A published tensor at one moment.
struct CellContent {
    version: u64,
    metadata: Metadata,
    bytes: Buf,
}

/// A content that lies in its cell, in memory of the heap. It was read with the cell, so it cannot be overtaken.
fn in_cell(reading: &CellReading) -> Option<Buf> {
    let content = reading.content.get(..usize::try_from(reading.length).ok()?)?;
    Some(if content.is_empty() { Buf::empty() } else { Buf::on_heap(content, CopyReason::Catalogue) })
}

/// Copies a content, and lets other tasks have their turn after each piece.
///
/// # Errors
/// The memory, if the content was replaced before all of it was copied.
async fn copy_in_pieces(
    peers: &dyn PeerCatalogue,
    reading: &CellReading,
    mut into: BufMut,
) -> Result<Buf, BufMut> {
    for (index, piece) in into.chunks_mut(PIECE_BYTES).enumerate() {
        if index > 0 {
            yield_once().await;
        }
        if !peers.copy(reading, index * PIECE_BYTES, piece) {
            return Err(into);
        }
    }
    Ok(into.freeze())
}
