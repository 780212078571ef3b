//! Tensors: metadata and shared, immutable bytes.

use std::{fmt, sync::Arc};

use bytes::Bytes;
use memory::{Buf, BufMut, Pool, copy::CopyReason, copy::copy_bytes};
use prost::Message;
use protocol::{Checksums, DataType, Metadata, Shape};

use crate::{WorkerError, encoded::TensorProto};

/// An immutable tensor over pool memory. Cheap to clone: the bytes are shared.
///
/// ```
/// use protocol::DataType;
/// use rendezvous::{Tensor, Worker};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), rendezvous::WorkerError> {
/// let worker = Worker::builder("/job:trainer/replica:0/task:0").start().await?;
/// let matrix = Tensor::from_values(worker.pool(), &[2, 2], &[1.0f32, 2.0, 3.0, 4.0])?;
/// assert_eq!((matrix.shape(), matrix.bytes().len()), (&[2, 2][..], 16));
///
/// // Written in place, without a copy: a buffer of the pool, then a tensor of it.
/// let mut buffer = worker.pool().alloc(8).await?;
/// buffer.fill(7);
/// let bytes = Tensor::new(buffer, DataType::U8, &[8])?;
/// assert_eq!(bytes.values::<u8>()?, [7; 8]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Tensor {
    metadata: Metadata,
    bytes: Buf,
    /// Shared by all clones.
    checksums: Option<Arc<Checksums>>,
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Metadata { dtype, shape, is_dead, .. } = &self.metadata;
        write!(f, "Tensor({dtype} {shape}{})", if *is_dead { ", dead" } else { "" })
    }
}

impl Tensor {
    /// A tensor over `bytes`, without a copy. `bytes` hold the elements in row-major order, little-endian.
    ///
    /// # Errors
    /// [`WorkerError::InvalidTensor`] when the shape is too large or the length does not fit it.
    pub fn new(bytes: BufMut, dtype: DataType, shape: &[u64]) -> Result<Self, WorkerError> {
        Self::shared(bytes.freeze(), dtype, shape)
    }

    /// As [`new`](Self::new), over bytes that others may hold too: a part of another buffer, or memory that has
    /// joined ([`Worker::user_memory`](crate::Worker::user_memory)).
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn shared(bytes: Buf, dtype: DataType, shape: &[u64]) -> Result<Self, WorkerError> {
        let metadata = describe(dtype, shape)?;
        if metadata.byte_length != bytes.len() as u64 {
            let problem = format!(
                "{dtype} {shape:?} takes {} bytes, but the buffer has {}; give exactly that many",
                metadata.byte_length,
                bytes.len()
            );
            return Err(WorkerError::InvalidTensor { problem });
        }
        Ok(Self { metadata, bytes, checksums: Some(Arc::default()) })
    }

    /// A tensor with a copy of `bytes` in `pool` (one counted copy).
    ///
    /// # Errors
    /// As [`new`](Self::new), and [`WorkerError::Memory`] when the pool is full.
    pub fn from_bytes(
        pool: &Pool,
        dtype: DataType,
        shape: &[u64],
        bytes: &[u8],
    ) -> Result<Self, WorkerError> {
        let mut buffer = pool.try_alloc(bytes.len())?;
        copy_bytes(&mut buffer, bytes, CopyReason::Import);
        Self::new(buffer, dtype, shape)
    }

    /// A tensor with `values` encoded into `pool`.
    ///
    /// # Errors
    /// As [`from_bytes`](Self::from_bytes).
    pub fn from_values<T: Element>(pool: &Pool, shape: &[u64], values: &[T]) -> Result<Self, WorkerError> {
        let width = size_of::<T>();
        let mut buffer = pool.try_alloc(values.len().saturating_mul(width))?;
        for (place, value) in buffer.chunks_exact_mut(width).zip(values) {
            value.encode(place);
        }
        Self::new(buffer, T::DTYPE, shape)
    }

    /// A tensor of byte strings in row-major order, encoded into `pool` as TensorFlow's `TensorProto` (one counted
    /// copy).
    ///
    /// # Errors
    /// [`WorkerError::InvalidTensor`] when the number of strings does not fit the shape, [`WorkerError::Memory`] when
    /// the pool is full.
    pub fn from_strings<S: AsRef<[u8]>>(
        pool: &Pool,
        shape: &[u64],
        strings: &[S],
    ) -> Result<Self, WorkerError> {
        let checked = Shape::new(shape).filter(|shape| shape.elements() == strings.len() as u64);
        let Some(checked) = checked else {
            let problem =
                format!("{} strings do not fill shape {shape:?}; give one for each element", strings.len());
            return Err(WorkerError::InvalidTensor { problem });
        };
        let strings = strings.iter().map(|string| Bytes::copy_from_slice(string.as_ref())).collect();
        let encoded = TensorProto::of_strings(shape, strings)?.encode_to_vec();
        let mut buffer = pool.try_alloc(encoded.len())?;
        copy_bytes(&mut buffer, &encoded, CopyReason::Import);
        let metadata = Metadata::encoded(DataType::String, checked, encoded.len() as u64);
        let metadata =
            metadata.ok_or_else(|| WorkerError::InvalidTensor { problem: "no string".to_owned() })?;
        Ok(Self { metadata, bytes: buffer.freeze(), checksums: Some(Arc::default()) })
    }

    /// The strings of a string tensor, which share its bytes. What a peer sent is checked here.
    ///
    /// # Errors
    /// [`WorkerError::InvalidTensor`] when the element type is another, or the encoding is not what the metadata says.
    pub fn strings(&self) -> Result<Vec<Bytes>, WorkerError> {
        if self.dtype() != DataType::String {
            let problem = format!("it holds {}, not string; ask for the type it has", self.dtype());
            return Err(WorkerError::InvalidTensor { problem });
        }
        if self.is_dead() {
            return Ok(Vec::new());
        }
        TensorProto::strings(Bytes::from(self.bytes.clone()), &self.metadata)
    }

    /// The value of a branch not taken: no bytes.
    ///
    /// # Errors
    /// [`WorkerError::InvalidTensor`] when the shape is too large.
    pub fn dead(dtype: DataType, shape: &[u64]) -> Result<Self, WorkerError> {
        let shape = if dtype.is_plain() { Some(describe(dtype, shape)?.shape) } else { Shape::new(shape) };
        let problem = "the shape of the dead value is too large".to_owned();
        let shape = shape.ok_or(WorkerError::InvalidTensor { problem })?;
        Ok(Self { metadata: Metadata::dead(dtype, shape), bytes: Buf::empty(), checksums: None })
    }

    pub(crate) fn received(metadata: Metadata, bytes: Buf, checksums: Option<Arc<Checksums>>) -> Self {
        Self { metadata, bytes, checksums }
    }

    /// From now on its checksums are remembered for all its clones, also if it was received.
    pub(crate) fn remember_checksums(mut self) -> Self {
        self.checksums.get_or_insert_default();
        self
    }

    pub(crate) fn checksums(&self) -> Option<Arc<Checksums>> {
        self.checksums.clone()
    }

    /// Element type.
    pub fn dtype(&self) -> DataType {
        self.metadata.dtype
    }

    /// Lengths of the dimensions; none for a scalar.
    pub fn shape(&self) -> &[u64] {
        self.metadata.shape.dimensions()
    }

    /// Whether this is the value of a branch not taken.
    pub fn is_dead(&self) -> bool {
        self.metadata.is_dead
    }

    /// Everything except the bytes.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The elements' bytes, row-major, little-endian; an encoded `TensorProto` where elements are not
    /// [plain](DataType::is_plain).
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The shared buffer; converts into `bytes::Bytes` without a copy.
    pub fn buf(&self) -> &Buf {
        &self.bytes
    }

    /// The elements, decoded.
    ///
    /// # Errors
    /// [`WorkerError::InvalidTensor`] when the element type is another.
    pub fn values<T: Element>(&self) -> Result<Vec<T>, WorkerError> {
        if self.dtype() != T::DTYPE {
            let problem = format!("it holds {}, not {}; ask for the type it has", self.dtype(), T::DTYPE);
            return Err(WorkerError::InvalidTensor { problem });
        }
        Ok(self.bytes.chunks_exact(size_of::<T>()).map(T::decode).collect())
    }
}

fn describe(dtype: DataType, shape: &[u64]) -> Result<Metadata, WorkerError> {
    if !dtype.is_plain() {
        let problem = format!("{dtype} elements are no plain bytes; make it with Tensor::from_strings");
        return Err(WorkerError::InvalidTensor { problem });
    }
    let metadata = Shape::new(shape).and_then(|shape| Metadata::new(dtype, shape));
    metadata.filter(|metadata| metadata.byte_length <= protocol::limits::TENSOR_BYTES_MAX).ok_or_else(|| {
        let problem = format!(
            "shape {shape:?} of {dtype} is too large: at most {} dimensions and {} bytes",
            protocol::limits::RANK_MAX,
            protocol::limits::TENSOR_BYTES_MAX
        );
        WorkerError::InvalidTensor { problem }
    })
}

/// A Rust type that is an element type.
pub trait Element: Copy {
    /// The element type.
    const DTYPE: DataType;

    /// Writes the little-endian bytes over `into`, which has exactly the element's length.
    fn encode(self, into: &mut [u8]);

    /// Reads the little-endian bytes of one element; missing bytes count as zero.
    fn decode(from: &[u8]) -> Self;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident,)*) => {
        $(impl Element for $rust {
            const DTYPE: DataType = DataType::$dtype;

            // Inlined, so that loops over elements become vector instructions in the caller's crate.
            #[inline]
            fn encode(self, into: &mut [u8]) {
                for (place, byte) in into.iter_mut().zip(self.to_le_bytes()) {
                    *place = byte;
                }
            }

            #[inline]
            fn decode(from: &[u8]) -> Self {
                let mut bytes = [0; size_of::<Self>()];
                for (place, &byte) in bytes.iter_mut().zip(from) {
                    *place = byte;
                }
                Self::from_le_bytes(bytes)
            }
        })*
    };
}

elements! {
    f32 => F32,
    f64 => F64,
    i8 => I8,
    i16 => I16,
    i32 => I32,
    i64 => I64,
    u8 => U8,
    u16 => U16,
    u32 => U32,
    u64 => U64,
}
