//! The versions of a published tensor, one after the other, for a subscriber.

use std::sync::Arc;

use futures::{
    StreamExt as _,
    stream::{self, BoxStream},
};
use tensorwire_protocol::{Code, Status, Wanted};

use crate::values::{
    SharedValues,
    published::{Edition, WaitingAnswers},
    takers::Taker,
};

/// What a subscriber has, and wants next.
struct Place {
    values: SharedValues,
    name: Arc<str>,
    wanted: Wanted,
    /// If it wants every version.
    taker: Option<Taker>,
    /// The group of answers that it belongs to, if it is a peer.
    answers: Option<Arc<dyn WaitingAnswers>>,
}

/// The versions that are `wanted` and all later ones. One is taken when the stream is polled: each, in the turn of its publisher, if
/// `every` is set, and otherwise the newest one at that time. Nothing is taken while the tensor is withdrawn. The stream ends with a
/// status when the worker shuts down.
pub(crate) fn versions(
    values: SharedValues,
    (name, wanted): (Arc<str>, Wanted),
    every: bool,
    answers: Option<Arc<dyn WaitingAnswers>>,
) -> BoxStream<'static, Result<Edition, Status>> {
    let has = match wanted {
        Wanted::NewerThan { incarnation, version } if incarnation == values.incarnation => version,
        _ => 0,
    };
    let taker = every.then(|| values.published.takers.subscribe(&name, has));
    let place = Place { values, name, wanted, taker, answers };
    stream::unfold(place, |mut place| async move {
        let taken = place.take().await;
        Some((taken, place))
    })
    .boxed()
}

impl Place {
    async fn take(&mut self) -> Result<Edition, Status> {
        let edition = loop {
            let published = &self.values.published;
            match published.edition(&self.name, self.wanted, self.answers.as_ref()).await {
                // It was withdrawn: the next call waits until it is published again.
                Err(status) if status.code == Code::NotFound => {}
                ended => break ended?,
            }
        };
        let incarnation = self.values.incarnation;
        self.wanted = Wanted::NewerThan { incarnation, version: edition.version };
        self.taker.iter().for_each(|taker| taker.took(edition.version));
        Ok(edition)
    }
}
