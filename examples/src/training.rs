//! Training in one process: what the distributed run is measured against.

use crate::{
    model::ModelKind,
    sgd::{Sgd, SgdConfig},
};

/// What fixes a training in one process.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrainingConfig {
    /// What is trained.
    pub model: ModelKind,
    /// How many updates.
    pub steps: u64,
    /// Samples for each of them.
    pub batch_size: u64,
    /// Fixes the first parameters and the order of the samples.
    pub seed: u64,
    /// The optimiser's settings.
    pub sgd: SgdConfig,
}

/// Trains from fresh parameters and returns the last ones. `progress` is called after each step with the loss of its
/// batch.
pub fn train(config: &TrainingConfig, mut progress: impl FnMut(f32)) -> Vec<Vec<f32>> {
    let mut model = config.model.open(config.seed);
    let mut parameters = model.initial_parameters(config.seed);
    let (mut gradients, mut updated) = (model.zeros(), model.zeros());
    let mut sgd = Sgd::new(config.sgd);
    for step in 0..config.steps {
        let samples = step * config.batch_size..(step + 1) * config.batch_size;
        let loss = model.gradients(&parameters, samples, &mut gradients);
        for (tensor, new) in updated.iter_mut().enumerate() {
            sgd.update(tensor, &parameters[tensor], &gradients[tensor], new);
        }
        std::mem::swap(&mut parameters, &mut updated);
        progress(loss);
    }
    parameters
}

#[cfg(test)]
mod tests {
    use super::{TrainingConfig, train};
    use crate::{
        linear::{BIAS, WEIGHT},
        model::{ModelKind, Quality},
        sgd::SgdConfig,
    };

    fn config(model: ModelKind, steps: u64, seed: u64) -> TrainingConfig {
        TrainingConfig { model, steps, batch_size: model.batch_size(), seed, sgd: model.sgd() }
    }

    #[test]
    fn one_process_reaches_95_percent_on_held_out_digits() {
        let config = config(ModelKind::Mlp, 600, 1);
        let mut losses = Vec::new();
        let parameters = train(&config, |loss| losses.push(loss));
        let quality = config.model.open(1).quality(&parameters);
        assert!(matches!(quality, Quality::Accuracy { accuracy, .. } if accuracy >= 0.95), "{quality}");
        assert_eq!(losses.len(), 600);
        assert!(losses[599] < losses[0] / 4.0, "{} to {}", losses[0], losses[599]);
    }

    #[test]
    fn equal_seeds_train_to_equal_parameters() {
        let trained = |seed| train(&config(ModelKind::Mlp, 5, seed), |_| ());
        assert_eq!(trained(2), trained(2));
        assert_ne!(trained(2), trained(3));
    }

    #[test]
    fn the_line_is_found() {
        let sgd = SgdConfig { learning_rate: 0.003, momentum: 0.0 };
        let config = TrainingConfig { sgd, ..config(ModelKind::Linear, 5_000, 1) };
        let quality = config.model.open(1).quality(&train(&config, |_| ()));
        let Quality::Line { weight, bias, .. } = quality else { panic!("{quality}") };
        assert!((weight - WEIGHT).abs() < 0.1 && (bias - BIAS).abs() < 0.1, "{quality}");
    }
}
