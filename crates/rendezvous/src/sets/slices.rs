//! Slices of the tensors of a peer's set.

use std::{ops::Range, pin::pin};

use tensorwire_memory::BufMut;
use tensorwire_protocol::{Code, Metadata, ReceiveOptions, Scope, SetContent, Status, Wanted, slice::Slice};

use crate::{
    error::WorkerError,
    sets::fetching::{Link, Move, NotMoved, PeerSet},
    values::{
        cut::Cut,
        published::check_published,
        sets::manifest::{FIRST_TENSOR, Manifest, ManifestEntry},
        tensor::Tensor,
    },
    worker::fetch::slice::{key, sliced, unfit},
};

impl PeerSet {
    /// Fetches a slice of the tensor called `name`, of the newest version. Returns the number of that version, and a tensor that consists
    /// of the elements in `ranges`: one range for each dimension.
    ///
    /// Between hosts only the slice is moved, with the names and shapes of the set. On one host the slice shares the peer's memory if it
    /// is one run of bytes, such as whole rows; otherwise it is copied out of that memory. The methods
    /// [`timeout`](Self::timeout) and [`sharing`](Self::sharing) apply.
    ///
    /// ```
    /// use tensorwire::{Tensor, Worker};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tensorwire::WorkerError> {
    /// # let trainer = Worker::builder("trainer").start().await?;
    /// # let weight = Tensor::from_values(trainer.pool(), &[2, 3], &[1u8, 2, 3, 4, 5, 6])?;
    /// # trainer.set("policy").commit(1, [("weight", weight)]).await?;
    /// # let server = Worker::client().start().await?;
    /// # let peer = server.peer_at(trainer.address()).await?;
    /// // The last two of three columns.
    /// let (version, columns) = peer.set("policy").fetch_slice("weight", &[0..2, 1..3]).await?;
    /// assert_eq!((version, columns.values::<u8>()?), (1, vec![2, 3, 5, 6]));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Memory
    /// A slice that is more than one run of bytes takes memory of its own: on one host of this worker's receive pool, otherwise of the
    /// peer's [`pool`](crate::Worker::pool) until it is sent, and it waits for that.
    ///
    /// # Errors
    /// [`WorkerError::Config`] with the field `ranges` if the tensor has no such slice, or name and ranges together are longer than
    /// 1,024 bytes; [`WorkerError::Local`] with NOT_FOUND if the version has no tensor called `name`, and with RESOURCE_EXHAUSTED if
    /// there is no memory; otherwise as [`fetch`](Self::fetch).
    ///
    /// # Cancel safety
    /// Cancel-safe: nothing is lost by dropping the future.
    pub async fn fetch_slice(&self, name: &str, ranges: &[Range<u64>]) -> Result<(u64, Tensor), WorkerError> {
        check_published(&self.name)?;
        let slice = sliced(ranges)?;
        key(&self.name, &slice)?;
        let fetched = async {
            let mut is_repeated = false;
            loop {
                tokio::task::coop::consume_budget().await;
                match self.slice_once(name, &slice).await {
                    Ok(fetched) => return Ok(fetched),
                    Err(not_moved) => not_moved.or_repeat(&mut is_repeated)?,
                }
            }
        };
        let what = || format!("fetching {slice} of `{name}` of the set {}", self.transfer());
        let hint = "does the peer run, and does it commit this set?";
        self.peer.worker.within(self.limit, what, hint, pin!(fetched)).await
    }

    async fn slice_once(&self, name: &str, slice: &Slice) -> Result<(u64, Tensor), NotMoved> {
        let link = self.link().await?;
        let head = self.head(&link, Wanted::Now).await?;
        let newest = head.newest;
        let (manifest, _) = Move::new(self, &link).manifest((&head, &newest), None).await?;
        let found = entry(&manifest, name);
        let (number, entry) = found.ok_or_else(|| self.has_no(name, newest.version()))?;
        slice.metadata(&entry.metadata).map_err(|invalid| unfit(slice, &invalid))?;
        let content = SetContent { edition: newest.edition(), number, is_last: true };
        let made = if link.lends(self.sharing) {
            let whole = self.content(&link, (content, entry.metadata.clone()), self.sharing.into()).await?;
            let cut = Cut::new(&whole, slice).map_err(|invalid| unfit(slice, &invalid))?;
            cut.made(self.peer.worker.receive_pool()).await.map_err(WorkerError::from)?
        } else {
            self.part(&link, (content, &entry.metadata), slice).await?
        };
        Ok((newest.version(), made))
    }

    /// Receives a slice of a content of a version, which has this metadata.
    pub(super) async fn part(
        &self,
        link: &Link,
        (content, metadata): (SetContent, &Metadata),
        slice: &Slice,
    ) -> Result<Tensor, NotMoved> {
        let (part, scope, metadata) = self.request((content, metadata), slice)?;
        let received = part.receive(link, scope, metadata, &ReceiveOptions::default()).await;
        received.map_err(NotMoved::of_content)
    }

    /// As [`part`](Self::part), into `place`, which is as long as the slice.
    pub(super) async fn part_into(
        &self,
        link: &Link,
        (content, metadata): (SetContent, &Metadata),
        slice: &Slice,
        place: BufMut,
    ) -> Result<(), NotMoved> {
        let (part, scope, metadata) = self.request((content, metadata), slice)?;
        // This worker's own tensors are lent.
        let Link::Connected(connection) = link else { return Err(WorkerError::handed_out().into()) };
        let received = connection.receive_expected_into((&scope, &part.transfer()), metadata, place).await;
        received.map(drop).map_err(NotMoved::of_content)
    }

    /// The request for a slice of a content: this set with the key of the slice as its name, the scope, and the metadata of what comes.
    fn request(
        &self,
        (content, metadata): (SetContent, &Metadata),
        slice: &Slice,
    ) -> Result<(Self, Scope, Metadata), WorkerError> {
        if *slice == Slice::whole(metadata.shape.dimensions()) {
            // Some elements can be moved whole only.
            return Ok((self.clone(), Scope::SetContent(content), metadata.clone()));
        }
        let metadata = slice.metadata(metadata).map_err(|invalid| unfit(slice, &invalid))?;
        let part = Self { name: key(&self.name, slice)?.into(), ..self.clone() };
        Ok((part, Scope::SetSlice(content), metadata))
    }

    fn has_no(&self, name: &str, version: u64) -> WorkerError {
        let message = format!("version {version} has no tensor `{name}`: fetch the set to see its names");
        WorkerError::Local { transfer: self.transfer().name(), status: Status::new(Code::NotFound, message) }
    }
}

/// The number and the entry of the tensor called `name`.
pub(super) fn entry<'a>(manifest: &'a Manifest, name: &str) -> Option<(u32, &'a ManifestEntry)> {
    let place = manifest.place(name)?;
    Some((FIRST_TENSOR + place as u32, manifest.entries.get(place)?))
}
