//! Borrows a whole version of a set on one host, under one lease.

use std::task::Poll;

use tensorwire_memory::{Buf, Place};
use tensorwire_protocol::{Metadata, SetContent, Sharing};

use crate::{
    peer_memory::import::yield_once,
    sets::fetching::{Link, Move, NotMoved},
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
    /// The tensors of the version of `edition` as views of the publisher's memory. `None` if it does not lend them, for instance because
    /// this worker has as many views as it may have.
    pub(super) async fn borrowed(
        &mut self,
        edition: u64,
        manifest: &Manifest,
    ) -> Result<Option<Vec<Tensor>>, NotMoved> {
        let content = SetContent { edition, number: LOAN, is_last: true };
        let expected = bytes_of(loan::table_bytes(manifest.entries.len()) as u64);
        let table = self.set.content(self.link, (content, expected), Sharing::View.into()).await?;
        let mut views = Vec::with_capacity(manifest.entries.len());
        for (place, entry) in loan::places(table.bytes(), &manifest.entries).iter().zip(&manifest.entries) {
            tokio::task::coop::consume_budget().await;
            views.push(view(table.buf(), place.as_ref(), &entry.metadata).await);
        }
        if views.iter().all(Option::is_none) {
            return Ok(None);
        }
        let mut others = self.contents(others(edition, &manifest.entries, &views)).await?.into_iter();
        Ok(views.into_iter().map(|view| view.or_else(|| others.next())).collect())
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
