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
    group::{
        Group,
        calling::{Calling, Ranks},
    },
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
        Collective::new(calling, all, move |calling| {
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
        let mut calling = self.call(|number| Call::rooted(number, CallKind::Gather, root));
        calling.require(check_root(self, root));
        Collective::new(calling, of_root, move |calling| {
            Box::pin(async move {
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
        let mut calling = self.call(|number| Call::rooted(number, CallKind::Scatter, root));
        calling.require(check_giver(self, root, tensors.is_some()));
        calling.require(tensors.as_ref().map_or(Ok(()), |tensors| check_one_for_each(self, tensors)));
        Collective::new(calling, of_root, move |calling| {
            Box::pin(async move {
                let Some(mut tensors) = tensors else { return calling.receive_tensor(root).await };
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
        let mut calling = self.call(|number| Call::plain(number, CallKind::AllToAll));
        calling.require(check_one_for_each(self, &tensors));
        Collective::new(calling, all, move |calling| {
            Box::pin(async move {
                let own = calling.rank();
                for rank in calling.others() {
                    calling.send_tensor(rank, tensors[rank].clone()).await?;
                }
                receive_all(calling, |rank| (rank == own).then(|| tensors[own].clone())).await
            })
        })
    }
}

fn all(calling: &Calling) -> Ranks {
    calling.others().collect()
}

/// The peers of a call whose messages go to or from the root.
fn of_root(calling: &Calling) -> Ranks {
    if calling.rank() == calling.root() { all(calling) } else { [calling.root()].into_iter().collect() }
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

fn check_one_for_each(group: &Group, tensors: &[Tensor]) -> Result<(), GroupError> {
    if tensors.len() == group.size() {
        return Ok(());
    }
    Err(GroupError::Argument {
        field: "tensors",
        value: tensors.len().to_string(),
        remedy: format!("give one for each of the {} ranks", group.size()),
    })
}
