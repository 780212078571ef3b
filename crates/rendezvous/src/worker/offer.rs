//! [`Offer`]: a tensor for those who have its ticket.

use std::{fmt, time::Duration};

use tensorwire_protocol::{Code, Offered, Scope, Sharing};
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

use crate::{
    error::{Transfer, WorkerError},
    values::{SharedValues, tensor::Tensor},
    worker::{
        Worker,
        fetch::{Settings, run},
        peer::Peer,
    },
};

/// A tensor that peers may read while this exists, made by [`Worker::offer`]. It is for content that each peer reads once, as in a
/// call of a group: a peer on the same host reads it in place, without a message. A tensor that peers find by a name is
/// [published](Worker::publish).
///
/// Dropping it ends the offer. Views that peers have stay valid, and hold the memory.
///
/// ```
/// use std::time::Duration;
///
/// use tensorwire::{Tensor, Worker};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tensorwire::WorkerError> {
/// # let server = Worker::builder("ps").start().await?;
/// let offer = server.offer(Tensor::from_values(server.pool(), &[3], &[1u8, 2, 3])?);
/// // The ticket goes to the peer, in a note or a value of a step.
/// let ticket = offer.ticket();
/// # let client = Worker::client().start().await?;
/// # let peer = client.peer_at(server.address()).await?;
/// let tensor = peer.fetch_offered(ticket, Duration::from_secs(5)).await?;
/// assert_eq!(tensor.map(|tensor| tensor.bytes().to_vec()), Some(vec![1, 2, 3]));
/// drop(offer);
/// assert!(peer.fetch_offered(ticket, Duration::from_secs(5)).await?.is_none());
/// # Ok(())
/// # }
/// ```
#[must_use = "no peer can read the tensor once this is dropped"]
pub struct Offer {
    values: SharedValues,
    offered: Offered,
}

/// What a peer needs to read an offered tensor. Its bytes may be sent to any peer. It is no secret: a peer that guesses it can read the
/// tensor, as a published one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Ticket {
    incarnation: U64,
    edition: U64,
    cell: U32,
}

impl From<Offered> for Ticket {
    fn from(Offered { incarnation, edition, cell }: Offered) -> Self {
        Self { incarnation: incarnation.into(), edition: edition.into(), cell: cell.into() }
    }
}

impl From<Ticket> for Offered {
    fn from(Ticket { incarnation, edition, cell }: Ticket) -> Self {
        Self { incarnation: incarnation.get(), edition: edition.get(), cell: cell.get() }
    }
}

impl fmt::Debug for Offer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Offer({:?})", self.offered)
    }
}

impl Worker {
    /// Offers `tensor` to peers that get the offer's [ticket](Offer::ticket). Once this worker is shut down, no peer can fetch it.
    #[doc(hidden)]
    pub fn offer(&self, tensor: Tensor) -> Offer {
        let values = self.node.values().clone();
        let offered = values.offers.begin(tensor.remember_checksums());
        Offer { values, offered }
    }
}

impl Offer {
    /// Its ticket. No other offer of any worker has the same one.
    pub fn ticket(&self) -> Ticket {
        self.offered.into()
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        self.values.offers.end(self.offered.cell);
    }
}

impl Peer {
    /// The tensor that this peer offers, or a view of it if both are on one host. `None` if the offer has ended.
    ///
    /// # Errors
    /// As from [`fetch`](Self::fetch).
    ///
    /// # Cancel safety
    /// Cancel-safe.
    #[doc(hidden)]
    pub async fn fetch_offered(
        &self,
        ticket: Ticket,
        limit: Duration,
    ) -> Result<Option<Tensor>, WorkerError> {
        let transfer = Transfer { peer: self.name(), key: "offer", step: None };
        let settings = Settings { limit, sharing: Sharing::View, scope: Scope::Offered(ticket.into()) };
        match run(self, &transfer, &settings).await {
            Ok((tensor, _)) => Ok(Some(tensor)),
            Err(WorkerError::Remote { status, .. }) if status.code == Code::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}
