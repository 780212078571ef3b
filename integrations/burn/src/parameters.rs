//! The parameters of a module, in the order in which it has them.

use std::fmt;

use burn::{
    module::{Module, ModuleVisitor, Param, Parameter as Value},
    tensor::{Bool, Bytes, DType, Int, Tensor, TensorData, kind::Basic},
};

use crate::error::Error;

/// A parameter of a module, as it is saved.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Parameter {
    /// Its path, such as `encoder.layers.0.weight`.
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
}

impl Parameter {
    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// These bytes as elements of its type and shape.
    ///
    /// # Errors
    /// [`Error::Burn`] if they are more or fewer.
    pub(crate) fn with(&self, bytes: Bytes) -> Result<TensorData, Error> {
        TensorData::try_from_bytes(bytes, self.shape.clone(), self.dtype).map_err(|error| self.unfit(&error))
    }

    pub(crate) fn unfit(&self, error: &impl fmt::Display) -> Error {
        Error::Burn(format!("`{}`: {error}", self.name))
    }
}

impl fmt::Display for Parameter {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "`{}` {:?} {:?}", self.name, self.dtype, self.shape)
    }
}

/// All parameters. Those that burn has not initialised yet stay so.
pub(crate) fn all<M: Module>(module: &M) -> Vec<Parameter> {
    let mut listing = Listing::default();
    module.visit(&mut listing);
    listing.found
}

/// The path of the parameter that is visited.
#[derive(Debug, Default)]
pub(crate) struct Path(Vec<String>);

impl Path {
    pub(crate) fn enter(&mut self, name: &str) {
        self.0.push(name.to_owned());
    }

    pub(crate) fn leave(&mut self) {
        self.0.pop();
    }

    pub(crate) fn name(&self) -> String {
        self.0.join(".")
    }
}

#[derive(Default)]
struct Listing {
    path: Path,
    found: Vec<Parameter>,
}

impl Listing {
    fn add<const D: usize, K: Basic + 'static>(&mut self, param: &Param<Tensor<D, K>>, usual: DType)
    where
        Tensor<D, K>: Value,
    {
        let (dtype, shape) = if param.is_initialized() {
            let saved = param.transform_for_save().val();
            (saved.dtype(), saved.shape())
        } else {
            (usual, param.lazy_shape())
        };
        self.found.push(Parameter { name: self.path.name(), dtype, shape: shape.to_vec() });
    }
}

impl ModuleVisitor for Listing {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.leave();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.add(param, param.lazy_device().settings().float_dtype.into());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(param, param.lazy_device().settings().int_dtype.into());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add(param, param.lazy_device().settings().bool_dtype.into());
    }
}
