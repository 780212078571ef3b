//! A multilayer perceptron with ReLU between its layers and softmax cross-entropy as its loss.
//!
//! Parameters and gradients are lists of named `f32` tensors (`w1`, `b1`, `w2`, …) in the order of [`Mlp::tensors`].
//! The model reads and writes them through `AsRef<[f32]>` and `AsMut<[f32]>`, so they can be in any memory of the
//! caller, for instance in memory that a peer wrote.

use crate::random::SplitMix64;
use crate::samples::Samples;

/// Floats that one step of a dot product takes: enough independent sums to fill vector registers.
const LANES: usize = 16;

/// One parameter tensor of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// `w1`, `b1`, `w2`, …
    pub name: String,
    /// Rows and columns of a weight matrix, or the length of a bias.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Number of floats.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A network, and the working memory of its passes.
#[derive(Debug)]
pub struct Mlp {
    widths: Vec<usize>,
    /// `activations[0]` is the input, the last one holds the class probabilities.
    activations: Vec<Vec<f32>>,
    /// Derivative of the loss by the values before each layer's ReLU.
    deltas: Vec<Vec<f32>>,
}

impl Mlp {
    /// A network with these layer widths, input first.
    pub fn new(widths: Vec<usize>) -> Self {
        let layers = widths.len().saturating_sub(1);
        Self { activations: vec![Vec::new(); layers + 1], deltas: vec![Vec::new(); layers], widths }
    }

    /// Names and shapes of the parameters, in the order that all calls expect.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let mut tensors = Vec::new();
        for (index, pair) in self.widths.windows(2).enumerate() {
            tensors.push(TensorSpec { name: format!("w{}", index + 1), shape: vec![pair[0], pair[1]] });
            tensors.push(TensorSpec { name: format!("b{}", index + 1), shape: vec![pair[1]] });
        }
        tensors
    }

    /// Bytes of all parameters together.
    pub fn parameter_bytes(&self) -> usize {
        self.tensors().iter().map(|tensor| tensor.elements() * size_of::<f32>()).sum()
    }

    /// Fresh parameters: weights uniform within He's bound for the layer, biases 0.
    pub fn initial_parameters(&self, seed: u64) -> Vec<Vec<f32>> {
        let mut random = SplitMix64::new(seed);
        let mut fill = |tensor: &TensorSpec| match tensor.shape[..] {
            [inputs, outputs] => {
                let bound = (6.0 / inputs as f32).sqrt();
                (0..inputs * outputs).map(|_| random.signed_unit() * bound).collect()
            }
            _ => vec![0.0; tensor.elements()],
        };
        self.tensors().iter().map(&mut fill).collect()
    }

    /// Gradients that are all 0, with the shapes of the parameters.
    pub fn zero_gradients(&self) -> Vec<Vec<f32>> {
        self.tensors().iter().map(|tensor| vec![0.0; tensor.elements()]).collect()
    }

    /// Mean loss over `batch`; `gradients` is overwritten with its derivatives.
    pub fn gradients<P: AsRef<[f32]>, G: AsMut<[f32]>>(
        &mut self,
        parameters: &[P],
        batch: &Samples,
        gradients: &mut [G],
    ) -> f32 {
        self.backward(parameters, batch, |layer| {
            if let [weights, bias] = &mut gradients[2 * layer.index..2 * layer.index + 2] {
                layer.write(weights.as_mut(), bias.as_mut());
            }
        })
    }

    /// Mean loss over `batch`. Passes each layer to `each` as soon as its derivatives can be written, the last layer
    /// first, so that the caller can send those of one layer while those of the next are computed.
    pub fn backward<P: AsRef<[f32]>>(
        &mut self,
        parameters: &[P],
        batch: &Samples,
        mut each: impl FnMut(LayerGradient<'_>),
    ) -> f32 {
        self.forward(parameters, batch);
        let loss = self.loss_and_last_delta(batch);
        for index in (0..self.deltas.len()).rev() {
            let width = Width { inputs: self.widths[index], outputs: self.widths[index + 1] };
            let (before, after) = self.deltas.split_at_mut(index);
            let (delta, input) = (&after[0], &self.activations[index]);
            each(LayerGradient { index, loss, input, delta, width });
            if let Some(previous) = before.last_mut() {
                input_delta(delta, parameters[2 * index].as_ref(), input, width, previous);
            }
        }
        loss
    }

    /// Mean loss over `samples`.
    pub fn loss<P: AsRef<[f32]>>(&mut self, parameters: &[P], samples: &Samples) -> f32 {
        self.forward(parameters, samples);
        self.loss_and_last_delta(samples)
    }

    /// Fraction of `samples` whose most probable class is the right one.
    pub fn accuracy<P: AsRef<[f32]>>(&mut self, parameters: &[P], samples: &Samples) -> f64 {
        self.forward(parameters, samples);
        let Some(probabilities) = self.activations.last() else {
            return 0.0;
        };
        let classes = self.widths.last().copied().unwrap_or(1);
        let right = probabilities
            .chunks_exact(classes)
            .zip(samples.labels())
            .filter(|(row, label)| index_of_largest(row) == **label)
            .count();
        right as f64 / samples.len().max(1) as f64
    }

    /// Fills `activations` for a batch.
    fn forward<P: AsRef<[f32]>>(&mut self, parameters: &[P], batch: &Samples) {
        self.activations[0].clear();
        self.activations[0].extend_from_slice(batch.pixels());
        let last = self.deltas.len();
        for layer in 1..=last {
            let width = Width { inputs: self.widths[layer - 1], outputs: self.widths[layer] };
            let (before, after) = self.activations.split_at_mut(layer);
            let output = &mut after[0];
            output.resize(batch.len() * width.outputs, 0.0);
            let (weights, bias) = (parameters[2 * layer - 2].as_ref(), parameters[2 * layer - 1].as_ref());
            affine(&before[layer - 1], weights, bias, width, output);
            if layer == last {
                output.chunks_exact_mut(width.outputs).for_each(softmax);
            } else {
                output.iter_mut().for_each(|value| *value = value.max(0.0));
            }
        }
    }

    /// Mean cross-entropy, and its derivative by the last layer's values before the softmax.
    fn loss_and_last_delta(&mut self, batch: &Samples) -> f32 {
        let (Some(probabilities), Some(delta)) = (self.activations.last(), self.deltas.last_mut()) else {
            return 0.0;
        };
        delta.clear();
        delta.extend_from_slice(probabilities);
        let classes = self.widths.last().copied().unwrap_or(1);
        let scale = 1.0 / batch.len().max(1) as f32;
        let mut loss = 0.0;
        for (row, &label) in delta.chunks_exact_mut(classes).zip(batch.labels()) {
            loss -= row[label].max(f32::MIN_POSITIVE).ln();
            row[label] -= 1.0;
            row.iter_mut().for_each(|value| *value *= scale);
        }
        loss * scale
    }
}

/// One layer in the backward pass of a network.
#[derive(Debug)]
pub struct LayerGradient<'pass> {
    /// The number of the layer, from 0. Its weights are tensor `2 * index`, its bias the next one.
    pub index: usize,
    /// Mean loss of the batch.
    pub loss: f32,
    input: &'pass [f32],
    delta: &'pass [f32],
    width: Width,
}

impl LayerGradient<'_> {
    /// Overwrites `weights` and `bias` with the derivatives of the loss by the layer's weights and bias.
    pub fn write(&self, weights: &mut [f32], bias: &mut [f32]) {
        weight_gradient(self.input, self.delta, self.width, weights);
        bias_gradient(self.delta, bias);
    }
}

/// The numbers of inputs and outputs of a layer.
#[derive(Debug, Clone, Copy)]
struct Width {
    inputs: usize,
    outputs: usize,
}

/// `output = input · weights + bias` for every row. Inputs of 0, half of them after a ReLU, cost nothing.
fn affine(input: &[f32], weights: &[f32], bias: &[f32], width: Width, output: &mut [f32]) {
    for (row, sums) in input.chunks_exact(width.inputs).zip(output.chunks_exact_mut(width.outputs)) {
        sums.copy_from_slice(bias);
        for (&value, column) in row.iter().zip(weights.chunks_exact(width.outputs)) {
            if value != 0.0 {
                add_scaled(value, column, sums);
            }
        }
    }
}

/// `gradient = inputᵀ · delta`. Goes by weight row, so that the row being summed stays in the cache.
fn weight_gradient(input: &[f32], delta: &[f32], width: Width, gradient: &mut [f32]) {
    for (index, sums) in gradient.chunks_exact_mut(width.outputs).enumerate() {
        sums.fill(0.0);
        for (row, delta) in input.chunks_exact(width.inputs).zip(delta.chunks_exact(width.outputs)) {
            if row[index] != 0.0 {
                add_scaled(row[index], delta, sums);
            }
        }
    }
}

/// `gradient` = the sum of the rows of `delta`.
fn bias_gradient(delta: &[f32], gradient: &mut [f32]) {
    gradient.fill(0.0);
    for row in delta.chunks_exact(gradient.len()) {
        add_scaled(1.0, row, gradient);
    }
}

/// `previous = delta · weightsᵀ` where the ReLU let the value through, else 0.
fn input_delta(delta: &[f32], weights: &[f32], input: &[f32], width: Width, previous: &mut Vec<f32>) {
    previous.clear();
    for (row, delta) in input.chunks_exact(width.inputs).zip(delta.chunks_exact(width.outputs)) {
        previous.extend(
            row.iter()
                .zip(weights.chunks_exact(width.outputs))
                .map(|(&value, column)| if value > 0.0 { dot(delta, column) } else { 0.0 }),
        );
    }
}

fn add_scaled(scale: f32, from: &[f32], to: &mut [f32]) {
    for (sum, value) in to.iter_mut().zip(from) {
        *sum += scale * value;
    }
}

fn dot(left: &[f32], right: &[f32]) -> f32 {
    let (left_blocks, right_blocks) = (left.chunks_exact(LANES), right.chunks_exact(LANES));
    let rest: f32 = left_blocks.remainder().iter().zip(right_blocks.remainder()).map(|(a, b)| a * b).sum();
    let mut sums = [0.0f32; LANES];
    for (a, b) in left_blocks.zip(right_blocks) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f32>() + rest
}

/// Turns one row of scores into probabilities.
fn softmax(row: &mut [f32]) {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    row.iter_mut().for_each(|value| *value = (*value - largest).exp());
    let sum: f32 = row.iter().sum();
    row.iter_mut().for_each(|value| *value /= sum);
}

fn index_of_largest(row: &[f32]) -> usize {
    let mut best = 0;
    for (index, value) in row.iter().enumerate() {
        if *value > row[best] {
            best = index;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::Mlp;
    use crate::{
        digits::{PIXELS, load},
        random::SplitMix64,
        samples::{Batches, CLASSES, Samples},
    };

    fn for_digits() -> Mlp {
        Mlp::new(vec![PIXELS, 512, 512, CLASSES])
    }

    fn first_samples() -> Samples {
        Batches::new(load().0, 3).range(0..64).clone()
    }

    /// Central differences of the loss, by parameters drawn at random, agree with the gradients computed.
    #[test]
    fn gradients_agree_with_finite_differences() {
        const STEP: f32 = 1e-2;
        let mut mlp = Mlp::new(vec![PIXELS, 12, 8, CLASSES]);
        let batch = first_samples();
        let mut parameters = mlp.initial_parameters(11);
        let mut gradients = mlp.zero_gradients();
        let mut unused = mlp.zero_gradients();
        mlp.gradients(&parameters, &batch, &mut gradients);

        let mut random = SplitMix64::new(5);
        let (mut checked, mut largest) = (0, 0.0f32);
        for (tensor, gradient) in gradients.iter().enumerate() {
            for _ in 0..40 {
                let index = random.below(gradient.len());
                let kept = parameters[tensor][index];
                parameters[tensor][index] = kept + STEP;
                let above = mlp.gradients(&parameters, &batch, &mut unused);
                parameters[tensor][index] = kept - STEP;
                let below = mlp.gradients(&parameters, &batch, &mut unused);
                parameters[tensor][index] = kept;
                let measured = (above - below) / (2.0 * STEP);
                let off = (measured - gradient[index]).abs();
                assert!(
                    off < 4e-3 + 0.02 * measured.abs(),
                    "tensor {tensor}[{index}]: {measured} {gradient:?}"
                );
                checked += 1;
                largest = largest.max(measured.abs());
            }
        }
        assert!(checked == 240 && largest > 0.05, "{checked} checked, largest {largest}");
    }

    #[test]
    fn parameters_of_the_digits_network_exceed_one_mebibyte() {
        let mlp = for_digits();
        let names: Vec<String> = mlp.tensors().into_iter().map(|tensor| tensor.name).collect();
        assert_eq!(names, ["w1", "b1", "w2", "b2", "w3", "b3"]);
        assert_eq!(mlp.parameter_bytes(), 301_066 * 4);
        assert!(mlp.parameter_bytes() >= 1 << 20);
    }

    #[test]
    fn untrained_parameters_guess() {
        let mut mlp = for_digits();
        let parameters = mlp.initial_parameters(1);
        let accuracy = mlp.accuracy(&parameters, &load().1.samples());
        assert!(accuracy < 0.3, "{accuracy}");
    }

    #[test]
    fn equal_seeds_give_equal_parameters() {
        let mlp = for_digits();
        assert_eq!(mlp.initial_parameters(4), mlp.initial_parameters(4));
        assert_ne!(mlp.initial_parameters(4), mlp.initial_parameters(5));
    }
}
