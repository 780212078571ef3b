//! Receiving into a user's buffer.

use std::sync::{Arc, MutexGuard, PoisonError};

use futures::FutureExt as _;
use tensorwire_fabric::RemoteRegion;
use tensorwire_memory::{BufMut, GrantEnd, GrantId, MemoryError, Pool, copy::CopyReason, copy::copy_bytes};
use tensorwire_protocol::{
    Allocator, Channel, Code, DataType, Destination, LentEnd, Metadata, Received, ReceivedGuard, Status,
};
use tensorwire_testpoints::sync::Mutex;

use crate::{
    error::{Transfer, WorkerError},
    peer_memory::{
        destinations::{ReceiveAllocator, Room, length_of, unexpected},
        import::{PIECE_BYTES, yield_once},
        lent::{Lent, ended},
    },
};

/// A user's buffer for one receive.
#[derive(Debug)]
pub(crate) struct Target {
    /// The accepted element type; `None` for any.
    dtype: Option<DataType>,
    /// The only accepted metadata; `None` for any that fits.
    expected: Option<Arc<[Metadata]>>,
    length: usize,
    state: Mutex<TargetState>,
}

#[derive(Debug)]
struct TargetState {
    /// `None` while it is granted to the peer, and after it was returned.
    buffer: Option<BufMut>,
    /// The grant of the buffer.
    lent: Option<GrantId>,
    /// The metadata of a value that does not fit.
    refused: Option<Metadata>,
}

impl Target {
    pub(crate) fn new(dtype: Option<DataType>, buffer: BufMut) -> Self {
        let state = TargetState { lent: None, refused: None, buffer: None };
        let target = Self { dtype, expected: None, length: buffer.len(), state: Mutex::new(state) };
        target.lock().buffer = Some(buffer);
        target
    }

    /// Accepts only a value of this metadata, for which `buffer` is long enough.
    pub(crate) fn expecting(expected: Metadata, buffer: BufMut) -> Self {
        Self { expected: Some(Arc::new([expected])), ..Self::new(None, buffer) }
    }

    pub(crate) fn fits(&self, metadata: &Metadata) -> bool {
        self.dtype.is_none_or(|dtype| metadata.dtype == dtype)
            && self.expected.as_ref().is_none_or(|expected| expected.contains(metadata))
            && metadata.byte_length <= self.length as u64
    }

    /// The error for a refused value, if one was refused.
    pub(crate) fn mismatch(&self, transfer: Transfer<'_>) -> Option<WorkerError> {
        self.lock().refused.take().map(|metadata| self.refusal(transfer, &metadata))
    }

    /// The error for a value that does not [fit](Self::fits).
    pub(crate) fn refusal(&self, transfer: Transfer<'_>, metadata: &Metadata) -> WorkerError {
        let transfer = transfer.name();
        if self.expected.is_some() {
            return WorkerError::Local { transfer, status: unexpected(metadata) };
        }
        if let Some(dtype) = self.dtype.filter(|dtype| metadata.dtype != *dtype) {
            return WorkerError::Mismatch {
                transfer,
                field: "element type",
                expected: dtype.to_string(),
                found: metadata.dtype.to_string(),
                remedy: "use the element type that is sent",
            };
        }
        WorkerError::Mismatch {
            transfer,
            field: "length",
            expected: format!("at most {} bytes", self.length),
            found: format!("{} bytes", metadata.byte_length),
            remedy: "give a longer buffer",
        }
    }

    /// Moves a received value of a peer into the buffer, with a copy if the value is elsewhere. A value that does not fit is
    /// not lost.
    pub(crate) async fn fill(
        &self,
        transfer: Transfer<'_>,
        held: &mut ReceivedGuard<impl Channel<Lent = Lent>>,
        pool: &Pool,
    ) -> Result<(Metadata, BufMut), WorkerError> {
        let Received { metadata, lent, .. } = held.get().ok_or_else(WorkerError::handed_out)?;
        if !self.fits(metadata) {
            return Err(self.refusal(transfer, metadata));
        }
        let metadata = metadata.clone();
        if let Some(Lent::Granted { .. }) = lent
            && self.lock().buffer.is_none()
        {
            // The value is in the buffer, or in the buffer of an earlier, dropped receive whose value this receive got.
            // In the second case, this receive's own buffer is still granted, and returns to its pool later.
            let Some(Lent::Granted { granted, .. }) = held.take().and_then(|received| received.lent) else {
                return Err(WorkerError::handed_out());
            };
            tensorwire_testpoints::mark!("content was written directly into the user's buffer");
            return Ok((metadata, granted.end(GrantEnd::Content)?));
        }
        if self.lock().buffer.is_none() {
            let length = usize::try_from(metadata.byte_length).unwrap_or(usize::MAX);
            let instead = pool.alloc(length).await?;
            self.lock().buffer = Some(instead);
        }
        self.copy(&metadata, |offset, into| read(lent.as_ref(), offset, into)).await?;
        let buffer = self.take().ok_or_else(WorkerError::handed_out)?;
        if let Some(lent) = held.take().and_then(|received| received.lent) {
            drop(lent.received()?);
        }
        Ok((metadata, buffer))
    }

    /// As [`fill`](Self::fill), with bytes of a value of this worker.
    pub(crate) async fn fill_with(
        &self,
        transfer: Transfer<'_>,
        metadata: &Metadata,
        bytes: &[u8],
    ) -> Result<(Metadata, BufMut), WorkerError> {
        if !self.fits(metadata) {
            return Err(self.refusal(transfer, metadata));
        }
        self.copy(metadata, |offset, into| {
            copy_bytes(into, bytes.get(offset..).unwrap_or_default(), CopyReason::Local);
            Ok::<_, WorkerError>(())
        })
        .await?;
        let buffer = self.take().ok_or_else(WorkerError::handed_out)?;
        Ok((metadata.clone(), buffer))
    }

    /// Copies a value's bytes into the buffer. The buffer stays in `self`, so that it is not lost if the future is
    /// dropped.
    pub(crate) async fn copy<E>(
        &self,
        metadata: &Metadata,
        mut read: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let length = usize::try_from(metadata.byte_length).unwrap_or(usize::MAX).min(self.length);
        for offset in (0..length).step_by(PIECE_BYTES) {
            if offset > 0 {
                yield_once().await;
            }
            let mut state = self.lock();
            let piece = offset..length.min(offset + PIECE_BYTES);
            if let Some(into) = state.buffer.as_mut().and_then(|buffer| buffer.get_mut(piece)) {
                read(offset, into)?;
            }
        }
        Ok(())
    }

    /// Takes the buffer, unless it is granted to the peer.
    pub(crate) fn take(&self) -> Option<BufMut> {
        self.lock().buffer.take()
    }

    fn lock(&self) -> MutexGuard<'_, TargetState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Copies bytes of a received value.
fn read(lent: Option<&Lent>, offset: usize, into: &mut [u8]) -> Result<(), MemoryError> {
    match lent {
        Some(Lent::Granted { granted, .. } | Lent::Bouncing { exposed: granted, .. }) => {
            granted.read_at(offset, into, CopyReason::Local)
        }
        Some(Lent::Here { bytes, .. }) => {
            copy_bytes(into, bytes.get(offset..).unwrap_or_default(), CopyReason::Local);
            Ok(())
        }
        Some(Lent::Pages(_)) | None => Ok(()),
    }
}

/// Allocates a [`Target`]'s buffer as the destination if the peer may write its block, or as the private memory of
/// bouncing content; otherwise memory of the receive pool.
#[derive(Debug)]
pub(crate) struct TargetAllocator<'receive> {
    pub(crate) receive: &'receive ReceiveAllocator,
    pub(crate) target: &'receive Target,
    /// Contents are validated. The content must not change afterwards, so it is validated in other memory and then
    /// copied.
    pub(crate) is_validated: bool,
}

impl TargetAllocator<'_> {
    /// The region of the buffer, if it may be granted to the peer.
    fn region(&self) -> Option<RemoteRegion> {
        let state = self.target.lock();
        if self.is_validated {
            return None;
        }
        state.buffer.as_ref()?.block().and_then(|block| self.receive.enclosure.regions.get(block.id()))
    }

    /// Grants the buffer after the peer has confirmed its region. Until then the buffer stays in the target.
    async fn lend(&self, region: RemoteRegion) -> Result<Option<(Lent, Destination)>, Status> {
        self.receive.confirm(region).await?;
        Ok(self.lend_as(region, |buffer| Room { exposed: buffer, private: None }))
    }

    /// Grants `exposed`, from which the value is copied into the buffer.
    async fn lend_bouncing(&self, exposed: BufMut) -> Result<Option<(Lent, Destination)>, Status> {
        let region = self.receive.confirmed(&exposed).await?;
        Ok(self.lend_as(region, |buffer| Room { exposed, private: Some(buffer) }))
    }

    /// Grants the memory that `room` makes of the buffer; `region` is the region of the exposed memory. `None` if the
    /// buffer is already granted.
    fn lend_as(
        &self,
        region: RemoteRegion,
        room: impl FnOnce(BufMut) -> Room,
    ) -> Option<(Lent, Destination)> {
        let mut state = self.target.lock();
        let (lent, destination) = room(state.buffer.take()?).lend(region, false);
        state.lent = lent.grant();
        Some((lent, destination))
    }

    /// The length of the bounce memory for a value that is copied into the buffer; `None` if it cannot be.
    fn bounced(&self, metadata: &Metadata) -> Result<Option<usize>, Status> {
        if self.is_validated || !self.receive.enclosure.is_bouncing() {
            return Ok(None);
        }
        let bytes = length_of(metadata)?;
        Ok(self.target.lock().buffer.as_ref().map(|_| bytes).filter(|_| self.target.fits(metadata)))
    }
}

impl Allocator for TargetAllocator<'_> {
    type Lent = Lent;

    fn expected(&self) -> Option<&Arc<[Metadata]>> {
        self.target.expected.as_ref()
    }

    fn accepts(&self, metadata: &Metadata) -> Result<(), Status> {
        let mut state = self.target.lock();
        if self.target.fits(metadata) {
            return Ok(());
        }
        state.refused = Some(metadata.clone());
        Err(Status::new(Code::InvalidArgument, "the value does not fit the buffer"))
    }

    fn take_back(&self, lent: Lent, end: LentEnd) -> Option<Lent> {
        let mut state = self.target.lock();
        match lent {
            Lent::Granted { granted, .. } if state.lent == Some(granted.id()) => {
                state.lent = None;
                state.buffer = ended(*granted, end);
                None
            }
            Lent::Bouncing { exposed, private, .. } if state.lent == Some(exposed.id()) => {
                state.lent = None;
                drop(ended(*exposed, end));
                state.buffer = Some(*private);
                None
            }
            other => Some(other),
        }
    }

    fn prefers_eager(&self, metadata: &Metadata) -> bool {
        self.receive.prefers_eager(metadata)
    }

    fn copy_eager(&self, metadata: &Metadata, content: &[u8]) -> Lent {
        let own = if self.target.fits(metadata) && !self.is_validated { self.target.take() } else { None };
        let Some(mut buffer) = own else { return self.receive.copy_eager(metadata, content) };
        copy_bytes(&mut buffer, content, CopyReason::Eager);
        Lent::Granted { granted: Box::new(buffer.grant()), has_slot: false }
    }

    async fn allocate(&self, metadata: &Metadata) -> Result<(Lent, Destination), Status> {
        if let Some(region) = self.region()
            && let Some(lent) = self.lend(region).await?
        {
            return Ok(lent);
        }
        if let Some(bytes) = self.bounced(metadata)?
            && let Some(exposed) = self.receive.bounce(bytes).await?
            && let Some(lent) = self.lend_bouncing(exposed).await?
        {
            return Ok(lent);
        }
        self.receive.allocate(metadata).await
    }

    fn allocate_early(&self, metadata: &Metadata) -> Result<Option<(Lent, Destination)>, Status> {
        let lent = if let Some(region) = self.region() {
            self.lend(region).now_or_never()
        } else if let Some(bytes) = self.bounced(metadata)? {
            match self.receive.bounce_early(bytes) {
                Ok(Some(exposed)) => self.lend_bouncing(exposed).now_or_never(),
                Ok(None) => None,
                Err(early) => return early.without(),
            }
        } else {
            return self.receive.allocate_early(metadata);
        };
        // Nothing if the peer has not confirmed the region yet: waiting would delay the request.
        lent.unwrap_or(Ok(None))
    }
}
