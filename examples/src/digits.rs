//! Handwritten digits: 1,797 bitmaps of 8 × 8 pixels, compiled into the `smartcore` crate.

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

    /// Every `count`-th bitmap from `index` on: the part that worker `index` of `count` trains on.
    #[must_use]
    pub fn shard(&self, index: usize, count: usize) -> Self {
        let mut shard = Self::default();
        for (bitmap, &label) in self.iter().skip(index).step_by(count.max(1)) {
            shard.push(bitmap, label);
        }
        shard
    }

    fn iter(&self) -> impl Iterator<Item = (&[f32], &usize)> {
        self.pixels.chunks_exact(PIXELS).zip(&self.labels)
    }
}

/// The data set, split.
#[derive(Debug, Clone)]
pub struct Digits {
    /// What models are trained on.
    pub training: Samples,
    /// What accuracy is measured on: [`HELD_OUT`] bitmaps.
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

/// Endless batches over samples: each pass visits every sample once, in an order of its own.
#[derive(Debug)]
pub struct Batches {
    samples: Samples,
    order: Vec<usize>,
    position: usize,
    random: SplitMix64,
    batch: Samples,
    batch_size: usize,
}

impl Batches {
    /// Batches of `batch_size` from `samples`, in the order that `seed` fixes.
    pub fn new(samples: Samples, batch_size: usize, seed: u64) -> Self {
        let order: Vec<usize> = (0..samples.len()).collect();
        // Starts at the end of a pass, so that the first batch shuffles.
        let position = order.len();
        Self {
            samples,
            order,
            position,
            random: SplitMix64::new(seed),
            batch: Samples::default(),
            batch_size,
        }
    }

    /// The next batch; empty only if there are no samples.
    pub fn next_batch(&mut self) -> &Samples {
        self.batch.clear();
        while self.batch.len() < self.batch_size && !self.samples.is_empty() {
            if self.position == self.order.len() {
                self.random.shuffle(&mut self.order);
                self.position = 0;
            }
            let index = self.order[self.position];
            let bitmap = &self.samples.pixels[index * PIXELS..(index + 1) * PIXELS];
            self.batch.push(bitmap, self.samples.labels[index]);
            self.position += 1;
        }
        &self.batch
    }
}

#[cfg(test)]
mod tests {
    use super::{Batches, CLASSES, Digits, HELD_OUT, PIXELS, Samples};

    fn fingerprint(samples: &Samples) -> Vec<(Vec<u32>, usize)> {
        samples.iter().map(|(bitmap, &label)| (bitmap.iter().map(|p| p.to_bits()).collect(), label)).collect()
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
    fn shards_partition_the_training_samples() {
        let training = Digits::load().training;
        let mut joined = fingerprint(&training.shard(0, 2));
        joined.extend(fingerprint(&training.shard(1, 2)));
        let mut whole = fingerprint(&training);
        joined.sort();
        whole.sort();
        assert_eq!(joined, whole);
    }

    #[test]
    fn one_pass_of_batches_visits_every_sample_once() {
        let training = Digits::load().training.shard(0, 12);
        let mut batches = Batches::new(training.clone(), 1, 9);
        let mut seen = Vec::new();
        for _ in 0..training.len() {
            seen.extend(fingerprint(batches.next_batch()));
        }
        let mut expected = fingerprint(&training);
        assert_ne!(seen, expected, "the order is shuffled");
        seen.sort();
        expected.sort();
        assert_eq!(seen, expected);
    }

    #[test]
    fn batches_of_no_samples_are_empty_instead_of_endless() {
        assert!(Batches::new(Samples::default(), 4, 1).next_batch().is_empty());
    }
}
