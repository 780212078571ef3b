//! Stochastic gradient descent with momentum.

/// How far and how steadily parameters follow their gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdConfig {
    /// Step length.
    pub learning_rate: f32,
    /// Part of the last step that goes on, in `0.0..1.0`. Gradients of workers that run asynchronously arrive late,
    /// which acts like momentum of its own, so this is smaller than usual.
    pub momentum: f32,
}

impl Default for SgdConfig {
    fn default() -> Self {
        Self { learning_rate: 0.05, momentum: 0.5 }
    }
}

/// An optimiser with its velocities, one per parameter.
#[derive(Debug)]
pub struct Sgd {
    config: SgdConfig,
    velocities: Vec<Vec<f32>>,
}

impl Sgd {
    /// An optimiser at rest.
    pub const fn new(config: SgdConfig) -> Self {
        Self { config, velocities: Vec::new() }
    }

    /// An optimiser that goes on where another was: with its velocities, one list for each tensor.
    pub const fn resume(config: SgdConfig, velocities: Vec<Vec<f32>>) -> Self {
        Self { config, velocities }
    }

    /// How fast each parameter moves: what [`resume`](Self::resume) needs. Empty before the first update.
    pub fn velocities(&self) -> &[Vec<f32>] {
        &self.velocities
    }

    /// Moves tensor number `tensor` against its gradient: reads the values from `old` and writes them to `new`, so that
    /// readers of `old` are not disturbed. All three have the same length, in every call for this tensor.
    pub fn update(&mut self, tensor: usize, old: &[f32], gradient: &[f32], new: &mut [f32]) {
        if self.velocities.len() <= tensor {
            self.velocities.resize_with(tensor + 1, Vec::new);
        }
        let velocity = &mut self.velocities[tensor];
        velocity.resize(gradient.len(), 0.0);
        let SgdConfig { learning_rate, momentum } = self.config;
        for (((value, slope), speed), new) in old.iter().zip(gradient).zip(velocity).zip(new) {
            *speed = momentum * *speed - learning_rate * slope;
            *new = value + *speed;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Sgd, SgdConfig};

    #[test]
    fn momentum_carries_the_last_step_on() {
        let mut sgd = Sgd::new(SgdConfig { learning_rate: 0.5, momentum: 0.5 });
        let (mut first, mut second) = ([0.0; 2], [0.0; 2]);
        sgd.update(0, &[1.0, 2.0], &[2.0, 0.0], &mut first);
        assert_eq!(first, [0.0, 2.0]);
        sgd.update(0, &first, &[0.0, 4.0], &mut second);
        assert_eq!(second, [-0.5, 0.0]);
    }

    #[test]
    fn a_resumed_optimiser_goes_on_bit_for_bit() {
        let config = SgdConfig { learning_rate: 0.3, momentum: 0.7 };
        let (mut whole, mut first) = (Sgd::new(config), Sgd::new(config));
        let mut values = [[0.1f32; 1]; 4];
        for (step, gradient) in [0.5f32, -0.2, 0.9].into_iter().enumerate() {
            let mut new = [0.0];
            whole.update(0, &values[step], &[gradient], &mut new);
            values[step + 1] = new;
        }
        let mut new = [0.0];
        first.update(0, &values[0], &[0.5], &mut new);
        first.update(0, &values[1], &[-0.2], &mut new);
        Sgd::resume(config, first.velocities().to_vec()).update(0, &values[2], &[0.9], &mut new);
        assert_eq!(new[0].to_bits(), values[3][0].to_bits());
    }

    #[test]
    fn tensors_have_velocities_of_their_own() {
        let mut sgd = Sgd::new(SgdConfig { learning_rate: 1.0, momentum: 0.5 });
        let mut new = [0.0];
        sgd.update(3, &[0.0], &[1.0], &mut new);
        sgd.update(1, &[0.0], &[0.0], &mut new);
        assert_eq!(new, [0.0]);
    }
}
