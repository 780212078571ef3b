//! Why weights or gradients do not pass between burn and Tensorwire.

use burn::tensor::DType;
use tensorwire::{DataType, WorkerError, collective::GroupError};

/// Why weights or gradients do not pass between burn and Tensorwire.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// burn has no element type like that of the tensor.
    #[error("`{name}` has elements of type {}, which burn has not: convert the tensor before it is committed", .dtype.name())]
    UnknownToBurn {
        /// The tensor.
        name: String,
        /// Its element type.
        dtype: DataType,
    },
    /// Tensorwire has no element type like that of the parameter.
    #[error(
        "`{name}` has elements of type {dtype:?}, which cannot be sent: convert the parameter with `cast` or `dequantize` before"
    )]
    UnknownToTensorwire {
        /// The path of the parameter.
        name: String,
        /// Its element type.
        dtype: DType,
    },
    /// A parameter and the tensor of its name differ.
    #[error(
        "`{name}` is {expected} in this module, and {got} in {source_name}: nothing of the module was changed; build the module that \
         these weights are of, or convert them before they are committed"
    )]
    Mismatch {
        /// The name of both.
        name: String,
        /// Type and shape of the parameter.
        expected: String,
        /// Those of the tensor.
        got: String,
        /// Which weights these are, such as `version 7`.
        source_name: String,
    },
    /// A parameter has no tensor.
    #[error(
        "{source_name} has no tensor `{name}`, which this module needs: nothing of the module was changed; build the module that these \
         weights are of, or commit all of its tensors"
    )]
    Missing {
        /// The path of the parameter.
        name: String,
        /// Which weights these are, such as `version 7`.
        source_name: String,
    },
    /// Bytes of a bool tensor are neither 0 nor 1.
    #[error("`{name}` in {source_name} has bytes that are no bool: commit it as `u8`")]
    NoBool {
        /// The tensor.
        name: String,
        /// Which weights these are, such as `version 7`.
        source_name: String,
    },
    /// A version was to be overwritten.
    #[error("a version of a set never changes: commit `named_tensors` of the module as the next version")]
    ReadOnly,
    /// Ranks have modules that differ.
    #[error("rank {rank} has {own} where rank {other} has {theirs}: build the same module on all ranks")]
    OtherModule {
        /// This rank.
        rank: usize,
        /// The first parameter that differs: path, type and shape, and whether it is trained.
        own: String,
        /// The other rank.
        other: usize,
        /// That of the other rank at the same place.
        theirs: String,
    },
    /// Ranks have optimisers that differ.
    #[error(
        "the optimiser of rank {rank} cannot have the state of that of rank {other}: build the same optimiser on all ranks"
    )]
    OtherOptimiser {
        /// This rank.
        rank: usize,
        /// The rank that sent its state.
        other: usize,
    },
    /// The module or a gradient is not as it was when the ranks compared their modules.
    #[error(
        "{own} was {before} when the ranks were aligned: call `align` on all ranks after a module has changed its form"
    )]
    Changed {
        /// The first parameter or gradient that differs: path, type and shape.
        own: String,
        /// The parameter at the same place before.
        before: String,
    },
    /// A back end of burn failed.
    #[error("burn: {0}")]
    Burn(String),
    /// An error of Tensorwire.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// An error of the group of the ranks.
    #[error(transparent)]
    Group(#[from] GroupError),
}
