//! The training itself: the upper part of the encoder learns to bring synopses near the descriptions of the same packages.

use std::path::Path;

use anyhow::{Context as _, Result, anyhow};
use candle_core::{Device, IndexOp as _, Tensor, Var};
use candle_nn::{AdamW, Optimizer as _, ParamsAdamW, loss::cross_entropy};

use crate::{
    packages::hash,
    prepared::{Prepared, write_whole},
    tunable::Tunable,
};

/// Products of vectors are divided by this before they are compared, as usual for such encoders.
const TEMPERATURE: f64 = 0.05;

/// How fast it learns.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Pace {
    /// The queries of a step.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub batch: u32,
    /// AdamW's learning rate.
    #[arg(long, default_value_t = 2e-4)]
    pub learning_rate: f64,
}

/// A training that can be continued from its checkpoint.
#[derive(Debug)]
pub struct Training {
    tunable: Tunable,
    optimiser: AdamW,
    prepared: Prepared,
    /// `[width, packages for training]`: a query is compared with all of them, and only its own is right.
    answers: Tensor,
    batch: usize,
    version: u64,
}

impl Training {
    /// Begins at version 1, which is the model as it was trained before, or at the version of the checkpoint.
    ///
    /// # Errors
    /// If the checkpoint is of another model.
    pub fn begin(tunable: Tunable, prepared: Prepared, pace: &Pace, checkpoint: &Path) -> Result<Self> {
        let trained = prepared.mask.dim(0)?;
        let answers = prepared.documents.narrow(0, 0, trained)?.t()?.contiguous()?;
        let parameters = ParamsAdamW { lr: pace.learning_rate, weight_decay: 0.0, ..ParamsAdamW::default() };
        let variables = tuned(&tunable)?.into_iter().map(|(_, variable)| variable).collect();
        let optimiser = AdamW::new(variables, parameters)?;
        let batch = trained.min(pace.batch as usize);
        let mut training = Self { tunable, optimiser, prepared, answers, batch, version: 1 };
        if checkpoint.exists() {
            training.read(checkpoint).with_context(|| {
                format!("the checkpoint {}: delete it to begin anew", checkpoint.display())
            })?;
        }
        Ok(training)
    }

    /// The number of the weights: 1 more with each step.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// One step; the loss before it.
    ///
    /// # Errors
    /// Those of candle.
    pub fn step(&mut self) -> Result<f32> {
        let chosen = self.chosen()?;
        let mask = self.prepared.mask.index_select(&chosen, 0)?;
        let hidden = self.prepared.hidden.index_select(&chosen, 0)?;
        // No longer than the longest of these.
        let longest = mask.sum(1)?.max(0)?.to_scalar::<f32>()? as usize;
        let (hidden, mask) =
            (hidden.i((.., ..longest))?.contiguous()?, mask.i((.., ..longest))?.contiguous()?);
        let queries = self.tunable.encoder.upper(&hidden, &mask)?;
        let loss = cross_entropy(&(queries.matmul(&self.answers)? / TEMPERATURE)?, &chosen)?;
        self.optimiser.backward_step(&loss)?;
        self.version += 1;
        Ok(loss.to_scalar()?)
    }

    /// The queries of this step: of the same version always the same, so that a training that continues misses none.
    fn chosen(&self) -> Result<Tensor> {
        let trained = self.prepared.mask.dim(0)?;
        let steps = (trained / self.batch) as u64;
        let (round, step) = ((self.version - 1) / steps, ((self.version - 1) % steps) as usize);
        let mut order: Vec<u32> = (0..trained as u32).collect();
        order.sort_by_key(|&query| hash(format!("{round} {query}").as_bytes()));
        let chosen = order.get(step * self.batch..(step + 1) * self.batch).unwrap_or_default();
        Ok(Tensor::new(chosen, &Device::Cpu)?)
    }

    /// The names and the values of what the steps change.
    ///
    /// # Errors
    /// If another thread panicked with the variables.
    pub fn tuned(&self) -> Result<Vec<(String, Var)>> {
        tuned(&self.tunable)
    }

    /// The encoder with the weights of this version.
    pub fn encoder(&self) -> &crate::encoder::Encoder {
        &self.tunable.encoder
    }

    /// Writes a checkpoint: the tuned weights and the version. The moments of AdamW are not in it; they begin anew.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, checkpoint: &Path) -> Result<()> {
        let tuned = self.tuned()?;
        let mut tensors: std::collections::HashMap<&str, Tensor> =
            tuned.iter().map(|(name, variable)| (&**name, variable.as_tensor().clone())).collect();
        tensors.insert("version", Tensor::new(&[self.version as i64], &Device::Cpu)?);
        write_whole(checkpoint, &tensors)
    }

    fn read(&mut self, checkpoint: &Path) -> Result<()> {
        let tensors = candle_core::safetensors::load(checkpoint, &Device::Cpu)?;
        let tensor = |name: &str| tensors.get(name).with_context(|| format!("it lacks `{name}`"));
        for (name, variable) in self.tuned()? {
            variable.set(tensor(&name)?).with_context(|| name)?;
        }
        self.version = u64::try_from(tensor("version")?.i(0)?.to_scalar::<i64>()?)?;
        Ok(())
    }
}

fn tuned(tunable: &Tunable) -> Result<Vec<(String, Var)>> {
    let prefix = tunable.config.tuned_prefix();
    let variables = tunable.variables.data().lock().map_err(|_| anyhow!("the variables are unusable"))?;
    let tuned = variables.iter().filter(|(name, _)| name.starts_with(&prefix));
    Ok(tuned.map(|(name, variable)| (name.clone(), variable.clone())).collect())
}
