//! Broadcasts: one rank's tensor for all.

use tensorwire_rendezvous::Tensor;

use crate::{
    call::{Call, CallKind},
    collectives::collective::Collective,
    error::GroupError,
    group::{
        Group,
        calling::{Calling, Ranks},
    },
    schedule::{self, Branch},
};

impl Group {
    /// Gives all ranks the tensor of `root`, which alone passes one. On one host the others get views of the root's memory,
    /// without a copy. The tensor travels along a binomial tree: at most ⌈log₂ size⌉ transfers, one after the other.
    ///
    /// ```no_run
    /// # async fn example(group: tensorwire::collective::Group, weights: tensorwire::Tensor)
    /// # -> Result<(), tensorwire::collective::GroupError> {
    /// let weights = group.broadcast(0, (group.rank() == 0).then_some(weights)).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Awaiting it returns [`GroupError::Argument`] if there is no such root, the root passes no tensor, or another rank passes
    /// one; other [`GroupError`]s.
    ///
    /// # Cancel safety
    /// Dropping it ends the group.
    pub fn broadcast(&self, root: usize, tensor: Option<Tensor>) -> Collective<Tensor> {
        let mut calling = self.call(|number| Call::rooted(number, CallKind::Broadcast, root));
        calling.require(check_giver(self, root, tensor.is_some()));
        Collective::new(calling, peers, move |calling| Box::pin(broadcast(calling, tensor)))
    }
}

async fn broadcast(calling: &Calling, tensor: Option<Tensor>) -> Result<Tensor, GroupError> {
    let branch = branch(calling);
    let tensor = match (tensor, branch.parent) {
        (None, Some(parent)) => calling.receive_tensor(parent).await?,
        (tensor, _) => tensor.ok_or_else(|| calling.misbehaved(calling.rank(), "a root has a tensor"))?,
    };
    for child in branch.children {
        calling.send_tensor(child, tensor.clone()).await?;
    }
    Ok(tensor)
}

fn peers(calling: &Calling) -> Ranks {
    let branch = branch(calling);
    branch.parent.into_iter().chain(branch.children).collect()
}

fn branch(calling: &Calling) -> Branch {
    schedule::branch(calling.rank(), calling.size(), calling.root())
}

/// Checks that there is such a root.
pub(super) fn check_root(group: &Group, root: usize) -> Result<(), GroupError> {
    let size = group.size();
    if root < size { Ok(()) } else { Err(GroupError::no_such_rank("root", root, size)) }
}

/// Checks that the root passes a value, and no other rank does.
pub(super) fn check_giver(group: &Group, root: usize, gives: bool) -> Result<(), GroupError> {
    check_root(group, root)?;
    let (value, remedy) = match (group.rank() == root, gives) {
        (true, false) => ("none", "this rank is the root: pass the value".to_owned()),
        (false, true) => ("some", format!("only rank {root} passes the value")),
        _ => return Ok(()),
    };
    Err(GroupError::Argument { field: "value", value: value.to_owned(), remedy })
}
