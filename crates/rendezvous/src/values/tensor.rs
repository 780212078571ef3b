//! Tensors: metadata and shared, immutable bytes.

use std::{any::type_name, fmt, sync::Arc};

use bytes::Bytes;
use half::{bf16, f16};
use prost::Message;
use tensorwire_memory::{Buf, BufMut, Pool, UserMemory, copy::CopyReason, copy::copy_bytes};
use tensorwire_protocol::{Checksums, DataType, Metadata, Shape};
use zerocopy::{ConvertError, Immutable, IntoBytes, KnownLayout, TryFromBytes};

use crate::{error::WorkerError, values::tensor_proto::TensorProto};

/// An immutable tensor in pool memory. Cheap to clone: clones share the bytes.
///
/// ```
/// use tensorwire::DataType;
/// use tensorwire::{Tensor, Worker};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tensorwire::WorkerError> {
/// let worker = Worker::builder("/job:trainer/replica:0/task:0").start().await?;
/// let matrix = Tensor::from_values(worker.pool(), &[2, 2], &[1.0f32, 2.0, 3.0, 4.0])?;
/// assert_eq!((matrix.shape(), matrix.bytes().len()), (&[2, 2][..], 16));
///
/// // Written in place, without a copy: a buffer of the pool becomes a tensor.
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
    /// Makes a tensor of `bytes` without a copy. They contain the elements in row-major order, little-endian.
    ///
    /// # Errors
    /// [`WorkerError::InvalidTensor`] if the shape is too large or the length does not match it.
    pub fn new(bytes: BufMut, dtype: DataType, shape: &[u64]) -> Result<Self, WorkerError> {
        Self::shared(bytes.freeze(), dtype, shape)
    }

    /// Like [`new`](Self::new), for bytes that may be shared: a part of another buffer, or memory that has joined
    /// ([`Worker::user_memory`](crate::Worker::user_memory)).
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

    /// Makes a tensor of a copy of `bytes` in `pool` (one counted copy).
    ///
    /// # Errors
    /// As [`new`](Self::new), and [`WorkerError::Memory`] if the pool is full.
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

    /// Makes a tensor of `values`, encoded into `pool`.
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

    /// Makes a tensor of `values` without a copy. The vector becomes part of `memory`, the
    /// [`user_memory`](crate::Worker::user_memory) of the worker that publishes or sends the tensor, and is dropped
    /// with the last clone of the tensor. TCP and RDMA send directly from the vector. Shared memory cannot: each time a
    /// peer on shared memory receives the tensor, the bytes are first copied into
    /// [`Worker::pool`](crate::Worker::pool).
    ///
    /// ```
    /// use tensorwire::{Tensor, Worker};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tensorwire::WorkerError> {
    /// # let worker = Worker::client().start().await?;
    /// let weights = vec![0.5f32; 1000];
    /// let tensor = Tensor::from_vec(worker.user_memory(), &[10, 100], weights)?;
    /// assert_eq!(tensor.as_slice::<f32>()?[999], 0.5);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new), and [`WorkerError::Memory`] if an RDMA device refuses the memory. Then the vector is
    /// dropped.
    pub fn from_vec<T: Element>(
        memory: &UserMemory,
        shape: &[u64],
        values: Vec<T>,
    ) -> Result<Self, WorkerError> {
        if let Some(problem) = unlike_here::<T>() {
            return Err(WorkerError::InvalidTensor { problem });
        }
        Self::shared(memory.buffer_of(Arc::new(values))?, T::DTYPE, shape)
    }

    /// Makes a tensor of byte strings in row-major order, encoded into `pool` as TensorFlow's `TensorProto` (one
    /// counted copy).
    ///
    /// # Errors
    /// [`WorkerError::InvalidTensor`] if the number of strings does not match the shape, [`WorkerError::Memory`] if the
    /// pool is full.
    pub fn from_strings<S: AsRef<[u8]>>(
        pool: &Pool,
        shape: &[u64],
        strings: &[S],
    ) -> Result<Self, WorkerError> {
        let checked = Shape::new(shape).filter(|shape| shape.elements() == strings.len() as u64);
        let Some(checked) = checked else {
            let problem = format!(
                "{} strings do not fill shape {shape:?}; give one string for each element",
                strings.len()
            );
            return Err(WorkerError::InvalidTensor { problem });
        };
        let strings = strings.iter().map(|string| Bytes::copy_from_slice(string.as_ref())).collect();
        let encoded = TensorProto::of_strings(shape, strings)?.encode_to_vec();
        let mut buffer = pool.try_alloc(encoded.len())?;
        copy_bytes(&mut buffer, &encoded, CopyReason::Import);
        let metadata = Metadata::encoded(DataType::String, checked, encoded.len() as u64);
        let metadata = metadata
            .ok_or_else(|| WorkerError::InvalidTensor { problem: "strings cannot be encoded".to_owned() })?;
        Ok(Self { metadata, bytes: buffer.freeze(), checksums: Some(Arc::default()) })
    }

    /// The strings of a string tensor. They share its bytes. The encoding of a received tensor is checked here.
    ///
    /// # Errors
    /// [`WorkerError::InvalidTensor`] if the element type is not string, or the encoding contradicts the metadata.
    pub fn strings(&self) -> Result<Vec<Bytes>, WorkerError> {
        if self.dtype() != DataType::String {
            let problem = format!("its element type is {}, not string; use the type it has", self.dtype());
            return Err(WorkerError::InvalidTensor { problem });
        }
        if self.is_dead() {
            return Ok(Vec::new());
        }
        TensorProto::strings(Bytes::from(self.bytes.clone()), &self.metadata)
    }

    /// Makes the value of a branch that was not taken. It has no bytes.
    ///
    /// # Errors
    /// [`WorkerError::InvalidTensor`] if the shape is too large.
    pub fn dead(dtype: DataType, shape: &[u64]) -> Result<Self, WorkerError> {
        let shape = if dtype.is_plain() { Some(describe(dtype, shape)?.shape) } else { Shape::new(shape) };
        let problem = "the shape of the dead value is too large".to_owned();
        let shape = shape.ok_or(WorkerError::InvalidTensor { problem })?;
        Ok(Self { metadata: Metadata::dead(dtype, shape), bytes: Buf::empty(), checksums: None })
    }

    pub(crate) fn received(metadata: Metadata, bytes: Buf, checksums: Option<Arc<Checksums>>) -> Self {
        Self { metadata, bytes, checksums }
    }

    /// The tensor with `content` in place of its bytes from `at` on, in the same memory.
    ///
    /// # Errors
    /// The unchanged tensor, if anything else has the memory, it is no pool's, or `content` leaves the tensor.
    pub(crate) fn try_overwrite(self, at: usize, content: &[u8]) -> Result<Self, Self> {
        let Self { metadata, bytes, checksums } = self;
        let end = at.checked_add(content.len()).filter(|end| *end <= bytes.len());
        let Some(end) = end else { return Err(Self { metadata, bytes, checksums }) };
        match bytes.try_into_mut() {
            Ok(mut bytes) => {
                copy_bytes(&mut bytes[at..end], content, CopyReason::Local);
                Ok(Self { metadata, bytes: bytes.freeze(), checksums: Some(Arc::default()) })
            }
            Err(bytes) => Err(Self { metadata, bytes, checksums }),
        }
    }

    /// Lets all clones made from now on share computed checksums, also for a received tensor.
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

    /// Whether this is the value of a branch that was not taken.
    pub fn is_dead(&self) -> bool {
        self.metadata.is_dead
    }

    /// Everything except the bytes.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The bytes of the elements, row-major and little-endian; an encoded `TensorProto` if the elements are not
    /// [plain](DataType::is_plain).
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The shared buffer. It converts into `bytes::Bytes` without a copy.
    pub fn buf(&self) -> &Buf {
        &self.bytes
    }

    /// The elements, row-major, without a copy. Empty for the value of a branch that was not taken.
    ///
    /// Memory that is allocated from a pool, and received values, are aligned for every element type. A part of other
    /// memory ([`shared`](Self::shared)), such as a mapped file, may not be aligned, nor may a view of it.
    ///
    /// ```
    /// use tensorwire::{Tensor, Worker};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tensorwire::WorkerError> {
    /// # let worker = Worker::client().start().await?;
    /// let tensor = Tensor::from_values(worker.pool(), &[2], &[1.0f32, 2.0])?;
    /// assert_eq!(tensor.as_slice::<f32>()?, [1.0, 2.0]);
    /// assert!(tensor.as_slice::<i32>().is_err());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`WorkerError::InvalidTensor`] if the tensor has another element type, if the bytes are not aligned for it or
    /// are not valid values of it (a `bool` that is neither 0 nor 1), or on a big-endian machine.
    /// [`values`](Self::values) needs no alignment.
    pub fn as_slice<T: Element>(&self) -> Result<&[T], WorkerError> {
        self.check_type::<T>()?;
        if self.bytes.is_empty() {
            return Ok(&[]);
        }
        let of_bytes = <[T]>::try_ref_from_bytes(&self.bytes).map_err(|error| match error {
            ConvertError::Alignment(_) => format!(
                "its bytes do not begin at a multiple of {}, as {} requires; read them with values()",
                align_of::<T>(),
                type_name::<T>()
            ),
            ConvertError::Size(_) => {
                format!("its {} bytes are not a whole number of elements", self.bytes.len())
            }
            ConvertError::Validity(_) => format!("some of its bytes are not a valid {}", type_name::<T>()),
        });
        let elements = unlike_here::<T>().map_or(of_bytes, Err);
        elements.map_err(|problem| WorkerError::InvalidTensor { problem })
    }

    /// The elements, copied and decoded. Needs no alignment. Any byte of a `bool` except 0 counts as true.
    ///
    /// # Errors
    /// [`WorkerError::InvalidTensor`] if the tensor has another element type.
    pub fn values<T: Element>(&self) -> Result<Vec<T>, WorkerError> {
        self.check_type::<T>()?;
        Ok(self.bytes.chunks_exact(size_of::<T>()).map(T::decode).collect())
    }

    fn check_type<T: Element>(&self) -> Result<(), WorkerError> {
        if self.dtype() == T::DTYPE {
            return Ok(());
        }
        let problem = format!("its element type is {}, not {}; use the type it has", self.dtype(), T::DTYPE);
        Err(WorkerError::InvalidTensor { problem })
    }
}

/// The reason why elements in this machine's memory differ from those in tensors, if they do.
fn unlike_here<T>() -> Option<String> {
    let differs = cfg!(target_endian = "big") && size_of::<T>() > 1;
    differs.then(|| "tensors are little-endian, and this machine is not; copy with values()".to_owned())
}

fn describe(dtype: DataType, shape: &[u64]) -> Result<Metadata, WorkerError> {
    if !dtype.is_plain() {
        let problem = format!("{dtype} elements are not plain bytes; use Tensor::from_strings");
        return Err(WorkerError::InvalidTensor { problem });
    }
    let metadata = Shape::new(shape).and_then(|shape| Metadata::new(dtype, shape));
    metadata
        .filter(|metadata| metadata.byte_length <= tensorwire_protocol::limits::TENSOR_BYTES_MAX)
        .ok_or_else(|| {
            let problem = format!(
                "shape {shape:?} of {dtype} is too large: at most {} dimensions and {} bytes",
                tensorwire_protocol::limits::RANK_MAX,
                tensorwire_protocol::limits::TENSOR_BYTES_MAX
            );
            WorkerError::InvalidTensor { problem }
        })
}

/// A Rust type that can be an element: the integers, `f32`, `f64`, `f16` and `bf16` of the crate `half`, `bool`, and
/// `[f32; 2]` and `[f64; 2]` for complex numbers (real, imaginary). There is none for 8-bit floats; read them with
/// [`Tensor::bytes`].
pub trait Element: Copy + Plain {
    /// The element type.
    const DTYPE: DataType;

    /// Writes the little-endian bytes to `into`, which has exactly the element's length.
    fn encode(self, into: &mut [u8]);

    /// Reads the little-endian bytes of one element; missing bytes count as zero.
    fn decode(from: &[u8]) -> Self;
}

/// Types whose memory is plain bytes.
pub trait Plain:
    TryFromBytes + IntoBytes + KnownLayout + Immutable + fmt::Debug + Send + Sync + 'static
{
}

impl<T> Plain for T where
    T: TryFromBytes + IntoBytes + KnownLayout + Immutable + fmt::Debug + Send + Sync + 'static
{
}

/// The bytes, filled up with zeros to `N`.
#[cold]
fn padded<const N: usize>(from: &[u8]) -> [u8; N] {
    std::array::from_fn(|at| from.get(at).copied().unwrap_or_default())
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident,)*) => {
        $(impl Element for $rust {
            const DTYPE: DataType = DataType::$dtype;

            // Inlined, and copies all bytes at once, so that loops over elements become vector instructions in the
            // caller's crate.
            #[inline]
            fn encode(self, into: &mut [u8]) {
                if let Some(place) = into.first_chunk_mut() {
                    *place = self.to_le_bytes();
                }
            }

            #[inline]
            fn decode(from: &[u8]) -> Self {
                Self::from_le_bytes(from.first_chunk().copied().unwrap_or_else(|| padded(from)))
            }
        })*
    };
}

elements! {
    f32 => F32,
    f64 => F64,
    f16 => F16,
    bf16 => Bf16,
    i8 => I8,
    i16 => I16,
    i32 => I32,
    i64 => I64,
    u8 => U8,
    u16 => U16,
    u32 => U32,
    u64 => U64,
}

impl Element for bool {
    const DTYPE: DataType = DataType::Bool;

    #[inline]
    fn encode(self, into: &mut [u8]) {
        Element::encode(u8::from(self), into);
    }

    #[inline]
    fn decode(from: &[u8]) -> Self {
        <u8 as Element>::decode(from) != 0
    }
}

macro_rules! complex {
    ($($part:ty => $dtype:ident,)*) => {
        $(impl Element for [$part; 2] {
            const DTYPE: DataType = DataType::$dtype;

            #[inline]
            fn encode(self, into: &mut [u8]) {
                for (place, part) in into.chunks_exact_mut(size_of::<$part>()).zip(self) {
                    Element::encode(part, place);
                }
            }

            #[inline]
            fn decode(from: &[u8]) -> Self {
                let (real, imaginary) = from.split_at(from.len().min(size_of::<$part>()));
                [Element::decode(real), Element::decode(imaginary)]
            }
        })*
    };
}

complex! {
    f32 => C64,
    f64 => C128,
}

#[cfg(test)]
mod tests {
    use tensorwire_memory::PoolConfig;

    use super::*;

    fn pool() -> Pool {
        Pool::new(PoolConfig { block_bytes: 65_536, ..PoolConfig::new("test") }).unwrap()
    }

    fn goes_through<T: Element + PartialEq>(values: &[T]) {
        let shape = [values.len() as u64];
        let copied = Tensor::from_values(&pool(), &shape, values).unwrap();
        assert_eq!((copied.dtype(), copied.values::<T>().unwrap().as_slice()), (T::DTYPE, values));
        assert_eq!(copied.as_slice::<T>().unwrap(), values);
        assert!(std::ptr::eq(copied.as_slice::<T>().unwrap().as_ptr().cast(), copied.bytes().as_ptr()));
        let own = values.to_vec();
        let at = own.as_ptr();
        let joined = Tensor::from_vec(&UserMemory::new(), &shape, own).unwrap();
        assert_eq!((joined.bytes(), joined.as_slice::<T>().unwrap().as_ptr()), (copied.bytes(), at));
    }

    #[test]
    fn elements_of_every_type_go_in_and_out_without_a_copy() {
        goes_through(&[1.5f32, f32::MIN, 0.0]);
        goes_through(&[1.5f64, f64::MAX]);
        goes_through(&[f16::from_f32(1.5), f16::MAX]);
        goes_through(&[bf16::from_f32(-2.5), bf16::MIN_POSITIVE]);
        goes_through(&[true, false, true]);
        goes_through(&[[1.0f32, -1.0], [0.5, 2.0]]);
        goes_through(&[[1.0f64, -1.0]]);
        goes_through(&[i8::MIN, 1]);
        goes_through(&[i16::MIN, 1]);
        goes_through(&[i32::MIN, 1]);
        goes_through(&[i64::MIN, 1]);
        goes_through(&[7u8, 8]);
        goes_through(&[u16::MAX, 1]);
        goes_through(&[u32::MAX, 1]);
        goes_through(&[u64::MAX, 1]);
        let none = Tensor::from_vec(&UserMemory::new(), &[0], Vec::<u64>::new()).unwrap();
        assert!(none.as_slice::<u64>().unwrap().is_empty());
    }

    #[test]
    fn a_slice_of_another_type_unaligned_or_of_no_bool_is_refused() {
        let problem = |error| match error {
            WorkerError::InvalidTensor { problem } => problem,
            other => panic!("{other}"),
        };
        let of_type = |dtype, shape: &[u64], bytes: Buf| Tensor::shared(bytes, dtype, shape).unwrap();
        let bytes = Tensor::from_values(&pool(), &[9], &[1u8, 0, 1, 0, 2, 0, 0, 0, 0]).unwrap().buf().clone();

        let floats = of_type(DataType::F32, &[2], bytes.slice(0..8).unwrap());
        assert_eq!(
            problem(floats.as_slice::<i32>().unwrap_err()),
            "its element type is f32, not i32; use the type it has"
        );
        let odd = of_type(DataType::U32, &[2], bytes.slice(1..9).unwrap());
        assert!(problem(odd.as_slice::<u32>().unwrap_err()).contains("values()"));
        assert_eq!(odd.values::<u32>().unwrap(), [0x0200_0100, 0]);
        let truths = of_type(DataType::Bool, &[4], bytes.slice(0..4).unwrap());
        assert_eq!(truths.as_slice::<bool>().unwrap(), [true, false, true, false]);
        let more = of_type(DataType::Bool, &[5], bytes.slice(0..5).unwrap());
        assert!(problem(more.as_slice::<bool>().unwrap_err()).contains("not a valid bool"));
        let dead = Tensor::dead(DataType::F64, &[3]).unwrap();
        assert!(dead.as_slice::<f64>().unwrap().is_empty());
    }

    #[test]
    fn a_vector_lives_as_long_as_tensors_of_it() {
        let memory = UserMemory::new();
        let tensor = Tensor::from_vec(&memory, &[2, 2], vec![1u16, 2, 3, 4]).unwrap();
        let clone = tensor.clone();
        drop((memory, tensor));
        assert_eq!(clone.as_slice::<u16>().unwrap(), [1, 2, 3, 4]);
        let refused = Tensor::from_vec(&UserMemory::new(), &[3], vec![1u16]);
        assert!(matches!(refused, Err(WorkerError::InvalidTensor { .. })));
    }
}
