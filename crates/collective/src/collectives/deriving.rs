//! Groups of some or all ranks of a group. They need no store, because all members are known.

use std::sync::Arc;

use crate::{
    call::{Call, CallKind, hash},
    collectives::collective::Collective,
    error::GroupError,
    group::{Group, GroupState, barrier::meet_all, calling::Calling, check_name},
};

impl Group {
    /// Makes another group of the same ranks, with independent calls and failures. It uses no store, and the same connections.
    /// Takes the messages of a [`barrier`](Self::barrier). Any number of groups may have one name.
    ///
    /// ```no_run
    /// # async fn example(group: tensorwire::collective::Group) -> Result<(), tensorwire::collective::GroupError> {
    /// // Short calls of one group do not wait for a long call of the other.
    /// let short = group.derive("short").await?;
    /// short.barrier().await?;
    /// short.close().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Awaiting it returns [`GroupError::Argument`] for an invalid name; [`GroupError::Mismatch`] if ranks give different names;
    /// other [`GroupError`]s.
    ///
    /// # Cancel safety
    /// Dropping it ends this group.
    pub fn derive(&self, name: &str) -> Collective<Group> {
        let derived = Derived { name: name.to_owned(), ranks: (0..self.size()).collect() };
        let (mut calling, group) = (self.call(|number| derived.call(number)), self.state.clone());
        calling.require(derived.check(self));
        Collective::meeting_all(calling, move |calling| {
            Box::pin(async move { derived.make(calling, &group, calling.rank()).await })
        })
    }

    /// As [`derive`](Self::derive), with some of the ranks. `ranks` are their numbers in this group, in the order of their new
    /// numbers. All ranks of this group call it with the same arguments. `None` for a rank that is not among them.
    ///
    /// # Errors
    /// As [`derive`](Self::derive), and [`GroupError::Argument`] if `ranks` is empty, repeats a rank or has one that does not
    /// exist.
    ///
    /// # Cancel safety
    /// Dropping it ends this group.
    pub fn subgroup(&self, name: &str, ranks: &[usize]) -> Collective<Option<Group>> {
        let derived = Derived { name: name.to_owned(), ranks: ranks.to_vec() };
        let (mut calling, group) = (self.call(|number| derived.call(number)), self.state.clone());
        calling.require(derived.check(self));
        Collective::meeting_all(calling, move |calling| {
            Box::pin(async move {
                match derived.ranks.iter().position(|rank| *rank == calling.rank()) {
                    Some(rank) => derived.make(calling, &group, rank).await.map(Some),
                    None => meet_all(calling).await.map(|()| None),
                }
            })
        })
    }
}

/// The arguments of a derivation, the same on all ranks.
struct Derived {
    name: String,
    ranks: Vec<usize>,
}

impl Derived {
    fn call(&self, number: u64) -> Call {
        let ranks = self.ranks.iter().flat_map(|rank| (*rank as u64).to_le_bytes());
        let parts = hash(self.name.bytes().chain([b'\n']).chain(ranks)) as u32;
        Call { parts, ..Call::plain(number, CallKind::Derive) }
    }

    fn check(&self, group: &Group) -> Result<(), GroupError> {
        let Self { name, ranks } = self;
        check_name(name)?;
        if let Some(rank) = ranks.iter().find(|rank| **rank >= group.size()) {
            return Err(GroupError::no_such_rank("ranks", *rank, group.size()));
        }
        let is_doubled = |at: usize| ranks.iter().take(at).any(|rank| Some(rank) == ranks.get(at));
        if !ranks.is_empty() && !(0..ranks.len()).any(is_doubled) {
            return Ok(());
        }
        let remedy = "give at least one rank, and none twice".to_owned();
        Err(GroupError::Argument { field: "ranks", value: format!("{ranks:?}"), remedy })
    }

    /// The derived group, in which this rank has number `rank`. Made before the barrier, after which other ranks may use the
    /// group at once.
    async fn make(&self, calling: &Calling, group: &GroupState, rank: usize) -> Result<Group, GroupError> {
        let state = group.derived(&self.name, calling.call.number, &self.ranks, rank)?;
        meet_all(calling).await?;
        state.all_have_joined();
        Ok(Group { state: Arc::new(state) })
    }
}
