//! The tensors of the bench: as many and as large as those of ResNet-50.

/// Residual blocks of each stage, and how many channels they work with and give on.
const STAGES: [(usize, usize, usize); 4] = [(3, 64, 256), (4, 128, 512), (6, 256, 1_024), (3, 512, 2_048)];
/// Classes that the last layer tells apart.
const CLASSES: usize = 1_000;

/// Elements of each of ResNet-50's 161 tensors, in their order: 25,557,032 together, from 64 to 2,359,296 in one.
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
    sizes.extend([channels * CLASSES, CLASSES]);
    sizes
}

/// About `parameters` elements in tensors whose sizes have ResNet-50's proportions.
pub(crate) fn sizes(parameters: u64) -> Vec<usize> {
    let whole = resnet50();
    let total: u64 = whole.iter().map(|&size| size as u64).sum();
    let scaled = |size: usize| (u128::from(parameters) * size as u128 / u128::from(total)).max(1);
    whole.into_iter().map(|size| scaled(size) as usize).collect()
}

/// Name of tensor `index`.
pub(crate) fn name(index: usize) -> String {
    format!("tensor {index}")
}

#[cfg(test)]
mod tests {
    use super::sizes;

    #[test]
    fn sizes_are_those_of_resnet50_and_scale() {
        let whole = sizes(25_557_032);
        assert_eq!((whole.len(), whole.iter().sum::<usize>()), (161, 25_557_032));
        assert_eq!((whole.iter().min(), whole.iter().max()), (Some(&64), Some(&2_359_296)));
        let small: usize = sizes(100_000).iter().sum();
        assert!((99_000..101_000).contains(&small), "{small}");
    }
}
