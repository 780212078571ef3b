//! The line `y = weight · x + bias`, learnt from noisy samples one at a time: the reference workload of TensorFlow's
//! RDMA transport. It moves next to nothing, so it shows what a step costs when the tensors are scalars.

use std::ops::Range;

use crate::{
    mlp::TensorSpec,
    model::{Model, Quality},
    random::SplitMix64,
};

/// What the samples lie on, give or take the noise.
pub const WEIGHT: f32 = 2.0;
/// See [`WEIGHT`].
pub const BIAS: f32 = 10.0;
/// Standard deviation of the noise.
const NOISE: f32 = 0.33;
/// Samples that the quality is measured on.
const HELD_OUT: u64 = 1_000;
/// Fixes the samples that the quality is measured on, whatever the seed of the training is.
const HELD_OUT_SEED: u64 = 0x11ea_0000;

/// The line, with the samples that `seed` fixes.
#[derive(Debug, Clone)]
pub struct Linear {
    seed: u64,
}

impl Linear {
    /// A line to be learnt from the samples that `seed` fixes.
    pub const fn new(seed: u64) -> Self {
        Self { seed }
    }
}

/// Sample `number` of those that `seed` fixes: x and y.
fn sample(seed: u64, number: u64) -> (f32, f32) {
    let mut random = SplitMix64::numbered(seed, number);
    let x = random.normal();
    (x, WEIGHT.mul_add(x, BIAS) + NOISE * random.normal())
}

fn line(parameters: &[Vec<f32>]) -> (f32, f32) {
    let scalar = |tensor: usize| parameters.get(tensor).and_then(|values| values.first()).copied();
    (scalar(0).unwrap_or(0.0), scalar(1).unwrap_or(0.0))
}

impl Model for Linear {
    fn tensors(&self) -> Vec<TensorSpec> {
        ["weight", "bias"].map(|name| TensorSpec { name: name.to_owned(), shape: Vec::new() }).to_vec()
    }

    fn initial_parameters(&self, seed: u64) -> Vec<Vec<f32>> {
        let mut random = SplitMix64::new(seed);
        vec![vec![random.normal()], vec![random.normal()]]
    }

    fn gradients(&mut self, parameters: &[Vec<f32>], samples: Range<u64>, gradients: &mut [Vec<f32>]) -> f32 {
        let (weight, bias) = line(parameters);
        let scale = 1.0 / (samples.end - samples.start).max(1) as f32;
        let (mut by_weight, mut by_bias, mut loss) = (0.0, 0.0, 0.0);
        for number in samples {
            let (x, y) = sample(self.seed, number);
            let off = weight * x + bias - y;
            by_weight += 2.0 * off * x * scale;
            by_bias += 2.0 * off * scale;
            loss += off * off * scale;
        }
        for (gradient, value) in gradients.iter_mut().zip([by_weight, by_bias]) {
            gradient.fill(value);
        }
        loss
    }

    fn quality(&mut self, parameters: &[Vec<f32>]) -> Quality {
        let (weight, bias) = line(parameters);
        let off = |(x, y): (f32, f32)| f64::from(weight * x + bias - y);
        let squares = (0..HELD_OUT).map(|number| off(sample(HELD_OUT_SEED, number)).powi(2));
        Quality::Line { weight, bias, loss: squares.sum::<f64>() / HELD_OUT as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::{BIAS, Linear, WEIGHT};
    use crate::model::{Model, Quality};

    #[test]
    fn gradients_agree_with_finite_differences() {
        let mut linear = Linear::new(1);
        let mut gradients = vec![vec![0.0], vec![0.0]];
        let (parameters, samples) = (vec![vec![0.5f32], vec![3.0f32]], 7..11);
        linear.gradients(&parameters, samples.clone(), &mut gradients);
        for tensor in 0..2 {
            let mut loss_at = |shift: f32| {
                let mut shifted = parameters.clone();
                shifted[tensor][0] += shift;
                linear.gradients(&shifted, samples.clone(), &mut [vec![0.0], vec![0.0]])
            };
            let measured = (loss_at(0.01) - loss_at(-0.01)) / 0.02;
            let found = gradients[tensor][0];
            assert!((measured - found).abs() < 0.01 * found.abs(), "{tensor}: {measured} {found}");
        }
    }

    #[test]
    fn the_true_line_is_only_off_by_the_noise() {
        let quality = Linear::new(1).quality(&[vec![WEIGHT], vec![BIAS]]);
        let Quality::Line { loss, .. } = quality else { panic!("{quality:?}") };
        assert!((0.08..0.14).contains(&loss), "{loss}");
    }
}
