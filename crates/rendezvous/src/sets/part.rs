//! [`Part`]: what one publisher has of a version of a sharded set.

use std::sync::{
    OnceLock,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use crate::{
    sets::{
        fetching::{Link, Move, NotMoved, PeerSet},
        plan::{Delta, Derivation},
    },
    values::{sets::manifest::Manifest, tensor::Tensor},
};

/// A version of one publisher.
pub(super) struct Part<'a> {
    pub(super) set: &'a PeerSet,
    pub(super) link: Link,
    pub(super) edition: u64,
    pub(super) manifest: Manifest,
    /// How its contents derive from those of the version that this worker has, if that is known.
    derivation: Option<Derivation>,
    /// Its tensors in the order of the manifest, as far as the publisher has lent them.
    lent: OnceLock<Vec<Option<Tensor>>>,
    /// Requests for its contents that are not made yet.
    unasked: AtomicUsize,
}

impl<'a> Part<'a> {
    pub(super) fn new(
        (set, link): (&'a PeerSet, Link),
        edition: u64,
        (manifest, derivation): (Manifest, Option<Derivation>),
    ) -> Self {
        let (lent, unasked) = (OnceLock::new(), AtomicUsize::default());
        Self { set, link, edition, manifest, derivation, lent, unasked }
    }

    /// Borrows its tensors, if the publisher lends them.
    pub(super) async fn borrow(&self) -> Result<(), NotMoved> {
        let lent = Move::new(self.set, &self.link).lent(self.edition, &self.manifest).await?;
        // Nobody else sets it.
        let _ = self.lent.set(lent);
        Ok(())
    }

    pub(super) fn lent(&self, name: &str) -> Option<&Tensor> {
        self.lent.get()?.get(self.manifest.place(name)?)?.as_ref()
    }

    /// The deltas that make a tensor of the one that this worker has, if there are any. What is lent needs none.
    pub(super) fn deltas(&self, name: &str) -> Option<&[Delta]> {
        let is_lent = matches!(self.link, Link::Own) || self.link.lends_versions();
        self.derivation.as_ref().filter(|_| !is_lent)?.deltas(self.manifest.place(name)?)
    }

    /// Whether the results share the memory of what is lent.
    pub(super) fn may_share(&self) -> bool {
        self.link.lends(self.set.sharing)
    }

    /// So many requests will be made.
    pub(super) fn count_requests(&self, more: usize) {
        self.unasked.fetch_add(more, Relaxed);
    }

    /// So many of the requests that were counted will not be made.
    pub(super) fn leave_out_requests(&self, fewer: usize) {
        self.unasked.fetch_sub(fewer, Relaxed);
    }

    /// Whether the request that is made now is the last one, at which the publisher stops holding the version. Requests arrive in the
    /// order in which they are made, and one that the publisher has taken holds the memory of its content until that is sent. But a
    /// request that waits for memory is made later: then the publisher holds the version until it is asked for another.
    pub(super) fn asks_last(&self) -> bool {
        self.unasked.fetch_sub(1, Relaxed) == 1 && self.set.peer.worker.receive_pool().stats().waiting == 0
    }
}
