//! Subscriptions to the peer's values.

use tensorwire_protocol::{Delivery, Scope, Sharing, Subscription, SubscriptionTerms};

use crate::{
    connection::{DataConnection, fabric_channel::FabricChannel, meter::receive_span},
    error::{Transfer, WorkerError},
    values::{published::Version, tensor::Tensor},
};

/// A value of a subscription.
pub(crate) struct Subscribed {
    pub(crate) tensor: Tensor,
    /// `None` for a value of a step.
    pub(crate) version: Option<Version>,
    /// How many values there were, this one included. `None` for a value of an earlier receive of the key.
    pub(crate) sequence: Option<u64>,
    /// The version of the first of these; 0 for values of a step.
    pub(crate) began: u64,
}

impl DataConnection {
    /// Subscribes to the values of `key`. Views are requested only where the fabric has them and the peer is trusted not to change the
    /// memory.
    pub(crate) fn subscribe(
        &self,
        (scope, key): (Scope, &str),
        (values, every, sharing): (u8, bool, Sharing),
    ) -> Subscription<FabricChannel> {
        let view = sharing == Sharing::View && self.may_view();
        self.protocol.subscribe(scope, key.into(), SubscriptionTerms { values, every, view })
    }

    /// The next value of a subscription.
    pub(crate) async fn next_value(
        &self,
        subscription: &mut Subscription<FabricChannel>,
        name: Transfer<'_>,
    ) -> Result<Subscribed, WorkerError> {
        let span = receive_span(name, self.kind);
        match subscription.next(&self.allocator).await {
            Ok(Delivery { received, sequence, began }) => {
                self.meter.ended(&span, Ok(received.metadata.byte_length));
                let version = if name.step.is_none() { self.version(&received) } else { None };
                Ok(Subscribed { tensor: Self::tensor(received)?, version, sequence, began })
            }
            Err(error) => {
                let error = self.transfer_error(name, error);
                self.meter.ended(&span, Err(&error));
                Err(error)
            }
        }
    }
}
