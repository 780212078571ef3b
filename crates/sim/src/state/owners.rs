//! S1: who owns every byte of every pool, over real memory.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use tensorwire_memory::{BlockId, GrantId};

use crate::{
    Violation,
    ids::{BlockNumber, GrantNumber, NodeId},
};

/// The owner of an allocation. Bytes outside all allocations belong to their pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// The process.
    User,
    /// A peer may write it.
    Granted(GrantNumber),
    /// No owner, until the process ends: it is leaked.
    Leaked,
}

#[derive(Debug)]
struct Owned {
    end: usize,
    node: NodeId,
    owner: Owner,
    /// Writes posted from it that have not completed.
    posted: u32,
}

/// The grant in force when a write was posted. The write may touch only the bytes that were granted then: a later grant of
/// the same bytes is for another write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PostedUnder {
    /// Not checked (unobserved memory, hostile peers).
    Unchecked,
    /// Nothing was granted there.
    Nothing,
    /// This grant.
    Grant(GrantNumber),
}

impl PostedUnder {
    fn allows(self, grant: GrantNumber) -> bool {
        match self {
            Self::Unchecked => true,
            Self::Nothing => false,
            Self::Grant(posted) => posted == grant,
        }
    }
}

/// The map. Every change comes from a [`MemoryObserver`](tensorwire_memory::MemoryObserver), every check from the fabric.
#[derive(Debug, Default)]
pub(crate) struct Owners {
    blocks: BTreeMap<BlockId, BlockNumber>,
    grants: BTreeMap<GrantId, GrantNumber>,
    allocations: BTreeMap<(BlockNumber, usize), Owned>,
    pub(crate) dead: BTreeSet<NodeId>,
    /// Leaks of living nodes.
    pub(crate) leaks: u64,
}

pub(crate) type Checked<T> = Result<T, Violation>;

fn broken<T>(text: String) -> Checked<T> {
    Err(Violation::Memory(text))
}

impl Owners {
    /// The number of a block whose pool is observed.
    pub(crate) fn observed(&self, block: BlockId) -> Option<BlockNumber> {
        self.blocks.get(&block).copied()
    }

    pub(crate) fn block(&mut self, block: BlockId) -> BlockNumber {
        let next = BlockNumber(self.blocks.len() as u32);
        *self.blocks.entry(block).or_insert(next)
    }

    pub(crate) fn grant(&mut self, grant: GrantId) -> GrantNumber {
        let next = GrantNumber(self.grants.len() as u32);
        *self.grants.entry(grant).or_insert(next)
    }

    /// Stops checking memory of `node`: its process is gone.
    pub(crate) fn forget_node(&mut self, node: NodeId) {
        self.dead.insert(node);
        self.allocations.retain(|_, owned| owned.node != node);
    }

    fn covering(&self, block: BlockNumber, range: &Range<usize>) -> Option<&Owned> {
        let (_, owned) = self.allocations.range((block, 0)..=(block, range.start)).next_back()?;
        (range.end <= owned.end).then_some(owned)
    }

    fn exact(&mut self, what: &str, block: BlockNumber, range: &Range<usize>) -> Checked<&mut Owned> {
        match self.allocations.get_mut(&(block, range.start)) {
            Some(owned) if owned.end == range.end => Ok(owned),
            _ => broken(format!("{what} of {block} {range:?}, which is no allocation")),
        }
    }

    pub(crate) fn allocated(
        &mut self,
        node: NodeId,
        block: BlockNumber,
        range: &Range<usize>,
    ) -> Checked<()> {
        let before = self.allocations.range((block, 0)..(block, range.end)).next_back();
        if let Some((&(_, start), owned)) = before
            && owned.end > range.start
        {
            return broken(format!(
                "allocation of {block} {range:?} overlaps {start}..{}, which is {:?}",
                owned.end, owned.owner
            ));
        }
        let owned = Owned { end: range.end, node, owner: Owner::User, posted: 0 };
        self.allocations.insert((block, range.start), owned);
        Ok(())
    }

    pub(crate) fn freed(&mut self, block: BlockNumber, range: &Range<usize>) -> Checked<()> {
        let owned = self.exact("freeing", block, range)?;
        if owned.owner != Owner::User || owned.posted > 0 {
            let (owner, posted) = (owned.owner, owned.posted);
            return broken(format!(
                "{block} {range:?} went back to its pool while it is {owner:?} and source of {posted} posted \
                 writes"
            ));
        }
        self.allocations.remove(&(block, range.start));
        Ok(())
    }

    pub(crate) fn granted(
        &mut self,
        block: BlockNumber,
        range: &Range<usize>,
        grant: GrantNumber,
    ) -> Checked<()> {
        let owned = self.exact("granting", block, range)?;
        if owned.owner != Owner::User || owned.posted > 0 {
            let (owner, posted) = (owned.owner, owned.posted);
            return broken(format!(
                "{block} {range:?} was granted while {owner:?} and posted {posted} times"
            ));
        }
        owned.owner = Owner::Granted(grant);
        Ok(())
    }

    pub(crate) fn grant_ended(
        &mut self,
        block: BlockNumber,
        range: &Range<usize>,
        grant: GrantNumber,
        leaked: bool,
    ) -> Checked<()> {
        let owned = self.exact("ending a grant", block, range)?;
        if owned.owner != Owner::Granted(grant) {
            let owner = owned.owner;
            return broken(format!("{grant} of {block} {range:?} ended, but it is {owner:?}"));
        }
        owned.owner = if leaked { Owner::Leaked } else { Owner::User };
        self.leaks += u64::from(leaked);
        Ok(())
    }

    /// Bytes of `node` that peers may write.
    pub(crate) fn granted_bytes(&self, node: NodeId) -> usize {
        let lent = |owned: &&Owned| owned.node == node && matches!(owned.owner, Owner::Granted(_));
        let lent = self.allocations.iter().filter(|(_, owned)| lent(owned));
        lent.map(|((_, start), owned)| owned.end - start).sum()
    }

    /// The grant under which a write of `range` is posted now.
    pub(crate) fn posted_under(&self, block: BlockNumber, range: &Range<usize>) -> PostedUnder {
        match self.covering(block, range) {
            Some(Owned { owner: Owner::Granted(grant), .. }) => PostedUnder::Grant(*grant),
            _ => PostedUnder::Nothing,
        }
    }

    /// Counts a posted write that reads `range`.
    pub(crate) fn post(&mut self, block: BlockNumber, range: &Range<usize>) -> Checked<()> {
        self.change_posted(block, range, "post", |posted| posted.checked_add(1))
    }

    /// The write has completed.
    pub(crate) fn unpost(&mut self, block: BlockNumber, range: &Range<usize>) -> Checked<()> {
        self.change_posted(block, range, "completion", |posted| posted.checked_sub(1))
    }

    fn change_posted(
        &mut self,
        block: BlockNumber,
        range: &Range<usize>,
        what: &str,
        change: impl Fn(u32) -> Option<u32>,
    ) -> Checked<()> {
        let found = self.allocations.range_mut((block, 0)..=(block, range.start)).next_back();
        if let Some((_, owned)) = found
            && range.end <= owned.end
            && owned.owner == Owner::User
            && let Some(posted) = change(owned.posted)
        {
            owned.posted = posted;
            return Ok(());
        }
        broken(format!("{what} of a write from {block} {range:?}, which is not the user's"))
    }

    /// Checks that the fabric may read `range` for a posted write.
    pub(crate) fn check_read(&self, block: BlockNumber, range: &Range<usize>) -> Checked<()> {
        match self.covering(block, range) {
            Some(Owned { owner: Owner::User, posted: 1.., .. }) => Ok(()),
            other => broken(format!("the fabric reads {block} {range:?}, which is {}", describe(other))),
        }
    }

    /// Checks that a peer may read `range`, which the user has exposed.
    pub(crate) fn check_exposed(&self, block: BlockNumber, range: &Range<usize>) -> Checked<()> {
        match self.covering(block, range) {
            Some(Owned { owner: Owner::User, .. }) => Ok(()),
            other => broken(format!("a peer reads {block} {range:?}, which is {}", describe(other))),
        }
    }

    /// Checks that a peer's write posted under `posted_under` may touch `range`.
    pub(crate) fn check_write(
        &self,
        block: BlockNumber,
        range: &Range<usize>,
        posted_under: PostedUnder,
    ) -> Checked<()> {
        match self.covering(block, range) {
            Some(Owned { owner: Owner::Granted(grant), .. }) if posted_under.allows(*grant) => Ok(()),
            other => broken(format!(
                "a peer's write, posted under {posted_under:?}, lands in {block} {range:?}, which is {}",
                describe(other)
            )),
        }
    }
}

fn describe(owned: Option<&Owned>) -> String {
    match owned {
        None => "the pool's, or not of one owner".into(),
        Some(owned) => format!("{:?} of {} with {} posted", owned.owner, owned.node, owned.posted),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: BlockNumber = BlockNumber(0);
    const NODE: NodeId = NodeId(1);
    const GRANT: GrantNumber = GrantNumber(7);

    /// One allocation at 64..164.
    fn owners() -> Owners {
        let mut owners = Owners::default();
        owners.allocated(NODE, BLOCK, &(64..164)).unwrap();
        owners
    }

    fn lent() -> Owners {
        let mut owners = owners();
        owners.granted(BLOCK, &(64..164), GRANT).unwrap();
        owners
    }

    #[test]
    fn s1_memory_that_is_out_cannot_be_handed_out_again() {
        for range in [64..164, 0..65, 163..200, 100..110, 0..1000] {
            assert!(owners().allocated(NODE, BLOCK, &range).is_err(), "{range:?}");
        }
        for range in [0..64, 164..200] {
            assert_eq!(owners().allocated(NODE, BLOCK, &range), Ok(()), "{range:?}");
        }
        assert_eq!(owners().allocated(NODE, BlockNumber(1), &(64..164)), Ok(()));
    }

    #[test]
    fn s1_only_the_users_own_memory_goes_back_and_only_whole() {
        assert_eq!(owners().freed(BLOCK, &(64..164)), Ok(()));
        assert!(owners().freed(BLOCK, &(64..163)).is_err());
        assert!(owners().freed(BLOCK, &(0..64)).is_err());
        assert!(lent().freed(BLOCK, &(64..164)).is_err(), "lent memory went back");
        let mut owners = owners();
        owners.post(BLOCK, &(70..80)).unwrap();
        assert!(owners.freed(BLOCK, &(64..164)).is_err(), "a posted source went back");
    }

    #[test]
    fn s1_a_source_is_read_while_it_is_posted_and_not_otherwise() {
        let mut owners = owners();
        assert!(owners.check_read(BLOCK, &(64..164)).is_err());
        owners.post(BLOCK, &(64..164)).unwrap();
        owners.post(BLOCK, &(64..100)).unwrap();
        assert_eq!(owners.check_read(BLOCK, &(100..164)), Ok(()));
        assert!(owners.check_read(BLOCK, &(100..165)).is_err());
        owners.unpost(BLOCK, &(64..164)).unwrap();
        owners.unpost(BLOCK, &(64..100)).unwrap();
        assert!(owners.unpost(BLOCK, &(64..100)).is_err(), "completed more often than posted");
        assert!(owners.check_read(BLOCK, &(64..164)).is_err());
        assert!(lent().post(BLOCK, &(64..164)).is_err(), "lent memory was posted");
    }

    #[test]
    fn s1_a_write_lands_in_the_grant_it_was_posted_under_and_nowhere_else() {
        let owners = lent();
        assert_eq!(owners.posted_under(BLOCK, &(64..164)), PostedUnder::Grant(GRANT));
        assert_eq!(owners.posted_under(BLOCK, &(64..165)), PostedUnder::Nothing);
        let check = |range, under| owners.check_write(BLOCK, &range, under);
        assert_eq!(check(64..164, PostedUnder::Grant(GRANT)), Ok(()));
        assert_eq!(check(100..101, PostedUnder::Unchecked), Ok(()));
        assert!(check(64..164, PostedUnder::Grant(GrantNumber(8))).is_err());
        assert!(check(64..164, PostedUnder::Nothing).is_err());
        assert!(check(63..64, PostedUnder::Unchecked).is_err());
        assert!(check(163..165, PostedUnder::Unchecked).is_err());
    }

    #[test]
    fn s1_a_grant_ends_once_and_what_leaks_stays_out_for_ever() {
        let mut owners = lent();
        assert!(owners.granted(BLOCK, &(64..164), GRANT).is_err());
        assert!(owners.grant_ended(BLOCK, &(64..164), GrantNumber(8), false).is_err());
        owners.grant_ended(BLOCK, &(64..164), GRANT, false).unwrap();
        assert!(owners.grant_ended(BLOCK, &(64..164), GRANT, false).is_err());
        owners.freed(BLOCK, &(64..164)).unwrap();

        let mut owners = lent();
        owners.grant_ended(BLOCK, &(64..164), GRANT, true).unwrap();
        assert_eq!(owners.leaks, 1);
        assert!(owners.freed(BLOCK, &(64..164)).is_err());
        assert!(owners.allocated(NODE, BLOCK, &(64..164)).is_err());
        assert!(owners.check_write(BLOCK, &(64..164), PostedUnder::Unchecked).is_err());
    }

    #[test]
    fn a_dead_node_owns_nothing() {
        let mut owners = lent();
        owners.forget_node(NODE);
        assert_eq!(owners.allocated(NodeId(2), BLOCK, &(64..164)), Ok(()));
    }
}
