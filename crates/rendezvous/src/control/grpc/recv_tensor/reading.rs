//! Reading an answer as it comes, so that content is copied once: out of the frames it came in, to where it stays.

use std::{error::Error, future::poll_fn, pin::Pin, sync::Arc};

use bytes::{Buf as _, Bytes};
use memory::{
    Buf, BufMut, MemoryError, Pool,
    copy::{CopyReason, copy_bytes},
};
use prost::Message;
use protocol::{Checksums, DataType, Metadata, Shape, Validation, limits::TENSOR_BYTES_MAX};
use tonic::codegen::{Body, http::HeaderMap};

use super::messages::{Any, TensorOptions, TensorShapeProto};
use crate::{Tensor, WorkerError, control::grpc::dial::causes, receive_into::Target};

/// Longest field besides contents: a shape of the most dimensions, and options.
const FIELD_BYTES_MAX: u64 = 8 << 10;

/// Protobuf's wire types.
mod wire_type {
    pub(super) const VARINT: u64 = 0;
    pub(super) const FIXED64: u64 = 1;
    pub(super) const LENGTH: u64 = 2;
    pub(super) const FIXED32: u64 = 5;
}

/// Fields of `RecvTensorResponse`.
mod response_field {
    pub(super) const TENSOR: u64 = 1;
    pub(super) const IS_DEAD: u64 = 2;
    pub(super) const OPTIONS: u64 = 4;
}

/// Fields of `TensorProto`.
mod tensor_field {
    pub(super) const DTYPE: u64 = 1;
    pub(super) const SHAPE: u64 = 2;
    pub(super) const CONTENT: u64 = 4;
}

/// Why there is no value.
#[derive(Debug)]
pub(super) enum Fault {
    /// The other end said so.
    Answered(tonic::Status),
    /// The way to it broke.
    Broken(String),
    /// It broke a rule.
    Misbehaved(String),
    /// It cannot be reached.
    Unreachable(Box<WorkerError>),
    /// There is no memory for it here.
    Memory(MemoryError),
    /// What came is not what was sent.
    Corrupted { validation: Validation, sent: u64, received: u64 },
}

impl From<MemoryError> for Fault {
    fn from(error: MemoryError) -> Self {
        Self::Memory(error)
    }
}

/// Where content goes: the user's buffer if it fits, else the pool.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) pool: Pool,
    pub(super) target: Option<Arc<Target>>,
}

/// A value that has come.
#[derive(Debug)]
pub(crate) struct Arrived {
    pub(crate) metadata: Metadata,
    /// Which publication it is, if it was published.
    pub(crate) version: Option<u64>,
    /// `None` if it has no bytes. May be longer than the content.
    buffer: Option<BufMut>,
    /// The bytes, once a tensor shares them; in place of the buffer.
    shared: Option<Buf>,
    checksums: Option<Arc<Checksums>>,
    /// Whose buffer it lies in.
    target: Option<Arc<Target>>,
}

impl Arrived {
    /// As a tensor, without a copy.
    pub(crate) fn into_tensor(self) -> Tensor {
        let mut own = self;
        own.share()
    }

    /// As a tensor, without a copy; the value stays.
    pub(crate) fn share(&mut self) -> Tensor {
        if let Some(buffer) = self.buffer.take() {
            self.shared = Some(buffer.freeze());
        }
        let length = usize::try_from(self.metadata.byte_length).unwrap_or(usize::MAX);
        let bytes = self.shared.as_ref().and_then(|whole| whole.slice(0..length)).unwrap_or_else(Buf::empty);
        Tensor::received(self.metadata.clone(), bytes, self.checksums.clone())
    }

    /// Its buffer, if that is the one of `target`.
    pub(crate) fn buffer_of(&mut self, target: &Arc<Target>) -> Option<BufMut> {
        let is_its = self.target.as_ref().is_some_and(|own| Arc::ptr_eq(own, target));
        if is_its { self.buffer.take() } else { None }
    }

    /// Its bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        let length = usize::try_from(self.metadata.byte_length).unwrap_or(usize::MAX);
        let whole = self.buffer.as_deref().or(self.shared.as_deref());
        whole.and_then(|whole| whole.get(..length)).unwrap_or_default()
    }
}

/// What is known of a value while it comes.
#[derive(Debug, Default)]
struct Coming {
    is_dead: bool,
    dtype: Option<DataType>,
    shape: Option<Shape>,
    options: TensorOptions,
    /// Once content has begun.
    content: Option<Content>,
}

/// Content that is being filled.
#[derive(Debug)]
struct Content {
    metadata: Metadata,
    /// `None` if there are no bytes.
    buffer: Option<BufMut>,
    target: Option<Arc<Target>>,
    filled: usize,
}

impl Content {
    async fn new(metadata: Metadata, place: &Place) -> Result<Self, Fault> {
        let length = usize::try_from(metadata.byte_length).unwrap_or(usize::MAX);
        let own = place.target.as_ref().filter(|target| length > 0 && target.fits(&metadata));
        if let Some((target, buffer)) = own.and_then(|target| Some((target, target.take()?))) {
            return Ok(Self { metadata, buffer: Some(buffer), target: Some(target.clone()), filled: 0 });
        }
        let buffer = if length > 0 { Some(place.pool.alloc(length).await?) } else { None };
        Ok(Self { metadata, buffer, target: None, filled: 0 })
    }

    fn length(&self) -> u64 {
        self.metadata.byte_length
    }

    /// Takes as many of `bytes` as there is room for; how many.
    fn fill(&mut self, bytes: &[u8]) -> usize {
        let length = usize::try_from(self.length()).unwrap_or(usize::MAX);
        let room = self.buffer.as_mut().and_then(|buffer| buffer.get_mut(self.filled..length));
        let copied = copy_bytes(room.unwrap_or_default(), bytes, CopyReason::Grpc);
        self.filled += copied;
        copied
    }

    fn is_full(&self) -> bool {
        self.filled as u64 == self.length()
    }

    /// What it is as a whole, if its checksum is right.
    fn arrived(mut self, options: TensorOptions) -> Result<Arrived, Fault> {
        let (metadata, buffer) = (self.metadata.clone(), self.buffer.take());
        let version = (options.version > 0).then_some(options.version);
        let target = self.target.take();
        let mut arrived = Arrived { metadata, version, buffer, shared: None, checksums: None, target };
        let validation = Validation::from_number(options.validation).unwrap_or_default();
        if let Some(received) = validation.checksum(arrived.bytes())
            && !arrived.bytes().is_empty()
        {
            if received != options.checksum {
                self.buffer = arrived.buffer.take();
                self.target = arrived.target.take();
                return Err(Fault::Corrupted { validation, sent: options.checksum, received });
            }
            arrived.checksums = Some(Arc::new(Checksums::known(validation, received)));
        }
        Ok(arrived)
    }
}

impl Drop for Content {
    /// A user's buffer goes back to where it is looked for.
    fn drop(&mut self) {
        if let (Some(target), Some(buffer)) = (self.target.take(), self.buffer.take()) {
            target.give_back(buffer);
        }
    }
}

/// Reads one answer.
#[derive(Debug)]
pub(super) struct Reader<B> {
    body: B,
    chunk: Bytes,
    /// Of the message.
    left: u64,
    trailers: Option<HeaderMap>,
    /// A tensor's header as it came, which is part of the content where elements are not plain.
    header: Vec<u8>,
    /// Whether what is read belongs to it.
    is_header: bool,
}

impl<B> Reader<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Error + 'static,
{
    pub(super) fn new(body: B) -> Self {
        Self { body, chunk: Bytes::new(), left: 0, trailers: None, header: Vec::new(), is_header: false }
    }

    /// The value, and nothing after it.
    pub(super) async fn value(mut self, place: &Place) -> Result<Arrived, Fault> {
        let mut coming = Coming::default();
        let mut messages = 0u64;
        while self.next_message().await? {
            let filled = coming.filled();
            self.read_response(&mut coming, place).await?;
            if filled == coming.filled() && messages > 0 {
                return Err(misbehaved("a message that follows brings nothing"));
            }
            messages += 1;
        }
        self.check_status()?;
        coming.finish(place).await
    }

    /// The end of an answer that brings nothing.
    pub(super) async fn nothing(mut self) -> Result<(), Fault> {
        while self.next_message().await? {
            self.pass_over(self.left).await?;
        }
        self.check_status()
    }

    fn check_status(&mut self) -> Result<(), Fault> {
        let status = self.trailers.take().as_ref().and_then(tonic::Status::from_header_map);
        match status {
            Some(status) if status.code() == tonic::Code::Ok => Ok(()),
            Some(status) => Err(Fault::Answered(status)),
            None => Err(Fault::Broken("the answer ended without a status".to_owned())),
        }
    }

    /// One `RecvTensorResponse`.
    async fn read_response(&mut self, coming: &mut Coming, place: &Place) -> Result<(), Fault> {
        while self.left > 0 {
            match self.tag().await? {
                (response_field::TENSOR, wire_type::LENGTH) => {
                    let length = self.varint().await?;
                    let end = self.left.checked_sub(length).ok_or_else(too_long)?;
                    self.read_tensor(coming, place, end).await?;
                }
                (response_field::IS_DEAD, wire_type::VARINT) => coming.is_dead = self.varint().await? != 0,
                (response_field::OPTIONS, wire_type::LENGTH) => {
                    let any = Any::decode(self.field().await?).map_err(malformed)?;
                    coming.options = TensorOptions::unpack(&any).map_err(malformed)?;
                }
                (_, kind) => self.pass_over_field(kind).await?,
            }
        }
        Ok(())
    }

    /// One `TensorProto`, up to where `end` bytes of the message are left.
    async fn read_tensor(&mut self, coming: &mut Coming, place: &Place, end: u64) -> Result<(), Fault> {
        self.header.clear();
        let length = self.left - end;
        while self.left > end {
            self.is_header = true;
            let tag = self.tag().await?;
            match tag {
                (tensor_field::DTYPE, wire_type::VARINT) => {
                    let number = u32::try_from(self.varint().await?).unwrap_or(u32::MAX);
                    coming.dtype = Some(DataType::from_number(number).map_err(malformed)?);
                }
                (tensor_field::SHAPE, wire_type::LENGTH) => {
                    let shape = TensorShapeProto::decode(self.field().await?).map_err(malformed)?;
                    coming.shape = Some(shape_of(&shape)?);
                }
                (tensor_field::CONTENT, wire_type::LENGTH) => {
                    self.is_header = false;
                    let piece = self.varint().await?;
                    coming.begin(piece, place).await?;
                    self.read_content(coming, piece).await?;
                }
                (_, kind) => self.pass_over_field(kind).await?,
            }
            self.is_header = false;
            if coming.is_encoded_here() {
                coming.begin(length, place).await?;
                let header = std::mem::take(&mut self.header);
                coming.fill(&header)?;
                self.read_content(coming, self.left - end).await?;
            }
        }
        if self.left < end { Err(too_long()) } else { Ok(()) }
    }

    /// `length` bytes into the content.
    async fn read_content(&mut self, coming: &mut Coming, length: u64) -> Result<(), Fault> {
        let mut missing = length;
        self.left = self.left.checked_sub(length).ok_or_else(too_long)?;
        while missing > 0 {
            self.refilled().await?;
            let piece = self.chunk.len().min(usize::try_from(missing).unwrap_or(usize::MAX));
            coming.fill(self.chunk.get(..piece).unwrap_or_default())?;
            self.chunk.advance(piece);
            missing -= piece as u64;
        }
        Ok(())
    }

    async fn tag(&mut self) -> Result<(u64, u64), Fault> {
        let tag = self.varint().await?;
        Ok((tag >> 3, tag & 7))
    }

    async fn varint(&mut self) -> Result<u64, Fault> {
        let mut value = 0;
        for shift in (0..70).step_by(7) {
            let byte = self.byte().await?;
            value |= u64::from(byte & 0x7F).checked_shl(shift).unwrap_or(0);
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(misbehaved("a number has more than ten bytes"))
    }

    async fn byte(&mut self) -> Result<u8, Fault> {
        self.left = self.left.checked_sub(1).ok_or_else(too_long)?;
        self.refilled().await?;
        let byte = self.chunk.get_u8();
        if self.is_header {
            self.header.push(byte);
        }
        Ok(byte)
    }

    /// A field of bytes that is not content.
    async fn field(&mut self) -> Result<Bytes, Fault> {
        let length = self.varint().await?;
        if length > FIELD_BYTES_MAX || length > self.left {
            return Err(misbehaved("a field besides the content is too long"));
        }
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let mut field = Vec::with_capacity(length);
        while field.len() < length {
            field.push(self.byte().await?);
        }
        Ok(field.into())
    }

    async fn pass_over_field(&mut self, kind: u64) -> Result<(), Fault> {
        match kind {
            wire_type::VARINT => self.varint().await.map(drop),
            wire_type::FIXED64 => self.pass_over(8).await,
            wire_type::LENGTH => self.field().await.map(drop),
            wire_type::FIXED32 => self.pass_over(4).await,
            _ => Err(misbehaved("a field of an unknown kind")),
        }
    }

    async fn pass_over(&mut self, length: u64) -> Result<(), Fault> {
        for _ in 0..length {
            self.byte().await?;
        }
        Ok(())
    }

    /// Begins the next message; false at the end of the answer.
    async fn next_message(&mut self) -> Result<bool, Fault> {
        self.left = 5;
        if !self.refill().await? {
            return Ok(false);
        }
        if self.byte().await? != 0 {
            return Err(misbehaved("a message is compressed, which was not asked for"));
        }
        let mut length = 0;
        for _ in 0..4 {
            length = length << 8 | u64::from(self.byte().await?);
        }
        self.left = length;
        Ok(true)
    }

    /// Has bytes at hand; the answer must not end here.
    async fn refilled(&mut self) -> Result<(), Fault> {
        if !self.chunk.is_empty() || self.refill().await? {
            return Ok(());
        }
        // An answer that is broken off says why.
        self.check_status()?;
        Err(misbehaved("an answer ends inside a message"))
    }

    async fn refill(&mut self) -> Result<bool, Fault> {
        while self.chunk.is_empty() {
            let Some(frame) = poll_fn(|context| Pin::new(&mut self.body).poll_frame(context)).await else {
                return Ok(false);
            };
            match frame.map_err(|error| Fault::Broken(causes(&error)))?.into_data() {
                Ok(data) => self.chunk = data,
                Err(other) => self.trailers = other.into_trailers().ok().or(self.trailers.take()),
            }
        }
        Ok(true)
    }
}

impl Coming {
    /// How much of the content there is, once it has begun.
    fn filled(&self) -> Option<usize> {
        self.content.as_ref().map(|content| content.filled)
    }

    /// Whether the tensor being read is the content itself, its header included.
    fn is_encoded_here(&self) -> bool {
        let known = self.shape.is_some() && self.dtype.is_some_and(|dtype| !dtype.is_plain());
        known && !self.is_dead && self.content.is_none() && self.options.content_bytes == 0
    }

    /// Content begins: `length` bytes of it come now. Memory is taken unless it went on.
    async fn begin(&mut self, length: u64, place: &Place) -> Result<(), Fault> {
        if self.content.is_none() {
            let total = if self.options.content_bytes > 0 { self.options.content_bytes } else { length };
            let metadata = self.metadata(total)?;
            if metadata.byte_length != total || self.is_dead {
                return Err(misbehaved("the content has another length than its type and shape say"));
            }
            self.content = Some(Content::new(metadata, place).await?);
        }
        Ok(())
    }

    fn fill(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        let filled = self.content.as_mut().map_or(0, |content| content.fill(bytes));
        if filled == bytes.len() { Ok(()) } else { Err(misbehaved("more content than was said")) }
    }

    fn metadata(&self, encoded: u64) -> Result<Metadata, Fault> {
        let missing = || misbehaved("type and shape do not come before the content");
        let (dtype, shape) = (self.dtype.ok_or_else(missing)?, self.shape.clone().ok_or_else(missing)?);
        if self.is_dead {
            return Ok(Metadata::dead(dtype, shape));
        }
        let made = if dtype.is_plain() {
            Metadata::new(dtype, shape)
        } else {
            Metadata::encoded(dtype, shape, encoded)
        };
        let made = made.filter(|metadata| metadata.byte_length <= TENSOR_BYTES_MAX);
        made.ok_or_else(|| misbehaved("the tensor is larger than any may be"))
    }

    async fn finish(mut self, place: &Place) -> Result<Arrived, Fault> {
        let content = match self.content.take() {
            Some(content) if !self.is_dead => content,
            Some(content) if content.metadata.dtype.is_plain() => {
                return Err(misbehaved("a dead value has content"));
            }
            _ => Content::new(self.metadata(0)?, place).await?,
        };
        if !content.is_full() {
            return Err(misbehaved("the answer has less content than its type and shape say"));
        }
        content.arrived(self.options)
    }
}

fn shape_of(proto: &TensorShapeProto) -> Result<Shape, Fault> {
    let sizes: Option<Vec<u64>> = proto.dim.iter().map(|dim| u64::try_from(dim.size).ok()).collect();
    let shape = sizes.filter(|_| !proto.unknown_rank).and_then(Shape::new);
    shape.ok_or_else(|| misbehaved("the shape is none that a tensor can have"))
}

fn misbehaved(rule: &str) -> Fault {
    Fault::Misbehaved(rule.to_owned())
}

fn malformed(error: impl Error) -> Fault {
    Fault::Misbehaved(error.to_string())
}

fn too_long() -> Fault {
    misbehaved("a field is longer than what it is part of")
}

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
#[cfg(test)]
mod tests;
