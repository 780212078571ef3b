//! DLPack: tensors of other libraries in the same process.

use std::sync::Arc;

use dlpark::{
    ManagedTensorBase,
    ffi::{DLDataType, DLDevice, DLDeviceType},
    legacy, tensor, versioned,
};
use tensorwire_memory::{DlpackMemory, UserMemory};
use tensorwire_protocol::DataType;

use super::{check_has_elements, invalid};
use crate::{Tensor, WorkerError};

/// The types that both have.
const PAIRS: [(DataType, DLDataType); 17] = [
    (DataType::Bool, DLDataType::BOOL),
    (DataType::U8, DLDataType::U8),
    (DataType::I8, DLDataType::I8),
    (DataType::U16, DLDataType::U16),
    (DataType::I16, DLDataType::I16),
    (DataType::U32, DLDataType::U32),
    (DataType::I32, DLDataType::I32),
    (DataType::U64, DLDataType::U64),
    (DataType::I64, DLDataType::I64),
    (DataType::F16, DLDataType::F16),
    (DataType::Bf16, DLDataType::BF16),
    (DataType::F32, DLDataType::F32),
    (DataType::F64, DLDataType::F64),
    (DataType::C64, DLDataType::C64),
    (DataType::C128, DLDataType::C128),
    (DataType::F8E5M2, DLDataType::F8E5M2),
    (DataType::F8E4M3, DLDataType::F8E4M3FN),
];

impl Tensor {
    /// The tensor as a DLPack tensor with a version, without a copy: on the CPU, row-major, and with the flag that says read-only. It holds
    /// the tensor's memory until its deleter is called, which may happen on any thread.
    ///
    /// ```
    /// use dlpark::DlpackFlags;
    /// use tensorwire::{Tensor, Worker};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let worker = Worker::client().start().await?;
    /// let tensor = Tensor::from_values(worker.pool(), &[2], &[1.0f32, 2.0])?;
    /// let exported = tensor.to_dlpack()?;
    /// assert_eq!((exported.validate()?.shape(), exported.flags()), (&[2][..], DlpackFlags::READ_ONLY));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`WorkerError::InvalidTensor`] for strings, for the value of a branch that was not taken, on a big-endian machine, and for a shape
    /// that is too large for DLPack.
    pub fn to_dlpack(&self) -> Result<versioned::Dlpack, WorkerError> {
        self.exported()
    }

    /// As [`to_dlpack`](Self::to_dlpack), without a version, for libraries that know no other. Such a DLPack tensor has no flag that says
    /// read-only. Give it only to code that does not write it: clones of the tensor, and peers that receive it, have the same memory.
    ///
    /// # Errors
    /// As [`to_dlpack`](Self::to_dlpack).
    pub fn to_unversioned_dlpack(&self) -> Result<legacy::Dlpack, WorkerError> {
        self.exported()
    }

    fn exported<M: ManagedTensorBase>(&self) -> Result<dlpark::Managed<M>, WorkerError> {
        check_has_elements(self)?;
        check_byte_order(self.dtype())?;
        let pair = PAIRS.iter().find(|pair| pair.0 == self.dtype());
        let (_, dtype) = pair.ok_or_else(|| {
            invalid(format!("DLPack has no element type {}; send it as it is", self.dtype()))
        })?;
        let exported = DlpackMemory::of_buffer(self.buf().clone(), *dtype, self.shape());
        let exported = exported.ok_or_else(|| {
            invalid(format!("its shape {:?} is too large for DLPack; reshape it", self.shape()))
        })?;
        Ok(exported.into_tensor())
    }

    /// Makes a tensor of a DLPack tensor, with or without a version, without a copy. Its memory becomes part of `memory`, as with
    /// [`from_vec`](Self::from_vec), and its deleter is called when the last clone of the tensor is dropped.
    ///
    /// That nobody writes the memory meanwhile is promised to [`DlpackMemory::new`]:
    ///
    /// ```
    /// use dlpark::{allocation::dynamic::Initialized, ffi::{DLDataType, DLManagedTensorVersioned}, metadata::Dynamic};
    /// use tensorwire::{Tensor, Worker, memory::DlpackMemory};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let worker = Worker::client().start().await?;
    /// # let of_strides = |strides: &[i64]| {
    /// #     let values = vec![1u8, 2, 3, 4];
    /// #     let first = values.as_ptr().cast_mut().cast();
    /// #     let metadata = Dynamic::new(&[2i64, 2][..], strides).prepare_as::<DLManagedTensorVersioned>().unwrap();
    /// #     let mut foreign = metadata.initialize(Box::new(values));
    /// #     foreign.set_data(first).set_dtype(DLDataType::U8).set_device(dlpark::ffi::DLDevice::CPU);
    /// #     unsafe { foreign.finish() }
    /// # };
    /// # let foreign = of_strides(&[2, 1]);
    /// // `foreign` is a dlpark::versioned::Dlpack, for instance of PyTorch.
    /// // SAFETY: it is a valid tensor, and nobody writes its elements from now on.
    /// let foreign = unsafe { DlpackMemory::new(foreign) };
    /// let tensor = Tensor::from_dlpack(worker.user_memory(), foreign)?;
    /// assert_eq!(tensor.shape(), [2, 2]);
    /// # let refused = unsafe { DlpackMemory::new(of_strides(&[1, 2])) };
    /// # let error = Tensor::from_dlpack(worker.user_memory(), refused).unwrap_err().to_string();
    /// # assert!(error.contains("strides [1, 2]"), "{error}");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`WorkerError::InvalidTensor`] if it is on another device than the CPU, if its strides are not row-major without gaps, if tensors lack
    /// its element type, if it is malformed or too large, or on a big-endian machine; [`WorkerError::Memory`] if an RDMA device refuses the
    /// memory. Its deleter is called then.
    pub fn from_dlpack<M: ManagedTensorBase + 'static>(
        memory: &UserMemory,
        tensor: DlpackMemory<M>,
    ) -> Result<Self, WorkerError> {
        let (dtype, shape) = described_as(&tensor)?;
        check_byte_order(dtype)?;
        Self::shared(memory.buffer_of(Arc::new(tensor))?, dtype, &shape)
    }
}

/// The element type and the shape of an imported tensor, if it can be used where it is.
fn described_as<M: ManagedTensorBase>(tensor: &DlpackMemory<M>) -> Result<(DataType, Vec<u64>), WorkerError> {
    let described = tensor.tensor().validate().map_err(|error| malformed(&error))?;
    check_device(described.device()).map_err(invalid)?;
    if !tensor.is_row_major() {
        return Err(invalid(format!(
            "the strides {:?} of the DLPack tensor of shape {:?} are not row-major; make it contiguous first, as `contiguous()` in PyTorch \
             and `ascontiguousarray` in NumPy do",
            described.strides().unwrap_or_default(),
            described.shape()
        )));
    }
    let dtype = from_dlpack_dtype(described.dtype()).map_err(invalid)?;
    // No dimension is negative: that was validated.
    let shape = described.shape().iter().map(|dimension| dimension.unsigned_abs()).collect();
    Ok((dtype, shape))
}

fn check_device(device: DLDevice) -> Result<(), String> {
    if device.device_type == DLDeviceType::CPU {
        return Ok(());
    }
    Err(format!(
        "the DLPack tensor is on device {} of type {}, not on the CPU (type {}); copy it to the CPU first",
        device.device_id,
        device.device_type.0,
        DLDeviceType::CPU.0
    ))
}

fn from_dlpack_dtype(dtype: DLDataType) -> Result<DataType, String> {
    let pair = PAIRS.iter().find(|pair| pair.1.matches(dtype));
    pair.map(|pair| pair.0).ok_or_else(|| {
        format!(
            "the DLPack tensor's element type (code {}, {} bits, {} lanes) is none that tensors have; convert it, or view its bytes as uint8",
            dtype.code.0, dtype.bits, dtype.lanes
        )
    })
}

fn malformed(error: &tensor::Error) -> WorkerError {
    invalid(format!("the DLPack tensor is malformed: {error}; correct what made it"))
}

/// DLPack has the byte order of the machine, and tensors are little-endian.
fn check_byte_order(dtype: DataType) -> Result<(), WorkerError> {
    if cfg!(target_endian = "big") && dtype.bits() > 8 {
        let problem =
            "tensors are little-endian, and this machine is not; copy with values() and from_values()";
        return Err(invalid(problem.to_owned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pair_has_one_size_and_goes_both_ways() {
        for (dtype, other) in PAIRS {
            assert_eq!(dtype.bits(), u64::from(other.bits), "{dtype}");
            assert_eq!((other.lanes, from_dlpack_dtype(other)), (1, Ok(dtype)));
        }
        let plain = DataType::ALL.iter().filter(|dtype| dtype.is_plain());
        assert_eq!(plain.count(), PAIRS.len());
    }

    #[test]
    fn another_device_is_refused_by_its_numbers() {
        assert_eq!(check_device(DLDevice::CPU), Ok(()));
        let refused = check_device(DLDevice::cuda(3)).unwrap_err();
        assert!(
            refused.contains("device 3 of type 2") && refused.contains("copy it to the CPU"),
            "{refused}"
        );
    }

    #[test]
    fn an_element_type_that_tensors_lack_is_refused_by_its_numbers() {
        let refused = from_dlpack_dtype(DLDataType::F4E2M1FN).unwrap_err();
        assert!(refused.contains("code 17, 4 bits, 1 lanes") && refused.contains("uint8"), "{refused}");
        let vector = DLDataType { lanes: 4, ..DLDataType::F32 };
        assert!(from_dlpack_dtype(vector).unwrap_err().contains("code 2, 32 bits, 4 lanes"));
    }
}
