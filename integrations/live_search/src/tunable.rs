//! An encoder whose weights change: by training, or because another process trained.

use std::{fmt, path::Path, sync::Arc};

use anyhow::{Context as _, Result, anyhow, ensure};
use candle_core::{DType, Device};
use candle_nn::VarMap;

use crate::encoder::{Config, Encoder, REMEDY};

/// An encoder whose weights can change.
#[derive(Clone)]
pub struct Tunable {
    /// The sizes.
    pub config: Config,
    /// All weights.
    pub variables: VarMap,
    /// The encoder that computes with them.
    pub encoder: Arc<Encoder>,
}

impl fmt::Debug for Tunable {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Tunable").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Tunable {
    /// The encoder in the folder `model`, with the weights of its file.
    ///
    /// # Errors
    /// If a file is missing or does not fit; the remedy is in the text.
    pub fn load(model: &Path) -> Result<Self> {
        let config = Config::load(model)?;
        let path = model.join("model.safetensors");
        let tensors = candle_core::safetensors::load(&path, &Device::Cpu)
            .with_context(|| format!("{}: {REMEDY}", path.display()))?;
        let variables = VarMap::new();
        // A map makes a variable that is missing; the names are compared for that.
        let encoder = Encoder::new(&config, &variables)?;
        for (name, variable) in
            variables.data().lock().map_err(|_| anyhow!("the variables are unusable"))?.iter()
        {
            let Some(values) = tensors.get(name) else {
                ensure!(config.begins_with_zeros(name), "{}: it lacks `{name}`", path.display());
                continue;
            };
            let set = values.to_dtype(DType::F32).and_then(|values| variable.set(&values));
            set.with_context(|| format!("{}: `{name}`", path.display()))?;
        }
        Ok(Self { config, variables, encoder: Arc::new(encoder) })
    }
}
