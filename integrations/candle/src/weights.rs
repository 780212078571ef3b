//! Models that are built from a set, and sets of a model's variables.

use candle_core::{DType, Device, Shape, Tensor, bail};
use candle_nn::{Init, VarBuilder, VarMap, var_builder::SimpleBackend};
use tensorwire::{memory::Pool, sets::Snapshot};

use crate::{
    convert::{from_candle, to_candle},
    error::Error,
};

/// A builder that finds the tensors of a model in a version of a set, which was fetched before: nothing waits. Each tensor is copied once
/// when the model asks for it; of the others nothing is copied.
pub fn var_builder(weights: &Snapshot, dtype: DType, device: &Device) -> VarBuilder<'static> {
    VarBuilder::from_backend(Box::new(Weights(weights.clone())), dtype, device.clone())
}

/// Names and tensors of all variables, copied into `pool`, for [`OwnSet::commit`](tensorwire::sets::OwnSet::commit). Call it
/// between two steps of the optimiser: variables that change meanwhile would be copied in two states.
///
/// # Errors
/// As [`from_candle`]; [`Error::Poisoned`].
pub fn named_tensors(pool: &Pool, variables: &VarMap) -> Result<Vec<(String, tensorwire::Tensor)>, Error> {
    let variables = variables.data().lock().map_err(|_| Error::Poisoned)?;
    variables.iter().map(|(name, variable)| Ok((name.clone(), from_candle(pool, variable)?))).collect()
}

struct Weights(Snapshot);

impl Weights {
    fn found(&self, name: &str, device: &Device) -> candle_core::Result<Tensor> {
        let Some(tensor) = self.0.get(name) else {
            bail!("version {} of the set has no tensor `{name}`", self.0.version());
        };
        to_candle(tensor, device).map_err(|error| match error {
            Error::Candle(error) => error,
            other => {
                candle_core::Error::wrap(other).context(format!("`{name}` of version {}", self.0.version()))
            }
        })
    }
}

impl SimpleBackend for Weights {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, device)?;
        if *tensor.shape() != shape {
            let (msg, got) =
                (format!("shape of `{name}` in version {}", self.0.version()), tensor.shape().clone());
            return Err(candle_core::Error::UnexpectedShape { msg, expected: shape, got });
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        self.found(name, device)?.to_dtype(dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.get(name).is_some()
    }
}
