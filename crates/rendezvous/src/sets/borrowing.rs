//! Borrows a whole version of a set on one host, under one lease.

use std::{pin::pin, task::Poll};

use futures::{TryFutureExt as _, future::try_join_all};
use tensorwire_memory::{
    Buf, Place, Pool,
    copy::{CopyReason, copy_of},
};
use tensorwire_protocol::{Metadata, SetContent, Sharing};

use crate::{
    error::WorkerError,
    peer_memory::import::{copied, yield_once},
    sets::{
        fetching::{Link, Move, NotMoved, Volume},
        plan::Way,
        tasks::{TensorWork, in_tasks},
    },
    values::{
        sets::{
            bytes_of, loan,
            manifest::{FIRST_TENSOR, LOAN, Manifest, ManifestEntry},
        },
        tensor::Tensor,
    },
};

impl Link {
    /// Whether the peer lends all tensors of a version at once. Contents that are validated come one by one.
    pub(super) fn lends_versions(&self) -> bool {
        matches!(self, Self::Connected(connection) if connection.may_view() && !connection.is_validated())
    }
}

impl Move<'_> {
    /// Views of the tensors of the version of `edition`, or `None` for each that the publisher does not lend, for instance because this
    /// worker has as many views as it may have. The publisher holds the version no longer than that, or until others of its contents are
    /// requested.
    pub(super) async fn lent(
        &self,
        edition: u64,
        manifest: &Manifest,
    ) -> Result<Vec<Option<Tensor>>, NotMoved> {
        if matches!(self.link, Link::Own) {
            return self.own(edition, manifest).await;
        }
        if !self.link.lends_versions() {
            return Ok(Vec::new());
        }
        let content = SetContent { edition, number: LOAN, is_last: true };
        let expected = bytes_of(loan::table_bytes(manifest.entries.len()) as u64);
        let table = self.set.content(self.link, (content, expected), Sharing::View.into()).await?;
        let mut views = Vec::with_capacity(manifest.entries.len());
        for (place, entry) in loan::places(table.bytes(), &manifest.entries).iter().zip(&manifest.entries) {
            tokio::task::coop::consume_budget().await;
            views.push(view(table.buf(), place.as_ref(), &entry.metadata).await);
        }
        Ok(views)
    }

    /// The tensors of a version of this worker.
    async fn own(&self, edition: u64, manifest: &Manifest) -> Result<Vec<Option<Tensor>>, NotMoved> {
        let all = vec![None; manifest.entries.len()];
        let contents = others(edition, &manifest.entries, &all).into_iter();
        let own =
            contents.map(|content| self.set.content(self.link, content, Sharing::View.into()).map_ok(Some));
        try_join_all(own).await
    }

    /// The tensors of the version of `edition`, as views as far as the publisher lends them. `None` if it lends none.
    pub(super) async fn borrowed(
        &mut self,
        edition: u64,
        manifest: &Manifest,
    ) -> Result<Option<Vec<Tensor>>, NotMoved> {
        let views = self.lent(edition, manifest).await?;
        if views.iter().all(Option::is_none) {
            return Ok(None);
        }
        let mut others = self.contents(others(edition, &manifest.entries, &views)).await?.into_iter();
        Ok(views.into_iter().map(|view| view.or_else(|| others.next())).collect())
    }

    /// Copies of what was borrowed, but for the tensors that this worker has.
    pub(super) async fn copied(
        &mut self,
        views: Vec<Tensor>,
        ways: Vec<Way>,
    ) -> Result<Vec<Tensor>, NotMoved> {
        let worker = &self.set.peer.worker;
        let is_missing = |way: &Way| !matches!(way, Way::Held(_));
        let missing = views.into_iter().zip(&ways).filter(|(_, way)| is_missing(way)).map(|(view, _)| view);
        let pool = worker.receive_pool();
        let copies = missing.map(|view| Copy { view, pool: pool.clone() }).collect();
        let copied = pin!(async {
            let copied = in_tasks(&**worker.node.runtime(), copies).await;
            let copied = copied.into_iter().map(|copy| copy.ok_or_else(WorkerError::handed_out)?);
            copied.collect::<Result<Vec<_>, _>>().map_err(NotMoved::from)
        });
        let copied = self.set.unless_starved(&[self.link], copied).await?;
        let volumes = copied.iter().map(|copy| Volume::of((self.set, self.link), copy));
        self.volume = volumes.fold(self.volume, Volume::and);
        let mut copied = copied.into_iter();
        let tensors = ways.into_iter().map(|way| match way {
            Way::Held(tensor) => Ok(tensor),
            _ => Ok(copied.next().ok_or_else(WorkerError::handed_out)?),
        });
        tensors.collect()
    }
}

/// A view that is copied.
struct Copy {
    view: Tensor,
    pool: Pool,
}

impl TensorWork for Copy {
    type Done = Result<Tensor, WorkerError>;

    const NAME: &'static str = "copies of tensors";

    fn bytes(&self) -> usize {
        self.view.bytes().len()
    }

    async fn work(self, all: usize) -> Result<Tensor, WorkerError> {
        if !self.view.buf().is_foreign() {
            // The publisher could not lend it, and has sent it.
            return Ok(self.view);
        }
        // The caches do not hold a long version until it is used.
        let copy = |into: &mut [u8], from: &[u8]| copy_of(all)(into, from, CopyReason::Catalogue);
        let bytes = copied(&self.pool, self.view.bytes(), copy).await?;
        Ok(Tensor::received(self.view.metadata().clone(), bytes, None))
    }
}

/// The contents that are not borrowed: those of memory that the publisher cannot lend.
fn others(edition: u64, entries: &[ManifestEntry], views: &[Option<Tensor>]) -> Vec<(SetContent, Metadata)> {
    let missing = entries.iter().zip(views).enumerate().filter(|(_, (_, view))| view.is_none());
    let contents = missing.map(|(at, (entry, _))| {
        let content = SetContent { edition, number: FIRST_TENSOR + at as u32, is_last: false };
        (content, entry.metadata.clone())
    });
    contents.collect()
}

/// A view of the tensor at `place`, which the peer names.
async fn view(table: &Buf, place: Option<&Place>, metadata: &Metadata) -> Option<Tensor> {
    if metadata.byte_length == 0 {
        return Some(Tensor::received(metadata.clone(), Buf::empty(), None));
    }
    let place = place?;
    loop {
        match table.attached_at(place) {
            Poll::Ready(bytes) => return Some(Tensor::received(metadata.clone(), bytes?, None)),
            Poll::Pending => yield_once().await,
        }
    }
}
