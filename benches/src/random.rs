//! Random numbers that are the same in every run.

/// A generator: xorshift64*.
#[derive(Debug)]
pub struct Random(u64);

impl Default for Random {
    fn default() -> Self {
        Self(1)
    }
}

impl Random {
    /// The next number. Its upper bits are the best ones.
    pub fn number(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// `count` of the numbers below `end`, each at most once, in random order.
    pub fn scattered(&mut self, end: u32, count: usize) -> impl Iterator<Item = u32> + use<> {
        let mut numbers: Vec<u32> = (0..end).collect();
        for last in (1..numbers.len()).rev() {
            numbers.swap(last, (self.number() % (last as u64 + 1)) as usize);
        }
        numbers.into_iter().take(count)
    }
}
