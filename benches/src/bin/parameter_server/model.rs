//! The models, and the step of their parameters along a gradient.

/// The learning rate.
const RATE: f32 = 1e-3;

/// For each stage of ResNet-50: the number of residual blocks, and their inner and output channels.
const STAGES: [(usize, usize, usize); 4] = [(3, 64, 256), (4, 128, 512), (6, 256, 1_024), (3, 512, 2_048)];

/// The tensors of a model, all of f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Model {
    /// Six tensors of 52 bytes together, to check that everything runs.
    Tiny,
    /// Eight tensors of 64 KiB together.
    Small,
    /// The 161 tensors of ResNet-50: 102 MB, from 256 B to 9.4 MB.
    Resnet50,
}

impl Model {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::Small => "small",
            Self::Resnet50 => "resnet50",
        }
    }

    /// Floats of each tensor.
    pub(crate) fn sizes(self) -> Vec<usize> {
        match self {
            Self::Tiny => vec![4, 2, 2, 2, 2, 1],
            Self::Small => [4_032, 64].repeat(4),
            Self::Resnet50 => resnet50(),
        }
    }

    pub(crate) fn names(self) -> Vec<String> {
        (0..self.sizes().len()).map(|index| format!("tensor {index}")).collect()
    }

    /// Bytes of all tensors.
    pub(crate) fn bytes(self) -> usize {
        self.sizes().iter().sum::<usize>() * size_of::<f32>()
    }

    /// The first parameters, or a gradient.
    pub(crate) fn filled(self, value: f32) -> impl Iterator<Item = Vec<u8>> {
        self.sizes().into_iter().map(move |size| value.to_ne_bytes().repeat(size))
    }
}

fn resnet50() -> Vec<usize> {
    let mut sizes = Vec::new();
    // A convolution is followed by scale and offset for each channel.
    let mut convolution =
        |weights: usize, channels: usize| sizes.extend([weights * channels, channels, channels]);
    convolution(7 * 7 * 3, 64);
    let mut channels = 64;
    for (blocks, narrow, wide) in STAGES {
        for block in 0..blocks {
            convolution(channels, narrow);
            convolution(3 * 3 * narrow, narrow);
            convolution(narrow, wide);
            if block == 0 {
                convolution(channels, wide);
            }
            channels = wide;
        }
    }
    sizes.extend([channels * 1_000, 1_000]);
    sizes
}

/// Writes to `after` the parameters `before` moved along the gradient.
pub(crate) fn descend(after: &mut [u8], before: &[u8], gradient: &[u8]) {
    let slopes = before.as_chunks().0.iter().zip(gradient.as_chunks().0);
    for (after, (&before, &slope)) in after.as_chunks_mut().0.iter_mut().zip(slopes) {
        *after = moved(before, slope);
    }
}

/// Moves the parameters along the gradient in place.
pub(crate) fn descend_in_place(parameters: &mut [u8], gradient: &[u8]) {
    for (parameter, &slope) in parameters.as_chunks_mut().0.iter_mut().zip(gradient.as_chunks().0) {
        *parameter = moved(*parameter, slope);
    }
}

fn moved(parameter: [u8; 4], slope: [u8; 4]) -> [u8; 4] {
    (f32::from_ne_bytes(parameter) - RATE * f32::from_ne_bytes(slope)).to_ne_bytes()
}
