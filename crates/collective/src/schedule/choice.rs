use super::{Algorithm, Plan, direct, doubling, halving_doubling, hierarchical, ring, tree};

/// The most ranks of one host that send short values to all others in one step. In larger groups the number of messages counts more than
/// that of steps.
const EXCHANGE_RANKS_MAX: usize = 4;

/// The longest value that travels in the note of the call header.
pub(crate) const JOINED_BYTES_MAX: usize = 2 << 10;

/// The longest value that travels by [`Algorithm::Doubling`]. On several hosts the steps that it saves must be worth the bytes that it
/// adds: measured over TCP, it takes 0.77 of the time of [`Algorithm::Exchange`] and [`Algorithm::HalvingDoubling`] for 64 KiB with four
/// ranks, and 0.7 with eight. Two ranks exchange: they send no more bytes than by any other algorithm, and combine in one step.
fn doubling_bytes_max(size: usize, hosts: usize) -> usize {
    match (size, hosts) {
        (..=EXCHANGE_RANKS_MAX, 1) | (..=2, _) => 0,
        (_, 1) | (9.., _) => JOINED_BYTES_MAX,
        _ => 64 << 10,
    }
}

/// Up to this size, counted for all ranks together, ranks of one host read all values of the others in one step. Above it, reading and
/// combining so many bytes takes longer than the second step of [`Algorithm::Views`].
const SHARED_EXCHANGE_BYTES_MAX: usize = 512 << 10;

/// Up to this size the number of steps in sequence counts more: [`Algorithm::HalvingDoubling`] takes `2·log2 P`, and the ring
/// `2·(P-1)`. Above it the bytes count more, which are the same for both, and the ring combines one segment while it receives the
/// next.
const HALVING_DOUBLING_BYTES_MAX: usize = 2 << 20;

/// Up to this size the number of steps counts more for a reduce, too, and where ranks share hosts. Above it, a root combines while it
/// receives, and a host sends fewer bytes by [`Algorithm::Hierarchical`].
const SHORT_BYTES_MAX: usize = 256 << 10;

/// The segment that is combined while the next is in flight. Shorter segments need more messages and more waits. Longer ones
/// leave the processor's cache before they are combined, and leave more to combine after the last receive.
pub(crate) const SEGMENT_BYTES: usize = 256 << 10;

/// The default algorithm for an all-reduce of `bytes` bytes among `size` ranks. `hosts` has the ranks of each host. The same on all
/// ranks.
#[must_use]
pub(crate) fn choose(size: usize, hosts: &[Vec<usize>], bytes: usize) -> Algorithm {
    let doubling_bytes_max = doubling_bytes_max(size, hosts.len());
    if doubling_bytes_max > 0 && bytes <= doubling_bytes_max {
        Algorithm::Doubling
    } else if hosts.len() == 1 {
        let is_short = bytes.saturating_mul(size) <= SHARED_EXCHANGE_BYTES_MAX;
        if is_short { Algorithm::Exchange } else { Algorithm::Views }
    } else if size <= 2 {
        Algorithm::Exchange
    } else if bytes > SHORT_BYTES_MAX && hosts.len() < size && are_alike(hosts) {
        Algorithm::Hierarchical
    } else if bytes <= HALVING_DOUBLING_BYTES_MAX {
        Algorithm::HalvingDoubling
    } else {
        Algorithm::Ring
    }
}

/// Whether no host has more than twice the ranks of another. The parts of [`Algorithm::Hierarchical`] are as many as the smallest host
/// has ranks: on a much larger host few ranks would combine for many.
fn are_alike(hosts: &[Vec<usize>]) -> bool {
    let lengths = || hosts.iter().map(Vec::len);
    lengths().max() <= lengths().min().map(|fewest| 2 * fewest)
}

/// What a rank does in a call.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Plans {
    /// For values that are rounded once: runs first, on 32-bit floats.
    pub(crate) wide: Option<Plan>,
    pub(crate) plan: Plan,
}

impl From<Plan> for Plans {
    fn from(plan: Plan) -> Self {
        Self { wide: None, plan }
    }
}

/// The plans of `rank` for an all-reduce of `count` elements of `width` bytes among the ranks of `hosts`. None for
/// [`Algorithm::Views`]. If `rounds_once`, elements must not be rounded before all are combined.
pub(crate) fn plans(
    algorithm: Algorithm,
    rank: usize,
    hosts: &[Vec<usize>],
    count: usize,
    width: usize,
    rounds_once: bool,
) -> Plans {
    let (size, segment) = (hosts.iter().map(Vec::len).sum(), SEGMENT_BYTES / width.max(1));
    match algorithm {
        Algorithm::Views => Plans::default(),
        Algorithm::Exchange => direct::exchange(rank, size, count, segment, rounds_once).into(),
        Algorithm::Doubling if rounds_once => {
            Plans { wide: Some(doubling::all_reduce(rank, size, count)), plan: Plan::default() }
        }
        Algorithm::Doubling => doubling::all_reduce(rank, size, count).into(),
        Algorithm::Hierarchical if rounds_once => {
            let segment = SEGMENT_BYTES / size_of::<f32>();
            let [combine, collect] = hierarchical::combine_and_collect(rank, hosts, count, segment);
            Plans { wide: Some(combine), plan: collect }
        }
        Algorithm::Hierarchical => hierarchical::all_reduce(rank, hosts, count, segment).into(),
        _ if rounds_once => direct::all_reduce(rank, size, count, segment).into(),
        Algorithm::Ring => ring::all_reduce(rank, size, count, segment).into(),
        Algorithm::HalvingDoubling => halving_doubling::all_reduce(rank, size, count).into(),
    }
}

/// The plan of `rank` for a reduction of `count` elements of `width` bytes to `root`.
pub(crate) fn reduce_plan(
    rank: usize,
    size: usize,
    count: usize,
    width: usize,
    root: usize,
    rounds_once: bool,
) -> Plan {
    if rounds_once {
        return direct::reduce(rank, size, count, root, SEGMENT_BYTES / width.max(1));
    }
    // As in an all-reduce, steps count more for short values, and bytes for long ones.
    if count * width <= SHORT_BYTES_MAX {
        tree::reduce(rank, size, count, root)
    } else {
        tree::reduce_long(rank, size, count, root, SEGMENT_BYTES / width.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::{Algorithm, Plans, choose, plans};
    use crate::schedule::{direct, doubling, halving_doubling, hierarchical, ring};

    #[test]
    fn a_plan_is_that_of_its_algorithm() {
        let hosts = [vec![0, 1, 2], vec![3, 4, 5]];
        let of = |algorithm| plans(algorithm, 3, &hosts, 1_000_000, 4, false);
        assert_eq!(of(Algorithm::Exchange), direct::exchange(3, 6, 1_000_000, 65_536, false).into());
        assert_eq!(of(Algorithm::Views), Plans::default());
        assert_eq!(of(Algorithm::Ring), ring::all_reduce(3, 6, 1_000_000, 65_536).into());
        assert_eq!(of(Algorithm::HalvingDoubling), halving_doubling::all_reduce(3, 6, 1_000_000).into());
        assert_eq!(of(Algorithm::Doubling), doubling::all_reduce(3, 6, 1_000_000).into());
        assert_eq!(
            of(Algorithm::Hierarchical),
            hierarchical::all_reduce(3, &hosts, 1_000_000, 65_536).into()
        );
    }

    #[test]
    fn values_that_are_rounded_once_are_wide_until_all_are_combined() {
        let hosts = [vec![0, 1, 2], vec![3, 4, 5]];
        let of = |algorithm| plans(algorithm, 3, &hosts, 1_000_000, 2, true);
        let direct = direct::all_reduce(3, 6, 1_000_000, 131_072);
        assert_eq!(
            [of(Algorithm::Ring), of(Algorithm::HalvingDoubling)],
            [(); 2].map(|()| direct.clone().into())
        );
        let doubled = of(Algorithm::Doubling);
        assert_eq!(doubled.wide, Some(doubling::all_reduce(3, 6, 1_000_000)));
        assert!(doubled.plan.exchanges.is_empty());
        let [wide, plan] = hierarchical::combine_and_collect(3, &hosts, 1_000_000, 65_536);
        assert_eq!(of(Algorithm::Hierarchical), Plans { wide: Some(wide), plan });
    }

    #[test]
    fn a_segment_of_the_ring_has_256_kib_whatever_its_elements() {
        for width in [1, 2, 4, 8, 16] {
            let Plans { plan, .. } = plans(Algorithm::Ring, 0, &[vec![0], vec![1]], 1 << 22, width, false);
            assert_eq!(plan.exchanges[0].send[0].1.len() * width, 256 << 10);
        }
    }

    #[test]
    fn short_values_are_doubled_and_long_ones_go_around() {
        let apart = |size: usize| (0..size).map(|rank| vec![rank]).collect::<Vec<_>>();
        for (size, longest) in [(3, 64 << 10), (4, 64 << 10), (8, 64 << 10), (9, 2 << 10), (64, 2 << 10)] {
            assert_eq!(choose(size, &apart(size), longest), Algorithm::Doubling, "{size}");
            assert_eq!(choose(size, &apart(size), longest + 1), Algorithm::HalvingDoubling, "{size}");
        }
        assert_eq!(choose(2, &apart(2), usize::MAX), Algorithm::Exchange);
        assert_eq!(choose(4, &apart(4), 2 << 20), Algorithm::HalvingDoubling);
        assert_eq!(choose(4, &apart(4), (2 << 20) + 1), Algorithm::Ring);
        assert_eq!(choose(1000, &apart(1000), usize::MAX), Algorithm::Ring);
    }

    #[test]
    fn ranks_that_share_a_host_use_its_memory() {
        let (one, two) = ([(0..9).collect()], [vec![0, 2, 4, 6], vec![1, 3, 5, 7]]);
        assert_eq!(choose(4, &[(0..4).collect()], 2048), Algorithm::Exchange);
        assert_eq!(choose(8, &[(0..8).collect()], 2048), Algorithm::Doubling);
        assert_eq!(choose(8, &[(0..8).collect()], 2049), Algorithm::Exchange);
        assert_eq!(choose(9, &one, (512 << 10) / 9), Algorithm::Exchange);
        assert_eq!(choose(9, &one, (512 << 10) / 9 + 1), Algorithm::Views);
        assert_eq!(choose(9, &one, usize::MAX), Algorithm::Views);
        assert_eq!(choose(8, &two, 256 << 10), Algorithm::HalvingDoubling);
        assert_eq!(choose(8, &two, usize::MAX), Algorithm::Hierarchical);
    }

    #[test]
    fn a_host_with_few_ranks_does_not_leave_all_work_to_few_of_another() {
        assert_eq!(choose(3, &[vec![0], vec![1, 2]], usize::MAX), Algorithm::Hierarchical);
        assert_eq!(choose(4, &[vec![0], vec![1, 2, 3]], usize::MAX), Algorithm::Ring);
    }
}
