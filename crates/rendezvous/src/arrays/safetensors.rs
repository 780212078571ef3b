//! The file format safetensors.

use safetensors::{
    Dtype, SafeTensors,
    tensor::{TensorInfo, TensorView},
};
use tensorwire_memory::Buf;
use tensorwire_protocol::DataType;

use super::{check_has_elements, invalid};
use crate::{Tensor, WorkerError, sets::Snapshot};

/// The types that both have.
const PAIRS: [(Dtype, DataType); 16] = [
    (Dtype::BOOL, DataType::Bool),
    (Dtype::U8, DataType::U8),
    (Dtype::I8, DataType::I8),
    (Dtype::U16, DataType::U16),
    (Dtype::I16, DataType::I16),
    (Dtype::U32, DataType::U32),
    (Dtype::I32, DataType::I32),
    (Dtype::U64, DataType::U64),
    (Dtype::I64, DataType::I64),
    (Dtype::F16, DataType::F16),
    (Dtype::BF16, DataType::Bf16),
    (Dtype::F32, DataType::F32),
    (Dtype::F64, DataType::F64),
    (Dtype::C64, DataType::C64),
    (Dtype::F8_E5M2, DataType::F8E5M2),
    (Dtype::F8_E4M3, DataType::F8E4M3),
];

/// The element type of tensors for an element type of safetensors files, if there is one.
pub fn from_safetensors_dtype(dtype: Dtype) -> Option<DataType> {
    PAIRS.iter().find(|pair| pair.0 == dtype).map(|pair| pair.1)
}

/// The element type of safetensors files for an element type of tensors, if there is one: not for strings and 128-bit complex numbers.
pub fn safetensors_dtype(dtype: DataType) -> Option<Dtype> {
    PAIRS.iter().find(|pair| pair.1 == dtype).map(|pair| pair.0)
}

impl Tensor {
    /// The tensors of a safetensors file, by name and in the order of the file, without a copy: parts of `file`. The memory is one buffer,
    /// which lives until the last of the tensors is dropped. They can be committed as a version of a
    /// [set](crate::sets::OwnSet::commit).
    ///
    /// A file in memory or a mapped file becomes a buffer by [`buffer_of`](tensorwire_memory::UserMemory::buffer_of) of the
    /// [`user_memory`](crate::Worker::user_memory) of the worker that publishes the tensors. Tensors need not be aligned in the file to be
    /// published; only [`as_slice`](Self::as_slice) needs that.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tensorwire::{Tensor, Worker};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tensorwire::WorkerError> {
    /// # let worker = Worker::client().start().await?;
    /// # let header = br#"{"bias":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#;
    /// # let file = [&(header.len() as u64).to_le_bytes()[..], header, b"abc"].concat();
    /// // `file` is a Vec<u8>, bytes::Bytes, or a Mapping of a file.
    /// let file = worker.user_memory().buffer_of(Arc::new(file))?;
    /// let weights = Tensor::from_safetensors(&file)?;
    /// assert_eq!((&*weights[0].0, weights[0].1.bytes()), ("bias", &b"abc"[..]));
    /// worker.set("policy").commit(1, weights).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`WorkerError::InvalidTensor`] if the file is malformed, or if a tensor has an element type that
    /// [tensors lack](crate::arrays::from_safetensors_dtype) or is too large; the error names it.
    pub fn from_safetensors(file: &Buf) -> Result<Vec<(String, Self)>, WorkerError> {
        let malformed = |problem: &str| {
            invalid(format!("the {} bytes are not a safetensors file: {problem}; save it again", file.len()))
        };
        let (header, metadata) =
            SafeTensors::read_metadata(file).map_err(|error| malformed(&error.to_string()))?;
        let contents = file.slice(size_of::<u64>() + header..file.len());
        let contents = contents.ok_or_else(|| malformed("its header is longer than the file"))?;
        let named = metadata.offset_keys().into_iter().map(|name| {
            let info = metadata.info(&name).ok_or_else(|| malformed("a name has no tensor"))?;
            let tensor = part(&contents, &name, info)?;
            Ok((name, tensor))
        });
        named.collect()
    }

    /// The tensor as a `safetensors::View`, for `safetensors::serialize`. Copies nothing.
    ///
    /// # Errors
    /// [`WorkerError::InvalidTensor`] if [safetensors files lack](crate::arrays::safetensors_dtype) the element type, for the value of a
    /// branch that was not taken, and for a shape that is too large for this machine.
    pub fn as_safetensors(&self) -> Result<TensorView<'_>, WorkerError> {
        self.view().map_err(invalid)
    }

    fn view(&self) -> Result<TensorView<'_>, String> {
        check_has_elements(self).map_err(problem_of)?;
        let dtype = safetensors_dtype(self.dtype()).ok_or_else(|| {
            format!(
                "safetensors files have no element type {}; write the elements as a type that they have",
                self.dtype()
            )
        })?;
        let shape: Result<Vec<usize>, _> =
            self.shape().iter().map(|&length| usize::try_from(length)).collect();
        let shape =
            shape.map_err(|_| format!("its shape {:?} is too large for this machine", self.shape()))?;
        TensorView::new(dtype, shape, self.bytes()).map_err(|error| error.to_string())
    }
}

impl Snapshot {
    /// All tensors by name, for `safetensors::serialize` and `safetensors::serialize_to_file`. Copies nothing.
    ///
    /// ```
    /// # async fn write(snapshot: tensorwire::sets::Snapshot) -> Result<(), Box<dyn std::error::Error>> {
    /// let path = std::path::Path::new("policy.safetensors");
    /// safetensors::serialize_to_file(snapshot.as_safetensors()?, None, path)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Tensor::as_safetensors`]; the error names the tensor.
    pub fn as_safetensors(&self) -> Result<Vec<(&str, TensorView<'_>)>, WorkerError> {
        let named = self.iter().map(|(name, tensor)| {
            let view = tensor.view().map_err(|problem| of_tensor(name, &problem))?;
            Ok((name, view))
        });
        named.collect()
    }
}

/// The tensor that `info` describes.
fn part(contents: &Buf, name: &str, info: &TensorInfo) -> Result<Tensor, WorkerError> {
    let dtype = from_safetensors_dtype(info.dtype).ok_or_else(|| {
        let problem = format!(
            "its element type {} is none that tensors have; publish its bytes as U8 with Tensor::shared",
            info.dtype
        );
        of_tensor(name, &problem)
    })?;
    let (start, end) = info.data_offsets;
    let bytes = contents.slice(start..end).ok_or_else(|| of_tensor(name, "its bytes are not in the file"))?;
    let shape: Vec<u64> = info.shape.iter().map(|&dimension| dimension as u64).collect();
    Tensor::shared(bytes, dtype, &shape).map_err(|error| of_tensor(name, &problem_of(error)))
}

fn of_tensor(name: &str, problem: &str) -> WorkerError {
    invalid(format!("{name:?}: {problem}"))
}

fn problem_of(error: WorkerError) -> String {
    match error {
        WorkerError::InvalidTensor { problem } => problem,
        other => other.to_string(),
    }
}
