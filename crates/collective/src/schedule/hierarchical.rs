//! Two levels: the ranks of a host combine their elements in its memory, and the hosts combine theirs over the network.
//!
//! The value has a part for each *owner*. The owners of a host are its first ranks, as many as the host with the fewest ranks has.
//! Each rank sends its elements of a part to the owner on its host, which combines them. Then the owners of that part on all
//! hosts combine it in a ring. When they collect, an owner also sends each complete piece to the other ranks of its host.
//!
//! So all owners use the network at the same time, and a host sends as little as one rank of a ring with a rank for each host
//! (Karonis et al., "Exploiting hierarchy in parallel computer networks to optimize collective operation performance", 2000, describes
//! the levels). If each host has one
//! rank, this is the [`ring`](super::ring).
//!
//! Each element is combined in one order, and all ranks get copies of that result: their bits are equal.

use super::{Arrival, Exchange, Plan, parts};
use std::ops::Range;

/// Every rank gets the combination of all. `hosts` has the ranks of each host, and no host is empty. All ranks pass the same. A rank
/// that is on none of them does nothing.
///
/// Parts differ by at most one element, and so do the pieces of a part, one for each host. A piece is cut into segments of at
/// most `segment` elements (0 counts as 1), each in its own exchanges.
///
/// Let there be `H` hosts. An owner whose part has `p` elements, of which the pieces of its own and of the next host have `o` and
/// `n`, sends `2·p - o - n` elements to the next host. So a host sends `2·count·(H-1)/H` elements if pieces are equal, which is the
/// minimum. On a host of `r` ranks an owner also sends the others `count - p` elements to combine and `(r-1)·p` to
/// collect. Ranks that own nothing send `count`: they receive only results, so they send all without waiting.
#[must_use]
pub(crate) fn all_reduce(rank: usize, hosts: &[Vec<usize>], count: usize, segment: usize) -> Plan {
    let place = Place::of(rank, hosts, count, segment);
    place.map(|place| place.plan(true, true)).unwrap_or_default()
}

/// As [`all_reduce`], in two plans, for a call that changes the elements in between: after the first, each owner has the complete
/// pieces of its host, and the second collects them.
#[must_use]
pub(crate) fn combine_and_collect(
    rank: usize,
    hosts: &[Vec<usize>],
    count: usize,
    segment: usize,
) -> [Plan; 2] {
    let place = Place::of(rank, hosts, count, segment);
    place.map(|place| [place.plan(true, false), place.plan(false, true)]).unwrap_or_default()
}

/// Where a rank is, and what is divided.
struct Place<'a> {
    hosts: &'a [Vec<usize>],
    /// The index of the rank's host.
    host: usize,
    /// The index of the rank among those of its host. It is an owner if it has pieces.
    place: usize,
    /// The pieces of each owner's part, one for each host.
    pieces: Vec<Vec<Range<usize>>>,
    segment: usize,
}

/// What all owners of a host do at the same time: each with a segment of one of its own pieces.
#[derive(Clone, Copy)]
struct Stage {
    number: usize,
    piece: usize,
    segment: usize,
}

impl<'a> Place<'a> {
    /// `None` for a rank that is on no host.
    fn of(rank: usize, hosts: &'a [Vec<usize>], count: usize, segment: usize) -> Option<Self> {
        let owners = hosts.iter().map(Vec::len).min().unwrap_or_default();
        let pieces = parts(0..count, owners).into_iter().map(|part| parts(part, hosts.len())).collect();
        let place_of = |ranks: &Vec<usize>| ranks.iter().position(|other| *other == rank);
        let found = hosts.iter().map(place_of).enumerate().find_map(|(host, place)| Some((host, place?)));
        found.map(|(host, place)| Self { hosts, host, place, pieces, segment: segment.max(1) })
    }

    /// A piece travels from host to host: once to be combined, and once to be collected. It becomes complete on the host of its
    /// number, where one stage does both.
    fn plan(&self, combines: bool, collects: bool) -> Plan {
        let mut plan = Plan::default();
        let hosts = self.hosts.len();
        for number in 0..2 * hosts - 1 {
            let piece = (self.host + 2 * hosts - 1 - number) % hosts;
            let longest = self.pieces.iter().map(|pieces| pieces[piece].len()).max().unwrap_or_default();
            for segment in 0..longest.div_ceil(self.segment) {
                let stage = Stage { number, piece, segment };
                if combines && number < hosts {
                    self.combine(stage, &mut plan);
                }
                if collects && number + 1 >= hosts {
                    self.collect(stage, &mut plan);
                }
            }
        }
        plan
    }

    fn combine(&self, stage: Stage, plan: &mut Plan) {
        self.combine_on_host(stage, plan);
        if stage.number > 0 {
            self.receive_from_host_before(stage, plan);
        }
        if stage.number + 1 < self.hosts.len() {
            plan.push(Exchange { send: self.to_host_after(stage), receive: vec![] });
        }
    }

    /// All sends happen at once. All receives are of one range, so each has its own exchange.
    fn combine_on_host(&self, stage: Stage, plan: &mut Plan) {
        let mut send: Vec<_> = self.other_owners().map(|(at, rank)| (rank, self.range(at, stage))).collect();
        if !self.is_owner() {
            plan.push(Exchange { send, receive: vec![] });
            return;
        }
        let is_sent_next = stage.number == 0 && self.hosts.len() > 1;
        let mut senders = self.others().map(|(_, rank)| rank).peekable();
        while let Some(sender) = senders.next() {
            let is_last = senders.peek().is_none();
            let arrival = if is_sent_next && is_last { Arrival::Pass } else { Arrival::Fold };
            let receive = vec![(sender, self.range(self.place, stage), arrival)];
            plan.push(Exchange { send: std::mem::take(&mut send), receive });
        }
    }

    fn receive_from_host_before(&self, stage: Stage, plan: &mut Plan) {
        let hosts = self.hosts.len();
        let before = &self.hosts[(self.host + hosts - 1) % hosts];
        let arrival = match stage.number + 1 {
            next if next < hosts => Arrival::Pass,
            next if next == hosts => Arrival::Fold,
            _ => Arrival::Replace,
        };
        if self.is_owner() {
            let receive = vec![(before[self.place], self.range(self.place, stage), arrival)];
            plan.push(Exchange { send: vec![], receive });
        }
    }

    /// What an owner sends to the host after its own, unless the piece is complete there.
    fn to_host_after(&self, stage: Stage) -> Vec<(usize, Range<usize>)> {
        let hosts = self.hosts.len();
        let is_end = stage.number == 2 * (hosts - 1);
        let after = &self.hosts[(self.host + 1) % hosts];
        let send = (self.is_owner() && !is_end).then(|| (after[self.place], self.range(self.place, stage)));
        send.into_iter().collect()
    }

    /// Sends on a complete segment, and receives those of the other owners.
    fn collect(&self, stage: Stage, plan: &mut Plan) {
        if stage.number >= self.hosts.len() {
            self.receive_from_host_before(stage, plan);
        }
        let mut send = self.to_host_after(stage);
        if self.is_owner() {
            send.extend(self.others().map(|(_, rank)| (rank, self.range(self.place, stage))));
        }
        let receives = self.other_owners().map(|(at, rank)| (rank, self.range(at, stage), Arrival::Replace));
        plan.push(Exchange { send, receive: receives.collect() });
    }

    fn is_owner(&self) -> bool {
        self.place < self.pieces.len()
    }

    /// The other ranks of the host and their places, beginning with the next one, so that they do not all send to the same rank first.
    fn others(&self) -> impl Iterator<Item = (usize, usize)> {
        let ranks = &self.hosts[self.host];
        (1..ranks.len()).map(|ahead| (self.place + ahead) % ranks.len()).map(|place| (place, ranks[place]))
    }

    fn other_owners(&self) -> impl Iterator<Item = (usize, usize)> {
        self.others().filter(|(place, _)| *place < self.pieces.len())
    }

    /// The elements of a stage that the owner at `place` has. Empty if its piece has fewer segments.
    fn range(&self, place: usize, stage: Stage) -> Range<usize> {
        let piece = &self.pieces[place][stage.piece];
        let start = (piece.start + stage.segment * self.segment).min(piece.end);
        start..start.saturating_add(self.segment).min(piece.end)
    }
}
