//! [`RecvBuffer`]: memory into which another rank sends from its send buffer of the same slot.

use std::{fmt, ops::Range, sync::Arc};

use tensorwire_memory::copy::{CopyReason, copy_bytes};
use tensorwire_rendezvous::{Peer, Tensor};
use tokio::sync::{mpsc, oneshot};

use super::{
    Core, Pairs,
    sending::{other_length, part_of},
    slots::{Opened, SlotId},
    wait::Wait,
    wire::{FRAME_BYTES, Frame, Lane, Receipt},
};
use crate::{
    call::{Call, CallKind},
    error::GroupError,
};

/// How many messages a receive buffer receives before its user waits for them. They complete the sender's `wait_send`, so two
/// ranks may both send, wait for their sends, and receive after that.
pub const AHEAD: usize = 4;

/// How many receive buffers there may be for one rank. Each has a request in progress, and a connection's requests are
/// [limited](tensorwire_rendezvous::Flow::requests_max): the rest are left for everything else.
pub const RECV_BUFFERS_MAX: usize = 128;

/// Memory of a fixed length, into which another rank sends from its [`SendBuffer`](super::SendBuffer) of the same slot and
/// length. Made by [`Group::recv_buffer`](crate::Group::recv_buffer).
///
/// Only [`wait_recv`](Self::wait_recv) writes to the memory. Up to [`AHEAD`] messages that have arrived wait outside it.
///
/// Dropping it drops the messages that the user has not waited for. The slot is free again once the send buffer is dropped too:
/// until then, another receive buffer of the slot receives nothing.
pub struct RecvBuffer {
    pairs: Arc<Pairs>,
    from: usize,
    slot: u64,
    buffer: u64,
    memory: Vec<u8>,
    arrived: mpsc::Receiver<Result<Landing, GroupError>>,
    /// The error of all further receives.
    failed: Option<GroupError>,
}

/// A message that has arrived, and the range for its content.
#[derive(Debug)]
struct Landing {
    range: Range<usize>,
    message: Tensor,
}

/// As [`Group::recv_buffer`](crate::Group::recv_buffer).
pub(crate) fn recv_buffer(
    pairs: &Arc<Pairs>,
    from: usize,
    slot: u64,
    length: usize,
) -> Result<RecvBuffer, GroupError> {
    let core = &pairs.core;
    let peer = core.peer(from)?.clone();
    let Opened { buffer, running, before } = core.slots().open_receiving((from, slot), RECV_BUFFERS_MAX)?;
    let (room, arrived) = mpsc::channel(AHEAD);
    let intake =
        Intake { core: core.clone(), id: (from, slot), peer, buffer, length, room, _running: running };
    core.spawn("receive buffer", Box::pin(intake.run(before)));
    let memory = vec![0; length];
    Ok(RecvBuffer { pairs: pairs.clone(), from, slot, buffer, memory, arrived, failed: None })
}

impl RecvBuffer {
    /// The memory: zeros, and what [`wait_recv`](Self::wait_recv) has written.
    pub fn bytes(&self) -> &[u8] {
        &self.memory
    }

    /// The memory, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory
    }

    /// Waits for one more message, and copies its content into the memory. Returns its range. Each call returns one message, in
    /// the order of the sends.
    ///
    /// # Errors
    /// Awaiting it returns [`GroupError::Argument`] if the send buffer has another length; [`GroupError::Gone`] once the send
    /// buffer was dropped and all its messages were returned; [`GroupError::TimedOut`], [`GroupError::Aborted`],
    /// [`GroupError::RankLost`], [`GroupError::Left`], [`GroupError::Over`], [`GroupError::Misbehaved`].
    ///
    /// # Cancel safety
    /// Cancel-safe: a message that this does not return is returned by the next call.
    pub fn wait_recv(&mut self) -> Wait<'_, Range<usize>> {
        let (pairs, from) = (self.pairs.clone(), self.from);
        let call = Call::plain(self.slot, CallKind::WaitReceive);
        Wait::new(&pairs, call, vec![from], async move {
            let gone = || GroupError::Gone { call: Box::new(call), rank: from, what: "send buffer" };
            match self.arrived.recv().await {
                Some(Ok(Landing { range, message })) => {
                    let content = message.bytes().get(FRAME_BYTES..).unwrap_or_default();
                    if let Some(target) = self.memory.get_mut(range.clone()) {
                        copy_bytes(target, content, CopyReason::Local);
                    }
                    Ok(range)
                }
                Some(Err(error)) => Err(self.failed.insert(error).clone()),
                None => Err(self.failed.clone().unwrap_or_else(gone)),
            }
        })
    }
}

impl fmt::Debug for RecvBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RecvBuffer({} bytes, slot {}, from {})", self.memory.len(), self.slot, self.from)
    }
}

impl Drop for RecvBuffer {
    fn drop(&mut self) {
        self.pairs.core.slots().close_receiving((self.from, self.slot), self.buffer);
    }
}

/// The task that receives the messages of one send buffer.
struct Intake {
    core: Arc<Core>,
    id: SlotId,
    peer: Peer,
    /// The number of the receive buffer.
    buffer: u64,
    /// Its length in bytes.
    length: usize,
    room: mpsc::Sender<Result<Landing, GroupError>>,
    /// Its drop starts the task of the slot's next buffer.
    _running: oneshot::Sender<()>,
}

impl Drop for Intake {
    fn drop(&mut self) {
        self.core.slots().task_ended(self.id, self.buffer);
    }
}

impl Intake {
    /// Runs until the send buffer ends, even if the user drops the receive buffer earlier: otherwise the slot's next receive
    /// buffer would receive the remaining messages.
    async fn run(self, before: Option<oneshot::Receiver<()>>) {
        if let Some(before) = before {
            // Dropped when the task ends, and never sent.
            let _ = before.await;
        }
        let lane = Lane::Slot(self.id.1);
        let key = lane.key();
        loop {
            let room = self.room.reserve().await.ok();
            let arrived = match self.next(&key, lane).await {
                Ok(Some(arrived)) => arrived,
                Ok(None) => return,
                Err(error) => {
                    self.core.slots().lose(self.id.0, &error);
                    room.into_iter().for_each(|room| room.send(Err(error.clone())));
                    return;
                }
            };
            // `None` if the user has dropped the buffer.
            if let Some(room) = room {
                room.send(arrived);
            }
        }
    }

    /// Receives and acknowledges the next message. `None` at the end of the send buffer.
    ///
    /// # Errors
    /// No more messages can be received.
    async fn next(&self, key: &str, lane: Lane) -> Result<Option<Result<Landing, GroupError>>, GroupError> {
        let (rank, slot) = self.id;
        let call = Call::plain(slot, CallKind::WaitReceive);
        // The task of another buffer may have lost the rank, and a new connection may bring messages of an earlier send buffer.
        self.core.slots().check_lost(rank)?;
        let message = self.core.next(&self.peer, key).await;
        let message = message.map_err(|error| GroupError::of_message(&call, rank, error))?;
        let (at, whole, length) = match Frame::decode(message.bytes()) {
            Some((Frame::Content { at, whole }, content)) => (at, whole, content.len()),
            Some((Frame::End, [])) => return Ok(None),
            _ => {
                let rule = "a message to a buffer begins with its frame";
                return Err(GroupError::Misbehaved { call: Box::new(call), rank, rule });
            }
        };
        let landing = self.range_of(at, whole, length);
        let receipt = match &landing {
            _ if self.room.is_closed() => Receipt::Gone,
            Ok(_) => Receipt::Taken,
            Err(_) => Receipt::Outside(self.length as u64),
        };
        self.core.acknowledge(rank, lane, receipt);
        Ok(Some(landing.map(|range| Landing { range, message })))
    }

    /// The range for a content of `length` bytes at `at`, from a send buffer of `whole` bytes.
    fn range_of(&self, at: u64, whole: u64, length: usize) -> Result<Range<usize>, GroupError> {
        if whole != self.length as u64 {
            return Err(other_length(self.length, self.id.0, whole));
        }
        part_of(("roffset", usize::try_from(at).unwrap_or(usize::MAX)), length, self.length)
    }
}
