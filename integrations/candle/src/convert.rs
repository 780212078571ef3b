//! Tensors of one and of the other, by one copy.

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Shape, Storage, Tensor, WithDType, bail};
use half::{bf16, f16};
use tensorwire::{DataType, Element, memory::Pool};

use crate::error::Error;

/// Types that both have: `candle` variant, Rust type, `tensorwire` variant.
macro_rules! with_types {
    ($macro:ident) => {
        $macro! {
            (U8, u8, U8), (U32, u32, U32), (I16, i16, I16), (I32, i32, I32), (I64, i64, I64), (BF16, bf16, Bf16), (F16, f16, F16),
            (F32, f32, F32), (F64, f64, F64)
        }
    };
}

/// A candle tensor of a copy of `tensor`, on `device`.
///
/// # Errors
/// [`Error::UnknownToCandle`], [`Error::Candle`] if the device refuses it.
pub fn to_candle(tensor: &tensorwire::Tensor, device: &Device) -> Result<Tensor, Error> {
    let shape = shape_of(tensor);
    macro_rules! copied {
        ($(($candle:ident, $rust:ty, $tensorwire:ident)),*) => {
            match tensor.dtype() {
                $(DataType::$tensorwire => Tensor::from_vec(elements::<$rust>(tensor.bytes()), shape, device)?,)*
                other => return Err(Error::UnknownToCandle(other)),
            }
        };
    }
    Ok(with_types!(copied))
}

/// A tensor of a copy of `tensor` in `pool`. One that is not contiguous, or not on the CPU, is copied by candle first.
///
/// # Errors
/// [`Error::UnknownToTensorwire`]; [`Error::Worker`] if the pool has no room; [`Error::Candle`].
pub fn from_candle(pool: &Pool, tensor: &Tensor) -> Result<tensorwire::Tensor, Error> {
    let tensor = tensor.to_device(&Device::Cpu)?.contiguous()?;
    let shape: Vec<u64> = tensor.dims().iter().map(|&length| length as u64).collect();
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { return Err(Error::UnknownToTensorwire(tensor.dtype())) };
    let range = layout.start_offset()..layout.start_offset() + layout.shape().elem_count();
    macro_rules! copied {
        ($(($candle:ident, $rust:ty, $tensorwire:ident)),*) => {
            match storage {
                $(CpuStorage::$candle(values) => {
                    tensorwire::Tensor::from_values(pool, &shape, values.get(range).unwrap_or_default())?
                })*
                _ => return Err(Error::UnknownToTensorwire(tensor.dtype())),
            }
        };
    }
    Ok(with_types!(copied))
}

/// The type of candle's elements for those of the tensor.
pub(crate) fn candle_type(dtype: DataType) -> Result<DType, Error> {
    macro_rules! found {
        ($(($candle:ident, $rust:ty, $tensorwire:ident)),*) => {
            match dtype {
                $(DataType::$tensorwire => Ok(DType::$candle),)*
                other => Err(Error::UnknownToCandle(other)),
            }
        };
    }
    with_types!(found)
}

pub(crate) fn shape_of(tensor: &tensorwire::Tensor) -> Shape {
    // Lengths of a tensor in memory fit.
    Shape::from(tensor.shape().iter().map(|&length| length as usize).collect::<Vec<_>>())
}

/// The elements, in a vector of their own. Their bytes need no alignment.
fn elements<T: Element + WithDType>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(T::decode).collect()
}

/// Copies a tensor over the values of a variable of the same type and shape, in the variable's own memory.
pub(crate) struct CopyIn<'a>(pub(crate) &'a tensorwire::Tensor);

impl InplaceOp1 for CopyIn<'_> {
    fn name(&self) -> &'static str {
        "copy of a received tensor"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else { bail!("the variable is not contiguous") };
        macro_rules! copied {
            ($(($candle:ident, $rust:ty, $tensorwire:ident)),*) => {
                match (storage, self.0.dtype()) {
                    $((CpuStorage::$candle(values), DataType::$tensorwire) => {
                        copy(self.0.bytes(), values.get_mut(start..end).unwrap_or_default())
                    })*
                    _ => bail!("the variable has elements of another type"),
                }
            };
        }
        with_types!(copied)
    }
}

fn copy<T: Element>(bytes: &[u8], values: &mut [T]) -> candle_core::Result<()> {
    if bytes.len() != size_of_val(values) {
        bail!("the variable has {} bytes, and the tensor {}", size_of_val(values), bytes.len());
    }
    for (place, from) in values.iter_mut().zip(bytes.chunks_exact(size_of::<T>())) {
        *place = T::decode(from);
    }
    Ok(())
}
