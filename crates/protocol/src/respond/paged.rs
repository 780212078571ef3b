//! A response whose content consists of pages of the sender's memory, which go to pages of the receiver's.

use std::pin::pin;

use super::{Ended, Response, TakenValue, length_of};
use crate::{Channel, Code, Destination, Metadata, Source, Status, TensorRequest, Want};

impl<C: Channel> Response<C> {
    /// Writes the pages when it is their turn, and waits until they may be reused.
    pub(super) async fn write_pages<S: Source<Bytes = C::Bytes>>(
        &mut self,
        request: &TensorRequest,
        metadata: &Metadata,
        pages: Vec<(C::Bytes, u64)>,
        taken: &mut TakenValue<S>,
    ) {
        let (destination, pages) = match self.prepare(request, metadata, pages).await {
            Ok(Ok(prepared)) => prepared,
            Ok(Err(status)) => {
                taken.dispose();
                return self.refuse(status).await;
            }
            Err(Ended) => return,
        };
        let (connection, immediate) = (self.connection.clone(), self.index.immediate(0));
        let (mut pages, channel) = (Some(pages), connection.channel());
        self.post(metadata.byte_length, taken, || {
            channel.write_pages(pages.take().unwrap_or_default(), destination, immediate)
        })
        .await;
    }

    /// Checks the pages, and makes them sendable. Returns the receiver's memory, too.
    async fn prepare(
        &self,
        request: &TensorRequest,
        metadata: &Metadata,
        mut pages: Vec<(C::Bytes, u64)>,
    ) -> Result<Result<(Destination, Vec<(C::Bytes, u64)>), Status>, Ended> {
        let channel = self.connection.channel();
        let checked = self.room(request, metadata).and_then(|room| {
            check_places(&pages, room)?;
            channel.check_pages(&pages)?;
            Ok(room)
        });
        let room = match checked {
            Ok(room) => room,
            Err(status) => return Ok(Err(status)),
        };
        for (page, _) in &mut pages {
            match self.unless_cancelled(pin!(channel.stage(page.clone()))).await? {
                Ok(staged) => *page = staged,
                Err(status) => return Ok(Err(status)),
            }
        }
        Ok(Ok((room, pages)))
    }

    /// The receiver's memory, for a content of this metadata.
    fn room(&self, request: &TensorRequest, metadata: &Metadata) -> Result<Destination, Status> {
        if self.connection.agreed().validation.is_on() {
            let message = "pages are not validated: connect without validation, or fetch a tensor instead";
            return Err(Status::new(Code::FailedPrecondition, message));
        }
        match request.want {
            Want::Write(Some(destination)) if *request.known == [metadata.clone()] => Ok(destination),
            _ => {
                let message = format!(
                    "the pages have {} bytes, for which the request has no room",
                    metadata.byte_length
                );
                Err(Status::new(Code::InvalidArgument, message))
            }
        }
    }
}

/// Checks that each page lies in the receiver's memory. Whether it was granted, the fabric checks.
fn check_places<B: AsRef<[u8]>>(pages: &[(B, u64)], room: Destination) -> Result<(), Status> {
    let fits = |(bytes, place): &(B, u64)| {
        place.checked_add(length_of(Some(bytes))).is_some_and(|end| end <= room.capacity)
    };
    if pages.iter().all(fits) {
        return Ok(());
    }
    Err(Status::new(Code::InvalidArgument, "a page would lie outside of the receiver's arena"))
}
