//! Runs a plan: sends and receives its elements, and combines what arrives.

use std::{collections::BTreeSet, ops::Range};

use futures::stream::{self, StreamExt as _};
use tensorwire_memory::copy::{CopyReason, copy_bytes};

use crate::{
    error::GroupError,
    group::calling::{Arrived, Calling},
    schedule::{Arrival, Plan},
};

/// How many messages are awaited ahead of those that are combined: while one is, the next ones arrive.
const AHEAD: usize = 4;

/// The elements of a call, as bytes, and how they are combined.
pub(super) struct Elements<'a> {
    pub(super) bytes: &'a mut [u8],
    /// Bytes of an element.
    pub(super) width: usize,
}

impl Elements<'_> {
    fn range(&self, elements: &Range<usize>) -> Range<usize> {
        elements.start * self.width..elements.end * self.width
    }
}

/// Runs `plan` on `elements`. `fold` combines its first argument with its second.
pub(super) async fn run(
    calling: &Calling,
    plan: &Plan,
    elements: Elements<'_>,
    fold: impl Fn(&mut [u8], &[u8]) -> Result<(), GroupError> + Sync,
) -> Result<(), GroupError> {
    let width = elements.width;
    let receives = plan.exchanges.iter().flat_map(|exchange| exchange.receive.iter());
    let receives: Vec<_> = receives.map(|(from, range, _)| (*from, range.len() * width)).collect();
    for from in receives.iter().map(|(from, _)| *from).collect::<BTreeSet<_>>() {
        calling.connect(from).await?;
    }
    let incoming = receives.into_iter().map(|(from, length)| calling.receive(from, length));
    let mut incoming = Box::pin(stream::iter(incoming).buffered(AHEAD));
    for exchange in &plan.exchanges {
        for (to, range) in &exchange.send {
            let sent = elements.bytes.get(elements.range(range)).unwrap_or_default();
            calling.send(*to, sent).await?;
        }
        for (_, range, arrival) in &exchange.receive {
            let arrived = incoming.next().await.unwrap_or(Ok(Arrived::EMPTY))?;
            let range = elements.range(range);
            let own = elements.bytes.get_mut(range).unwrap_or_default();
            match arrival {
                Arrival::Fold => fold(own, arrived.bytes())?,
                Arrival::Replace => replace(own, arrived.bytes()),
            }
        }
    }
    Ok(())
}

/// Puts what has arrived in place of `own`, which is as long.
pub(super) fn replace(own: &mut [u8], arrived: &[u8]) {
    if own.len() == arrived.len() {
        copy_bytes(own, arrived, CopyReason::Local);
    }
}
