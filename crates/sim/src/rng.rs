//! The only source of randomness in a simulated world.

use std::{ops::Range, time::Duration};

/// xoshiro256++, seeded through splitmix64. Not for secrets.
#[derive(Debug, Clone)]
pub struct Rng {
    state: [u64; 4],
}

/// One step of splitmix64: a bijection that scatters its input over all bits.
pub(crate) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl Rng {
    /// The sequence of `seed`.
    pub fn new(seed: u64) -> Self {
        let mut word = seed;
        let state = std::array::from_fn(|_| {
            word = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
            mix(word)
        });
        Self { state }
    }

    /// A sequence of its own for `purpose`, so that one consumer's draws don't shift another's.
    pub fn fork(&self, purpose: u64) -> Self {
        Self::new(self.state[0] ^ mix(purpose))
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        let [a, b, c, d] = self.state;
        let result = a.wrapping_add(d).rotate_left(23).wrapping_add(a);
        let (c, d) = (c ^ a, d ^ b);
        self.state = [a ^ d, b ^ c, c ^ (self.state[1] << 17), d.rotate_left(45)];
        result
    }

    /// A number below `bound`; 0 when `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        let product = u128::from(self.next_u64()) * bound as u128;
        (product >> 64) as usize
    }

    /// A number of `range`; its start when it is empty.
    pub fn within(&mut self, range: Range<usize>) -> usize {
        range.start + self.below(range.end.saturating_sub(range.start))
    }

    /// True in `part` of `of` draws.
    pub fn chance(&mut self, part: u32, of: u32) -> bool {
        self.below(of as usize) < part as usize
    }

    /// A duration up to and including `max`.
    pub fn duration(&mut self, max: Duration) -> Duration {
        let nanos = usize::try_from(max.as_nanos()).unwrap_or(usize::MAX - 1);
        Duration::from_nanos(self.below(nanos + 1) as u64)
    }

    /// One of `choices`, which must not be empty.
    pub fn pick<T: Copy, const N: usize>(&mut self, choices: [T; N]) -> T {
        const { assert!(N > 0) };
        choices[self.below(N)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_seed_gives_one_sequence() {
        let draw = |seed| {
            let mut rng = Rng::new(seed);
            [rng.next_u64(), rng.next_u64(), rng.next_u64()]
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn draws_stay_inside_their_bounds_and_reach_both_ends() {
        let mut rng = Rng::new(1);
        let drawn: Vec<usize> = (0..1000).map(|_| rng.within(3..7)).collect();
        assert!(drawn.iter().all(|value| (3..7).contains(value)));
        assert!((3..7).all(|value| drawn.contains(&value)));
        assert_eq!(rng.below(0), 0);
        assert!((0..100).all(|_| rng.duration(Duration::from_nanos(5)) <= Duration::from_nanos(5)));
        assert!(!rng.chance(0, 10) && rng.chance(10, 10));
    }

    #[test]
    fn forks_differ_by_purpose() {
        let rng = Rng::new(3);
        assert_ne!(rng.fork(1).next_u64(), rng.fork(2).next_u64());
        assert_eq!(rng.fork(1).next_u64(), rng.fork(1).next_u64());
    }
}
