//! The register of a rank in the agreement on the next generation. The agreement is the synod of Lamport's *The Part-Time
//! Parliament* (1998), for one decree.
//!
//! Every rank has a [`Register`], which it alone writes and all others read. A leader promises a [`Ballot`] of its own in its
//! register. The others promise it too when they read it, and the leader proposes when a quorum has. A proposal that a quorum has
//! accepted is decided. A rank [merges](Register::merge) each register that it reads into its own, which passes on what its owner
//! has merged. So nothing depends on whose register a rank reads, how often, or how late.
//!
//! # Why there is one decision
//!
//! - A *quorum* is more than half of the old generation's ranks, or half of them and the store, whose vote is one more register.
//!   Any two quorums share a rank or the store: two of more than half share a rank, and so do one of more than half and one of
//!   half; two of half share the store. So ranks that reach the store and ranks that do not cannot decide differently, and no
//!   record in the store decides anything by itself.
//! - A register accepts nothing below the ballot that it has promised. A leader proposes what was accepted under the highest
//!   ballot in the registers that have promised its own. Because quorums overlap, a later leader finds what was decided and
//!   proposes the same.
//! - A ballot contains its leader's rank, and a rank never uses a ballot number twice, so a ballot has one proposal.
//! - A register lives as long as the group or the next generation. A rank that lost it, because its process ended or it dropped
//!   both, publishes none again under this incarnation of its worker, and the others ignore any other incarnation.
//! - The store's register lives as long as the store's data. A store that restarts without its data would vote twice. So each
//!   rank has a [witness](super::joining::Witness) in the store: its own record with a random number, written before it was in
//!   the group, once, under a key of its own that was empty. A rank counts the store's vote only if it finds its witness *after*
//!   the vote was written. Then the store has lost nothing since the witness was written, so its register is still the same one
//!   and holds the vote. All votes that count, of whichever rank, were requested after all ranks had joined, and so after all
//!   witnesses were written: between any two of them the store has lost nothing. If the store loses its data between the vote and
//!   the check, the witness is lost too, and the vote does not count. A store that restores an older state of its data, with the
//!   witness and without the vote, cannot be distinguished from one that lost nothing.

use super::member::Member;

/// The first line of a register. It changes with the format.
const FORMAT: &str = "tensorwire agreement 1";

/// The number of an attempt to lead. The default is lower than all others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ballot {
    round: u64,
    /// The leader.
    rank: usize,
}

/// The proposed next generation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Roster {
    /// The old generation's ranks that stay, in their order.
    pub(super) staying: Vec<usize>,
    /// The members that follow them.
    pub(super) newcomers: Vec<Member>,
    /// How many entries of the run's waiting list have been considered so far.
    pub(super) considered: u64,
}

/// The state of a rank, or of the store, in the agreement.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Register {
    promised: Ballot,
    accepted: Option<(Ballot, Roster)>,
    /// Whether the accepted roster is decided.
    is_decided: bool,
}

impl Register {
    pub(super) fn promised(&self) -> Ballot {
        self.promised
    }

    pub(super) fn has_promised(&self, ballot: Ballot) -> bool {
        self.promised == ballot
    }

    pub(super) fn has_accepted(&self, ballot: Ballot) -> bool {
        self.accepted.as_ref().is_some_and(|(accepted, _)| *accepted == ballot)
    }

    pub(super) fn decided(&self) -> Option<&Roster> {
        self.accepted.as_ref().filter(|_| self.is_decided).map(|(_, roster)| roster)
    }

    /// Promises a new ballot of `rank`, which owns this register.
    pub(super) fn start_ballot(&mut self, rank: usize) -> Ballot {
        self.promised = Ballot { round: self.promised.round.saturating_add(1), rank };
        self.promised
    }

    /// Proposes `roster`, unless a higher ballot was promised meanwhile. At most once for each ballot.
    pub(super) fn propose(&mut self, ballot: Ballot, roster: Roster) {
        if self.promised == ballot && !self.is_decided {
            self.accepted = Some((ballot, roster));
        }
    }

    /// Marks the roster of `ballot` as decided: a quorum has accepted it.
    pub(super) fn decide(&mut self, ballot: Ballot) {
        self.is_decided |= self.has_accepted(ballot);
    }

    /// Takes over what another register has promised, accepted or decided. Returns whether this one has changed.
    pub(super) fn merge(&mut self, other: &Self) -> bool {
        if self.is_decided {
            return false;
        }
        let before = (self.promised, self.accepted.as_ref().map(|(ballot, _)| *ballot));
        self.promised = self.promised.max(other.promised);
        let is_new = |(ballot, _): &&(Ballot, Roster)| {
            other.is_decided || *ballot >= self.promised && Some(*ballot) > before.1
        };
        if let Some(accepted) = other.accepted.as_ref().filter(is_new) {
            self.accepted = Some(accepted.clone());
        }
        self.is_decided = other.is_decided;
        self.is_decided || before != (self.promised, self.accepted.as_ref().map(|(ballot, _)| *ballot))
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut text = format!("{FORMAT}\n{}\n{}\n", self.promised.round, self.promised.rank);
        if let Some((ballot, roster)) = &self.accepted {
            let staying: Vec<String> = roster.staying.iter().map(usize::to_string).collect();
            let lines = [
                ballot.round.to_string(),
                ballot.rank.to_string(),
                u8::from(self.is_decided).to_string(),
                roster.considered.to_string(),
                staying.join(","),
            ];
            text.push_str(&(lines.join("\n") + "\n"));
            roster.newcomers.iter().for_each(|newcomer| text.push_str(&newcomer.text()));
        }
        text.into_bytes()
    }

    /// Decodes the register of a rank of `size`, or of the store. `None` if it is of another version or invalid.
    pub(super) fn decode(bytes: &[u8], size: usize) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        let mut lines = text.strip_suffix('\n')?.split('\n');
        if lines.next()? != FORMAT {
            return None;
        }
        let promised = Ballot::take(&mut lines, size)?;
        let mut lines = lines.peekable();
        if lines.peek().is_none() {
            return Some(Self { promised, ..Self::default() });
        }
        let ballot = Ballot::take(&mut lines, size)?;
        let is_decided = lines.next()? == "1";
        let considered = lines.next()?.parse().ok()?;
        let staying = lines.next()?.split(',').map(|rank| rank.parse().ok());
        let staying = staying.collect::<Option<Vec<usize>>>()?;
        let is_in_order = staying.is_sorted_by(|one, next| one < next);
        if !is_in_order || staying.last().is_some_and(|last| *last >= size) {
            return None;
        }
        let mut newcomers = Vec::new();
        // No more are admitted than ranks stay.
        while lines.peek().is_some() && newcomers.len() < staying.len() {
            newcomers.push(Member::take(&mut lines)?);
        }
        if lines.peek().is_some() {
            return None;
        }
        Some(Self {
            promised,
            accepted: Some((ballot, Roster { staying, newcomers, considered })),
            is_decided,
        })
    }
}

impl Ballot {
    pub(super) fn rank(self) -> usize {
        self.rank
    }

    fn take<'text>(lines: &mut impl Iterator<Item = &'text str>, size: usize) -> Option<Self> {
        let round = lines.next()?.parse().ok()?;
        let rank = lines.next()?.parse().ok().filter(|rank| *rank < size)?;
        Some(Self { round, rank })
    }
}

/// The roster that was accepted under the highest ballot, which the leader must propose. `None` if it is free to choose.
pub(super) fn highest_accepted<'seen>(
    registers: impl IntoIterator<Item = &'seen Register>,
) -> Option<&'seen Roster> {
    let accepted = registers.into_iter().filter_map(|register| register.accepted.as_ref());
    accepted.max_by_key(|(ballot, _)| *ballot).map(|(_, roster)| roster)
}

/// Whether `ranks` of `size`, with or without the store, are a quorum.
pub(super) fn is_quorum(ranks: usize, has_store: bool, size: usize) -> bool {
    2 * ranks + usize::from(has_store) > size
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn roster(staying: Vec<usize>) -> Roster {
        Roster { staying, newcomers: Vec::new(), considered: 0 }
    }

    #[test]
    fn a_register_survives_its_encoding() {
        let mut register = Register::default();
        assert_eq!(Register::decode(&register.encode(), 3), Some(register.clone()));
        let ballot = register.start_ballot(2);
        let member = Member {
            worker: "a".to_owned(),
            address: "127.0.0.1:1".to_owned(),
            incarnation: 7,
            nonce: 8,
            host: String::new(),
        };
        register.propose(ballot, Roster { newcomers: vec![member; 2], considered: 5, ..roster(vec![0, 2]) });
        assert_eq!(Register::decode(&register.encode(), 3), Some(register.clone()));
        register.decide(ballot);
        assert_eq!(Register::decode(&register.encode(), 3), Some(register.clone()));
        assert_eq!(Register::decode(&register.encode(), 2), None, "of a rank that does not exist");
        let bytes = register.encode();
        assert_eq!(Register::decode(&bytes[..bytes.len() - 9], 3), None, "cut off");
    }

    #[test]
    fn a_decision_is_final() {
        let (mut one, mut other) = (Register::default(), Register::default());
        let ballot = one.start_ballot(0);
        one.propose(ballot, roster(vec![0]));
        one.decide(ballot);
        let higher = other.start_ballot(1);
        let higher = other.start_ballot(1).max(higher);
        other.propose(higher, roster(vec![1]));
        assert!(!one.merge(&other) && other.merge(&one), "only the one without a decision changes");
        assert_eq!((one.decided(), other.decided()), (Some(&roster(vec![0])), Some(&roster(vec![0]))));
    }

    /// One event in an agreement of several ranks.
    #[derive(Debug, Clone, Copy)]
    enum Event {
        /// A rank reads an earlier state of a rank's register, or of the store's.
        Read {
            by: usize,
            of: usize,
            age: usize,
        },
        Lead {
            rank: usize,
        },
        /// A leader checks whether it has the votes to go on.
        Count {
            rank: usize,
        },
        /// A rank merges its register into the store's and reads the result.
        Store {
            by: usize,
        },
        /// The rank checks whether its witness is in the store.
        Look {
            by: usize,
        },
        /// The store restarts without its data.
        Lose,
        Die {
            rank: usize,
        },
    }

    /// The number of ranks, whether two halves of them cannot reach each other, and the events.
    fn events() -> impl Strategy<Value = (usize, bool, Vec<Event>)> {
        let size = prop_oneof![4 => 2..4usize, 1 => 1..8usize];
        size.prop_flat_map(|size| {
            let rank = 0..size;
            let reads = (rank.clone(), rank.clone(), 0..3usize);
            let event = prop_oneof![
                200 => reads.prop_map(|(by, of, age)| Event::Read { by, of, age }),
                6 => rank.clone().prop_map(|rank| Event::Lead { rank }),
                150 => rank.clone().prop_map(|rank| Event::Count { rank }),
                20 => rank.clone().prop_map(|by| Event::Store { by }),
                40 => rank.clone().prop_map(|by| Event::Look { by }),
                2 => Just(Event::Lose),
                1 => rank.prop_map(|rank| Event::Die { rank }),
            ];
            (Just(size), prop::bool::ANY, prop::collection::vec(event, 0..400))
        })
    }

    /// Ranks that read each other's registers, and what each knows of the others.
    struct World {
        size: usize,
        is_in_halves: bool,
        /// The history of each rank's register, and of the store's at last.
        registers: Vec<Vec<Register>>,
        known: Vec<Vec<Register>>,
        /// The store's register as each rank has read it, until the rank checks its witness.
        asked: Vec<Option<Register>>,
        has_witnesses: bool,
        leads: Vec<Option<(Ballot, bool)>>,
        is_alive: Vec<bool>,
        decided: Vec<Roster>,
    }

    impl World {
        fn new(size: usize, is_in_halves: bool) -> Self {
            Self {
                size,
                is_in_halves,
                registers: vec![vec![Register::default()]; size + 1],
                known: vec![vec![Register::default(); size + 1]; size],
                asked: vec![None; size],
                has_witnesses: true,
                leads: vec![None; size],
                is_alive: vec![true; size],
                decided: Vec::new(),
            }
        }

        fn now(&self, at: usize) -> Register {
            self.registers[at].last().unwrap().clone()
        }

        fn read(&mut self, by: usize, of: usize, register: Register) {
            let mut own = self.now(by);
            own.merge(&register);
            self.registers[by].push(own);
            self.known[by][of] = register;
        }

        fn count(&mut self, rank: usize) {
            let Some((ballot, has_proposed)) = self.leads[rank] else { return };
            let mut own = self.now(rank);
            self.known[rank][rank] = own.clone();
            let has_voted = |register: &Register| match has_proposed {
                true => register.has_accepted(ballot),
                false => register.has_promised(ballot),
            };
            let ranks = self.known[rank][..self.size].iter().filter(|register| has_voted(register)).count();
            if !is_quorum(ranks, has_voted(&self.known[rank][self.size]), self.size) {
                return;
            }
            if has_proposed {
                own.decide(ballot);
                self.decided.extend(own.decided().cloned());
            } else {
                // Every new proposal differs from all before it.
                let fresh = Roster { considered: self.registers[rank].len() as u64, ..roster(vec![rank]) };
                let proposed = highest_accepted(&self.known[rank]).cloned().unwrap_or(fresh);
                own.propose(ballot, proposed);
                self.leads[rank] = Some((ballot, true));
            }
            self.registers[rank].push(own);
        }

        /// Whether rank `by` can read the register of `of`.
        fn sees(&self, by: usize, of: usize) -> bool {
            by != of && !(self.is_in_halves && (2 * by < self.size) != (2 * of < self.size))
        }

        fn happen(&mut self, event: Event) {
            match event {
                Event::Read { by, of, age } if self.is_alive[by] && self.sees(by, of) => {
                    let all = &self.registers[of];
                    let register = all[all.len().saturating_sub(1 + age)].clone();
                    self.read(by, of, register);
                }
                Event::Lead { rank } if self.is_alive[rank] && self.now(rank).decided().is_none() => {
                    let mut own = self.now(rank);
                    self.leads[rank] = Some((own.start_ballot(rank), false));
                    self.registers[rank].push(own);
                }
                Event::Count { rank } if self.is_alive[rank] => self.count(rank),
                Event::Store { by } if self.is_alive[by] => {
                    let mut store = self.now(self.size);
                    store.merge(&self.now(by));
                    self.registers[self.size].push(store.clone());
                    self.asked[by] = Some(store);
                }
                Event::Look { by } if self.is_alive[by] => {
                    let asked = self.asked[by].take();
                    if let Some(store) = asked.filter(|_| self.has_witnesses) {
                        self.read(by, self.size, store);
                    }
                }
                Event::Lose => {
                    self.registers[self.size].push(Register::default());
                    self.has_witnesses = false;
                }
                Event::Die { rank } => self.is_alive[rank] = false,
                _ => {}
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4_000))]

        /// However late, often or rarely registers are read, and whichever ranks lead or die.
        #[test]
        fn ranks_never_decide_two_things((size, is_in_halves, events) in events()) {
            let mut world = World::new(size, is_in_halves);
            events.into_iter().for_each(|event| world.happen(event));
            world.decided.dedup();
            prop_assert!(world.decided.len() <= 1, "{:?}", world.decided);
            let learned = world.registers.iter().flatten().filter_map(Register::decided);
            let mut learned: Vec<_> = learned.collect();
            learned.dedup();
            prop_assert!(learned.len() <= 1, "{learned:?}");
        }
    }
}
