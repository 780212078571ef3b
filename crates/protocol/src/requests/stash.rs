//! Contents whose receive was given up, and the receives that wait for each key.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    hash::{BuildHasher, Hash, Hasher},
    iter, mem,
    sync::Arc,
    task::Waker,
};

use crate::{EagerContent, LentEnd, Metadata, StepId, key::KeyHash};

/// One key of one step, whose values are in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StepKey {
    /// The hash of the other fields. It is computed once, because a key is long and looked up several times.
    hash: u64,
    pub(crate) step: StepId,
    pub(crate) key: Arc<str>,
}

impl StepKey {
    pub(crate) fn new(step: StepId, key: Arc<str>) -> Self {
        Self { hash: KeyHash::default().hash_one((step, &*key)), step, key }
    }
}

impl Hash for StepKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

/// A value that has arrived.
#[derive(Debug)]
pub(crate) struct Landed<L> {
    /// Grows with every arrival of the connection.
    pub(crate) number: u64,
    pub(crate) metadata: Metadata,
    pub(crate) content: Content<L>,
    pub(crate) check: Check,
}

/// How a content is to be validated before it is handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Check {
    /// It has no checksum, or matched it.
    None,
    /// By the checksum that came in a message.
    InMessage(u64),
    /// By the checksum in its result slot.
    Slot,
}

/// Where the bytes of a value are.
#[derive(Debug)]
pub(crate) enum Content<L> {
    /// There are none.
    None,
    /// In the memory that was granted.
    Lent(L),
    /// They came inside META_DATA_RESPONSE.
    Eager(EagerContent),
}

impl<L> Content<L> {
    pub(crate) fn lent(self) -> Option<L> {
        match self {
            Self::Lent(lent) => Some(lent),
            Self::None | Self::Eager(_) => None,
        }
    }
}

impl<L> From<Option<L>> for Content<L> {
    fn from(lent: Option<L>) -> Self {
        lent.map_or(Self::None, Self::Lent)
    }
}

impl<L> Landed<L> {
    /// The memory of a value that no receive wants.
    pub(crate) fn returned(self) -> Option<(L, LentEnd)> {
        self.content.lent().map(|lent| (lent, LentEnd::Content))
    }
}

/// A receive that has not sent its request.
#[derive(Debug)]
struct InLine {
    ticket: u64,
    waker: Option<Waker>,
}

/// The receives of one key that have not sent their requests, oldest first. Most keys have one, which needs no allocation.
#[derive(Debug)]
struct Line {
    first: InLine,
    others: VecDeque<InLine>,
}

impl Line {
    fn get_mut(&mut self, ticket: u64) -> Option<&mut InLine> {
        if self.first.ticket == ticket {
            return Some(&mut self.first);
        }
        let at = self.others.binary_search_by_key(&ticket, |other| other.ticket).ok()?;
        self.others.get_mut(at)
    }
}

/// See the module's documentation. Empty as long as no receive is given up while its content is on its way.
#[derive(Debug)]
pub(crate) struct Stash<L> {
    contents: VecDeque<(StepKey, Landed<L>)>,
    lines: HashMap<StepKey, Line, KeyHash>,
    next_ticket: u64,
}

impl<L> Stash<L> {
    pub(crate) fn new() -> Self {
        Self { contents: VecDeque::new(), lines: HashMap::default(), next_ticket: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.contents.len()
    }

    /// Whether there is no content, and no receive waits.
    pub(crate) fn is_unused(&self) -> bool {
        self.contents.is_empty() && self.lines.is_empty()
    }

    /// Reserves room for `more` contents.
    pub(crate) fn reserve(&mut self, more: usize) {
        self.contents.reserve(more);
    }

    /// Stores a content in the order of arrival. Allocates nothing if room was [reserved](Self::reserve).
    pub(crate) fn put(&mut self, step_key: StepKey, landed: Landed<L>) {
        let at = self.contents.partition_point(|(_, other)| other.number < landed.number);
        self.contents.insert(at, (step_key, landed));
    }

    /// The oldest content of `step_key`.
    pub(crate) fn take(&mut self, step_key: &StepKey) -> Option<Landed<L>> {
        let is_same = |other: &StepKey| {
            other == step_key
                || tensorwire_testpoints::planted!("stashed content is found by its key alone")
                    && other.key == step_key.key
        };
        let at = self.contents.iter().position(|(other, _)| is_same(other))?;
        self.contents.remove(at).map(|(_, landed)| landed)
    }

    /// Takes any content of `step`; `None` when there are none.
    pub(crate) fn take_of_step(&mut self, step: StepId) -> Option<Landed<L>> {
        let at = self.contents.iter().position(|(step_key, _)| step_key.step == step)?;
        self.contents.remove(at).map(|(_, landed)| landed)
    }

    pub(crate) fn take_any(&mut self) -> Option<Landed<L>> {
        self.contents.pop_front().map(|(_, landed)| landed)
    }

    pub(crate) fn steps(&self) -> impl Iterator<Item = StepId> {
        self.contents.iter().map(|(step_key, _)| step_key.step)
    }

    /// Joins the line for `step_key`, at the back unless the receive has a ticket, and stores the waker. Returns the waker that is
    /// replaced.
    pub(crate) fn wait(
        &mut self,
        step_key: &StepKey,
        ticket: &mut Option<u64>,
        waker: &Waker,
    ) -> Option<Waker> {
        if let Some(ticket) = *ticket {
            return self.lines.get_mut(step_key)?.get_mut(ticket)?.waker.replace(waker.clone());
        }
        self.next_ticket += 1;
        *ticket = Some(self.next_ticket);
        let newcomer = InLine { ticket: self.next_ticket, waker: Some(waker.clone()) };
        match self.lines.entry(step_key.clone()) {
            Entry::Occupied(line) => line.into_mut().others.push_back(newcomer),
            Entry::Vacant(line) => drop(line.insert(Line { first: newcomer, others: VecDeque::new() })),
        }
        None
    }

    pub(crate) fn is_first(&self, step_key: &StepKey, ticket: Option<u64>) -> bool {
        self.lines.get(step_key).is_none_or(|line| Some(line.first.ticket) == ticket)
    }

    /// Leaves the line. Returns the waker of this receive and that of the next one.
    pub(crate) fn leave(&mut self, step_key: &StepKey, ticket: &mut Option<u64>) -> [Option<Waker>; 2] {
        let Some(ticket) = ticket.take() else { return [None, None] };
        let Entry::Occupied(mut found) = self.lines.entry(step_key.clone()) else { return [None, None] };
        let line = found.get_mut();
        let left = if line.first.ticket != ticket {
            let at = line.others.binary_search_by_key(&ticket, |other| other.ticket);
            at.ok().and_then(|at| line.others.remove(at))
        } else if let Some(next) = line.others.pop_front() {
            Some(mem::replace(&mut line.first, next))
        } else {
            return [found.remove().first.waker, None];
        };
        [left.and_then(|left| left.waker), line.first.waker.take()]
    }

    /// The waker of the receive that a content or a cancel's answer for `step_key` concerns.
    pub(crate) fn first_in_line(&mut self, step_key: &StepKey) -> Option<Waker> {
        self.lines.get_mut(step_key)?.first.waker.take()
    }

    /// The receives, in the order in which they joined.
    pub(crate) fn wakers(&mut self) -> impl Iterator<Item = Waker> {
        let lines = self.lines.values_mut();
        let all = lines.flat_map(|line| iter::once(&mut line.first).chain(&mut line.others));
        let mut all: Vec<_> = all.filter_map(|one| Some((one.ticket, one.waker.take()?))).collect();
        all.sort_unstable_by_key(|(ticket, _)| *ticket);
        all.into_iter().map(|(_, waker)| waker)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step_key(step: i64, key: &str) -> StepKey {
        StepKey::new(StepId(step), key.into())
    }

    fn landed(number: u64) -> Landed<u64> {
        let metadata = crate::Metadata::dead(crate::DataType::U8, crate::Shape::default());
        Landed { number, metadata, content: Content::Lent(number), check: Check::None }
    }

    #[test]
    fn contents_of_a_key_come_out_in_the_order_of_arrival() {
        let mut stash = Stash::new();
        for number in [3, 1, 2] {
            stash.put(step_key(1, "a"), landed(number));
            stash.put(step_key(2, "a"), landed(10 + number));
        }
        for number in 1..=3 {
            assert_eq!(stash.take(&step_key(1, "a")).unwrap().number, number);
        }
        assert!(stash.take(&step_key(1, "a")).is_none());
        assert!(stash.take(&step_key(2, "b")).is_none());
        assert_eq!(stash.take_of_step(StepId(2)).unwrap().number, 11);
        assert_eq!(stash.len(), 2);
    }

    #[test]
    fn a_line_is_first_come_first_served() {
        let mut stash: Stash<u64> = Stash::new();
        let step_key = step_key(1, "a");
        let (mut one, mut two) = (None, None);
        for ticket in [&mut one, &mut two] {
            assert!(stash.wait(&step_key, ticket, Waker::noop()).is_none());
        }
        assert!(stash.wait(&step_key, &mut one, Waker::noop()).is_some(), "it has its position already");
        assert!(
            stash.is_first(&step_key, one)
                && !stash.is_first(&step_key, two)
                && !stash.is_first(&step_key, None)
        );
        let [own, next] = stash.leave(&step_key, &mut one);
        assert!(own.is_some() && next.is_some() && one.is_none());
        assert!(stash.is_first(&step_key, two));
        stash.leave(&step_key, &mut two);
        assert!(stash.is_first(&step_key, None));
    }
}
