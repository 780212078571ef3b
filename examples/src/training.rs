//! Training in one process: what the distributed run is measured against.

use crate::digits::{Batches, Digits};
use crate::mlp::Mlp;
use crate::sgd::{Sgd, SgdConfig};

/// Samples per gradient.
pub const BATCH_SIZE: usize = 32;
/// Gradients of a whole training run, by default.
pub const STEPS: usize = 2_000;

/// Trains a fresh network for `steps` gradients and returns its parameters. `progress` is called after each step
/// with the loss of its batch.
pub fn train(digits: &Digits, steps: usize, seed: u64, mut progress: impl FnMut(f32)) -> Vec<Vec<f32>> {
    let mut mlp = Mlp::for_digits();
    let mut parameters = mlp.initial_parameters(seed);
    let mut gradients = mlp.zero_gradients();
    let mut updated = mlp.zero_gradients();
    let mut sgd = Sgd::new(SgdConfig::default());
    let mut batches = Batches::new(digits.training.clone(), BATCH_SIZE, seed);
    for _ in 0..steps {
        let loss = mlp.gradients(&parameters, batches.next_batch(), &mut gradients);
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
    use super::train;
    use crate::digits::Digits;
    use crate::mlp::Mlp;

    #[test]
    fn one_process_reaches_95_percent_on_held_out_digits() {
        const STEPS: usize = 600;
        let digits = Digits::load();
        let mut losses = Vec::new();
        let parameters = train(&digits, STEPS, 1, |loss| losses.push(loss));
        let accuracy = Mlp::for_digits().accuracy(&parameters, &digits.held_out);
        assert!(accuracy >= 0.95, "{accuracy}");
        assert_eq!(losses.len(), STEPS);
        assert!(losses[STEPS - 1] < losses[0] / 4.0, "{} to {}", losses[0], losses[STEPS - 1]);
    }

    #[test]
    fn equal_seeds_train_to_equal_parameters() {
        let digits = Digits::load();
        assert_eq!(train(&digits, 5, 2, |_| ()), train(&digits, 5, 2, |_| ()));
        assert_ne!(train(&digits, 5, 2, |_| ()), train(&digits, 5, 3, |_| ()));
    }
}
