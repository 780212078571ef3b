//! One-sided reads of this side. They are requested in parts, a few at a time, so that the memory that the peer queues
//! for this side is bounded, and other traffic is sent between the answers.

use std::{
    collections::VecDeque,
    sync::{MutexGuard, PoisonError},
};

use tensorwire_fabric::{QueuePairCore, RemoteRange};
use tensorwire_memory::RemoteTarget;
use tensorwire_testpoints::sync::Mutex;

use crate::{
    frame::{AnswerFrame, Key, READ_BYTES_MAX, READS_MAX, ReadFrame},
    outgoing::{Outgoing, Part},
    sender::Sender,
};

/// A read, checked and resolved.
#[derive(Debug)]
pub(super) struct Read {
    /// The operation, and whether this is its last part.
    pub(super) operation: Part,
    pub(super) range: RemoteRange,
    pub(super) remote_key: Key,
    /// `None` if it is empty.
    pub(super) target: Option<RemoteTarget>,
}

/// A requested part.
#[derive(Debug)]
struct Asked {
    tag: u32,
    target: Option<RemoteTarget>,
    /// The offset in the target.
    offset: u64,
    length: u64,
    operation: Part,
}

/// The reads of one connection.
#[derive(Debug, Default)]
pub(super) struct Reads(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    /// Reads that are not completely requested, each with the number of requested bytes. The slots bound their number.
    posted: VecDeque<(Read, u64)>,
    /// Requested parts, in the order of their answers. At most [`READS_MAX`].
    asked: VecDeque<Asked>,
    next_tag: u32,
}

/// The destination of an answer.
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

    /// Requests parts up to the limit of outstanding ones. Returns whether something was posted.
    pub(super) fn ask(&self, sender: &Sender) -> bool {
        let mut inner = self.lock();
        let mut posted = false;
        while let Some(request) = inner.next_request() {
            // Under the lock, so that requests leave in the order in which their answers are expected.
            posted |= sender.post([request]).is_some();
        }
        posted
    }

    /// The destination of `answer`, if it is the next expected one.
    pub(super) fn expected(&self, answer: &AnswerFrame) -> Option<Expected> {
        let inner = self.lock();
        let next = inner.asked.front()?;
        let fits = next.tag == answer.tag && next.length == answer.rest;
        fits.then(|| Expected { target: next.target.clone(), offset: next.offset })
    }

    /// Records that the next expected answer has landed completely.
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
