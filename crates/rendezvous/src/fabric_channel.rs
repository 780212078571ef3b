//! The protocol's channel over a queue pair.

use std::{
    collections::VecDeque,
    future::Future,
    pin::{Pin, pin},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
};

use futures::{future::BoxFuture, poll};
use memory::{Buf, BufMut, GrantEnd, Granted, Pool, copy::CopyReason};
use protocol::{Allocator, Channel, ChannelError, Destination, LentEnd, Metadata, RingSpan, Status};
use tokio::sync::Notify;
use verbs_reactor::{
    FabricError, Immediate, Operation, QueuePair, RegionGeneration, RegionId, RemoteRange, WorkRequest,
};

use crate::{announce::Announcer, import::Import, pools::Regions};

/// "A message is in your ring."
const MESSAGE: Immediate = Immediate(0xFFFF_FFFF);
/// "Your oldest unacknowledged message was taken."
const ACKNOWLEDGEMENT: Immediate = Immediate(0xFFFF_FFFE);

/// A queue pair, the ring at the peer and the ring here.
#[derive(Debug)]
pub(crate) struct FabricChannel {
    pub(crate) queue_pair: QueuePair,
    pub(crate) message_pool: Pool,
    pub(crate) own_ring: Arc<Ring>,
    pub(crate) peer_ring: Destination,
    pub(crate) held: Arc<HeldPosts>,
    pub(crate) import: Import,
}

/// Posts that found the send queue full: a fabric may report a completion later than the answer it caused. They
/// are posted in order by [`HeldPosts::post_when_possible`].
#[derive(Debug, Default)]
pub(crate) struct HeldPosts {
    queue: Mutex<VecDeque<WorkRequest>>,
    some: Notify,
}

impl HeldPosts {
    /// Posts now, or holds the request behind those held already.
    fn post(&self, queue_pair: &QueuePair, request: WorkRequest) -> Result<(), ChannelError> {
        let mut queue = self.lock();
        if queue.is_empty() {
            match queue_pair.post_now(&request) {
                Ok(operation) => {
                    // Nobody awaits it: the slot keeps the bytes, and a failure shows as the connection's.
                    drop(operation);
                    return Ok(());
                }
                Err(FabricError::SendQueueFull { .. }) => {}
                Err(error) => return Err(lost(&error)),
            }
        }
        let most = queue_pair.config().send_depth as usize;
        if queue.len() >= most {
            return Err(ChannelError(format!("more than {most} posts wait for the send queue")));
        }
        queue.push_back(request);
        self.some.notify_one();
        Ok(())
    }

    /// Posts what is held as completions make room, until the queue pair fails.
    pub(crate) async fn post_when_possible(self: Arc<Self>, queue_pair: QueuePair) {
        while queue_pair.failure().is_none() {
            if self.lock().is_empty() {
                self.some.notified().await;
            }
            queue_pair.room().await;
            self.post_held(&queue_pair);
        }
    }

    fn post_held(&self, queue_pair: &QueuePair) {
        let mut queue = self.lock();
        while let Some(request) = queue.front() {
            if let Err(FabricError::SendQueueFull { .. }) = queue_pair.post_now(request).map(drop) {
                return;
            }
            queue.pop_front();
        }
    }

    /// Lets [`post_when_possible`](Self::post_when_possible) see that the queue pair has failed.
    pub(crate) fn wake(&self) {
        self.some.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<WorkRequest>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FabricChannel {
    fn post(
        &self,
        local: Buf,
        remote: Option<RemoteRange>,
        immediate: Option<Immediate>,
    ) -> Result<(), ChannelError> {
        self.held.post(&self.queue_pair, WorkRequest::Write { local, remote, immediate })
    }

    fn ring_range(&self, span: RingSpan) -> RemoteRange {
        RemoteRange {
            region: RegionId(self.peer_ring.region),
            generation: RegionGeneration(self.peer_ring.generation),
            offset: self.peer_ring.offset + u64::from(span.offset),
            length: u64::from(span.length),
        }
    }
}

/// The message ring that the peer writes: lent to it for the life of the connection.
#[derive(Debug)]
pub(crate) struct Ring(Mutex<Option<Granted>>);

impl Ring {
    pub(crate) fn new(granted: Granted) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Some(granted))))
    }

    fn read(&self, offset: u32, into: &mut [u8]) -> Result<(), ChannelError> {
        let ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(ring) = ring.as_ref() else { return Err(ChannelError("the connection is over".to_owned())) };
        let read = ring.read_at(offset as usize, into, CopyReason::Message);
        read.map_err(|error| ChannelError(error.to_string()))
    }

    /// The queue pair is destroyed and drained, or never was connected: the ring goes back to its pool.
    pub(crate) fn end(&self) {
        let ring = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Err(error)) = ring.map(|ring| ring.end(GrantEnd::QueuePairDrained)) {
            tracing::warn!(%error, "a message ring could not be taken back");
        }
    }
}

fn lost(error: &FabricError) -> ChannelError {
    ChannelError(error.to_string())
}

impl Channel for FabricChannel {
    type Bytes = Buf;
    type Lent = Granted;
    type Write = ContentWrite;

    fn post_message(&self, first: RingSpan, second: RingSpan, bytes: &[u8]) -> Result<(), ChannelError> {
        let mut buffer =
            self.message_pool.try_alloc(bytes.len()).map_err(|error| ChannelError(error.to_string()))?;
        buffer.copy_from_slice(bytes);
        let buffer = buffer.freeze();
        let split = first.length as usize;
        let (Some(head), Some(tail)) = (buffer.slice(0..split), buffer.slice(split..bytes.len())) else {
            return Err(ChannelError("a message is shorter than its place in the ring".to_owned()));
        };
        if tail.is_empty() {
            return self.post(head, Some(self.ring_range(first)), Some(MESSAGE));
        }
        self.post(head, Some(self.ring_range(first)), None)?;
        self.post(tail, Some(self.ring_range(second)), Some(MESSAGE))
    }

    fn post_acknowledgement(&self) -> Result<(), ChannelError> {
        self.post(Buf::empty(), None, Some(ACKNOWLEDGEMENT))
    }

    fn write_content(
        &self,
        bytes: Option<Buf>,
        destination: Option<Destination>,
        immediate: u32,
    ) -> ContentWrite {
        let immediate = Immediate(immediate);
        let (Some(bytes), Some(destination)) = (bytes, destination) else {
            return ContentWrite::Posted(self.queue_pair.notify(immediate));
        };
        let remote = RemoteRange {
            region: RegionId(destination.region),
            generation: RegionGeneration(destination.generation),
            offset: destination.offset,
            length: bytes.len() as u64,
        };
        if self.import.needs(self.queue_pair.kind(), &bytes) {
            let (import, queue_pair) = (self.import.clone(), self.queue_pair.clone());
            let write = async move {
                let bytes = import.copy_of(&bytes).await?;
                queue_pair.write_imm(bytes, remote, immediate).await.map_err(|error| lost(&error))
            };
            return ContentWrite::Importing(Box::pin(write));
        }
        ContentWrite::Posted(self.queue_pair.write_imm(bytes, remote, immediate))
    }

    fn read_ring(&self, offset: u32, into: &mut [u8]) -> Result<(), ChannelError> {
        self.own_ring.read(offset, into)
    }

    fn take_back(&self, lent: Granted, end: LentEnd) {
        let why = match end {
            LentEnd::MetaDataResponse => GrantEnd::MetaDataResponse,
            LentEnd::ErrorStatus => GrantEnd::ErrorStatus,
            LentEnd::CancelAck => GrantEnd::CancelAck,
            LentEnd::Content => GrantEnd::Content,
            LentEnd::NeverSent => GrantEnd::NeverSent,
            // A reason this version does not know is no evidence: the memory is leaked and counted.
            _ => return drop(lent),
        };
        if let Err(error) = lent.end(why) {
            tracing::warn!(%error, "lent memory could not be taken back");
        }
    }
}

/// A content write under way.
#[pin_project::pin_project(project = ContentWriteProjection)]
pub(crate) enum ContentWrite {
    Posted(#[pin] Operation),
    /// Posted once its bytes have been copied to where the fabric can send them from.
    Importing(BoxFuture<'static, Result<(), ChannelError>>),
}

impl Future for ContentWrite {
    type Output = Result<(), ChannelError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project() {
            ContentWriteProjection::Posted(operation) => {
                operation.poll(context).map_err(|error| lost(&error))
            }
            ContentWriteProjection::Importing(write) => write.as_mut().poll(context),
        }
    }
}

/// Destinations from the receive pool, announced to one peer.
#[derive(Debug, Clone)]
pub(crate) struct ReceiveAllocator {
    pub(crate) pool: Pool,
    pub(crate) regions: Arc<Regions>,
    pub(crate) announcer: Arc<Announcer>,
}

impl ReceiveAllocator {
    /// Lends `buffer` to the peer, once it has confirmed the buffer's region.
    async fn lend(&self, buffer: BufMut) -> Result<(Granted, Destination), Status> {
        let region = buffer.block().and_then(|block| self.regions.get(block.id()));
        let region = region.ok_or_else(|| exhausted(&"its block is not registered with the fabric"))?;
        self.announcer
            .confirmed(region)
            .await
            .map_err(|why| Status::new(protocol::Code::Unavailable, why))?;
        let granted = buffer.grant();
        let destination = Destination {
            region: region.region.0,
            generation: region.generation.0,
            offset: granted.offset() as u64,
            capacity: granted.length() as u64,
        };
        Ok((granted, destination))
    }
}

fn exhausted(error: &dyn std::fmt::Display) -> Status {
    Status::new(protocol::Code::ResourceExhausted, format!("no memory for the tensor: {error}"))
}

fn length_of(metadata: &Metadata) -> Result<usize, Status> {
    usize::try_from(metadata.byte_length).map_err(|error| exhausted(&error))
}

impl Allocator for ReceiveAllocator {
    type Lent = Granted;

    async fn allocate(&self, metadata: &Metadata) -> Result<(Granted, Destination), Status> {
        let buffer = self.pool.alloc(length_of(metadata)?).await.map_err(|error| exhausted(&error))?;
        self.lend(buffer).await
    }

    /// From the part of the pool that unanswered requests may hold; what is beyond goes out without a destination.
    async fn allocate_early(&self, metadata: &Metadata) -> Result<Option<(Granted, Destination)>, Status> {
        let buffer = match self.pool.try_alloc_early(length_of(metadata)?) {
            Ok(buffer) => buffer,
            Err(error) if error.is_exhausted() => return Ok(None),
            Err(error) => return Err(exhausted(&error)),
        };
        let lending = pin!(self.lend(buffer));
        match poll!(lending) {
            Poll::Ready(lent) => lent.map(Some),
            // The peer does not know the region yet: waiting for that would delay the request.
            Poll::Pending => Ok(None),
        }
    }
}
