//! [`Offer`]: a tensor for those who have its ticket.

use std::{fmt, time::Duration};

use tensorwire_memory::Buf;
use tensorwire_protocol::{DataType, Metadata, Shape, Sharing, Wanted};
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

use crate::{
    error::{Transfer, WorkerError},
    values::{SharedValues, offers::name_of, published::Version, tensor::Tensor},
    worker::{
        Worker,
        fetch::{Settings, run},
        peer::Peer,
    },
};

/// A tensor that peers may read while this exists, made by [`Worker::offer`]. It is for content that is told to peers at once and
/// read once by each, as in a call of a group: a peer on the same host reads it in place, without a message. A tensor that
/// is to be found by a name is [published](Worker::publish).
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
    ticket: Ticket,
}

/// What a peer needs to read an offered tensor. Its bytes may be sent to any peer. It is no secret: who guesses it can read the tensor,
/// as a published one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Ticket {
    incarnation: U64,
    version: U64,
    number: U32,
}

impl Ticket {
    fn version(self) -> Version {
        Version { incarnation: self.incarnation.get(), number: self.version.get() }
    }
}

impl fmt::Debug for Offer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Offer({}, {})", self.ticket.number, self.ticket.version())
    }
}

impl Worker {
    /// Offers `tensor` to peers that get the offer's [ticket](Offer::ticket). Once this worker is shut down, no peer can fetch it.
    #[doc(hidden)]
    pub fn offer(&self, tensor: Tensor) -> Offer {
        let values = self.node.values().clone();
        let number = values.offers.take();
        let version = values.published.publish(&name_of(number), tensor.remember_checksums());
        let ticket = Ticket {
            incarnation: version.incarnation().into(),
            version: version.number().into(),
            number: number.into(),
        };
        Offer { values, ticket }
    }
}

impl Offer {
    /// Its ticket. No other offer of any worker has the same one.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        let (values, number) = (&self.values, self.ticket.number.get());
        let nothing = Metadata::dead(DataType::U8, Shape::default());
        values.published.publish(&name_of(number), Tensor::received(nothing, Buf::empty(), None));
        values.offers.give_back(number);
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
        let (name, offered) = (name_of(ticket.number.get()), ticket.version());
        let transfer = Transfer { peer: self.name(), key: &name, step: None };
        // It is there already. What was published before it does not count.
        let before = offered.number().saturating_sub(1);
        let wanted = Wanted::NewerThan { incarnation: offered.incarnation(), version: before };
        let settings = Settings { limit, sharing: Sharing::View, wanted: Some(wanted) };
        let (tensor, version) = run(self, &transfer, &settings).await?;
        Ok((version == Some(offered)).then_some(tensor))
    }
}
