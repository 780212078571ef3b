//! Who forms the next generation, as the ranks agree on it: the synod of Lamport's *The Part-Time Parliament* (1998), for one decree.
//!
//! Every rank has a [`Register`], which it alone writes and all others read. A rank that leads promises itself a [`Ballot`] of its own.
//! The others that see it promise it too, and it proposes once enough have. A proposal that enough have accepted is decided.
//! Whoever reads a register [heeds](Register::heed) what it says, also what its owner has from others: so it does not matter whom a rank
//! hears, how often, or how late.
//!
//! # Why there is one decision
//!
//! - *Enough* is more than half of the old generation's ranks, or half of them and the store, whose vote is one more register. Two such
//!   sets have a rank or the store in common: two sets of more than half of the ranks have a rank in common, and so have one of more
//!   than half and one of half; two of half both have the store. So those who reach the store and those who do not cannot decide
//!   differently, and no record in the store decides anything by itself.
//! - A register accepts nothing below the ballot that it has promised. A leader proposes what was accepted under the highest ballot that
//!   it sees in the registers which have promised its own. With the rule above, a later leader finds what was decided, and
//!   proposes the same.
//! - A ballot contains its leader's rank, and a rank never stands twice with one number, so a ballot has one proposal.
//! - A register lives as long as the group, or the next generation. A rank that has lost it, because its process ended or it dropped
//!   both, says nothing more under this incarnation of its worker, and others take no other incarnation's word.
//! - The store's register lives as long as the store's data. A store that was started again without them would vote twice. So each rank
//!   has a [witness](super::joining::Witness) in it: its own record, which it wrote under a key of its own before it was in the group,
//!   with a number that it drew for that, only where nothing was, and never again. A rank counts the store's vote only if it finds its
//!   witness there *after* the vote was written. Then the store has lost nothing since the witness was written, so its register is the one
//!   that it has had since then, and holds the vote. All votes that count, of whichever rank, were asked for after all ranks had come,
//!   and therefore after all witnesses were written: so between any two of them the store has lost nothing. What it loses
//!   between the vote and the look at the witness takes the witness with it, and the vote does not count. A store that comes back with
//!   an older state of its data, which has the witness and not the vote, is one that no rank can tell from one that lost nothing.

use super::member::Member;

/// The first line of a register. It changes with the format.
const FORMAT: &str = "tensorwire agreement 1";

/// The number of an attempt to lead. The default is lower than all others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ballot {
    round: u64,
    /// Who leads.
    rank: usize,
}

/// A generation that is proposed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Roster {
    /// The old generation's ranks that stay, in their order.
    pub(super) staying: Vec<usize>,
    /// Those that come behind them.
    pub(super) newcomers: Vec<Member>,
    /// How many of those that have waited in the store were considered, from the beginning of the run.
    pub(super) considered: u64,
}

/// What a rank, or the store, has said in the agreement.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Register {
    promised: Ballot,
    accepted: Option<(Ballot, Roster)>,
    /// Whether what is accepted is decided.
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

    /// Promises a ballot of `rank`, which this register's rank never had.
    pub(super) fn stand(&mut self, rank: usize) -> Ballot {
        self.promised = Ballot { round: self.promised.round.saturating_add(1), rank };
        self.promised
    }

    /// Proposes `roster`, unless a higher ballot was promised meanwhile. Once for each ballot.
    pub(super) fn propose(&mut self, ballot: Ballot, roster: Roster) {
        if self.promised == ballot && !self.is_decided {
            self.accepted = Some((ballot, roster));
        }
    }

    /// Enough have accepted what was proposed with this ballot.
    pub(super) fn decide(&mut self, ballot: Ballot) {
        self.is_decided |= self.has_accepted(ballot);
    }

    /// Follows what another register says. Returns whether this one has changed.
    pub(super) fn heed(&mut self, other: &Self) -> bool {
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

    /// The register that a rank of `size`, or the store, has written. `None` if it is none of this version.
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
        while lines.peek().is_some() {
            newcomers.push(Member::take(&mut lines)?);
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

/// What a leader must propose that has seen these registers: what was accepted under the highest ballot. `None` if it is free.
pub(super) fn bound<'seen>(registers: impl IntoIterator<Item = &'seen Register>) -> Option<&'seen Roster> {
    let accepted = registers.into_iter().filter_map(|register| register.accepted.as_ref());
    accepted.max_by_key(|(ballot, _)| *ballot).map(|(_, roster)| roster)
}

/// Whether a proposal is decided that `ranks` of `size` have accepted, and the store or not.
pub(super) fn are_enough(ranks: usize, has_store: bool, size: usize) -> bool {
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
        let ballot = register.stand(2);
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
        let ballot = one.stand(0);
        one.propose(ballot, roster(vec![0]));
        one.decide(ballot);
        let higher = other.stand(1);
        let higher = other.stand(1).max(higher);
        other.propose(higher, roster(vec![1]));
        assert!(!one.heed(&other) && other.heed(&one), "only the one without a decision learns");
        assert_eq!((one.decided(), other.decided()), (Some(&roster(vec![0])), Some(&roster(vec![0]))));
    }

    /// One thing that happens in an agreement of several ranks.
    #[derive(Debug, Clone, Copy)]
    enum Event {
        /// A rank reads what a register, or the store's, was at some earlier time.
        Read {
            by: usize,
            of: usize,
            age: usize,
        },
        Stand {
            rank: usize,
        },
        /// A rank that leads looks whether it has enough votes to go on.
        Count {
            rank: usize,
        },
        /// A rank writes its register into the store, and reads what is there then.
        Store {
            by: usize,
        },
        /// The rank looks whether its witness is in the store.
        Look {
            by: usize,
        },
        /// The store is started again without its data.
        Lose,
        Die {
            rank: usize,
        },
    }

    /// How many ranks, whether two halves of them do not see each other, and what happens.
    fn events() -> impl Strategy<Value = (usize, bool, Vec<Event>)> {
        let size = prop_oneof![4 => 2..4usize, 1 => 1..8usize];
        size.prop_flat_map(|size| {
            let rank = 0..size;
            let reads = (rank.clone(), rank.clone(), 0..3usize);
            let event = prop_oneof![
                200 => reads.prop_map(|(by, of, age)| Event::Read { by, of, age }),
                6 => rank.clone().prop_map(|rank| Event::Stand { rank }),
                150 => rank.clone().prop_map(|rank| Event::Count { rank }),
                20 => rank.clone().prop_map(|by| Event::Store { by }),
                40 => rank.clone().prop_map(|by| Event::Look { by }),
                2 => Just(Event::Lose),
                1 => rank.prop_map(|rank| Event::Die { rank }),
            ];
            (Just(size), prop::bool::ANY, prop::collection::vec(event, 0..400))
        })
    }

    /// Ranks that see each other's registers, and what each knows of the others.
    struct World {
        size: usize,
        is_in_halves: bool,
        /// Of each rank, and of the store at last: all that its register ever was.
        registers: Vec<Vec<Register>>,
        known: Vec<Vec<Register>>,
        /// What the store's register was when each rank has asked it, and has not looked at its witness yet.
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

        fn hear(&mut self, by: usize, of: usize, register: Register) {
            let mut own = self.now(by);
            own.heed(&register);
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
            if !are_enough(ranks, has_voted(&self.known[rank][self.size]), self.size) {
                return;
            }
            if has_proposed {
                own.decide(ballot);
                self.decided.extend(own.decided().cloned());
            } else {
                // Whatever is proposed anew is like nothing before.
                let fresh = Roster { considered: self.registers[rank].len() as u64, ..roster(vec![rank]) };
                let proposed = bound(&self.known[rank]).cloned().unwrap_or(fresh);
                own.propose(ballot, proposed);
                self.leads[rank] = Some((ballot, true));
            }
            self.registers[rank].push(own);
        }

        /// Whether one rank sees the other.
        fn sees(&self, by: usize, of: usize) -> bool {
            by != of && !(self.is_in_halves && (2 * by < self.size) != (2 * of < self.size))
        }

        fn happen(&mut self, event: Event) {
            match event {
                Event::Read { by, of, age } if self.is_alive[by] && self.sees(by, of) => {
                    let all = &self.registers[of];
                    let register = all[all.len().saturating_sub(1 + age)].clone();
                    self.hear(by, of, register);
                }
                Event::Stand { rank } if self.is_alive[rank] && self.now(rank).decided().is_none() => {
                    let mut own = self.now(rank);
                    self.leads[rank] = Some((own.stand(rank), false));
                    self.registers[rank].push(own);
                }
                Event::Count { rank } if self.is_alive[rank] => self.count(rank),
                Event::Store { by } if self.is_alive[by] => {
                    let mut store = self.now(self.size);
                    store.heed(&self.now(by));
                    self.registers[self.size].push(store.clone());
                    self.asked[by] = Some(store);
                }
                Event::Look { by } if self.is_alive[by] => {
                    let asked = self.asked[by].take();
                    if let Some(store) = asked.filter(|_| self.has_witnesses) {
                        self.hear(by, self.size, store);
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

        /// Whatever is read late, twice or never, and whoever leads or dies at whatever time.
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
