//! The model with its samples, and training in one process, with which the distributed training is compared.

use std::ops::Range;

use crate::{
    digits::{Batches, Digits, Samples},
    mlp::{LayerGradient, Mlp, TensorSpec},
};

/// The network, and the samples that it learns from.
///
/// The arguments and the seed determine all results, so any process can compute any step, or repeat it.
#[derive(Debug)]
pub struct Model {
    mlp: Mlp,
    batches: Batches,
    held_out: Samples,
    seed: u64,
}

impl Model {
    /// Samples from which a worker computes one gradient.
    pub const BATCH: u64 = 32;

    /// The model, with first parameters and an order of the samples that `seed` fixes.
    pub fn new(seed: u64) -> Self {
        let Digits { training, held_out } = Digits::load();
        Self { mlp: Mlp::for_digits(), batches: Batches::new(training, seed), held_out, seed }
    }

    /// Names and shapes of the parameters, in the order that all calls expect.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        self.mlp.tensors()
    }

    /// Fresh parameters.
    pub fn initial_parameters(&self) -> Vec<Vec<f32>> {
        self.mlp.initial_parameters(self.seed)
    }

    /// Mean loss over the samples with these numbers, and its derivatives by the parameters.
    pub fn gradients(&mut self, parameters: &[Vec<f32>], samples: Range<u64>) -> (f32, Vec<Vec<f32>>) {
        let mut gradients = self.mlp.zero_gradients();
        let loss = self.mlp.gradients(parameters, self.batches.range(samples), &mut gradients);
        (loss, gradients)
    }

    /// Mean loss over the samples with these numbers. Passes each layer to `each`, the last one first, as
    /// [`Mlp::backward`] does.
    pub fn backward(
        &mut self,
        parameters: &[Vec<f32>],
        samples: Range<u64>,
        each: impl FnMut(LayerGradient<'_>),
    ) -> f32 {
        self.mlp.backward(parameters, self.batches.range(samples), each)
    }

    /// Mean loss over the held-out samples.
    pub fn loss(&mut self, parameters: &[Vec<f32>]) -> f32 {
        self.mlp.loss(parameters, &self.held_out)
    }

    /// Fraction of the held-out samples, which no training sees, that are classified correctly.
    pub fn accuracy(&mut self, parameters: &[Vec<f32>]) -> f64 {
        self.mlp.accuracy(parameters, &self.held_out)
    }

    /// How many samples are held out.
    pub fn held_out(&self) -> usize {
        self.held_out.len()
    }
}

/// Moves one tensor of parameters against its gradient, `rate` times as far as that is long.
pub fn descend(values: &mut [f32], gradient: &[f32], rate: f32) {
    for (value, slope) in values.iter_mut().zip(gradient) {
        *value -= rate * slope;
    }
}

/// The parameters of a training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Plan {
    /// How many updates.
    pub steps: u64,
    /// Samples for each of them, of all processes together.
    pub batch: u64,
    /// How far the parameters follow a gradient.
    pub rate: f32,
    /// Fixes the first parameters and the order of the samples.
    pub seed: u64,
}

/// Trains in this process, each step from the samples of all processes. Returns the last parameters. `progress` is
/// called after each step with its number from 1 and the loss.
pub fn train(model: &mut Model, plan: &Plan, mut progress: impl FnMut(u64, f32)) -> Vec<Vec<f32>> {
    let (mut parameters, batch) = (model.initial_parameters(), plan.batch);
    for step in 0..plan.steps {
        let (loss, gradients) = model.gradients(&parameters, step * batch..(step + 1) * batch);
        for (values, gradient) in parameters.iter_mut().zip(&gradients) {
            descend(values, gradient, plan.rate);
        }
        progress(step + 1, loss);
    }
    parameters
}

#[cfg(test)]
mod tests {
    use super::{Model, Plan, train};

    fn plan(steps: u64, seed: u64) -> Plan {
        Plan { steps, batch: Model::BATCH, rate: 0.2, seed }
    }

    #[test]
    fn one_process_reaches_95_percent_on_held_out_digits() {
        let (mut model, mut losses) = (Model::new(1), Vec::new());
        let parameters = train(&mut model, &plan(600, 1), |_, loss| losses.push(loss));
        let accuracy = model.accuracy(&parameters);
        assert!(accuracy >= 0.95, "{accuracy}");
        assert_eq!(losses.len(), 600);
        assert!(losses[599] < losses[0] / 4.0, "{} to {}", losses[0], losses[599]);
    }

    #[test]
    fn equal_seeds_train_to_equal_parameters() {
        let trained = |seed| train(&mut Model::new(seed), &plan(5, seed), |_, _| ());
        assert_eq!(trained(2), trained(2));
        assert_ne!(trained(2), trained(3));
    }
}
