//! The model with its samples, and training in one process, with which the distributed training is compared.

use std::{io, ops::Range};

use crate::{
    data::Data,
    mlp::{LayerGradient, Mlp, TensorSpec},
    rows::Rows,
    samples::{Batches, CLASSES, Samples},
};

/// Which model is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelKind {
    /// A network: 512 and 512 hidden units with ReLU.
    Mlp,
    /// A linear model: softmax regression.
    Linear,
}

/// A training.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The model.
    pub model: ModelKind,
    /// What it learns from.
    pub data: Data,
    /// How many updates.
    pub steps: u64,
    /// Samples for each of them, of all processes together.
    pub batch: u64,
    /// How far the parameters follow a gradient.
    pub rate: f32,
    /// Fixes the first parameters and the order of the samples.
    pub seed: u64,
}

impl Plan {
    fn mlp(&self) -> Mlp {
        match self.model {
            ModelKind::Mlp => Mlp::new(vec![self.data.pixels(), 512, 512, CLASSES]),
            ModelKind::Linear => Mlp::new(vec![self.data.pixels(), CLASSES]),
        }
    }

    /// Names and shapes of the parameters, in the order that all calls expect.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        self.mlp().tensors()
    }

    /// Fresh parameters.
    pub fn initial_parameters(&self) -> Vec<Vec<f32>> {
        self.mlp().initial_parameters(self.seed)
    }

    /// The model with its samples.
    ///
    /// # Errors
    /// The samples cannot be read.
    pub fn load(&self) -> io::Result<Model> {
        let (training, held_out) = self.data.load()?;
        Ok(Model {
            mlp: self.mlp(),
            batches: Batches::new(training, self.seed),
            held_out: held_out.samples(),
        })
    }

    /// The published accuracy of such a model on the held-out samples, in percent, and its source. None is known for the digits,
    /// because each publication splits them in another way.
    pub const fn published(&self) -> Option<(f64, &'static str)> {
        match (&self.data, self.model) {
            (Data::Digits, _) => None,
            (Data::FashionMnist(_), ModelKind::Linear) => {
                Some((84.2, "logistic regression, Xiao et al. 2017 (arXiv:1708.07747), table 3"))
            }
            (Data::FashionMnist(_), ModelKind::Mlp) => {
                Some((87.1, "a hidden layer of 100 units, Xiao et al. 2017 (arXiv:1708.07747), table 3"))
            }
        }
    }
}

/// The network, and the samples that it learns from.
///
/// The arguments and the seed determine all results, so any process can compute any step, or repeat it.
#[derive(Debug)]
pub struct Model {
    mlp: Mlp,
    batches: Batches,
    held_out: Samples,
}

impl Model {
    /// Samples from which a worker computes one gradient.
    pub const BATCH: u64 = 32;

    /// Mean loss over the samples with these numbers, and its derivatives by the parameters.
    pub fn gradients(
        &mut self,
        parameters: &[impl AsRef<[f32]>],
        samples: Range<u64>,
    ) -> (f32, Vec<Vec<f32>>) {
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

    /// The rows of the first weight matrix on which the loss over these samples depends.
    pub fn touched(&mut self, samples: Range<u64>) -> Rows {
        Rows::Some(self.batches.range(samples).touched())
    }

    /// Mean loss over the held-out samples.
    pub fn loss(&mut self, parameters: &[impl AsRef<[f32]>]) -> f32 {
        self.mlp.loss(parameters, &self.held_out)
    }

    /// Fraction of the held-out samples, which no training sees, that are classified correctly.
    pub fn accuracy(&mut self, parameters: &[impl AsRef<[f32]>]) -> f64 {
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

/// Trains in this process, each step from the samples of all processes. Returns the last parameters. `progress` is
/// called after each step with its number from 1 and the loss.
pub fn train(model: &mut Model, plan: &Plan, mut progress: impl FnMut(u64, f32)) -> Vec<Vec<f32>> {
    let (mut parameters, batch) = (plan.initial_parameters(), plan.batch);
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
    use super::{Model, ModelKind, Plan, train};
    use crate::data::Data;

    fn plan(model: ModelKind, steps: u64, seed: u64) -> Plan {
        Plan { model, data: Data::Digits, steps, batch: Model::BATCH, rate: 0.2, seed }
    }

    #[test]
    fn one_process_learns_held_out_digits() {
        for (kind, least) in [(ModelKind::Mlp, 0.95), (ModelKind::Linear, 0.93)] {
            let (plan, mut losses) = (plan(kind, 600, 1), Vec::new());
            let mut model = plan.load().unwrap();
            let parameters = train(&mut model, &plan, |_, loss| losses.push(loss));
            let accuracy = model.accuracy(&parameters);
            assert!(accuracy >= least, "{kind:?}: {accuracy}");
            assert_eq!(losses.len(), 600);
            assert!(losses[599] < losses[0] / 4.0, "{kind:?}: {} to {}", losses[0], losses[599]);
        }
    }

    #[test]
    fn equal_seeds_train_to_equal_parameters() {
        let trained = |seed| {
            let plan = plan(ModelKind::Mlp, 5, seed);
            train(&mut plan.load().unwrap(), &plan, |_, _| ())
        };
        assert_eq!(trained(2), trained(2));
        assert_ne!(trained(2), trained(3));
    }

    /// So a worker need not pull the other rows.
    #[test]
    fn the_loss_of_a_batch_does_not_depend_on_rows_that_it_does_not_touch() {
        let plan = plan(ModelKind::Linear, 1, 1);
        let (mut model, parameters) = (plan.load().unwrap(), plan.initial_parameters());
        let rows = model.touched(0..32);
        let mut pulled = vec![vec![0.0; parameters[0].len()], parameters[1].clone()];
        let spec = &plan.tensors()[0];
        let taken = rows.taken(spec, &parameters[0]).unwrap();
        assert!(taken.len() < parameters[0].len());
        rows.zip(spec, &mut pulled[0], &taken, |value, moved| *value = moved).unwrap();
        assert_eq!(model.gradients(&pulled, 0..32), model.gradients(&parameters, 0..32));
    }
}
