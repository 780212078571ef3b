//! Validation of contents, before they are returned to the caller.

use std::{future::poll_fn, sync::Arc, task::Poll};

use super::{Received, ReceivedGuard};
use crate::{
    Channel, Checksums, Connection, Damage, LentEnd, TransferError,
    requests::Check,
    validation::{Summing, decode_result},
};

/// The checksum that came with a content.
struct Sent {
    sum: u64,
    /// Whether the other fields that came with it match the content.
    fits: bool,
}

/// Moves a value out of the reach of a peer that is not trusted, and compares it with its checksum if it has one.
///
/// # Cancel safety
/// If the future is dropped, a value of a step goes to the next receive of its key, which validates it again.
pub(super) async fn validate<C: Channel>(
    connection: &Arc<Connection<C>>,
    received: Received<C::Lent>,
) -> Result<Received<C::Lent>, TransferError> {
    let mut received = set_apart(connection, received).await?;
    if received.check == Check::None {
        return Ok(received);
    }
    received.lent = received.lent.map(C::settle).transpose().map_err(TransferError::Local)?;
    let mut held = connection.hold(received);
    let found = held.sum().await;
    let Some(mut received) = held.take() else { return Err(TransferError::gone()) };
    let validation = connection.agreed().validation;
    let sent = sent::<C>(&received, validation);
    let matches = sent.fits && sent.sum == found;
    connection.lock().line.counters.count_checksum(matches);
    if matches {
        received.check = Check::None;
        received.checksums = Some(Arc::new(Checksums::known(validation, found)));
        return Ok(received);
    }
    if let Some(lent) = received.lent {
        connection.channel().take_back(lent, LentEnd::Content);
    }
    let damage = if sent.fits { Damage::Content } else { Damage::ResultSlot };
    Err(TransferError::Corrupted { validation, sent: sent.sum, received: found, damage })
}

/// Moves the value to memory where the peer can no longer change it.
async fn set_apart<C: Channel>(
    connection: &Arc<Connection<C>>,
    received: Received<C::Lent>,
) -> Result<Received<C::Lent>, TransferError> {
    if !is_exposed::<C>(&received) {
        return Ok(received);
    }
    let mut held = connection.hold(received);
    if let Some(Received { metadata, lent: Some(lent), .. }) = held.get_mut() {
        C::set_apart(lent, metadata.byte_length).await.map_err(TransferError::Local)?;
    }
    held.take().ok_or_else(TransferError::gone)
}

impl<L> Received<L> {
    /// Whether it needs no validation.
    pub(super) fn is_valid<C: Channel<Lent = L>>(&self) -> bool {
        self.check == Check::None && !is_exposed::<C>(self)
    }
}

/// Whether the peer may still write the content.
fn is_exposed<C: Channel>(received: &Received<C::Lent>) -> bool {
    received.lent.as_ref().is_some_and(C::is_exposed)
}

fn sent<C: Channel>(received: &Received<C::Lent>, validation: crate::Validation) -> Sent {
    let record = received.lent.as_ref().and_then(C::result);
    match (received.check, record) {
        (Check::InMessage(sum), _) => Sent { sum, fits: true },
        (_, Some(record)) => {
            let (sum, fits) = decode_result(&record, validation, received.metadata.byte_length);
            Sent { sum, fits }
        }
        (_, None) => Sent { sum: 0, fits: false },
    }
}

impl<C: Channel> ReceivedGuard<C> {
    /// The checksum of the bytes that came. Yields to other tasks between pieces.
    async fn sum(&mut self) -> u64 {
        let mut summing = Summing::new(self.connection.agreed().validation);
        let received = &mut self.received;
        poll_fn(move |context| {
            let content = received.as_ref().map(content::<C>).unwrap_or_default();
            let sum = summing.as_mut().map_or(Some(0), |summing| summing.go_on(content));
            sum.map_or_else(
                || {
                    context.waker().wake_by_ref();
                    Poll::Pending
                },
                Poll::Ready,
            )
        })
        .await
    }
}

/// The first bytes of the content, as many as the metadata declares. If there are fewer, the checksum differs.
fn content<C: Channel>(received: &Received<C::Lent>) -> &[u8] {
    let bytes = received.lent.as_ref().map(C::content).unwrap_or_default();
    let length = usize::try_from(received.metadata.byte_length).unwrap_or(usize::MAX);
    bytes.get(..length).unwrap_or(bytes)
}
