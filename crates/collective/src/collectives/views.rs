//! All-reduce on one host: each rank reads the others' elements where they are.
//!
//! Every rank lends the others a view of its elements. Of each element, one rank reads all ranks' values and combines them; then it
//! lends the others the result. So each rank reads all inputs of its part once and writes it once, and copies the other parts.
//! All ranks have the same result, bit by bit, because each element is combined once, in the order of the ranks.

use std::ops::Range;

use futures::future::try_join_all;
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{Tensor, WorkerError};

use super::running::replace;
use crate::{error::GroupError, group::calling::Calling, schedule};

/// Combines `bytes`, elements of `width` bytes, of all ranks. `fold_all` writes the combination of its inputs.
pub(super) async fn all_reduce(
    calling: &Calling,
    bytes: &mut [u8],
    width: usize,
    fold_all: impl Fn(&mut [u8], &[&[u8]]) -> Result<(), GroupError> + Sync,
) -> Result<(), GroupError> {
    let (rank, size) = (calling.rank(), calling.size());
    let parts = schedule::parts(0..bytes.len() / width, size).into_iter();
    let parts: Vec<Range<usize>> = parts.map(|part| part.start * width..part.end * width).collect();
    let at = parts[rank].clone();
    // All memory first, so that nobody waits for some while others wait for what it sends.
    let mut result = calling.pool().alloc(at.len()).await.map_err(WorkerError::from)?;
    // A user's memory is staged once.
    let own = calling.message(bytes, false).await?;
    for to in calling.others() {
        calling.send_tensor(to, own.clone()).await?;
    }
    let inputs = receive(calling, &own, |_| bytes.len()).await?;
    let slices: Vec<&[u8]> =
        inputs.iter().map(|input| input.bytes().get(at.clone()).unwrap_or_default()).collect();
    fold_all(&mut result, &slices)?;
    drop(slices);
    drop(inputs);
    let result = Tensor::new(result, DataType::U8, &[at.len() as u64])?;
    for to in calling.others() {
        calling.send_tensor(to, result.clone()).await?;
    }
    let results = receive(calling, &result, |rank| parts[rank].len()).await?;
    for (at, result) in parts.iter().zip(&results) {
        replace(bytes.get_mut(at.clone()).unwrap_or_default(), result.bytes());
    }
    Ok(())
}

/// The tensors of all ranks, of which `own` is this rank's and the others' have `length` bytes.
async fn receive(
    calling: &Calling,
    own: &Tensor,
    length: impl Fn(usize) -> usize,
) -> Result<Vec<Tensor>, GroupError> {
    let received = (0..calling.size()).map(|rank| {
        let length = length(rank);
        async move {
            if rank == calling.rank() {
                return Ok(own.clone());
            }
            let tensor = calling.receive_tensor(rank).await?;
            match tensor.bytes().len() == length {
                true => Ok(tensor),
                false => Err(calling.misbehaved(rank, "a message has the length that the call gives it")),
            }
        }
    });
    try_join_all(received).await
}
