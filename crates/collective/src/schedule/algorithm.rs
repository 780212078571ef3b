use std::fmt;

/// How the elements of all ranks are combined, and how every rank gets the result. All ranks of a group use the same algorithm
/// for a call.
///
/// The costs are those of one rank in a group of `P` ranks whose value has `S` bytes. A step sends one message and waits for one.
/// The number of steps in sequence decides the time of a short value, and the bytes that of a long one.
///
/// Sums, products and means of 16-bit floats are [rounded once](crate::Reduction), so no rank passes on what it has combined of some:
/// instead of [`Ring`](Self::Ring) and [`HalvingDoubling`](Self::HalvingDoubling) each rank sends every other its part of
/// the elements, combines its own of all, and sends the result to all, with two steps and `2·S·(P-1)/P` bytes. In [`Hierarchical`](Self::Hierarchical) they are 32-bit floats until
/// they are combined, so a host sends `3·S·(H-1)/H` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum Algorithm {
    /// Every rank sends all its elements to every other rank, and combines what it receives in the order of the ranks.
    ///
    /// One step, `S·(P-1)` bytes. For two ranks this is the minimum, and one segment is combined while the next is in flight. For
    /// short values in small groups, whose time depends only on the number of steps in sequence. Ranks on one host read the values
    /// in place.
    Exchange = 1,
    /// Every rank reads the elements of the others in place.
    ///
    /// Two steps: each rank combines its part of all values, then it reads the parts of the others. No bytes are sent. For all
    /// ranks on one host, which it needs.
    Views = 2,
    /// The ranks form a ring, and each sends only to the next one.
    ///
    /// `2·(P-1)` steps, `2·S·(P-1)/P` bytes, which is the minimum. For long values: each rank has two peers, and combines one
    /// segment while the next is in flight.
    Ring = 3,
    /// Pairs of ranks exchange halves, then quarters, and so on.
    ///
    /// `2·log2 P` steps, `2·S·(P-1)/P` bytes if `P` is a power of two. For values of middle length. If `P` is not a power of two,
    /// it takes two more steps, and some ranks send up to `S` more bytes.
    HalvingDoubling = 4,
    /// Pairs of ranks send each other all that they have, and each round doubles the ranks of which a rank knows: see
    /// [Hensgen, Finkel and Manber 1988](https://doi.org/10.1007/BF01379320).
    ///
    /// `log2 P` steps, `S·log2 P` bytes; two more steps if `P` is not a power of two. For short values in groups in which the number
    /// of messages counts.
    Doubling = 5,
    /// The ranks of each host combine, then the hosts in a ring.
    ///
    /// `2·H` steps for `H` hosts, of which `2` are within hosts. A *host* sends the others `2·S·(H-1)/H` bytes, which is the
    /// minimum, over as many connections as the smallest host has ranks. For long values of several ranks on each of several hosts.
    Hierarchical = 6,
}

impl Algorithm {
    /// All algorithms, in the order of their numbers.
    pub const ALL: [Self; 6] =
        [Self::Exchange, Self::Views, Self::Ring, Self::HalvingDoubling, Self::Doubling, Self::Hierarchical];

    /// The algorithm with this number. Ranks compare these numbers.
    pub(crate) fn of_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| *algorithm as u8 == number)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Exchange => "exchange",
            Self::Views => "views",
            Self::Ring => "ring",
            Self::HalvingDoubling => "halving_doubling",
            Self::Doubling => "doubling",
            Self::Hierarchical => "hierarchical",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Algorithm;

    #[test]
    fn numbers_name_algorithms_from_one_without_gaps() {
        let numbered = (1..).map_while(Algorithm::of_number);
        assert!(numbered.eq(Algorithm::ALL));
        assert_eq!(Algorithm::of_number(0), None);
        assert_eq!(Algorithm::of_number(u8::MAX), None);
    }
}
