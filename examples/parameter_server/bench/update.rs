//! The server's arithmetic, the same one behind every transport.

/// Parameters as a server has them, with the optimiser's velocities.
#[derive(Debug)]
pub(crate) struct Updated {
    values: Vec<Vec<f32>>,
    velocities: Vec<Vec<f32>>,
}

const LEARNING_RATE: f32 = 0.01;
const MOMENTUM: f32 = 0.9;

impl Updated {
    pub(crate) fn new(sizes: &[usize]) -> Self {
        let zeros = || sizes.iter().map(|&size| vec![0.0; size]).collect();
        Self { values: zeros(), velocities: zeros() }
    }

    /// Takes a step along the mean of the gradients of two workers for one tensor, as they came: little-endian bytes.
    /// Gives the new values.
    pub(crate) fn update(&mut self, tensor: usize, gradients: [&[u8]; 2]) -> &[f32] {
        let values = &mut self.values[tensor];
        let pairs = floats(gradients[0]).zip(floats(gradients[1]));
        for ((value, velocity), (one, other)) in
            values.iter_mut().zip(&mut self.velocities[tensor]).zip(pairs)
        {
            *velocity = MOMENTUM * *velocity - LEARNING_RATE * 0.5 * (one + other);
            *value += *velocity;
        }
        values
    }
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes))
}
