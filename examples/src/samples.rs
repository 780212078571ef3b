//! Labelled images, and the order in which a training visits them.

use std::ops::Range;

use crate::random::SplitMix64;

/// Classes that an image can belong to.
pub const CLASSES: usize = 10;

/// Images as files have them: a byte for each pixel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Images {
    /// Pixels of one image.
    pub pixels: usize,
    /// The largest grey value.
    pub grey_max: u8,
    /// All images, one after the other.
    pub bytes: Vec<u8>,
    /// The class of each image, below [`CLASSES`].
    pub labels: Vec<u8>,
}

impl Images {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// The bytes and the class of one image.
    pub fn image(&self, index: usize) -> (&[u8], u8) {
        (&self.bytes[index * self.pixels..(index + 1) * self.pixels], self.labels[index])
    }

    /// Adds an image.
    pub fn push(&mut self, (bytes, label): (&[u8], u8)) {
        self.bytes.extend_from_slice(bytes);
        self.labels.push(label);
    }

    /// All of them for a model.
    pub fn samples(&self) -> Samples {
        let mut samples = Samples::default();
        (0..self.len()).for_each(|index| samples.push(self, index));
        samples
    }
}

/// Images as a model takes them: grey values from 0 to 1.
#[derive(Debug, Clone, Default)]
pub struct Samples {
    pixels: Vec<f32>,
    labels: Vec<usize>,
}

impl Samples {
    fn push(&mut self, images: &Images, index: usize) {
        let ((bytes, label), grey_max) = (images.image(index), f32::from(images.grey_max));
        self.pixels.extend(bytes.iter().map(|&grey| f32::from(grey) / grey_max));
        self.labels.push(label.into());
    }

    fn clear(&mut self) {
        self.pixels.clear();
        self.labels.clear();
    }

    /// Number of images.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there is no image.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// All grey values, one image after the other.
    pub fn pixels(&self) -> &[f32] {
        &self.pixels
    }

    /// The class of each image.
    pub fn labels(&self) -> &[usize] {
        &self.labels
    }

    /// The numbers of the pixels that are not 0 in every image, sorted.
    pub fn touched(&self) -> Vec<usize> {
        let pixels = self.pixels.len() / self.len().max(1);
        let is_touched =
            |pixel: &usize| self.pixels.iter().skip(*pixel).step_by(pixels).any(|&grey| grey != 0.0);
        (0..pixels).filter(is_touched).collect()
    }
}

/// An endless sequence over images: pass after pass, each visits every image once, in an order of its own.
///
/// Any part of the sequence can be asked for at any time, so a process that starts in the middle of a training, or
/// starts again, takes exactly its own samples.
#[derive(Debug)]
pub struct Batches {
    images: Images,
    seed: u64,
    /// The pass that `order` belongs to.
    pass: Option<u64>,
    order: Vec<usize>,
    batch: Samples,
}

impl Batches {
    /// The sequence over `images` that `seed` fixes.
    pub fn new(images: Images, seed: u64) -> Self {
        Self { images, seed, pass: None, order: Vec::new(), batch: Samples::default() }
    }

    /// The samples with these numbers in the sequence; none only if there are no images.
    pub fn range(&mut self, numbers: Range<u64>) -> &Samples {
        self.batch.clear();
        let length = self.images.len() as u64;
        for number in numbers.filter(|_| length > 0) {
            self.turn_to(number / length);
            self.batch.push(&self.images, self.order[(number % length) as usize]);
        }
        &self.batch
    }

    fn turn_to(&mut self, pass: u64) {
        if self.pass != Some(pass) {
            self.pass = Some(pass);
            self.order.clear();
            self.order.extend(0..self.images.len());
            SplitMix64::numbered(self.seed, pass).shuffle(&mut self.order);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Batches, Images, Samples};
    use crate::digits;

    fn fingerprint(samples: &Samples) -> Vec<(Vec<u32>, usize)> {
        let images = samples.pixels.chunks_exact(digits::PIXELS).zip(&samples.labels);
        images.map(|(image, &label)| (image.iter().map(|p| p.to_bits()).collect(), label)).collect()
    }

    #[test]
    fn each_pass_visits_every_sample_once_in_an_order_of_its_own() {
        let (training, _) = digits::load();
        let length = training.len() as u64;
        let mut batches = Batches::new(training.clone(), 9);
        let first = fingerprint(batches.range(0..length));
        let second = fingerprint(batches.range(length..2 * length));
        let whole = fingerprint(&training.samples());
        assert!(first != second && first != whole, "the order is shuffled");
        for mut pass in [first, second] {
            let mut expected = whole.clone();
            pass.sort();
            expected.sort();
            assert_eq!(pass, expected);
        }
    }

    #[test]
    fn a_part_of_the_sequence_is_the_same_whoever_asks_and_when() {
        let (training, _) = digits::load();
        let at_the_end_of_a_pass = training.len() as u64 - 10;
        let mut whole = Batches::new(training.clone(), 4);
        let whole = fingerprint(whole.range(at_the_end_of_a_pass..at_the_end_of_a_pass + 20));
        let mut parts = Batches::new(training, 4);
        let second = fingerprint(parts.range(at_the_end_of_a_pass + 10..at_the_end_of_a_pass + 20));
        let first = fingerprint(parts.range(at_the_end_of_a_pass..at_the_end_of_a_pass + 10));
        assert_eq!([first, second].concat(), whole);
    }

    #[test]
    fn batches_of_no_samples_are_empty_instead_of_endless() {
        assert!(Batches::new(Images::default(), 1).range(0..4).is_empty());
    }

    #[test]
    fn touched_pixels_are_those_that_are_not_0_in_some_image() {
        let mut images = Images { pixels: 4, grey_max: 2, ..Images::default() };
        images.push((&[0, 1, 0, 0], 3));
        images.push((&[0, 2, 0, 1], 4));
        assert_eq!(images.samples().touched(), [1, 3]);
        assert!(Samples::default().touched().is_empty());
    }
}
