//! Why weights do not pass between candle and Tensorwire.

use candle_core::{DType, Shape};
use tensorwire::{DataType, WorkerError};

/// Why weights do not pass between candle and Tensorwire.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// candle has no element type like that of the tensor.
    #[error("candle has no elements of type {}: convert the tensor before it is committed", .0.name())]
    UnknownToCandle(DataType),
    /// Tensorwire has no element type like that of the tensor.
    #[error("tensors of {0:?} cannot be sent: convert with to_dtype before")]
    UnknownToTensorwire(DType),
    /// A variable and the tensor of its name differ.
    #[error(
        "`{name}` is {expected} in this model, and {got} in version {version}: nothing of this version was copied"
    )]
    Mismatch {
        /// The name of both.
        name: String,
        /// Type and shape of the variable.
        expected: String,
        /// Those of the tensor.
        got: String,
        /// The version.
        version: u64,
    },
    /// A variable is not in the version.
    #[error(
        "version {version} has no tensor `{name}`, which this model needs: nothing of this version was copied"
    )]
    Missing {
        /// The name of the variable.
        name: String,
        /// The version.
        version: u64,
    },
    /// Another task panicked while it changed the variables.
    #[error("the variables are unusable: another task panicked while it changed them")]
    Poisoned,
    /// An error of candle.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// An error of Tensorwire.
    #[error(transparent)]
    Worker(#[from] WorkerError),
}

/// Type and shape in words.
pub(crate) fn described(dtype: impl std::fmt::Debug, shape: &Shape) -> String {
    format!("{dtype:?} {:?}", shape.dims())
}
