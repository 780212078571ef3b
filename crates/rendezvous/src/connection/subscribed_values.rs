//! The values of a peer's subscription.

use std::sync::Arc;

use futures::{
    StreamExt as _,
    stream::{self, BoxStream},
};
use tensorwire_protocol::{Code, Scope, Sequenced, Status, StepId, SubscriptionTerms, Take};

use crate::{
    connection::peer_values::{PeerValues, Taken},
    values::{published::Edition, versions::versions},
};

impl PeerValues {
    /// See [`Source::subscribe`](tensorwire_protocol::Source::subscribe).
    pub(super) fn subscribed(
        self: &Arc<Self>,
        (scope, key): (Scope, &Arc<str>),
        terms: SubscriptionTerms,
    ) -> BoxStream<'static, Result<Sequenced<Taken>, Status>> {
        match scope {
            Scope::Versioned(wanted) => {
                let versions =
                    versions(self.values.clone(), (key.clone(), wanted), terms.every, Some(self.answers()));
                let meter = self.meter.clone();
                let sent = versions.map(move |edition| {
                    let edition = edition?;
                    meter.sends(edition.tensor.metadata().byte_length);
                    let Edition { sequence, began, .. } = edition;
                    Ok(Sequenced { taken: Taken::Published(edition), sequence, began })
                });
                sent.boxed()
            }
            Scope::Step(step) => self.clone().of_whole_step(step, key.clone(), terms.every),
            _ => {
                let message = "only values of steps and published tensors can be subscribed to";
                let refused = Status::new(Code::InvalidArgument, message);
                stream::iter([Err(refused)]).boxed()
            }
        }
    }

    /// The values that are sent in a step under a key, each once. Without `every`, those that are older than the newest one are dropped.
    fn of_whole_step(
        self: Arc<Self>,
        step: StepId,
        key: Arc<str>,
        every: bool,
    ) -> BoxStream<'static, Result<Sequenced<Taken>, Status>> {
        let values = stream::unfold(0, move |sequence| {
            let (own, key) = (self.clone(), key.clone());
            async move {
                let taken = own.next_of_step((step, &key), every).await;
                let sequence = sequence + taken.as_ref().map_or(0, |(_, count)| *count);
                Some((taken.map(|(taken, _)| Sequenced { taken, sequence, began: 0 }), sequence))
            }
        });
        values.boxed()
    }

    /// The next value, and how many there were up to it.
    async fn next_of_step(
        &self,
        (step, key): (StepId, &Arc<str>),
        every: bool,
    ) -> Result<(Taken, u64), Status> {
        let mut taken = self.taken(Scope::Step(step), key).await?;
        let mut count = 1;
        // These do not wait for a value, but perhaps for its copy out of a device.
        while !every && let Ok(newer) = self.taken(Scope::StepNow(step), key).await {
            taken = newer;
            count += 1;
        }
        Ok((taken, count))
    }

    async fn taken(&self, scope: Scope, key: &Arc<str>) -> Result<Taken, Status> {
        match self.take_at(scope, key) {
            Take::Now(taken) => taken,
            Take::Later(taking) => taking.await,
        }
    }
}
