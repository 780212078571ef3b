//! Collectives of whole tensors. Each tensor goes from the rank that has it directly to those that need it, so every rank sends
//! and receives the fewest bytes possible. On one host the received tensors are views.

use futures::future::try_join_all;
use tensorwire_rendezvous::Tensor;

use crate::{
    call::{Call, CallKind},
    collectives::{
        broadcast::{check_giver, check_root},
        collective::Collective,
    },
    error::GroupError,
    group::{Group, calling::Calling},
};

impl Group {
    /// Gives all ranks the tensors of all ranks, in the order of the ranks. They may have different shapes and types. On one
    /// host, the tensors of the other ranks are views of their memory.
    ///
    /// # Errors
    /// Awaiting it returns a [`GroupError`].
    ///
    /// # Cancel safety
    /// Dropping it ends the group.
    pub fn all_gather(&self, tensor: Tensor) -> Collective<Vec<Tensor>> {
        let calling = self.call(|number| Call::plain(number, CallKind::AllGather));
        Collective::new(calling, move |calling| {
            Box::pin(async move {
                let own = calling.rank();
                for rank in calling.others() {
                    calling.send_tensor(rank, tensor.clone()).await?;
                }
                receive_all(calling, |rank| (rank == own).then(|| tensor.clone())).await
            })
        })
    }

    /// Gives `root` the tensors of all ranks, in the order of the ranks, and `None` to the others.
    ///
    /// # Errors
    /// Awaiting it returns a [`GroupError`].
    ///
    /// # Cancel safety
    /// Dropping it ends the group.
    pub fn gather(&self, root: usize, tensor: Tensor) -> Collective<Option<Vec<Tensor>>> {
        let calling = self.call(|number| Call::rooted(number, CallKind::Gather, root));
        Collective::new(calling, move |calling| {
            Box::pin(async move {
                check_root(calling, root)?;
                if calling.rank() != root {
                    calling.send_tensor(root, tensor).await?;
                    return Ok(None);
                }
                receive_all(calling, |rank| (rank == root).then(|| tensor.clone())).await.map(Some)
            })
        })
    }

    /// Gives each rank one tensor of `root`. The root passes one for each rank, in the order of the ranks; the others pass
    /// `None`.
    ///
    /// # Errors
    /// Awaiting it returns [`GroupError::Argument`] if the root passes another number of tensors, or another rank passes any;
    /// other [`GroupError`]s.
    ///
    /// # Cancel safety
    /// Dropping it ends the group.
    pub fn scatter(&self, root: usize, tensors: Option<Vec<Tensor>>) -> Collective<Tensor> {
        let calling = self.call(|number| Call::rooted(number, CallKind::Scatter, root));
        Collective::new(calling, move |calling| {
            Box::pin(async move {
                check_giver(calling, root, tensors.is_some())?;
                let Some(tensors) = tensors else { return calling.receive_tensor(root).await };
                let mut tensors = one_for_each(calling, tensors)?;
                for rank in calling.others() {
                    calling.send_tensor(rank, tensors[rank].clone()).await?;
                }
                Ok(tensors.swap_remove(root))
            })
        })
    }

    /// Gives each rank one tensor of each rank. `tensors` has one for each rank, in the order of the ranks; the result has those
    /// that the ranks passed for this one. They may have different shapes and types.
    ///
    /// # Errors
    /// Awaiting it returns [`GroupError::Argument`] if there are not as many tensors as ranks; other [`GroupError`]s.
    ///
    /// # Cancel safety
    /// Dropping it ends the group.
    pub fn all_to_all(&self, tensors: Vec<Tensor>) -> Collective<Vec<Tensor>> {
        let calling = self.call(|number| Call::plain(number, CallKind::AllToAll));
        Collective::new(calling, move |calling| {
            Box::pin(async move {
                let tensors = one_for_each(calling, tensors)?;
                let own = calling.rank();
                for rank in calling.others() {
                    calling.send_tensor(rank, tensors[rank].clone()).await?;
                }
                receive_all(calling, |rank| (rank == own).then(|| tensors[own].clone())).await
            })
        })
    }
}

/// The tensors of all ranks: those that `known` returns, and the others received.
async fn receive_all(
    calling: &Calling,
    known: impl Fn(usize) -> Option<Tensor>,
) -> Result<Vec<Tensor>, GroupError> {
    try_join_all((0..calling.size()).map(|rank| {
        let known = known(rank);
        async move {
            match known {
                Some(tensor) => Ok(tensor),
                None => calling.receive_tensor(rank).await,
            }
        }
    }))
    .await
}

fn one_for_each(calling: &Calling, tensors: Vec<Tensor>) -> Result<Vec<Tensor>, GroupError> {
    if tensors.len() == calling.size() {
        return Ok(tensors);
    }
    Err(GroupError::Argument {
        field: "tensors",
        value: tensors.len().to_string(),
        remedy: format!("give one for each of the {} ranks", calling.size()),
    })
}
