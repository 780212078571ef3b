//! Arrays of the crate `ndarray`.

use ndarray::{Array, ArrayRef, ArrayViewD, Dimension};
use tensorwire_memory::{Pool, UserMemory};

use super::{check_has_elements, invalid};
use crate::{Element, Tensor, WorkerError};

impl Tensor {
    /// Makes a tensor of `array` without a copy, if its elements are in row-major order without gaps. The vector of the array becomes part
    /// of `memory`, as with [`from_vec`](Self::from_vec); of an array that was sliced, the whole vector.
    ///
    /// ```
    /// use ndarray::array;
    /// use tensorwire::{Tensor, Worker};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tensorwire::WorkerError> {
    /// # let worker = Worker::client().start().await?;
    /// let tensor = Tensor::from_array(worker.user_memory(), array![[1.0f32, 2.0], [3.0, 4.0]])?;
    /// assert_eq!(tensor.as_array::<f32>()?, array![[1.0, 2.0], [3.0, 4.0]].into_dyn());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`WorkerError::InvalidTensor`] if the elements are in another order, or on a big-endian machine:
    /// [`copy_of_array`](Self::copy_of_array) takes any array. Otherwise as [`from_vec`](Self::from_vec).
    pub fn from_array<T: Element, D: Dimension>(
        memory: &UserMemory,
        array: Array<T, D>,
    ) -> Result<Self, WorkerError> {
        let shape = dimensions(array.shape());
        if !array.is_standard_layout() {
            return Err(invalid(format!(
                "the strides {:?} of the array of shape {shape:?} are not row-major; copy it with Tensor::copy_of_array, or give \
                 as_standard_layout().into_owned()",
                array.strides()
            )));
        }
        let length = array.len() * size_of::<T>();
        let (values, offset) = array.into_raw_vec_and_offset();
        let start = offset.unwrap_or_default() * size_of::<T>();
        let whole = Self::from_vec(memory, &[values.len() as u64], values)?;
        let elements = whole.buf().slice(start..start + length);
        let elements =
            elements.ok_or_else(|| invalid("the array leaves its own vector; copy it".to_owned()))?;
        Self::shared(elements, T::DTYPE, &shape)
    }

    /// Makes a tensor of a copy of `array` in `pool`: of an array or a view with any strides.
    ///
    /// ```
    /// use ndarray::array;
    /// use tensorwire::{Tensor, Worker};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tensorwire::WorkerError> {
    /// # let worker = Worker::client().start().await?;
    /// let transposed = Tensor::copy_of_array(worker.pool(), &array![[1i64, 2], [3, 4]].t())?;
    /// assert_eq!(transposed.values::<i64>()?, [1, 3, 2, 4]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`from_bytes`](Self::from_bytes).
    pub fn copy_of_array<T: Element, D: Dimension>(
        pool: &Pool,
        array: &ArrayRef<T, D>,
    ) -> Result<Self, WorkerError> {
        let width = size_of::<T>();
        let mut buffer = pool.try_alloc(array.len().saturating_mul(width))?;
        for (place, value) in buffer.chunks_exact_mut(width).zip(array) {
            value.encode(place);
        }
        Self::new(buffer, T::DTYPE, &dimensions(array.shape()))
    }

    /// The elements as an array of any number of dimensions, without a copy. `to_owned()` makes an array of a copy,
    /// `into_dimensionality` one with a fixed number of dimensions.
    ///
    /// # Errors
    /// As [`as_slice`](Self::as_slice), and [`WorkerError::InvalidTensor`] for the value of a branch that was not taken and for a shape that
    /// is too large for `ndarray`.
    pub fn as_array<T: Element>(&self) -> Result<ArrayViewD<'_, T>, WorkerError> {
        check_has_elements(self)?;
        let elements = self.as_slice::<T>()?;
        let shape: Option<Vec<usize>> =
            self.shape().iter().map(|&dimension| usize::try_from(dimension).ok()).collect();
        let array = shape.and_then(|shape| ArrayViewD::from_shape(shape, elements).ok());
        array.ok_or_else(|| {
            let problem = format!("its shape {:?} is too large for ndarray; use as_slice()", self.shape());
            invalid(problem)
        })
    }
}

fn dimensions(shape: &[usize]) -> Vec<u64> {
    shape.iter().map(|&dimension| dimension as u64).collect()
}
