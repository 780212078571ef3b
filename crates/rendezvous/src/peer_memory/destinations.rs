//! Allocation of the memory that received values are written into.

use std::sync::Arc;

use futures::FutureExt as _;
use tensorwire_fabric::RemoteRegion;
use tensorwire_memory::{Block, Buf, BufMut, MemoryError, Pool, copy::CopyReason};
use tensorwire_protocol::{Allocator, Code, DataType, Destination, Metadata, ResultSlot, Status};

use crate::peer_memory::{
    announcer::Announcer,
    enclosure::Enclosure,
    lent::{Lent, RESULT_SLOT},
};

/// Values of at most so many bytes are requested inside messages: with its record, such a value still fits into one short
/// write of every fabric.
const EAGER_BYTES: u64 = 96;

/// Allocates destinations for values of one peer. They are in the receive pool; or in a bounce pool of this connection,
/// paired with memory of the receive pool that no peer can write.
#[derive(Debug, Clone)]
pub(crate) struct ReceiveAllocator {
    /// The receive pool.
    pub(crate) pool: Pool,
    pub(crate) enclosure: Arc<Enclosure>,
    pub(crate) announcer: Arc<Announcer>,
    /// Destinations have a result slot after the content.
    pub(crate) has_slots: bool,
}

impl ReceiveAllocator {
    /// The length of a destination for a content.
    fn lent_bytes(&self, metadata: &Metadata) -> Result<usize, Status> {
        let content = length_of(metadata)?;
        if !self.has_slots {
            return Ok(content);
        }
        let whole =
            content.checked_next_multiple_of(RESULT_SLOT).and_then(|whole| whole.checked_add(RESULT_SLOT));
        whole.ok_or_else(|| exhausted(&format!("{content} bytes and a result slot are too long")))
    }

    /// The region of `buffer`, after the peer has confirmed it.
    pub(crate) async fn confirmed(&self, buffer: &BufMut) -> Result<RemoteRegion, Status> {
        let block = buffer.block().map(Block::id);
        if let Some(region) = block.and_then(|block| self.announcer.remembered(block)) {
            return Ok(region);
        }
        let known = block.and_then(|block| Some((block, self.enclosure.regions.get(block)?)));
        let (block, region) =
            known.ok_or_else(|| exhausted(&"its block is not registered with the fabric"))?;
        self.confirm(region).await?;
        self.announcer.remember(block, region);
        Ok(region)
    }

    /// Waits until the peer has confirmed the region.
    pub(crate) async fn confirm(&self, region: RemoteRegion) -> Result<(), Status> {
        self.announcer.confirmed(region).await
    }

    /// Grants memory to the peer, after it has confirmed the region.
    async fn lend(&self, room: Room) -> Result<(Lent, Destination), Status> {
        let region = self.confirmed(&room.exposed).await?;
        Ok(room.lend(region, self.has_slots))
    }

    /// Memory of the bounce pool; `None` if the peer writes directly into the receive pool.
    pub(crate) async fn bounce(&self, bytes: usize) -> Result<Option<BufMut>, Status> {
        let Some(pool) = self.bounce_pool()? else { return Ok(None) };
        pool.alloc(bytes).await.map(Some).map_err(|error| exhausted(&error))
    }

    /// As [`bounce`](Self::bounce), for a request whose metadata is not confirmed. Such requests may use only part of
    /// the pool.
    pub(crate) fn bounce_early(&self, bytes: usize) -> Result<Option<BufMut>, Early> {
        let Some(pool) = self.bounce_pool().map_err(Early::Refused)? else { return Ok(None) };
        pool.try_alloc_early(bytes).map(Some).map_err(Early::from)
    }

    /// The bounce pool; `None` if the peer writes directly into the receive pool. Fails if the bounce pool is closed,
    /// so that the receive pool is never granted instead.
    fn bounce_pool(&self) -> Result<Option<Pool>, Status> {
        let pool = self.enclosure.bounce();
        if pool.is_none() && self.enclosure.is_bouncing() {
            return Err(Status::new(Code::Unavailable, "the connection is over"));
        }
        Ok(pool)
    }
}

/// Memory for a content that is not granted yet.
pub(crate) struct Room {
    /// The memory that the peer will write.
    pub(crate) exposed: BufMut,
    /// The memory that the content is copied to afterwards, if it bounces.
    pub(crate) private: Option<BufMut>,
}

impl Room {
    /// `stays` is in the receive pool.
    fn new(stays: BufMut, bounce: Option<BufMut>) -> Self {
        match bounce {
            Some(exposed) => Self { exposed, private: Some(stays) },
            None => Self { exposed: stays, private: None },
        }
    }

    /// Grants it; `region` is the region of the exposed memory.
    pub(crate) fn lend(self, region: RemoteRegion, has_slot: bool) -> (Lent, Destination) {
        let granted = Box::new(self.exposed.grant());
        let (region, generation) = (region.region.0, region.generation.0);
        let offset = granted.offset() as u64;
        let capacity = granted.length().saturating_sub(if has_slot { RESULT_SLOT } else { 0 }) as u64;
        let slot = ResultSlot { region, generation, offset: offset + capacity };
        let result = has_slot.then_some(slot);
        let destination = Destination { region, generation, offset, capacity, result };
        let lent = match self.private {
            Some(private) => Lent::Bouncing { exposed: granted, private: Box::new(private), has_slot },
            None => Lent::Granted { granted, has_slot },
        };
        (lent, destination)
    }
}

/// Why a request has no destination yet.
pub(crate) enum Early {
    /// The request is sent without one.
    Without,
    /// The receive fails.
    Refused(Status),
}

impl From<MemoryError> for Early {
    fn from(error: MemoryError) -> Self {
        if error.is_exhausted() { Self::Without } else { Self::Refused(exhausted(&error)) }
    }
}

impl Early {
    pub(crate) fn without<T>(self) -> Result<Option<T>, Status> {
        match self {
            Self::Without => Ok(None),
            Self::Refused(status) => Err(status),
        }
    }
}

fn exhausted(error: &dyn std::fmt::Display) -> Status {
    Status::new(Code::ResourceExhausted, format!("no memory for the tensor: {error}"))
}

pub(crate) fn length_of(metadata: &Metadata) -> Result<usize, Status> {
    usize::try_from(metadata.byte_length).map_err(|error| exhausted(&error))
}

/// The refusal of a value whose metadata is another than is known.
pub(crate) fn unexpected(Metadata { dtype, shape, .. }: &Metadata) -> Status {
    let message = format!("the peer sends {dtype} {shape} instead of the content that it has announced");
    Status::new(Code::InvalidArgument, message)
}

/// As [`ReceiveAllocator`], for a value of which something is known.
pub(crate) struct ExpectingAllocator<'a> {
    pub(crate) receive: &'a ReceiveAllocator,
    pub(crate) expected: Expected,
    /// Of a call.
    pub(crate) arguments: Option<Arc<[u8]>>,
}

/// The values that a receive accepts.
pub(crate) enum Expected {
    /// Those of these metadata, which the request names.
    These(Arc<[Metadata]>),
    /// Bytes, of any number.
    Bytes,
}

impl Allocator for ExpectingAllocator<'_> {
    type Lent = Lent;

    fn accepts(&self, metadata: &Metadata) -> Result<(), Status> {
        let is_expected = match &self.expected {
            Expected::These(expected) => expected.contains(metadata),
            Expected::Bytes => {
                let Metadata { dtype, shape, is_dead, byte_length } = metadata;
                *dtype == DataType::U8 && shape.dimensions() == [*byte_length] && !is_dead
            }
        };
        if is_expected { Ok(()) } else { Err(unexpected(metadata)) }
    }

    fn expected(&self) -> Option<&Arc<[Metadata]>> {
        match &self.expected {
            Expected::These(expected) => Some(expected),
            Expected::Bytes => None,
        }
    }

    fn arguments(&self) -> Option<Arc<[u8]>> {
        self.arguments.clone()
    }

    fn prefers_eager(&self, metadata: &Metadata) -> bool {
        self.receive.prefers_eager(metadata)
    }

    fn copy_eager(&self, metadata: &Metadata, content: &[u8]) -> Lent {
        self.receive.copy_eager(metadata, content)
    }

    async fn allocate(&self, metadata: &Metadata) -> Result<(Lent, Destination), Status> {
        self.receive.allocate(metadata).await
    }

    fn allocate_early(&self, metadata: &Metadata) -> Result<Option<(Lent, Destination)>, Status> {
        self.receive.allocate_early(metadata)
    }
}

impl Allocator for ReceiveAllocator {
    type Lent = Lent;

    fn prefers_eager(&self, metadata: &Metadata) -> bool {
        metadata.byte_length <= EAGER_BYTES
            && !tensorwire_testpoints::chance!("a small value is asked for with memory")
    }

    fn copy_eager(&self, _: &Metadata, content: &[u8]) -> Lent {
        Lent::view(Buf::on_heap(content, CopyReason::Eager))
    }

    async fn allocate(&self, metadata: &Metadata) -> Result<(Lent, Destination), Status> {
        let bytes = self.lent_bytes(metadata)?;
        let stays = self.pool.alloc(bytes).await.map_err(|error| exhausted(&error))?;
        let bounce = self.bounce(bytes).await?;
        self.lend(Room::new(stays, bounce)).await
    }

    /// Uses the part of the pool for requests whose metadata is not confirmed. If it is exhausted, the request is sent
    /// without a destination.
    fn allocate_early(&self, metadata: &Metadata) -> Result<Option<(Lent, Destination)>, Status> {
        let bytes = self.lent_bytes(metadata)?;
        let stays = self.pool.try_alloc_early(bytes).map_err(Early::from);
        let room = stays.and_then(|stays| Ok(Room::new(stays, self.bounce_early(bytes)?)));
        let room = match room {
            Ok(room) => room,
            Err(early) => return early.without(),
        };
        // Nothing if the peer has not confirmed the region yet: waiting would delay the request.
        self.lend(room).now_or_never().transpose()
    }
}
