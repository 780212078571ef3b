//! Memory that DLPack tensors describe.

use std::{fmt, ptr::NonNull};

use dlpark::{
    DlpackFlags, Managed, ManagedTensorBase, TensorRef,
    ffi::{DLDataType, DLDevice, DLDeviceType},
    metadata::Dynamic,
};

use crate::{Buf, ForeignMemory};

/// A DLPack tensor whose memory nobody writes. The tensor's deleter is called when this value is dropped.
///
/// As the owner of [foreign memory](ForeignMemory) its bytes are the elements. It has no bytes if they are not on the CPU or not in
/// row-major order.
///
/// ```
/// use dlpark::ffi::{DLDataType, DLManagedTensorVersioned};
/// use tensorwire_memory::{Buf, DlpackMemory, ForeignMemory, Pool, PoolConfig};
///
/// let pool = Pool::new(PoolConfig::new("source"))?;
/// let bytes = pool.try_alloc(6)?.freeze();
/// let at = bytes.as_ptr();
/// let memory = DlpackMemory::<DLManagedTensorVersioned>::of_buffer(bytes, DLDataType::U8, &[2, 3]).unwrap();
/// assert_eq!((memory.base().as_ptr().cast_const(), memory.length()), (at, 6));
/// # Ok::<(), tensorwire_memory::MemoryError>(())
/// ```
pub struct DlpackMemory<M: ManagedTensorBase> {
    tensor: Managed<M>,
}

impl<M: ManagedTensorBase> DlpackMemory<M> {
    /// Takes a tensor of another library.
    ///
    /// # Safety
    /// Until the tensor's deleter is called:
    /// - What its descriptor says is true, and does not change.
    /// - If its device is the CPU, the bytes of its elements are initialised and can be read by any thread.
    /// - Nobody writes them: no code of this process, no other process, no device.
    pub unsafe fn new(tensor: Managed<M>) -> Self {
        Self { tensor }
    }

    /// The DLPack tensor of `bytes`, in row-major order, on the CPU, and read-only if the format `M` can say that. The bytes live until its
    /// deleter is called, which may happen on any thread. No copy. `None` if `bytes` are not exactly the elements, or if the shape is too
    /// large for DLPack.
    pub fn of_buffer(bytes: Buf, dtype: DLDataType, shape: &[u64]) -> Option<Self> {
        let bits = u64::from(dtype.bits) * u64::from(dtype.lanes);
        let bits = shape.iter().try_fold(bits, |bits, &dimension| bits.checked_mul(dimension))?;
        if bits.div_ceil(8) != bytes.len() as u64 {
            return None;
        }
        let metadata = Dynamic::compact(shape).prepare_as::<M>().ok()?;
        let first = if bytes.is_empty() { std::ptr::null_mut() } else { bytes.as_ptr().cast_mut().cast() };
        let mut tensor = metadata.initialize(Box::new(bytes));
        tensor.set_data(first).set_dtype(dtype).set_device(DLDevice::CPU);
        tensor.set_flags(DlpackFlags::READ_ONLY).ok()?;
        // SAFETY: the context is the buffer, whose bytes neither move nor change while it lives, and they are exactly as many as the
        // descriptor says. It has the shape and row-major strides in its own allocation. Nobody writes a `Buf`, and the flags say that.
        Some(Self { tensor: unsafe { tensor.finish() } })
    }

    /// The tensor: its descriptor and flags.
    pub fn tensor(&self) -> &Managed<M> {
        &self.tensor
    }

    /// The tensor, for another library.
    pub fn into_tensor(self) -> Managed<M> {
        self.tensor
    }

    /// Whether the elements are in row-major order without gaps; not if the descriptor is malformed. A dimension of one element may have
    /// any stride.
    pub fn is_row_major(&self) -> bool {
        self.tensor.validate().is_ok_and(|described| is_row_major(&described))
    }

    fn bytes(&self) -> &[u8] {
        let described = self.tensor.validate().ok();
        let described = described.filter(|described| {
            described.device().device_type == DLDeviceType::CPU && is_row_major(described)
        });
        let Some(described) = described else { return &[] };
        // SAFETY: the descriptor is true, by the contract of `new` or by the construction in `of_buffer`. So the elements are in memory
        // behind this address, for as long as the tensor is not dropped.
        let Ok(first) = (unsafe { described.offset_bytes_ptr() }) else { return &[] };
        // SAFETY: as above: they are row-major without gaps, so there are `num_bytes` initialised bytes, which nobody writes.
        unsafe { std::slice::from_raw_parts(first, described.num_bytes()) }
    }
}

fn is_row_major(described: &TensorRef<'_>) -> bool {
    let Some(strides) = described.strides() else { return true };
    if described.num_elements() == 0 {
        return true;
    }
    let mut row_major = 1;
    described.shape().iter().zip(strides).rev().all(|(&length, &stride)| {
        let is_so = length == 1 || stride == row_major;
        row_major *= length;
        is_so
    })
}

/// The descriptor, without the elements.
impl<M: ManagedTensorBase> fmt::Debug for DlpackMemory<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut described = f.debug_struct("DlpackMemory");
        if let Ok(tensor) = self.tensor.validate() {
            described.field("dtype", &tensor.dtype()).field("shape", &tensor.shape());
        }
        described.finish_non_exhaustive()
    }
}

// SAFETY: by the contract of `new`, and by the construction in `of_buffer`, the descriptor does not change, the bytes can be read by any
// thread, and nobody writes them until the deleter is called, which `Managed` does when it is dropped.
unsafe impl<M: ManagedTensorBase> ForeignMemory for DlpackMemory<M> {
    fn base(&self) -> NonNull<u8> {
        NonNull::from(self.bytes()).cast()
    }

    fn length(&self) -> usize {
        self.bytes().len()
    }
}
