//! Every interleaving of two saturated sides, at small depths and with a tiny ring: no receive is ever missing, no side is ever
//! stuck, and no exchange repeats for ever without a message or content getting through.
//!
//! The states are those of [`Flow`], the same that a connection runs, and of the two wires between them, with all
//! counts taken relative to each other, so that there are finitely many. A post may stay on the wire for any time. It is checked
//! against the receives of its target as though everything landed at once.
//!
//! Each flaw that is planted below must be found, which shows that the model can fail.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{HashMap, VecDeque};

use tensorwire_protocol::{
    Agreed, Parameters, PeerMisbehaved, RingSpan,
    credit::{Answer, Ask, Blocked, Counts, Flow, Open, RingConsumer, RingPlace},
};

/// Bytes of a message, and of one with nothing but counts.
const MESSAGE: u32 = 2;
const COUNT_ONLY: u32 = 1;
/// Bytes of the ring: it holds one or two messages, or more than there are credits.
const TINY: u32 = 2;
const SMALL: u32 = 4;
const LARGE: u32 = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// The receive of ASK is not posted.
    AskWithoutReceive,
    /// The receive that an ANSWER took is not posted again.
    AnswerKeepsReceive,
    /// Counts that arrive alone cause a return.
    CountsCauseReturns,
    /// An ASK is not answered.
    AskIgnored,
    /// Contents are not counted among what was taken in.
    ContentNotReturned,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Item {
    Message(Counts),
    CountOnly(Counts),
    Content,
    Ask(Ask),
    Answer(Answer),
}

#[derive(Debug, Clone)]
struct End {
    flow: Flow,
    /// Posted by this side, not consumed by the other.
    wire: VecDeque<Item>,
    /// Receives that this side has posted.
    receives: usize,
    /// Where in the peer's ring the next message begins.
    written: u32,
    /// The reading side of the own ring.
    consumer: RingConsumer,
    /// Bytes of the peer's ring, which is as large as the own one.
    ring_bytes: u32,
}

#[derive(Debug, Clone)]
struct World {
    ends: [End; 2],
}

/// What went wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Finding {
    ReceiveMissing,
    /// A correct peer was accused.
    Accused(PeerMisbehaved),
    /// A message is not written, or not read, directly behind the one before it.
    Misplaced,
    /// From some state, one side can never post again.
    Stuck,
    /// Arrivals and flow control can repeat for ever without anything getting through.
    Idling,
}

/// A state, with all counts taken relative to each other.
type Key = Box<[u8]>;

impl World {
    fn new(depth: u32, ring: u32, flaw: Flaw) -> Self {
        let parameters = Parameters { depth, ..Parameters::default() };
        let flow = Flow::new(&Agreed::of(&parameters, &parameters), ring, ring, ring);
        let receives = depth as usize - usize::from(flaw == Flaw::AskWithoutReceive);
        let end = || End {
            flow: flow.clone(),
            wire: VecDeque::new(),
            receives,
            written: 0,
            consumer: RingConsumer::new(ring),
            ring_bytes: ring,
        };
        Self { ends: [end(), end()] }
    }

    fn key(&self) -> Key {
        let mut key = Vec::with_capacity(64);
        // Everything is small: depths, ring bytes, and differences of counts.
        let mut put = |number: u32| key.push(u8::try_from(number).unwrap());
        for end in &self.ends {
            let Open { immediates, ring_bytes, unreturned, unreturned_bytes, asked } = end.flow.open();
            [immediates, ring_bytes, unreturned, unreturned_bytes].into_iter().for_each(&mut put);
            let (asked, asked_bytes) = asked.map_or((0, 0), |(asked, bytes)| (asked + 1, bytes));
            [asked, asked_bytes, end.receives as u32, end.wire.len() as u32].into_iter().for_each(&mut put);
            let now = end.flow.counts();
            for item in &end.wire {
                let (kind, counts, wanted) = match *item {
                    Item::Message(counts) => (0, counts, 0),
                    Item::CountOnly(counts) => (1, counts, 0),
                    Item::Content => (2, now, 0),
                    Item::Ask(ask) => (3, ask.counts, ask.wanted),
                    Item::Answer(answer) => (4, answer.counts, 0),
                };
                // How far the counts on this wire are behind what this side has consumed since.
                let receives = now.receives.wrapping_sub(counts.receives);
                let ring_bytes = now.ring_bytes.wrapping_sub(counts.ring_bytes);
                [kind, receives, ring_bytes, wanted].into_iter().for_each(&mut put);
            }
        }
        key.into()
    }

    /// Puts `item` on the wire of `who`. Its target must have posted a receive.
    fn post(&mut self, who: usize, item: Item) -> Result<(), Finding> {
        self.ends[who].wire.push_back(item);
        if self.ends[who].wire.len() > self.ends[1 - who].receives {
            Err(Finding::ReceiveMissing)
        } else {
            Ok(())
        }
    }

    /// `who` posts a message into the peer's ring, if it may.
    fn post_message(&mut self, who: usize, length: u32) -> Result<Result<(), Blocked>, Finding> {
        let end = &mut self.ends[who];
        let place = match end.flow.post_message(length) {
            Ok(place) => place,
            Err(blocked) => return Ok(Err(blocked)),
        };
        let expected = place_at(end.written, length, end.ring_bytes);
        end.written = (end.written + length) % end.ring_bytes;
        if place == expected { Ok(Ok(())) } else { Err(Finding::Misplaced) }
    }

    /// `who` reads a message of `length` bytes out of its ring; the peer has written what is behind it on the wire too.
    fn read(&mut self, who: usize, length: u32) -> Result<(), Finding> {
        let [reader, writer] = if who == 0 { [0, 1] } else { [1, 0] };
        let behind: u32 = self.ends[writer].wire.iter().map(Item::ring_bytes).sum();
        let ring = self.ends[writer].ring_bytes;
        let begin = (self.ends[writer].written + 2 * ring - (behind + length) % ring) % ring;
        let place = self.ends[reader].consumer.place(length);
        self.ends[reader].consumer.advance(length);
        if place == Some(place_at(begin, length, ring)) { Ok(()) } else { Err(Finding::Misplaced) }
    }

    /// `who` tries to post; true if something got onto the wire that users wait for.
    fn produce(&mut self, who: usize, is_content: bool) -> Result<bool, Finding> {
        let flow = &mut self.ends[who].flow;
        let counts = flow.counts();
        let produced = if is_content {
            flow.post_content().map(|()| Item::Content)
        } else {
            self.post_message(who, MESSAGE)?.map(|()| Item::Message(counts))
        };
        match produced {
            Ok(item) => self.post(who, item).map(|()| true),
            Err(blocked) => {
                let ask = self.ends[who].flow.ask(blocked);
                ask.map_or(Ok(()), |ask| self.post(who, Item::Ask(ask))).map(|()| false)
            }
        }
    }

    /// The other side consumes the oldest of `who`'s posts.
    fn take(&mut self, who: usize, flaw: Flaw) -> Result<(), Finding> {
        let item = self.ends[who].wire.pop_front().expect("something on the wire");
        let taker = 1 - who;
        if item.ring_bytes() > 0 {
            self.read(taker, item.ring_bytes())?;
        }
        let flow = &mut self.ends[taker].flow;
        let taken = match item {
            Item::Message(counts) => flow.take_message(MESSAGE, counts),
            Item::CountOnly(counts) => flow.take_message(COUNT_ONLY, counts),
            Item::Content if flaw == Flaw::ContentNotReturned => Ok(()),
            Item::Content => flow.take_content(),
            Item::Answer(answer) => flow.take_answer(answer),
            Item::Ask(ask) => {
                let answer = flow.take_ask(ask).map_err(Finding::Accused)?;
                if flaw == Flaw::AskIgnored {
                    return Ok(());
                }
                return self.post(taker, Item::Answer(answer));
            }
        };
        taken.map_err(Finding::Accused)?;
        match item {
            Item::Answer(_) => {
                self.ends[taker].receives -= usize::from(flaw == Flaw::AnswerKeepsReceive);
                Ok(())
            }
            Item::CountOnly(_) if flaw != Flaw::CountsCauseReturns => Ok(()),
            _ => self.return_if_due(taker),
        }
    }

    fn return_if_due(&mut self, who: usize) -> Result<(), Finding> {
        let flow = &mut self.ends[who].flow;
        let counts = flow.counts();
        if flow.is_return_due() && self.post_message(who, COUNT_ONLY)?.is_ok() {
            return self.post(who, Item::CountOnly(counts));
        }
        Ok(())
    }
}

impl Item {
    fn ring_bytes(&self) -> u32 {
        match self {
            Self::Message(_) => MESSAGE,
            Self::CountOnly(_) => COUNT_ONLY,
            Self::Content | Self::Ask(_) | Self::Answer(_) => 0,
        }
    }
}

/// Where a message of `length` bytes that begins at `begin` lies in a ring.
fn place_at(begin: u32, length: u32, ring: u32) -> RingPlace {
    let first = length.min(ring - begin);
    RingPlace {
        first: RingSpan { offset: begin, length: first },
        second: RingSpan { offset: 0, length: length - first },
    }
}

/// The effect of an edge: the side whose message or content gets through, if there is one.
type Through = Option<usize>;

/// All states that are reachable, and what leads where.
struct Graph {
    edges: Vec<Vec<(u32, Through)>>,
}

/// What each side wants to send, without limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Wants {
    messages: bool,
    contents: bool,
}

const MESSAGES: Wants = Wants { messages: true, contents: false };
const CONTENTS: Wants = Wants { messages: false, contents: true };
const EVERYTHING: Wants = Wants { messages: true, contents: true };
const NOTHING: Wants = Wants { messages: false, contents: false };

/// What is explored.
#[derive(Debug, Clone, Copy)]
struct Setup {
    depth: u32,
    ring: u32,
    wants: [Wants; 2],
}

impl Setup {
    fn senders(self) -> impl Iterator<Item = usize> {
        [0, 1].into_iter().filter(move |&who| self.wants[who] != NOTHING)
    }
}

fn explore(setup: Setup, flaw: Flaw) -> Result<Graph, Finding> {
    let start = World::new(setup.depth, setup.ring, flaw);
    let mut numbers = HashMap::from([(start.key(), 0u32)]);
    let mut queue = VecDeque::from([start]);
    let mut edges = Vec::new();
    while let Some(world) = queue.pop_front() {
        let mut out = Vec::new();
        for (next, through) in successors(&world, setup, flaw)? {
            let count = numbers.len() as u32;
            let key = next.key();
            let number = *numbers.entry(key).or_insert_with(|| {
                queue.push_back(next);
                count
            });
            out.push((number, through));
        }
        edges.push(out);
    }
    Ok(Graph { edges })
}

fn successors(world: &World, setup: Setup, flaw: Flaw) -> Result<Vec<(World, Through)>, Finding> {
    let mut all = Vec::new();
    for who in [0, 1] {
        if !world.ends[who].wire.is_empty() {
            let mut next = world.clone();
            next.take(who, flaw)?;
            all.push((next, None));
        }
    }
    for who in setup.senders() {
        let Wants { messages, contents } = setup.wants[who];
        for is_content in
            [false, true].into_iter().filter(|&is_content| [messages, contents][usize::from(is_content)])
        {
            let mut next = world.clone();
            let is_through = next.produce(who, is_content)?;
            // A side that is blocked and has sent ASK does nothing until something arrives.
            if is_through || next.ends[who].wire.len() > world.ends[who].wire.len() {
                all.push((next, is_through.then_some(who)));
            }
        }
    }
    Ok(all)
}

impl Graph {
    fn check(&self, setup: Setup) -> Result<(), Finding> {
        for who in setup.senders() {
            if !self.can_always_send(who) {
                return Err(Finding::Stuck);
            }
        }
        if self.goes_round_without_progress() { Err(Finding::Idling) } else { Ok(()) }
    }

    /// Whether every state has a path on which a message or content of `who` gets through.
    fn can_always_send(&self, who: usize) -> bool {
        let mut before = vec![Vec::new(); self.edges.len()];
        let mut good = vec![false; self.edges.len()];
        let mut queue = VecDeque::new();
        for (state, out) in self.edges.iter().enumerate() {
            for &(next, through) in out {
                before[next as usize].push(state as u32);
                if through == Some(who) && !good[state] {
                    good[state] = true;
                    queue.push_back(state);
                }
            }
        }
        while let Some(state) = queue.pop_front() {
            for &earlier in &before[state] {
                if !good[earlier as usize] {
                    good[earlier as usize] = true;
                    queue.push_back(earlier as usize);
                }
            }
        }
        good.into_iter().all(|good| good)
    }

    /// Whether the edges on which nothing gets through have a cycle.
    fn goes_round_without_progress(&self) -> bool {
        let quiet = |state: usize| self.edges[state].iter().filter(|(_, through)| through.is_none());
        let mut into = vec![0u32; self.edges.len()];
        for state in 0..self.edges.len() {
            quiet(state).for_each(|&(next, _)| into[next as usize] += 1);
        }
        let mut free: Vec<usize> = (0..into.len()).filter(|&state| into[state] == 0).collect();
        let mut sorted = 0;
        while let Some(state) = free.pop() {
            sorted += 1;
            for &(next, _) in quiet(state) {
                into[next as usize] -= 1;
                if into[next as usize] == 0 {
                    free.push(next as usize);
                }
            }
        }
        sorted < self.edges.len()
    }
}

fn find(depth: u32, ring: u32, wants: [Wants; 2], flaw: Flaw) -> Option<Finding> {
    let setup = Setup { depth, ring, wants };
    let explored = explore(setup, flaw).and_then(|graph| {
        eprintln!("{setup:?}: {} states", graph.edges.len());
        graph.check(setup)
    });
    explored.err()
}

fn nothing_is_found(depth: u32, wants: [Wants; 2]) {
    for ring in [TINY, SMALL, LARGE] {
        assert_eq!(find(depth, ring, wants, Flaw::None), None, "depth {depth}, ring of {ring} bytes");
    }
}

#[test]
fn both_ends_saturated_with_messages_at_depth_4() {
    nothing_is_found(4, [MESSAGES; 2]);
}

#[test]
fn both_ends_saturated_with_messages_at_depth_5() {
    nothing_is_found(5, [MESSAGES; 2]);
}

#[test]
fn both_ends_saturated_with_messages_at_depth_6() {
    nothing_is_found(6, [MESSAGES; 2]);
}

#[test]
fn one_end_saturated_with_everything_at_depth_4_to_6() {
    (4..=6).for_each(|depth| nothing_is_found(depth, [EVERYTHING, NOTHING]));
}

#[test]
fn both_ends_saturated_with_everything_at_depth_4() {
    nothing_is_found(4, [EVERYTHING; 2]);
}

#[test]
fn requests_against_contents_at_depth_5() {
    nothing_is_found(5, [MESSAGES, CONTENTS]);
}

#[test]
fn requests_against_contents_at_depth_6() {
    nothing_is_found(6, [MESSAGES, CONTENTS]);
}

#[test]
fn an_ask_without_a_receive_of_its_own_is_found() {
    let found = find(4, SMALL, [MESSAGES; 2], Flaw::AskWithoutReceive);
    assert_eq!(found, Some(Finding::ReceiveMissing));
}

#[test]
fn an_answer_that_keeps_its_receive_is_found() {
    let found = find(4, SMALL, [MESSAGES; 2], Flaw::AnswerKeepsReceive);
    assert_eq!(found, Some(Finding::ReceiveMissing));
}

#[test]
fn counts_that_cause_returns_are_found() {
    // Two idle sides send each other counts for ever, and the ring never has room for a message again.
    let wants = [MESSAGES, NOTHING];
    assert_eq!(find(4, TINY, wants, Flaw::None), None);
    let found = find(4, TINY, wants, Flaw::CountsCauseReturns);
    assert!(matches!(found, Some(Finding::Idling | Finding::Stuck)), "{found:?}");
}

#[test]
fn an_ask_that_is_not_answered_is_found() {
    let found = find(4, SMALL, [MESSAGES; 2], Flaw::AskIgnored);
    assert_eq!(found, Some(Finding::Stuck));
}

#[test]
fn contents_that_are_not_returned_are_found() {
    let found = find(4, SMALL, [EVERYTHING, NOTHING], Flaw::ContentNotReturned);
    assert_eq!(found, Some(Finding::Accused(PeerMisbehaved::AnswerShort)));
}
