//! A response whose content consists of several pieces of the sender's memory, which go to places in the receiver's: pages, or the tensors
//! of a list.

use std::{future::Future, pin::pin};

use super::{Ended, Response, TakenValue, length_of};
use crate::{Channel, ChannelError, Code, Destination, Metadata, Scope, Source, Status, TensorRequest, Want};

impl<C: Channel> Response<C> {
    /// Writes the pages when it is their turn, and waits until they may be reused.
    pub(super) async fn write_pages<S: Source<Bytes = C::Bytes>>(
        &mut self,
        request: &TensorRequest,
        metadata: &Metadata,
        pages: Vec<(C::Bytes, u64)>,
        taken: &mut TakenValue<S>,
    ) {
        let ((which, destination), mut pages) = match self.prepare(request, metadata, pages).await {
            Ok(Ok(prepared)) => prepared,
            Ok(Err(status)) => {
                taken.dispose();
                return self.refuse(status).await;
            }
            Err(Ended) => return,
        };
        // The places of pages are not one after the other.
        if !matches!(request.scope, Scope::Pages(_)) {
            let channel = self.connection.channel();
            let pieces = &mut pages;
            let posted = self.posted_ahead(metadata.byte_length, |piece| {
                channel.write_pieces_ahead(pieces, destination, piece)
            });
            if posted.await.is_err() {
                return;
            }
        }
        let (connection, immediate) = (self.connection.clone(), self.index.immediate(which));
        let (mut pages, channel) = (Some(pages), connection.channel());
        self.post(metadata.byte_length, taken, || {
            channel.write_pages(pages.take().unwrap_or_default(), destination, immediate)
        })
        .await;
    }

    /// What `write` posts of a content of `length` bytes before its turn. `None` if the content is one piece.
    pub(super) async fn posted_ahead<T, Write: Future<Output = Result<T, ChannelError>>>(
        &self,
        length: u64,
        write: impl FnOnce(u32) -> Write,
    ) -> Result<Option<T>, Ended> {
        let piece = self.connection.agreed().piece_bytes;
        let Some(piece) = piece.filter(|piece| u64::from(*piece) < length) else { return Ok(None) };
        self.connection.lock().responses.begun(self.index);
        let written = self.unless_cancelled(pin!(write(piece))).await?;
        written.map(Some).map_err(|error| {
            self.connection.fail(&error.0);
            Ended
        })
    }

    /// Checks the pages, and makes them sendable. Returns the receiver's memory, too.
    async fn prepare(
        &self,
        request: &TensorRequest,
        metadata: &Metadata,
        mut pages: Vec<(C::Bytes, u64)>,
    ) -> Result<Result<(Room, Vec<(C::Bytes, u64)>), Status>, Ended> {
        let channel = self.connection.channel();
        let room = match request.scope {
            Scope::Pages(_) => self.room_for_pages(request, metadata),
            _ => self.room(request, metadata).await?,
        };
        let checked = match room {
            Ok(room) => {
                check_places(&pages, room.1).and_then(|()| channel.check_pages(&pages)).map(|()| room)
            }
            Err(status) => Err(status),
        };
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

    /// The receiver's memory, for a content of this metadata. It is asked for, unless the request has some. Requests for pages have, because
    /// the pages have places of their own there.
    async fn room(
        &self,
        request: &TensorRequest,
        metadata: &Metadata,
    ) -> Result<Result<Room, Status>, Ended> {
        let known = if self.connection.agreed().describes_first() { &[] } else { &*request.known };
        let which = known.iter().position(|known| known == metadata);
        if let (Some(which), Want::Write(Some(destination))) = (which, request.want) {
            Ok(Ok((which, destination)))
        } else {
            let destination = self.describe_and_wait(metadata, None).await?;
            let missing =
                || Status::new(Code::InvalidArgument, "the request names no memory for the content");
            Ok(destination.map(|destination| (0, destination)).ok_or_else(missing))
        }
    }

    /// The receiver's memory, for pages of this metadata.
    fn room_for_pages(&self, request: &TensorRequest, metadata: &Metadata) -> Result<Room, Status> {
        if self.connection.agreed().validation.is_on() {
            let message = "pages are not validated: connect without validation, or fetch a tensor instead";
            return Err(Status::new(Code::FailedPrecondition, message));
        }
        match request.want {
            Want::Write(Some(destination)) if *request.known == [metadata.clone()] => Ok((0, destination)),
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

/// Which of the known metadata the content has, and the memory for it.
type Room = (usize, Destination);

/// Checks that each page lies in the receiver's memory. Whether it was granted, the fabric checks.
fn check_places<B: AsRef<[u8]>>(pages: &[(B, u64)], room: Destination) -> Result<(), Status> {
    let fits = |(bytes, place): &(B, u64)| {
        place.checked_add(length_of(Some(bytes))).is_some_and(|end| end <= room.capacity)
    };
    if pages.iter().all(fits) {
        return Ok(());
    }
    Err(Status::new(Code::InvalidArgument, "a page would lie outside of the receiver's memory"))
}
