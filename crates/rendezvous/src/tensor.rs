//! Tensors: metadata and shared, immutable bytes.

use std::fmt;

use memory::{Buf, BufMut, Pool, copy::CopyReason, copy::copy_bytes};
use protocol::{DataType, Metadata, Shape};

use crate::WorkerError;

/// An immutable tensor over pool memory. Cheap to clone: the bytes are shared.
#[derive(Clone)]
pub struct Tensor {
    metadata: Metadata,
    bytes: Buf,
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
        Ok(Self { metadata, bytes })
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

    /// The value of a branch not taken: no bytes.
    ///
    /// # Errors
    /// [`WorkerError::InvalidTensor`] when the shape is too large.
    pub fn dead(dtype: DataType, shape: &[u64]) -> Result<Self, WorkerError> {
        let shape = describe(dtype, shape)?.shape;
        Ok(Self { metadata: Metadata::dead(dtype, shape), bytes: Buf::empty() })
    }

    pub(crate) fn received(metadata: Metadata, bytes: Buf) -> Self {
        Self { metadata, bytes }
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

    /// The elements' bytes, row-major, little-endian.
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
