//! A small deterministic generator, so that a seed fixes a whole run.

/// SplitMix64: one 64-bit word of state, and any seed is usable.
#[derive(Debug, Clone)]
pub struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    /// A generator whose output `seed` determines.
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// Number `number` of the generators that a seed determines.
    pub fn numbered(seed: u64, number: u64) -> Self {
        // Mixed, since plain sums would give parts of one sequence.
        Self::new(Self::new(seed).next_u64() ^ Self::new(number.wrapping_add(1)).next_u64().rotate_left(32))
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.state;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    /// A number in `0..bound`; 0 when `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        // The multiply-shift reduction: its bias is below 2^-40 for every bound an example uses.
        let wide = u128::from(self.next_u64()) * (bound as u128);
        (wide >> 64) as usize
    }

    /// A number in `-1.0..1.0`.
    pub fn signed_unit(&mut self) -> f32 {
        let unit = (self.next_u64() >> 40) as f32 / (1u64 << 24) as f32;
        unit.mul_add(2.0, -1.0)
    }

    /// Puts `items` into a random order (Fisher-Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::SplitMix64;

    #[test]
    fn first_words_are_those_of_the_published_generator() {
        let mut random = SplitMix64::new(1_234_567);
        let words: Vec<u64> = (0..3).map(|_| random.next_u64()).collect();
        assert_eq!(words, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn below_reaches_every_number_under_its_bound_and_none_above() {
        let mut random = SplitMix64::new(7);
        let mut seen = [0u32; 10];
        for _ in 0..1_000 {
            seen[random.below(10)] += 1;
        }
        assert!(seen.iter().all(|&count| count > 50), "{seen:?}");
    }

    #[test]
    fn shuffle_keeps_every_item_once() {
        let mut items: Vec<u32> = (0..1_000).collect();
        SplitMix64::new(3).shuffle(&mut items);
        assert_ne!(items, (0..1_000).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..1_000).collect::<Vec<_>>());
    }
}
