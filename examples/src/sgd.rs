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
        Self {
            learning_rate: 0.05,
            momentum: 0.5,
        }
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
        Self {
            config,
            velocities: Vec::new(),
        }
    }

    /// Moves `parameters` against `gradients`. Both lists have the same order and lengths in every call.
    pub fn apply<P: AsMut<[f32]>, G: AsRef<[f32]>>(&mut self, parameters: &mut [P], gradients: &[G]) {
        self.velocities
            .resize(parameters.len().max(self.velocities.len()), Vec::new());
        for ((parameter, gradient), velocity) in
            parameters.iter_mut().zip(gradients).zip(&mut self.velocities)
        {
            let gradient = gradient.as_ref();
            velocity.resize(gradient.len(), 0.0);
            for ((value, slope), speed) in parameter
                .as_mut()
                .iter_mut()
                .zip(gradient)
                .zip(velocity.iter_mut())
            {
                *speed = self.config.momentum * *speed - self.config.learning_rate * slope;
                *value += *speed;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Sgd, SgdConfig};

    #[test]
    fn momentum_carries_the_last_step_on() {
        let mut sgd = Sgd::new(SgdConfig {
            learning_rate: 0.5,
            momentum: 0.5,
        });
        let mut parameters = [vec![1.0f32, 2.0]];
        sgd.apply(&mut parameters, &[[2.0f32, 0.0]]);
        assert_eq!(parameters[0], [0.0, 2.0]);
        sgd.apply(&mut parameters, &[[0.0f32, 4.0]]);
        assert_eq!(parameters[0], [-0.5, 0.0]);
    }
}
