//! Handwritten digits: 1,797 bitmaps of 8 × 8 pixels, compiled into the `smartcore` crate.

use std::ops::Range;

use crate::random::SplitMix64;

/// Pixels of one bitmap, row by row.
pub const PIXELS: usize = 64;
/// Digits a bitmap can show.
pub const CLASSES: usize = 10;
/// Bitmaps that no training run ever sees.
pub const HELD_OUT: usize = 540;

/// The largest grey value in the data set.
const GREY_MAX: f32 = 16.0;
/// Fixes which bitmaps are held out. It is no option: processes with different seeds must agree on the split.
const SPLIT_SEED: u64 = 0x7e57_d161;

/// Bitmaps with the digit that each one shows.
#[derive(Debug, Clone, Default)]
pub struct Samples {
    pixels: Vec<f32>,
    labels: Vec<usize>,
}

impl Samples {
    /// Adds one bitmap of [`PIXELS`] grey values in `0.0..=1.0`.
    fn push(&mut self, bitmap: &[f32], label: usize) {
        self.pixels.extend_from_slice(bitmap);
        self.labels.push(label);
    }

    /// Empties the collection and keeps its memory.
    fn clear(&mut self) {
        self.pixels.clear();
        self.labels.clear();
    }

    /// Number of bitmaps.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there is no bitmap.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// All grey values, [`PIXELS`] per bitmap, one bitmap after the other.
    pub fn pixels(&self) -> &[f32] {
        &self.pixels
    }

    /// The digit of each bitmap.
    pub fn labels(&self) -> &[usize] {
        &self.labels
    }
}

/// The data set, split.
#[derive(Debug, Clone)]
pub struct Digits {
    /// The samples for training.
    pub training: Samples,
    /// The samples for measuring accuracy: [`HELD_OUT`] bitmaps.
    pub held_out: Samples,
}

impl Digits {
    /// Unpacks and splits the data set; every call in every process gives the same split.
    pub fn load() -> Self {
        let data = smartcore::dataset::digits::load_dataset();
        let all: Vec<(&[f32], usize)> =
            data.data.chunks_exact(PIXELS).zip(data.target.iter().map(|&digit| digit as usize)).collect();
        let mut order: Vec<usize> = (0..all.len()).collect();
        SplitMix64::new(SPLIT_SEED).shuffle(&mut order);

        let (mut training, mut held_out) = (Samples::default(), Samples::default());
        for (position, &index) in order.iter().enumerate() {
            let (bitmap, label) = all[index];
            let scaled: Vec<f32> = bitmap.iter().map(|grey| grey / GREY_MAX).collect();
            let part = if position < HELD_OUT { &mut held_out } else { &mut training };
            part.push(&scaled, label);
        }
        Self { training, held_out }
    }
}

/// An endless sequence over samples: pass after pass, each visits every sample once, in an order of its own.
///
/// Any part of the sequence can be asked for at any time, so a process that starts in the middle of a training, or
/// starts again, takes exactly its own samples.
#[derive(Debug)]
pub struct Batches {
    samples: Samples,
    seed: u64,
    /// The pass that `order` belongs to.
    pass: Option<u64>,
    order: Vec<usize>,
    batch: Samples,
}

impl Batches {
    /// The sequence over `samples` that `seed` fixes.
    pub fn new(samples: Samples, seed: u64) -> Self {
        Self { samples, seed, pass: None, order: Vec::new(), batch: Samples::default() }
    }

    /// The samples with these numbers in the sequence; none only if there are no samples.
    pub fn range(&mut self, numbers: Range<u64>) -> &Samples {
        self.batch.clear();
        let length = self.samples.len() as u64;
        for number in numbers.filter(|_| length > 0) {
            self.turn_to(number / length);
            let index = self.order[(number % length) as usize];
            let bitmap = &self.samples.pixels[index * PIXELS..(index + 1) * PIXELS];
            self.batch.push(bitmap, self.samples.labels[index]);
        }
        &self.batch
    }

    fn turn_to(&mut self, pass: u64) {
        if self.pass != Some(pass) {
            self.pass = Some(pass);
            self.order.clear();
            self.order.extend(0..self.samples.len());
            SplitMix64::numbered(self.seed, pass).shuffle(&mut self.order);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Batches, CLASSES, Digits, HELD_OUT, PIXELS, Samples};

    fn fingerprint(samples: &Samples) -> Vec<(Vec<u32>, usize)> {
        let bitmaps = samples.pixels.chunks_exact(PIXELS).zip(&samples.labels);
        bitmaps.map(|(bitmap, &label)| (bitmap.iter().map(|p| p.to_bits()).collect(), label)).collect()
    }

    #[test]
    fn split_is_the_same_each_time_and_covers_the_data_set() {
        let (one, other) = (Digits::load(), Digits::load());
        assert_eq!(fingerprint(&one.held_out), fingerprint(&other.held_out));
        assert_eq!(one.held_out.len(), HELD_OUT);
        assert_eq!(one.training.len() + one.held_out.len(), 1_797);
        assert_eq!(one.training.pixels().len(), one.training.len() * PIXELS);
        assert!(one.training.pixels().iter().all(|pixel| (0.0..=1.0).contains(pixel)));
    }

    #[test]
    fn held_out_bitmaps_show_every_digit_about_equally_often() {
        let mut counts = [0usize; CLASSES];
        for &label in Digits::load().held_out.labels() {
            counts[label] += 1;
        }
        assert!(counts.iter().all(|&count| count > HELD_OUT / CLASSES / 2), "{counts:?}");
    }

    #[test]
    fn each_pass_visits_every_sample_once_in_an_order_of_its_own() {
        let training = Digits::load().training;
        let length = training.len() as u64;
        let mut batches = Batches::new(training.clone(), 9);
        let first = fingerprint(batches.range(0..length));
        let second = fingerprint(batches.range(length..2 * length));
        let whole = fingerprint(&training);
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
        let training = Digits::load().training;
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
        assert!(Batches::new(Samples::default(), 1).range(0..4).is_empty());
    }
}
