//! [`SendBuffer`]: memory whose parts are sent into the receive buffer of the same slot on another rank.

use std::{collections::VecDeque, fmt, sync::Arc};

use tensorwire_memory::{
    Buf,
    copy::{CopyReason, copy_bytes},
};
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{Tensor, WorkerError};

use super::{
    Core, Pairs,
    receipts::Pending,
    wait::Wait,
    wire::{FRAME_BYTES, Frame, Lane, Receipt},
};
use crate::{
    call::{Call, CallKind},
    error::GroupError,
};

/// How many sends of one buffer may be in progress. A further one waits for the oldest.
pub const SENDS_UNDER_WAY: usize = 8;

/// Memory of a fixed length. Its parts are sent into the [`RecvBuffer`](super::RecvBuffer) of the same slot and length on another
/// rank. Made by [`Group::send_buffer`](crate::Group::send_buffer).
///
/// A send copies its part, so the memory may be written again as soon as [`send`](Self::send) has completed.
///
/// Dropping it frees the slot on this rank at once, and on the other rank once its buffer is dropped too. Messages sent before
/// still arrive.
pub struct SendBuffer {
    pairs: Arc<Pairs>,
    to: usize,
    slot: u64,
    memory: Vec<u8>,
    /// Sends without a receipt, oldest first.
    under_way: VecDeque<Pending>,
    /// Sends with a receipt that `wait_send` has not counted yet.
    completed: u64,
    /// The error of all further sends.
    failed: Option<GroupError>,
}

/// As [`Group::send_buffer`](crate::Group::send_buffer).
pub(crate) fn send_buffer(
    pairs: &Arc<Pairs>,
    to: usize,
    slot: u64,
    length: usize,
) -> Result<SendBuffer, GroupError> {
    pairs.core.peer(to)?;
    pairs.core.slots().open_sending((to, slot))?;
    Ok(SendBuffer {
        pairs: pairs.clone(),
        to,
        slot,
        memory: vec![0; length],
        under_way: VecDeque::new(),
        completed: 0,
        failed: None,
    })
}

impl SendBuffer {
    /// The memory.
    pub fn bytes(&self) -> &[u8] {
        &self.memory
    }

    /// The memory, for writing. All zero at first.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory
    }

    /// Sends the `length` bytes at `offset` to the offset `roffset` of the receive buffer. Completes once they are sent; waits
    /// while [`SENDS_UNDER_WAY`] sends are in progress.
    ///
    /// # Errors
    /// Awaiting it returns [`GroupError::Argument`] if a part exceeds its buffer; the errors of [`wait_send`](Self::wait_send)
    /// for an earlier send.
    /// # Cancel safety
    /// Cancel-safe: if it is dropped before it completes, nothing is sent.
    pub fn send(&mut self, offset: usize, length: usize, roffset: usize) -> Wait<'_, ()> {
        let (pairs, to) = (self.pairs.clone(), self.to);
        let call = Call::plain(self.slot, CallKind::SlotSend);
        Wait::new(&pairs, call, vec![to], async move {
            let part = part_of(("offset", offset), length, self.memory.len())?;
            part_of(("roffset", roffset), length, self.memory.len())?;
            self.ready()?;
            if self.under_way.len() >= SENDS_UNDER_WAY {
                self.oldest(&call).await?;
            }
            let frame = Frame::Content { at: roffset as u64, whole: self.memory.len() as u64 };
            let core = &self.pairs.core;
            let message = core.framed(&frame.encode(), self.memory.get(part).unwrap_or_default()).await?;
            let sent = core.post(self.to, Lane::Slot(self.slot), message, &call);
            self.under_way.push_back(sent?);
            Ok(())
        })
    }

    /// Waits until one more send is received. It counts sends: each call counts one that was received. A send is received when
    /// its message has arrived and the receive buffer has fewer than [`AHEAD`](super::AHEAD) messages that its user has not
    /// waited for.
    ///
    /// # Errors
    /// Awaiting it returns [`GroupError::Argument`] if all sends were counted, or the receive buffer has another length;
    /// [`GroupError::Gone`] if the receive buffer was dropped; [`GroupError::TimedOut`], [`GroupError::Aborted`],
    /// [`GroupError::RankLost`], [`GroupError::Left`], [`GroupError::Over`].
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub fn wait_send(&mut self) -> Wait<'_, ()> {
        let (pairs, to) = (self.pairs.clone(), self.to);
        let call = Call::plain(self.slot, CallKind::WaitSend);
        Wait::new(&pairs, call, vec![to], async move {
            if self.completed == 0 {
                self.ready()?;
                self.oldest(&call).await?;
            }
            self.completed -= 1;
            Ok(())
        })
    }

    /// Waits for the receipt of the oldest send, and counts it.
    async fn oldest(&mut self, call: &Call) -> Result<(), GroupError> {
        let Some(oldest) = self.under_way.front_mut() else {
            return Err(GroupError::Argument {
                field: "wait_send",
                value: "no send in progress".to_owned(),
                remedy: "wait at most once for each send of this buffer".to_owned(),
            });
        };
        let receipt = oldest.receipt(call).await;
        self.under_way.pop_front();
        match receipt.and_then(|receipt| self.accepted(receipt, call)) {
            Ok(()) => {
                self.completed += 1;
                Ok(())
            }
            Err(error) => Err(self.failed.insert(error).clone()),
        }
    }

    fn accepted(&self, receipt: Receipt, call: &Call) -> Result<(), GroupError> {
        match receipt {
            Receipt::Taken => Ok(()),
            Receipt::Gone => {
                Err(GroupError::Gone { call: Box::new(*call), rank: self.to, what: "receive buffer" })
            }
            Receipt::Outside(theirs) => Err(other_length(self.memory.len(), self.to, theirs)),
        }
    }

    fn ready(&self) -> Result<(), GroupError> {
        self.failed.clone().map_or(Ok(()), Err)
    }
}

impl fmt::Debug for SendBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SendBuffer({} bytes, slot {}, to {})", self.memory.len(), self.slot, self.to)
    }
}

impl Drop for SendBuffer {
    fn drop(&mut self) {
        let core = &self.pairs.core;
        core.end_slot(self.to, self.slot);
        core.slots().close_sending((self.to, self.slot));
    }
}

/// The range of `length` at `at`, which must lie inside `whole`.
pub(super) fn part_of(
    (field, at): (&'static str, usize),
    length: usize,
    whole: usize,
) -> Result<std::ops::Range<usize>, GroupError> {
    let refuse = |field, value: usize, most: usize| GroupError::Argument {
        field,
        value: value.to_string(),
        remedy: format!("there are {whole} bytes: give at most {most}"),
    };
    if at > whole {
        return Err(refuse(field, at, whole));
    }
    if length > whole - at {
        // The error names the argument that is too large even alone.
        let (field, value, most) =
            if length > whole { ("length", length, whole - at) } else { (field, at, whole - length) };
        return Err(refuse(field, value, most));
    }
    Ok(at..at + length)
}

/// The error of two buffers of one slot with different lengths.
pub(super) fn other_length(own: usize, rank: usize, theirs: u64) -> GroupError {
    GroupError::Argument {
        field: "length",
        value: own.to_string(),
        remedy: format!(
            "the buffer of this slot on rank {rank} has {theirs} bytes: give both the same length"
        ),
    }
}

impl Core {
    /// A message with a copy of `bytes` after `frame`.
    pub(super) async fn framed(&self, frame: &[u8], bytes: &[u8]) -> Result<Tensor, GroupError> {
        let length = frame.len() + bytes.len();
        let mut buffer = self.worker.pool().alloc(length).await.map_err(WorkerError::from)?;
        let (front, rest) = buffer.split_at_mut(frame.len());
        copy_bytes(front, frame, CopyReason::Import);
        copy_bytes(rest, bytes, CopyReason::Import);
        Ok(Tensor::new(buffer, DataType::U8, &[length as u64])?)
    }

    /// Reports the end of this send buffer to the receive buffer of its slot.
    fn end_slot(&self, to: usize, slot: u64) {
        let bytes = Buf::on_heap(&Frame::End.encode(), CopyReason::Import);
        let sent = self.peer(to).and_then(|peer| {
            let end = Tensor::shared(bytes, DataType::U8, &[FRAME_BYTES as u64])?;
            Ok(self.step.to(peer).send(&Lane::Slot(slot).key(), end)?)
        });
        if let Err(error) = sent {
            // The receiver notices the broken connection itself.
            log!(DEBUG, rank = to, slot, %error, "could not send the end of a send buffer");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(at: usize, length: usize, whole: usize) -> String {
        part_of(("offset", at), length, whole).unwrap_err().to_string()
    }

    #[test]
    fn parts_lie_inside() {
        assert_eq!(part_of(("offset", 0), 0, 0).unwrap(), 0..0);
        assert_eq!(part_of(("offset", 3), 5, 8).unwrap(), 3..8);
        assert_eq!(part_of(("offset", 8), 0, 8).unwrap(), 8..8);
        assert_eq!(refused(9, 0, 8), "offset = `9`: there are 8 bytes: give at most 8");
        assert_eq!(refused(1, 9, 8), "length = `9`: there are 8 bytes: give at most 7");
        assert_eq!(refused(4, 5, 8), "offset = `4`: there are 8 bytes: give at most 3");
        assert_eq!(
            refused(usize::MAX, usize::MAX, 8).split(':').next(),
            Some("offset = `18446744073709551615`")
        );
    }
}
