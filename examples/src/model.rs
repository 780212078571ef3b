//! What can be trained: a model with the samples it learns from.

use std::{fmt, ops::Range};

use crate::{
    digits::{Batches, Digits},
    linear::Linear,
    mlp::{Mlp, TensorSpec},
    sgd::SgdConfig,
};

/// Something that learns by gradients.
///
/// All its results are fixed by the arguments and the seed it was opened with, so any process can compute any step, or
/// compute it again.
pub trait Model: fmt::Debug {
    /// Names and shapes of the parameters, in the order that all calls expect.
    fn tensors(&self) -> Vec<TensorSpec>;

    /// Fresh parameters.
    fn initial_parameters(&self, seed: u64) -> Vec<Vec<f32>>;

    /// Mean loss over the samples with these numbers; `gradients` is overwritten with its derivatives.
    fn gradients(&mut self, parameters: &[Vec<f32>], samples: Range<u64>, gradients: &mut [Vec<f32>]) -> f32;

    /// How good the parameters are on samples that no training sees.
    fn quality(&mut self, parameters: &[Vec<f32>]) -> Quality;

    /// Zeros with the shapes of the parameters.
    fn zeros(&self) -> Vec<Vec<f32>> {
        self.tensors().iter().map(|tensor| vec![0.0; tensor.elements()]).collect()
    }
}

/// How good parameters are.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Quality {
    /// Of a classifier.
    Accuracy {
        /// Part of the held-out samples that are classified rightly, in `0.0..=1.0`.
        accuracy: f64,
        /// How many there are.
        held_out: usize,
    },
    /// Of a line.
    Line {
        /// Its slope.
        weight: f32,
        /// Its value at 0.
        bias: f32,
        /// Mean squared error over the held-out samples.
        loss: f64,
    },
}

impl fmt::Display for Quality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accuracy { accuracy, held_out } => {
                write!(f, "{:.1} % of {held_out} held-out digits", accuracy * 100.0)
            }
            Self::Line { weight, bias, loss } => {
                write!(f, "loss {loss:.4}, weight {weight:.4}, bias {bias:.4}")
            }
        }
    }
}

/// The models that can be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelKind {
    /// A network with 301,066 parameters that reads handwritten digits.
    Mlp,
    /// A line with two scalar parameters.
    Linear,
}

impl ModelKind {
    /// The name on command lines and in files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mlp => "mlp",
            Self::Linear => "linear",
        }
    }

    /// The model, with the samples in the order that `seed` fixes.
    pub fn open(self, seed: u64) -> Box<dyn Model> {
        match self {
            Self::Mlp => Box::new(DigitReader::new(Digits::load(), seed)),
            Self::Linear => Box::new(Linear::new(seed)),
        }
    }

    /// Samples for one gradient.
    pub const fn batch_size(self) -> u64 {
        match self {
            Self::Mlp => 32,
            Self::Linear => 1,
        }
    }

    /// Updates of a whole training, unless told otherwise.
    pub const fn steps(self) -> u64 {
        match self {
            Self::Mlp => 2_000,
            Self::Linear => 100_000,
        }
    }

    /// How the parameters follow their gradients, unless told otherwise.
    pub fn sgd(self) -> SgdConfig {
        match self {
            Self::Mlp => SgdConfig::default(),
            Self::Linear => SgdConfig { learning_rate: 0.000_03, momentum: 0.0 },
        }
    }
}

/// The network and the digits.
#[derive(Debug)]
struct DigitReader {
    mlp: Mlp,
    batches: Batches,
    digits: Digits,
}

impl DigitReader {
    fn new(digits: Digits, seed: u64) -> Self {
        Self { mlp: Mlp::for_digits(), batches: Batches::new(digits.training.clone(), seed), digits }
    }
}

impl Model for DigitReader {
    fn tensors(&self) -> Vec<TensorSpec> {
        self.mlp.tensors()
    }

    fn initial_parameters(&self, seed: u64) -> Vec<Vec<f32>> {
        self.mlp.initial_parameters(seed)
    }

    fn gradients(&mut self, parameters: &[Vec<f32>], samples: Range<u64>, gradients: &mut [Vec<f32>]) -> f32 {
        self.mlp.gradients(parameters, self.batches.range(samples), gradients)
    }

    fn quality(&mut self, parameters: &[Vec<f32>]) -> Quality {
        let accuracy = self.mlp.accuracy(parameters, &self.digits.held_out);
        Quality::Accuracy { accuracy, held_out: self.digits.held_out.len() }
    }
}
