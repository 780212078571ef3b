//! Fetching slices of published tensors.

use std::{ops::Range, pin::pin, time::Duration};

use tensorwire_protocol::{
    Code, ReceiveOptions, Scope, Sharing,
    limits::NAME_BYTES_MAX,
    slice::{InvalidSlice, Slice},
};

use super::transfer;
use crate::{
    error::{Transfer, WorkerError},
    values::{cut::Cut, tensor::Tensor},
    worker::{Worker, metrics::Timed, peer::Peer},
};

impl Peer {
    /// Fetches a slice of the tensor that the peer has published under `name`: a tensor that consists of the elements in `ranges`, one
    /// range for each dimension. The deadline is the worker's [`timeout`](crate::WorkerBuilder::timeout).
    ///
    /// Between hosts only the slice is moved. On one host the slice shares the peer's memory if it is one run of bytes, such as whole
    /// rows; otherwise it is copied out of that memory.
    ///
    /// ```
    /// use tensorwire::{Tensor, Worker};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tensorwire::WorkerError> {
    /// # let server = Worker::builder("ps").start().await?;
    /// # server.publish("w", Tensor::from_values(server.pool(), &[2, 3], &[1u8, 2, 3, 4, 5, 6])?)?;
    /// # let client = Worker::client().start().await?;
    /// # let peer = client.peer_at(server.address()).await?;
    /// // The second of two rows.
    /// assert_eq!(peer.fetch_slice("w", &[1..2, 0..3]).await?.values::<u8>()?, [4, 5, 6]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Memory
    /// A slice that is more than one run of bytes takes memory of its own: on one host of this worker's receive pool, otherwise of the
    /// peer's [`pool`](crate::Worker::pool) until it is sent, and it waits for that.
    ///
    /// # Errors
    /// [`WorkerError::Config`] with the field `ranges` if the tensor has no such slice, or name and ranges together are longer than
    /// 1,024 bytes; [`WorkerError::InvalidTensor`] if what the peer sends has another shape; otherwise as [`fetch`](Self::fetch).
    ///
    /// # Cancel safety
    /// As [`fetch`](Self::fetch).
    pub async fn fetch_slice(&self, name: &str, ranges: &[Range<u64>]) -> Result<Tensor, WorkerError> {
        self.fetch_slice_within(name, ranges, self.worker.operations.defaults.limit).await
    }

    /// [`fetch_slice`](Self::fetch_slice) with a deadline of its own, for reads of a group's exports, which have the group's.
    #[doc(hidden)]
    pub async fn fetch_slice_within(
        &self,
        name: &str,
        ranges: &[Range<u64>],
        limit: Duration,
    ) -> Result<Tensor, WorkerError> {
        // A task that fetches in a loop must yield to others, as if it had waited for the peer.
        tokio::task::coop::consume_budget().await;
        let whole = transfer(self, name)?;
        let slice = sliced(ranges)?;
        let key = key(name, &slice)?;
        let part = Transfer { key: &key, ..whole };
        let worker = &self.worker;
        let fetched = async {
            if let Some(whole) = self.view(&whole).await? {
                let cut = Cut::new(&whole, &slice).map_err(|invalid| unfit(&slice, &invalid))?;
                return Ok(cut.made(worker.receive_pool()).await?);
            }
            let options = ReceiveOptions::default();
            let fetched = worker.fetch_one(&self.known, &part, &Scope::Slice, &options).await;
            let (tensor, _) = fetched.map_err(|error| match error {
                WorkerError::Remote { status, .. } if status.code == Code::InvalidArgument => {
                    unfit(&slice, &status.message)
                }
                error => error,
            })?;
            of_lengths(tensor, &slice, &part)
        };
        worker.timed(Timed::Fetch, limit, || format!("fetching {part}"), pin!(fetched)).await
    }

    /// The whole tensor, if the peer's memory can be viewed, or is this worker's.
    async fn view(&self, whole: &Transfer<'_>) -> Result<Option<Tensor>, WorkerError> {
        let (scope, sharing) = (Scope::Published, Sharing::View);
        if let Some((found, _)) = self.known.find(|link| link.take_at_once(scope, *whole, sharing)) {
            return Ok(Some(found));
        }
        let Worker { node, .. } = &self.worker;
        if !node.is_own(&self.known) && !node.connected(&self.known).await?.may_view() {
            return Ok(None);
        }
        let fetched = self.worker.fetch_one(&self.known, whole, &scope, &sharing.into()).await?;
        Ok(Some(fetched.0))
    }
}

/// The tensor, if it has the shape of the slice that a peer was asked for.
fn of_lengths(tensor: Tensor, slice: &Slice, part: &Transfer<'_>) -> Result<Tensor, WorkerError> {
    if tensor.shape() == slice.lengths() {
        return Ok(tensor);
    }
    let problem = format!("{part} came with the shape {:?}", tensor.shape());
    Err(WorkerError::InvalidTensor { problem })
}

/// The slice of these ranges.
pub(crate) fn sliced(ranges: &[Range<u64>]) -> Result<Slice, WorkerError> {
    Slice::new(ranges).map_err(|invalid: InvalidSlice| unfit(&format_args!("{ranges:?}"), &invalid))
}

/// The key of a request for a slice.
pub(crate) fn key(name: &str, slice: &Slice) -> Result<String, WorkerError> {
    let key = format!("{name}{slice}");
    if key.len() > NAME_BYTES_MAX {
        let remedy = format!("the name and the ranges have more than {NAME_BYTES_MAX} bytes together");
        return Err(unfit(slice, &remedy));
    }
    Ok(key)
}

/// The error of ranges that the tensor does not have.
pub(crate) fn unfit(ranges: &dyn std::fmt::Display, problem: &dyn std::fmt::Display) -> WorkerError {
    WorkerError::Config { field: "ranges", value: ranges.to_string(), remedy: problem.to_string() }
}
