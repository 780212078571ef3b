//! One-sided reads of this side: asked for in parts, a few at a time, so that what the peer holds for us is
//! bounded, and other traffic goes between the answers.

use std::{
    collections::VecDeque,
    sync::{MutexGuard, PoisonError},
};

use tensorwire_memory::RemoteTarget;
use tensorwire_testpoints::sync::Mutex;
use tensorwire_verbs_reactor::{QueuePairCore, RemoteRange};

use crate::{
    frame::{AnswerFrame, Key, READ_BYTES_MAX, READS_MAX, ReadFrame},
    outgoing::{Outgoing, Part},
    sender::Sender,
};

/// A read, checked and resolved.
#[derive(Debug)]
pub(super) struct Read {
    /// The operation, and whether it ends with this.
    pub(super) operation: Part,
    pub(super) range: RemoteRange,
    pub(super) remote_key: Key,
    /// `None` if it is empty.
    pub(super) target: Option<RemoteTarget>,
}

/// A part that the peer was asked for.
#[derive(Debug)]
struct Asked {
    tag: u32,
    target: Option<RemoteTarget>,
    /// Where it goes in the target.
    offset: u64,
    length: u64,
    operation: Part,
}

/// The reads of one connection.
#[derive(Debug, Default)]
pub(super) struct Reads(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    /// Not asked for, or not completely; the number is what was. Bounded by the slots.
    posted: VecDeque<(Read, u64)>,
    /// In the order in which they are answered. At most [`READS_MAX`].
    asked: VecDeque<Asked>,
    next_tag: u32,
}

/// Where an answer goes.
#[derive(Debug)]
pub(super) struct Expected {
    pub(super) target: Option<RemoteTarget>,
    pub(super) offset: u64,
}

impl Reads {
    /// Posts the reads of one operation.
    pub(super) fn post(&self, reads: impl IntoIterator<Item = Read>) {
        self.lock().posted.extend(reads.into_iter().map(|read| (read, 0)));
    }

    /// Asks for as much as may be outstanding. Whether something was posted.
    pub(super) fn ask(&self, sender: &Sender) -> bool {
        let mut inner = self.lock();
        let mut posted = false;
        while let Some(request) = inner.next_request() {
            // Under the lock, so that requests leave in the order in which their answers are expected.
            posted |= sender.post([request]);
        }
        posted
    }

    /// What `answer` begins, if it is the next expected one.
    pub(super) fn expected(&self, answer: &AnswerFrame) -> Option<Expected> {
        let inner = self.lock();
        let next = inner.asked.front()?;
        let fits = next.tag == answer.tag && next.length == answer.rest;
        fits.then(|| Expected { target: next.target.clone(), offset: next.offset })
    }

    /// The next expected answer has landed whole.
    pub(super) fn answered(&self, core: &QueuePairCore) {
        let Some(asked) = self.lock().asked.pop_front() else { return };
        let Asked { target, operation, .. } = asked;
        drop(target);
        if operation.is_last {
            core.complete(operation.key, operation.bytes, Ok(()));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    fn next_request(&mut self) -> Option<Outgoing> {
        if self.asked.len() >= READS_MAX as usize {
            return None;
        }
        let (read, offset) = self.posted.front_mut()?;
        let rest = read.range.length - *offset;
        let length = rest.min(READ_BYTES_MAX);
        let is_last = length == rest;
        let range = RemoteRange { offset: read.range.offset + *offset, length, ..read.range };
        let operation = Part { is_last: is_last && read.operation.is_last, ..read.operation };
        let (target, remote_key, offset) = (read.target.clone(), read.remote_key, *offset);
        if is_last {
            self.posted.pop_front();
        } else if let Some((_, asked)) = self.posted.front_mut() {
            *asked += length;
        }
        self.next_tag = self.next_tag.wrapping_add(1);
        let tag = self.next_tag;
        self.asked.push_back(Asked { tag, target, offset, length, operation });
        Some(Outgoing::request(ReadFrame { range, key: remote_key, tag }))
    }
}
