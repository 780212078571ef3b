//! Handwritten digits: 1,797 bitmaps of 8 × 8 pixels, compiled into the `smartcore` crate.

use crate::{random::SplitMix64, samples::Images};

/// Pixels of one bitmap, row by row.
pub const PIXELS: usize = 64;
/// Bitmaps that no training run ever sees.
pub const HELD_OUT: usize = 540;

/// The largest grey value in the data set.
const GREY_MAX: u8 = 16;
/// Fixes which bitmaps are held out. It is no option: processes with different seeds must agree on the split.
const SPLIT_SEED: u64 = 0x7e57_d161;

/// The bitmaps for training, and the [`HELD_OUT`] others. Every call in every process gives the same split.
pub fn load() -> (Images, Images) {
    let data = smartcore::dataset::digits::load_dataset();
    let greys: Vec<u8> = data.data.iter().map(|&grey| grey as u8).collect();
    let all: Vec<(&[u8], u8)> =
        greys.chunks_exact(PIXELS).zip(data.target.iter().map(|&digit| digit as u8)).collect();
    let mut order: Vec<usize> = (0..all.len()).collect();
    SplitMix64::new(SPLIT_SEED).shuffle(&mut order);

    let none = Images { pixels: PIXELS, grey_max: GREY_MAX, ..Images::default() };
    let (mut training, mut held_out) = (none.clone(), none);
    for (position, &index) in order.iter().enumerate() {
        let part = if position < HELD_OUT { &mut held_out } else { &mut training };
        part.push(all[index]);
    }
    (training, held_out)
}

#[cfg(test)]
mod tests {
    use super::{HELD_OUT, PIXELS, load};
    use crate::samples::CLASSES;

    #[test]
    fn split_is_the_same_each_time_and_covers_the_data_set() {
        let (training, held_out) = load();
        assert_eq!(load(), (training.clone(), held_out.clone()));
        assert_eq!(held_out.len(), HELD_OUT);
        assert_eq!(training.len() + held_out.len(), 1_797);
        let samples = training.samples();
        assert_eq!(samples.pixels().len(), training.len() * PIXELS);
        assert!(samples.pixels().iter().all(|pixel| (0.0..=1.0).contains(pixel)));
    }

    #[test]
    fn held_out_bitmaps_show_every_digit_about_equally_often() {
        let mut counts = [0usize; CLASSES];
        for label in load().1.labels {
            counts[usize::from(label)] += 1;
        }
        assert!(counts.iter().all(|&count| count > HELD_OUT / CLASSES / 2), "{counts:?}");
    }
}
