//! Broadcasts: a value of one rank for all.

use tensorwire_rendezvous::Tensor;

use crate::{
    call::{Call, CallKind},
    collectives::collective::Collective,
    error::GroupError,
    group::{Group, calling::Calling},
};

impl Group {
    /// Gives all ranks the tensor of `root`, which alone gives one. On one host the others get views of the root's memory, without
    /// a copy. The tensor travels along a binomial tree: at most ⌈log₂ size⌉ transfers, one after the other.
    ///
    /// ```no_run
    /// # async fn example(group: tensorwire_collective::Group, weights: tensorwire_rendezvous::Tensor)
    /// # -> Result<(), tensorwire_collective::GroupError> {
    /// let weights = group.broadcast(0, (group.rank() == 0).then_some(weights)).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Awaiting it returns [`GroupError::Argument`] if there is no such root, or the root gives no tensor, or another rank gives one;
    /// other [`GroupError`]s.
    ///
    /// # Cancel safety
    /// Dropping it ends the group.
    pub fn broadcast(&self, root: usize, tensor: Option<Tensor>) -> Collective<Tensor> {
        let calling = self.call(|number| Call::rooted(number, CallKind::Broadcast, root));
        Collective::new(calling, move |calling| Box::pin(broadcast(calling, root, tensor)))
    }
}

async fn broadcast(calling: &Calling, root: usize, tensor: Option<Tensor>) -> Result<Tensor, GroupError> {
    check_giver(calling, root, tensor.is_some())?;
    let size = calling.size();
    // As if the root were rank 0.
    let rank = (calling.rank() + size - root) % size;
    let real = |rank: usize| (rank + root) % size;
    // A rank gets the tensor from the one whose number lacks its highest bit, and gives it to those that have one bit more.
    let highest = rank.checked_ilog2().map_or(0, |bit| 1 << bit);
    let tensor = match tensor {
        Some(tensor) => tensor,
        None => calling.receive_tensor(real(rank - highest)).await?,
    };
    let mut bit = if rank == 0 { 1 } else { 2 * highest };
    while rank + bit < size {
        calling.send_tensor(real(rank + bit), tensor.clone()).await?;
        bit *= 2;
    }
    Ok(tensor)
}

/// There is such a root.
pub(super) fn check_root(calling: &Calling, root: usize) -> Result<(), GroupError> {
    let size = calling.size();
    if root < size { Ok(()) } else { Err(GroupError::no_such_rank("root", root, size)) }
}

/// The root gives a value, and nobody else does.
pub(super) fn check_giver(calling: &Calling, root: usize, gives: bool) -> Result<(), GroupError> {
    check_root(calling, root)?;
    let (value, remedy) = match (calling.rank() == root, gives) {
        (true, false) => ("none", "this rank is the root: it gives the value".to_owned()),
        (false, true) => ("some", format!("rank {root} alone gives the value")),
        _ => return Ok(()),
    };
    Err(GroupError::Argument { field: "value", value: value.to_owned(), remedy })
}
