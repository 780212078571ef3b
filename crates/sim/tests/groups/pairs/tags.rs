//! Tagged messages: each rank sends some to each rank under each tag, and receives those of one, several or any.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use tensorwire_collective::{
    GroupError,
    pair::{Sent, Source},
};
use tensorwire_rendezvous::Tensor;
use tensorwire_sim::Rng;

use super::life::Life;
use crate::join_all::join_all;

pub(super) const TAGS: [u64; 3] = [0, 1, u64::MAX];

/// Messages of each rank to each under each tag.
const MESSAGES: u32 = 5;

/// How the messages of a tag are received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// From each rank separately.
    One,
    /// From all ranks, one after the other.
    Several,
    /// This many receives at the same time.
    Racing(usize),
}

/// The messages that one rank has received from some ranks.
struct Inbox {
    /// The number of the next message of each rank.
    next: BTreeMap<usize, u32>,
    /// Ranks that send nothing more.
    lost: BTreeSet<usize>,
    /// Receives in progress.
    waiting: usize,
}

impl Inbox {
    fn of(ranks: Range<usize>) -> Self {
        Self { next: ranks.map(|rank| (rank, 0)).collect(), lost: BTreeSet::new(), waiting: 0 }
    }

    /// The ranks that may still send messages.
    fn sources(&self) -> Vec<usize> {
        self.next.keys().copied().filter(|rank| !self.lost.contains(rank)).collect()
    }

    /// The number of outstanding messages.
    fn left(&self) -> usize {
        self.sources().iter().map(|rank| (MESSAGES - self.next[rank]) as usize).sum()
    }
}

impl Life {
    fn way(&self, to: usize, tag: u64) -> Way {
        let mut rng = self.drawn([1, to, tag as usize]);
        match rng.below(3) {
            0 => Way::One,
            1 => Way::Several,
            _ => Way::Racing(2 + rng.below(2)),
        }
    }

    /// Elements of a message. The number of an empty message follows from those before it.
    fn length(&self, from: usize, to: usize, tag: u64, number: u32) -> usize {
        let mut rng = self.drawn([2, from, to, tag as usize, number as usize]);
        let may_be_empty = !matches!(self.way(to, tag), Way::Racing(_));
        if may_be_empty && number % 4 == 2 { 0 } else { rng.pick([1, 7, 300, 3000]) }
    }

    fn values(&self, from: usize, to: usize, tag: u64, number: u32) -> Vec<i32> {
        let first =
            (from * 1_000 + to * 10_000) as i32 + (tag as i32).wrapping_mul(1_000_000) + number as i32;
        let length = self.length(from, to, tag, number) as i32;
        (0..length).map(|at| first.wrapping_add(at.wrapping_mul(31))).collect()
    }

    pub(super) async fn send_tagged(&self, to: usize) {
        join_all(TAGS.map(|tag| self.send_under(to, tag))).await;
    }

    async fn send_under(&self, to: usize, tag: u64) {
        let mut rng = self.private([3, to, tag as usize]);
        let mut kept = Vec::new();
        for number in 0..MESSAGES {
            self.pause(&mut rng).await;
            let tensor = self.tensor(&self.values(self.own(), to, tag, number));
            match self.group.send(to, tag, tensor) {
                Err(error) => self.explain("send", &[to], &error),
                Ok(sent) => match rng.below(4) {
                    0 => drop(sent),
                    1 => self.received(&mut rng, (to, tag, number), sent).await,
                    _ => kept.push((number, sent)),
                },
            }
        }
        for (number, sent) in kept {
            self.received(&mut rng, (to, tag, number), sent).await;
        }
    }

    /// Waits until a message was received.
    async fn received(&self, rng: &mut Rng, (to, tag, number): (usize, u64, u32), mut sent: Sent) {
        loop {
            match self.wait(rng, "sent", &[to], sent.wait()).await {
                None => {}
                Some(Err(_)) => return,
                Some(Ok(())) => break,
            }
        }
        let mut books = self.books();
        books.reached.acknowledged += 1;
        let lane = (self.own(), to, tag);
        let acknowledged = books.acknowledged.entry(lane).or_default();
        *acknowledged += 1;
        let (acknowledged, handed) = (*acknowledged, books.handed.entry(lane).or_default());
        // Where receives race, receipts are counted.
        let is_racing = matches!(self.way(to, tag), Way::Racing(_));
        let is_true = if is_racing { acknowledged <= handed.len() } else { handed.contains(&number) };
        drop(books);
        if !is_true {
            self.fail_data(&format!("message {number} of tag {tag} to {to} was not received, as it says"));
        }
    }

    pub(super) async fn receive_tagged(&self, tag: u64) {
        let size = self.group.size();
        match self.way(self.own(), tag) {
            Way::One => {
                let inboxes = (0..size).map(|from| self.receive_into(tag, from..from + 1, 1));
                join_all(inboxes.collect::<Vec<_>>()).await;
            }
            Way::Several => self.receive_into(tag, 0..size, 1).await,
            Way::Racing(count) => self.receive_into(tag, 0..size, count).await,
        }
    }

    async fn receive_into(&self, tag: u64, from: Range<usize>, count: usize) {
        let first = from.start;
        let inbox = std::sync::Mutex::new(Inbox::of(from));
        let receiving = (0..count).map(|at| self.receive_some(tag, &inbox, [first, at]));
        join_all(receiving.collect::<Vec<_>>()).await;
    }

    /// Receives until nothing is outstanding, and no other receive is in progress.
    async fn receive_some(&self, tag: u64, inbox: &std::sync::Mutex<Inbox>, [first, at]: [usize; 2]) {
        let mut rng = self.private([4, tag as usize, first, at]);
        loop {
            self.pause(&mut rng).await;
            let sources = {
                let mut inbox = inbox.lock().unwrap();
                if inbox.waiting >= inbox.left() {
                    return;
                }
                inbox.waiting += 1;
                inbox.sources()
            };
            let from = match &sources[..] {
                [one] => Source::Rank(*one),
                all if all.len() == self.group.size() => Source::Any,
                some => Source::Ranks(some.to_vec()),
            };
            let message = self.wait(&mut rng, "receive", &sources, self.group.recv(from, tag)).await;
            let mut inbox = inbox.lock().unwrap();
            inbox.waiting -= 1;
            match message {
                None => {}
                Some(Ok(message)) => {
                    let is_alone = inbox.waiting == 0 && !matches!(self.way(self.own(), tag), Way::Racing(_));
                    self.books().reached.from_several += u64::from(sources.len() > 1);
                    if self.hand_out(tag, message.rank, &message.tensor, is_alone, &mut inbox).is_none() {
                        let what = format!("of {}, tag {tag}: {:?}", message.rank, message.tensor);
                        return self.fail_data(&what);
                    }
                }
                Some(Err(error)) => self.note_lost(&error, &sources, &mut inbox),
            }
        }
    }

    /// Notes a received message, and checks that it is the expected one.
    fn hand_out(
        &self,
        tag: u64,
        from: usize,
        tensor: &Tensor,
        is_in_order: bool,
        inbox: &mut Inbox,
    ) -> Option<()> {
        let (own, values) = (self.own(), tensor.values::<i32>().ok()?);
        let next = inbox.next.get_mut(&from)?;
        let mut numbers = 0..MESSAGES;
        let number = match values.is_empty() {
            true => numbers.find(|number| *number >= *next && self.length(from, own, tag, *number) == 0)?,
            false => numbers.find(|number| self.values(from, own, tag, *number) == values)?,
        };
        let mut books = self.books();
        books.reached.received += 1;
        let is_new = books.handed.entry((from, own, tag)).or_default().insert(number);
        drop(books);
        if !is_in_order {
            *next += 1;
            return is_new.then_some(());
        }
        if !is_new || number < *next {
            return None;
        }
        if number > *next {
            self.blame("gap", from, &format!("message {number} of tag {tag} came instead of {next}"));
        }
        *next = number + 1;
        Some(())
    }

    /// Notes the ranks that send nothing more.
    fn note_lost(&self, error: &GroupError, sources: &[usize], inbox: &mut Inbox) {
        match error {
            GroupError::RankLost { rank, .. } => drop(inbox.lost.insert(*rank)),
            GroupError::Over { rank: Some(rank), .. } if self.group.failure().is_none() => {
                inbox.lost.insert(*rank);
            }
            GroupError::TimedOut { .. } => {
                inbox.lost.extend(sources.iter().filter(|source| self.is_touched(**source)));
            }
            _ => inbox.lost.extend(sources),
        }
    }
}
