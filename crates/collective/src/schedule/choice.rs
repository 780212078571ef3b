use super::{Algorithm, Plan, bcube, halving_doubling, ring, tree};

/// A value of this many bytes travels in one message beside its header. Above, each of the `size-1` copies that
/// [`Algorithm::Exchange`] sends costs more than the steps that it saves.
const EXCHANGE_BYTES_MAX: usize = 2 << 10;

/// With one rank more, sending to each of the others takes longer than the three steps each way that pairs of eight ranks take.
const EXCHANGE_RANKS_MAX: usize = 8;

/// Up to here the number of steps that follow each other weighs more: [`Algorithm::HalvingDoubling`] takes `2·log2 P`, and the ring
/// `2·(P-1)`. Above, the bytes do, which are the same for both, and the ring combines one segment while it receives the next.
const HALVING_DOUBLING_BYTES_MAX: usize = 256 << 10;

/// What of a part is combined while the next is under way. A shorter segment has more messages and more waits for them. A longer
/// one is no longer in the processor's cache when it is combined, and leaves more to combine after the last receive.
const SEGMENT_BYTES: usize = 256 << 10;

/// Ranks of a group of [`Algorithm::Bcube`]. More take fewer steps, but have more messages under way in each. Four halve the steps
/// that pairs take, and three peers in a step are as many as most hosts have links.
const BCUBE_BASE: usize = 4;

/// The algorithm for an all-reduce of `bytes` bytes among `size` ranks that may be on several hosts, when nobody has chosen one.
/// All ranks of a group choose the same.
#[must_use]
pub fn choose(size: usize, bytes: usize) -> Algorithm {
    if bytes <= EXCHANGE_BYTES_MAX && size <= EXCHANGE_RANKS_MAX {
        Algorithm::Exchange
    } else if bytes <= HALVING_DOUBLING_BYTES_MAX {
        Algorithm::HalvingDoubling
    } else {
        Algorithm::Ring
    }
}

/// What `rank` does in an all-reduce of `count` elements of `width` bytes. `None` for [`Algorithm::Exchange`] and
/// [`Algorithm::Views`], for which the group needs no plan.
pub(crate) fn plan(
    algorithm: Algorithm,
    rank: usize,
    size: usize,
    count: usize,
    width: usize,
) -> Option<Plan> {
    match algorithm {
        Algorithm::Exchange | Algorithm::Views => None,
        Algorithm::Ring => Some(ring::all_reduce(rank, size, count, SEGMENT_BYTES / width.max(1))),
        Algorithm::HalvingDoubling => Some(halving_doubling::all_reduce(rank, size, count)),
        Algorithm::Bcube => Some(bcube::all_reduce(rank, size, count, BCUBE_BASE)),
    }
}

/// What `rank` does in a reduction of `count` elements of `width` bytes to `root`.
pub(crate) fn reduce_plan(rank: usize, size: usize, count: usize, width: usize, root: usize) -> Plan {
    // As for an all-reduce, steps weigh more for short values, and bytes for long ones.
    if count * width <= HALVING_DOUBLING_BYTES_MAX {
        tree::reduce(rank, size, count, root)
    } else {
        tree::reduce_long(rank, size, count, root, SEGMENT_BYTES / width.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::{Algorithm, choose, plan};
    use crate::schedule::{bcube, halving_doubling, ring};

    #[test]
    fn a_plan_is_that_of_its_algorithm() {
        let of = |algorithm| plan(algorithm, 3, 6, 1_000_000, 4);
        assert_eq!(of(Algorithm::Exchange), None);
        assert_eq!(of(Algorithm::Views), None);
        assert_eq!(of(Algorithm::Ring), Some(ring::all_reduce(3, 6, 1_000_000, 65_536)));
        assert_eq!(of(Algorithm::HalvingDoubling), Some(halving_doubling::all_reduce(3, 6, 1_000_000)));
        assert_eq!(of(Algorithm::Bcube), Some(bcube::all_reduce(3, 6, 1_000_000, 4)));
    }

    #[test]
    fn a_segment_of_the_ring_has_256_kib_whatever_its_elements() {
        for width in [1, 2, 4, 8, 16] {
            let plan = plan(Algorithm::Ring, 0, 2, 1 << 22, width).unwrap();
            assert_eq!(plan.exchanges[0].send[0].1.len() * width, 256 << 10);
        }
    }

    #[test]
    fn short_values_are_exchanged_in_small_groups_and_long_ones_go_around() {
        assert_eq!(choose(8, 2048), Algorithm::Exchange);
        assert_eq!(choose(9, 2048), Algorithm::HalvingDoubling);
        assert_eq!(choose(8, 2049), Algorithm::HalvingDoubling);
        assert_eq!(choose(2, 256 << 10), Algorithm::HalvingDoubling);
        assert_eq!(choose(2, (256 << 10) + 1), Algorithm::Ring);
        assert_eq!(choose(1000, usize::MAX), Algorithm::Ring);
    }
}
