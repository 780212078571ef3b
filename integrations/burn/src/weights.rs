//! Modules that take the weights of a set, and sets of a module's weights.

use std::collections::{BTreeMap, BTreeSet};

use burn::{
    module::{Module, ModuleVisitor, Param},
    store::{ApplyResult, ModuleSnapshot, ModuleStore, burn_pack},
    tensor::{Bool, DType, Int},
};
use tensorwire::{DataType, Tensor, memory::Pool, sets::Snapshot};

use crate::{
    convert::{shared, to_burn, to_tensorwire},
    error::Error,
    memory_of::{Kind, in_place},
    parameters::{self, Parameter, Path},
};

/// A version of a set as a store of modules: `module.load_from(&mut SnapshotStore::new(&snapshot))`. The version was fetched before, so
/// nothing waits for a peer. Use it between two batches: the module changes as a whole.
///
/// A module takes all of its parameters, by their paths, or an error and nothing. The set may have more tensors, which
/// [`ApplyResult::unused`] names. Element types are not converted. Parameters keep their ids, so an optimiser keeps its state of them.
#[derive(Debug, Clone)]
pub struct SnapshotStore {
    snapshot: Snapshot,
    /// All tensors for burn, made when they are asked for.
    tensors: Option<BTreeMap<String, burn_pack::Tensor>>,
}

impl SnapshotStore {
    /// The weights of this version.
    pub fn new(snapshot: &Snapshot) -> Self {
        Self { snapshot: snapshot.clone(), tensors: None }
    }

    fn name(&self) -> String {
        format!("version {}", self.snapshot.version())
    }
}

impl ModuleStore for SnapshotStore {
    type Error = Error;

    /// [`Error::ReadOnly`]: [`named_tensors`] are committed.
    fn collect_from<M: ModuleSnapshot>(&mut self, _: &M) -> Result<(), Error> {
        Err(Error::ReadOnly)
    }

    /// # Errors
    /// [`Error::Missing`], [`Error::Mismatch`] and [`Error::NoBool`], after which the module is as before. [`Error::Burn`] if its device
    /// refuses a tensor.
    fn apply_to<M: ModuleSnapshot>(&mut self, module: &mut M) -> Result<ApplyResult, Error> {
        let mut result = apply(module, &self.name(), |name| self.snapshot.get(name))?;
        let applied: BTreeSet<&String> = result.applied.iter().collect();
        let names = self.snapshot.iter().map(|(name, _)| name.to_owned());
        result.unused = names.filter(|name| !applied.contains(name)).collect();
        Ok(result)
    }

    fn get_tensor(&mut self, name: &str) -> Result<Option<&burn_pack::Tensor>, Error> {
        Ok(self.get_all_tensors()?.get(name))
    }

    fn get_all_tensors(&mut self) -> Result<&BTreeMap<String, burn_pack::Tensor>, Error> {
        let tensors = match self.tensors.take() {
            Some(tensors) => tensors,
            None => converted(&self.snapshot, &self.name())?,
        };
        Ok(self.tensors.insert(tensors))
    }

    fn keys(&mut self) -> Result<Vec<String>, Error> {
        Ok(self.snapshot.iter().map(|(name, _)| name.to_owned()).collect())
    }
}

/// Paths and tensors of all parameters, copied into `pool`, for [`OwnSet::commit`](tensorwire::sets::OwnSet::commit). Call it between two
/// steps of the optimiser. Other back ends than Flex read each parameter back from the device: a GPU is waited for, so call it on a thread
/// that may block.
///
/// # Errors
/// [`Error::UnknownToTensorwire`]; [`Error::Worker`] if the pool has no room; [`Error::Burn`] if a device fails.
pub fn named_tensors<M: Module>(pool: &Pool, module: &M) -> Result<Vec<(String, Tensor)>, Error> {
    let mut sending = Sending { pool, path: Path::default(), sent: Ok(Vec::new()) };
    module.visit(&mut sending);
    sending.sent
}

struct Sending<'a> {
    pool: &'a Pool,
    path: Path,
    /// Of the parameters that were visited, or the first error.
    sent: Result<Vec<(String, Tensor)>, Error>,
}

impl Sending<'_> {
    fn add<const D: usize, K: Kind>(&mut self, tensor: &burn::Tensor<D, K>) {
        let Ok(sent) = &mut self.sent else { return };
        let name = self.path.name();
        match copied(self.pool, &name, tensor) {
            Ok(tensor) => sent.push((name, tensor)),
            Err(error) => self.sent = Err(error),
        }
    }
}

impl ModuleVisitor for Sending<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.leave();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<burn::Tensor<D>>) {
        self.add(&param.transform_for_save().val().inner());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<burn::Tensor<D, Int>>) {
        self.add(&param.transform_for_save().val());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<burn::Tensor<D, Bool>>) {
        self.add(&param.transform_for_save().val());
    }
}

fn copied<const D: usize, K: Kind>(
    pool: &Pool,
    name: &str,
    tensor: &burn::Tensor<D, K>,
) -> Result<Tensor, Error> {
    let (name, dtype) = (name.to_owned(), tensor.dtype());
    let Some(sent_as) = to_tensorwire(dtype) else { return Err(Error::UnknownToTensorwire { name, dtype }) };
    let shape: Vec<u64> = tensor.shape().iter().map(|&length| length as u64).collect();
    let copy = |bytes: &[u8]| Tensor::from_bytes(pool, sent_as, &shape, bytes);
    if let Some(copied) = in_place(tensor, copy) {
        return Ok(copied?);
    }
    let data = tensor.try_to_data().map_err(|error| Error::Burn(format!("`{name}`: {error}")))?;
    Ok(copy(data.bytes())?)
}

/// Gives the module the tensors of its parameters' names, all or none.
pub(crate) fn apply<'a, M: Module>(
    module: &mut M,
    source_name: &str,
    find: impl Fn(&str) -> Option<&'a Tensor>,
) -> Result<ApplyResult, Error> {
    let parameters = parameters::all(module);
    let fitting = parameters.iter().map(|parameter| fitting(parameter, source_name, find(&parameter.name)));
    let tensors = fitting.collect::<Result<Vec<_>, Error>>()?;
    let result = module.apply(tensors, None, None, false);
    match result.errors.first() {
        None => Ok(result),
        Some(error) => Err(Error::Burn(format!("{source_name}: {error}"))),
    }
}

/// The tensor for burn, if the parameter can have it.
fn fitting(
    parameter: &Parameter,
    source_name: &str,
    tensor: Option<&Tensor>,
) -> Result<burn_pack::Tensor, Error> {
    let (name, source_name) = (parameter.name.clone(), source_name.to_owned());
    let Some(tensor) = tensor.filter(|tensor| !tensor.is_dead()) else {
        return Err(Error::Missing { name, source_name });
    };
    if to_tensorwire(parameter.dtype) != Some(tensor.dtype()) || !is_shape(tensor, &parameter.shape) {
        let expected = format!("{:?} {:?}", parameter.dtype, parameter.shape);
        let got = format!("{} {:?}", tensor.dtype().name(), tensor.shape());
        return Err(Error::Mismatch { name, expected, got, source_name });
    }
    for_burn(tensor, name, parameter.dtype, source_name)
}

fn is_shape(tensor: &Tensor, shape: &[usize]) -> bool {
    tensor.shape().iter().copied().eq(shape.iter().map(|&length| length as u64))
}

fn for_burn(
    tensor: &Tensor,
    name: String,
    dtype: DType,
    source_name: String,
) -> Result<burn_pack::Tensor, Error> {
    // burn takes any byte for a bool, and other values than 0 and 1 would be undefined.
    if tensor.dtype() == DataType::Bool && tensor.as_slice::<bool>().is_err() {
        return Err(Error::NoBool { name, source_name });
    }
    // Lengths of a tensor in memory fit.
    let shape: Vec<usize> = tensor.shape().iter().map(|&length| length as usize).collect();
    Ok(burn_pack::Tensor::new(name, dtype, shape, None, shared(tensor.clone().into(), dtype)))
}

fn converted(snapshot: &Snapshot, source_name: &str) -> Result<BTreeMap<String, burn_pack::Tensor>, Error> {
    let named = snapshot.iter().map(|(name, tensor)| {
        let Some(dtype) = to_burn(tensor.dtype()) else {
            return Err(Error::UnknownToBurn { name: name.to_owned(), dtype: tensor.dtype() });
        };
        Ok((name.to_owned(), for_burn(tensor, name.to_owned(), dtype, source_name.to_owned())?))
    });
    named.collect()
}
