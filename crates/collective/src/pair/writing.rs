//! Writes to exports.
//!
//! A write is a call of the owner, which makes a new version of the published tensor: in the same memory if nobody reads that, otherwise in
//! a copy. So a reader gets one version or another, and never parts of two. A long content is published meanwhile, and the owner reads it
//! from the writer: on one host it copies it once, out of the writer's memory. A rank has one write to another under way at a time: so its
//! writes keep their order.

use std::{
    ops::Range,
    slice,
    sync::{Arc, PoisonError, atomic::Ordering},
};

use tensorwire_memory::{
    BufMut,
    copy::{CopyReason, copy_bytes},
};
use tensorwire_protocol::{Code, Status};
use tensorwire_rendezvous::{Tensor, Worker, WorkerError, calls::Call};

use super::{
    Core, NO_LIMIT, Pairs,
    exporting::{ExportKey, Exported, Writes, bytes_of, name},
    sending::part_of,
    wait::Wait,
    wire::Put,
};
use crate::{call::CallKind, error::GroupError};

/// The longest content that is in the call itself, in bytes: with what precedes it, it travels in one message.
const IN_CALL_MAX: usize = 3 << 10;

/// The name of the handler of writes.
fn handler(group: i64) -> String {
    format!("tensorwire put {group:016x}")
}

/// As [`Group::put`](crate::Group::put).
pub(crate) fn put<'a>(pairs: &Arc<Pairs>, key: &ExportKey, offset: usize, bytes: &'a [u8]) -> Wait<'a, ()> {
    let (core, key, call) = (pairs.core.clone(), *key, key.call(CallKind::Put));
    let part = part_of(("offset", offset), bytes.len(), key.length());
    let checked = core.checked(&key).and_then(|peer| part.map(|_| peer.clone()));
    let peer = match checked {
        Ok(peer) => peer,
        Err(error) => return Wait::failed(pairs, call, error),
    };
    Wait::new(pairs, call, vec![key.rank()], async move {
        let Some(turn) = core.writing.get(key.rank()) else { return Err(key.gone(CallKind::Put)) };
        // Given to writes in the order in which they were first polled.
        let _turn = turn.acquire().await;
        let number = core.writes.fetch_add(1, Ordering::Relaxed) + 1;
        let lent = if bytes.len() > IN_CALL_MAX { Some(Lent::new(&core, bytes).await?) } else { None };
        let put = Put {
            export: key.number(),
            at: offset as u64,
            number,
            length: bytes.len() as u64,
            source: lent.as_ref().map_or(0, |lent| lent.number),
        };
        let message = core.framed(&put.encode(), if lent.is_some() { &[] } else { bytes }).await?;
        let answer = peer.call(&handler(core.step.id()), message).timeout(NO_LIMIT).await;
        answer.map(drop).map_err(|error| match error {
            WorkerError::Remote { status, .. } if status.code == Code::NotFound => key.gone(CallKind::Put),
            WorkerError::Remote { status, .. } if status.code == Code::OutOfRange => {
                key.broken(CallKind::Put)
            }
            WorkerError::Remote { status, .. } if status.code == Code::ResourceExhausted => {
                GroupError::NoMemory { call: Box::new(call), rank: key.rank() }
            }
            error => GroupError::of_message(&call, key.rank(), error),
        })
    })
}

/// The content of a write, published until this is dropped.
struct Lent<'a> {
    core: &'a Core,
    number: u64,
}

impl<'a> Lent<'a> {
    async fn new(core: &'a Core, content: &[u8]) -> Result<Self, GroupError> {
        let mut buffer = core.worker.pool().alloc(content.len()).await.map_err(WorkerError::from)?;
        copy_bytes(&mut buffer, content, CopyReason::Import);
        let lent = Self { core, number: core.runtime().random().max(1) };
        core.worker.publish(&name(core.step.id(), lent.number), bytes_of(&buffer.freeze())?)?;
        Ok(lent)
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.core.worker.withdraw(&name(self.core.step.id(), self.number));
    }
}

impl Pairs {
    /// Lets other ranks write to the exports of this one, until this is dropped.
    pub(super) fn accept_writes(&self) -> Result<(), WorkerError> {
        let mut accepting = self.accepting.lock().unwrap_or_else(PoisonError::into_inner);
        if accepting.is_none() {
            let core = self.core.clone();
            let write = move |call: Call| {
                let core = core.clone();
                async move { core.write(&call).await }
            };
            *accepting = Some(self.core.worker.handle(&handler(self.core.step.id()), write)?);
        }
        Ok(())
    }
}

impl Core {
    /// Makes a new version of an export with the content of a write.
    ///
    /// # Errors
    /// For the rank that writes: NOT_FOUND, OUT_OF_RANGE, RESOURCE_EXHAUSTED, or that the call is no write of this version.
    async fn write(&self, call: &Call) -> Result<(), Status> {
        let rank = self.peers.iter().position(|peer| peer.name() == call.peer());
        let rank =
            rank.ok_or_else(|| Status::new(Code::PermissionDenied, "only ranks of the group write"))?;
        let put = call.arguments().first().and_then(|message| Put::decode(message.bytes()));
        let (put, content) =
            put.ok_or_else(|| Status::new(Code::InvalidArgument, "this is no write of this version"))?;
        let export = &*self.exports.find(put.export).ok_or_else(Writes::gone)?;
        let [at, length] = [put.at, put.length].map(|number| usize::try_from(number).unwrap_or(usize::MAX));
        let part = part_of(("offset", at), length, export.length())
            .map_err(|error| Status::new(Code::OutOfRange, error.to_string()))?;
        let lent = self.lent(rank, &put).await?;
        let content = lent.as_ref().map_or(content, |lent| lent.bytes());
        if content.len() != part.len() {
            return Err(Status::new(Code::InvalidArgument, "the content has another length"));
        }
        let name = name(self.step.id(), put.export);
        let write = Write { worker: &self.worker, export, name, rank, number: put.number, part, content };
        if write.in_place()? {
            tensorwire_testpoints::mark!("an export was overwritten in place");
            return Ok(());
        }
        tensorwire_testpoints::mark!("an export that is read was copied");
        let copy = self.worker.pool().alloc(export.length()).await.map_err(no_memory)?;
        write.in_copy(copy)
    }

    /// The content that a rank has published for its write; `None` if it is in the call.
    async fn lent(&self, rank: usize, put: &Put) -> Result<Option<Tensor>, Status> {
        let Some(writer) = self.peers.get(rank).filter(|_| put.source != 0) else { return Ok(None) };
        let name = name(self.step.id(), put.source);
        let fetched = writer.fetch_slice_within(&name, slice::from_ref(&(0..put.length)), NO_LIMIT).await;
        Ok(Some(fetched?))
    }
}

/// A write that this rank applies to its export.
struct Write<'a> {
    worker: &'a Worker,
    export: &'a Exported,
    /// Under which the export's bytes are published.
    name: String,
    rank: usize,
    number: u64,
    part: Range<usize>,
    content: &'a [u8],
}

impl Write<'_> {
    /// Returns whether it could be applied to the memory of the present version.
    fn in_place(&self) -> Result<bool, Status> {
        let mut writes = self.export.writes();
        writes.begin(self.rank, self.number)?;
        Ok(self.worker.overwrite(&self.name, self.part.start, self.content))
    }

    /// Publishes `copy`, which is as long as the export, with the present content and the part that is written.
    fn in_copy(&self, mut copy: BufMut) -> Result<(), Status> {
        let mut writes = self.export.writes();
        writes.begin(self.rank, self.number)?;
        let present = self.worker.published(&self.name).ok_or_else(Writes::gone)?;
        copy_bytes(&mut copy, present.bytes(), CopyReason::Local);
        if let Some(target) = copy.get_mut(self.part.clone()) {
            copy_bytes(target, self.content, CopyReason::Local);
        }
        let published = bytes_of(&copy.freeze()).and_then(|bytes| self.worker.publish(&self.name, bytes));
        drop(writes);
        // Releases the memory, which may wake tasks.
        drop(present);
        published.map(drop).map_err(no_memory)
    }
}

fn no_memory(error: impl Into<WorkerError>) -> Status {
    Status::new(Code::ResourceExhausted, error.into().to_string())
}
