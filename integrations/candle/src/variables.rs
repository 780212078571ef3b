//! Variables that take the versions of a set.

use std::fmt;

use candle_core::{Device, Var};
use candle_nn::VarMap;
use tensorwire::{Tensor, sets::Snapshot};

use crate::{
    convert::{CopyIn, candle_type, shape_of, to_candle},
    error::{Error, described},
};

/// The variables of a model, into which versions of a set are copied. Tensors that the model has no variable of are left out; a
/// variable without a tensor is an error.
///
/// It holds the version that was applied last, because tensors that a newer one shares with it are not copied again.
pub struct Variables {
    map: VarMap,
    applied: Option<Snapshot>,
}

impl fmt::Debug for Variables {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Variables").field("applied", &self.applied).finish_non_exhaustive()
    }
}

impl Variables {
    /// Of the map with which the model was built.
    pub fn new(map: VarMap) -> Self {
        Self { map, applied: None }
    }

    /// The version that the variables have; `None` before the first, and after an error of candle.
    pub fn version(&self) -> Option<u64> {
        self.applied.as_ref().map(Snapshot::version)
    }

    /// Copies a version into the variables, in place, and returns how many tensors it has copied. Nothing waits. Call it between two
    /// batches: what is computed meanwhile sees parts of both versions.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Mismatch`] and [`Error::UnknownToCandle`], after which the variables are as before. [`Error::Candle`]
    /// if a device refuses a copy: then the variables may have parts of both versions until the next one is applied.
    /// [`Error::Poisoned`].
    pub fn apply(&mut self, version: &Snapshot) -> Result<usize, Error> {
        let variables = self.map.data().lock().map_err(|_| Error::Poisoned)?;
        let tensors =
            variables.iter().map(|(name, variable)| Ok((variable, fitting(version, name, variable)?, name)));
        let tensors = tensors.collect::<Result<Vec<_>, Error>>()?;
        let before = self.applied.take();
        let mut copied = 0;
        for (variable, tensor, name) in tensors {
            let old = before.as_ref().and_then(|before| before.get(name));
            if !old.is_some_and(|old| is_same(old, tensor)) {
                copy(variable, tensor)?;
                copied += 1;
            }
        }
        self.applied = Some(version.clone());
        Ok(copied)
    }
}

/// Whether both are the same bytes at the same place. Both are alive, so neither is in memory that the other had before.
fn is_same(one: &Tensor, other: &Tensor) -> bool {
    std::ptr::eq(one.bytes(), other.bytes())
}

fn copy(variable: &Var, tensor: &Tensor) -> Result<(), Error> {
    match variable.device() {
        Device::Cpu => variable.inplace_op1(&CopyIn(tensor))?,
        device => variable.set(&to_candle(tensor, device)?)?,
    }
    Ok(())
}

/// The tensor that the variable can have.
fn fitting<'a>(snapshot: &'a Snapshot, name: &str, variable: &Var) -> Result<&'a Tensor, Error> {
    let version = snapshot.version();
    let tensor = snapshot.get(name).ok_or_else(|| Error::Missing { name: name.to_owned(), version })?;
    let (dtype, shape) = (candle_type(tensor.dtype())?, shape_of(tensor));
    if (variable.dtype(), variable.shape()) == (dtype, &shape) {
        return Ok(tensor);
    }
    let (expected, got) = (described(variable.dtype(), variable.shape()), described(dtype, &shape));
    Err(Error::Mismatch { name: name.to_owned(), expected, got, version })
}
