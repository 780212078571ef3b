//! The group's operations between two ranks.

use std::ops::RangeBounds;

use tensorwire_rendezvous::{Element, Tensor};
use zerocopy::FromBytes;

use super::Group;
use crate::{
    error::GroupError,
    pair::{self, Export, ExportKey, Message, RecvBuffer, SendBuffer, Sent, Source, Wait},
};

impl Group {
    /// Sends `tensor` to the rank `to`, which receives it with [`recv`](Self::recv). The tensor stays on this rank until the
    /// receiver requests it. Messages to one rank with one tag are received in the order in which they were sent.
    ///
    /// ```no_run
    /// use tensorwire::collective::{Group, GroupError};
    /// use tensorwire::Tensor;
    ///
    /// # async fn example(group: Group) -> Result<(), GroupError> {
    /// const WORK: u64 = 1;
    /// const RESULT: u64 = 2;
    /// if group.rank() == 0 {
    ///     for _ in 1..group.size() {
    ///         let result = group.recv(.., RESULT).await?;
    ///         println!("rank {} has {:?}", result.rank, result.tensor);
    ///     }
    /// } else {
    ///     let tensor = Tensor::from_values(group.worker().pool(), &[2], &[1.5f32, 2.5])?;
    ///     group.send(0, RESULT, tensor)?.await?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`GroupError::Argument`] if there is no such rank; [`GroupError::RankLost`], also after a connection with it has broken while
    /// messages to it were not received yet; [`GroupError::Over`]; [`GroupError::Worker`] if too many sent values wait on this worker ([`Limits::values_max`](tensorwire_rendezvous::Limits::values_max)).
    pub fn send(&self, to: usize, tag: u64, tensor: Tensor) -> Result<Sent, GroupError> {
        pair::send(&self.state.pairs, to, tag, tensor)
    }

    /// Receives the next message with this tag: from one rank, the first of several (`[1, 2]`), or of any (`..`). A rank that
    /// sends without pause does not delay the others.
    ///
    /// A message may be empty. If one of the ranks is lost, the receive fails: leave that rank out of the next one.
    ///
    /// # Errors
    /// Awaiting it returns [`GroupError::Argument`] if there is no such rank; [`GroupError::TimedOut`], [`GroupError::Aborted`],
    /// [`GroupError::RankLost`], [`GroupError::Left`], [`GroupError::Over`].
    ///
    /// # Cancel safety
    /// Cancel-safe: no message is lost, doubled or reordered, however many receives from several ranks are dropped.
    pub fn recv(&self, from: impl Into<Source>, tag: u64) -> Wait<'static, Message> {
        pair::recv(&self.state.pairs, from.into(), tag)
    }

    /// As [`recv`](Self::recv), into `values`, by one copy. Returns the rank that sent the message. No peer writes to `values`,
    /// so the future may borrow them.
    ///
    /// # Errors
    /// As [`recv`](Self::recv), and [`GroupError::Argument`] if the message has another type or number of elements. Then the
    /// message is dropped, and `values` are unchanged.
    ///
    /// # Cancel safety
    /// As [`recv`](Self::recv).
    pub fn recv_into<'a, T: Element + FromBytes>(
        &self,
        from: impl Into<Source>,
        tag: u64,
        values: &'a mut [T],
    ) -> Wait<'a, usize> {
        pair::recv_into(&self.state.pairs, from.into(), tag, values)
    }

    /// A buffer of `length` bytes, parts of which this rank sends into the [receive buffer](Self::recv_buffer) of the rank `to`
    /// for this rank and slot, which has the same length. The n-th send buffer of a slot belongs to its n-th receive buffer.
    ///
    /// ```no_run
    /// # async fn example(group: tensorwire::collective::Group) -> Result<(), tensorwire::collective::GroupError> {
    /// let other = 1 - group.rank();
    /// let (mut outgoing, mut incoming) = (group.send_buffer(other, 0, 4096)?, group.recv_buffer(other, 0, 4096)?);
    /// for round in 0..100 {
    ///     outgoing.bytes_mut()[..8].fill(round);
    ///     // The first 8 bytes, to the offset 16.
    ///     outgoing.send(0, 8, 16).await?;
    ///     outgoing.wait_send().await?;
    ///     let landed = incoming.wait_recv().await?;
    ///     assert_eq!(incoming.bytes()[landed], [round; 8]);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`GroupError::Argument`] if there is no such rank, or the slot is in use.
    pub fn send_buffer(&self, to: usize, slot: u64, length: usize) -> Result<SendBuffer, GroupError> {
        pair::send_buffer(&self.state.pairs, to, slot, length)
    }

    /// A buffer of `length` bytes, into which the rank `from` sends from its [send buffer](Self::send_buffer) for this rank and
    /// slot.
    ///
    /// # Errors
    /// [`GroupError::Argument`] if there is no such rank, the slot is in use, or there are [too
    /// many](crate::pair::RECV_BUFFERS_MAX) receive buffers; the error that ended an earlier buffer of this slot, such as
    /// [`GroupError::RankLost`], because it is then unknown which send buffer comes next.
    pub fn recv_buffer(&self, from: usize, slot: u64, length: usize) -> Result<RecvBuffer, GroupError> {
        pair::recv_buffer(&self.state.pairs, from, slot, length)
    }

    /// Lets all ranks of the group read and write the bytes of `tensor` by the key of the returned export, until the export is
    /// dropped. The tensor itself does not change: each write makes a new version.
    ///
    /// ```no_run
    /// use tensorwire::collective::{Group, GroupError, pair::ExportKey};
    /// use tensorwire::Tensor;
    ///
    /// # async fn example(group: Group, tensor: Tensor) -> Result<(), GroupError> {
    /// let export = group.export(tensor)?;
    /// let bytes = Tensor::from_values(group.worker().pool(), &[40], &export.key().encode())?;
    /// let keys = group.all_gather(bytes).await?;
    /// let key = ExportKey::decode(keys[1].bytes())?;
    /// group.put(&key, 0, &[1, 2, 3]).await?;
    /// let read = group.get(&key, 1..3).await?;
    /// group.barrier().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`GroupError::Argument`] if its elements are not plain numbers.
    pub fn export(&self, tensor: Tensor) -> Result<Export, GroupError> {
        pair::export(&self.state.pairs, tensor)
    }

    /// Reads bytes of another rank's current export. On one host the result is a view of that rank's memory, and no message is
    /// needed. Over a network only these bytes are transferred.
    ///
    /// # Errors
    /// Awaiting it returns [`GroupError::Argument`], before anything is sent, if the range exceeds the export or the key is of
    /// another group, run or generation; [`GroupError::Gone`] if the export was dropped; [`GroupError::NoMemory`] if the owner
    /// has no memory to send it from, or to write it; [`GroupError::TimedOut`], [`GroupError::Aborted`],
    /// [`GroupError::RankLost`], [`GroupError::Over`].
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub fn get(&self, key: &ExportKey, range: impl RangeBounds<usize>) -> Wait<'static, Tensor> {
        pair::get(&self.state.pairs, key, range)
    }

    /// Writes `bytes` into another rank's export, beginning at `offset`. Completes once readers see them. Writes of one rank are
    /// applied in order. Tensors that were read before do not change.
    ///
    /// # Memory
    /// Up to 1 MiB are written into the export's memory. For more, or while anything has the export's present content (a view, a read
    /// under way, the tensor that was exported), or if that is in no pool, the owner copies the whole export.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    ///
    /// # Cancel safety
    /// If it is dropped, the bytes may be written or not. They are not written after a later write of this rank.
    pub fn put<'a>(&self, key: &ExportKey, offset: usize, bytes: &'a [u8]) -> Wait<'a, ()> {
        pair::put(&self.state.pairs, key, offset, bytes)
    }
}
