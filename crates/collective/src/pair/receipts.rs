//! How a sender learns that a message was received.
//!
//! Messages of a lane are received in the order in which they were sent. The receiver sends a receipt for each when it hands the
//! message to its user, all under one key. While a rank has messages in progress to another, one task awaits the other's
//! receipts: one request, however many messages there are. The task also notices the loss of the other rank. A sender that does
//! not wait for its receipt leaves nothing behind.
//!
//! Receipts have no numbers, because a message is the user's tensor without a frame. When a rank's receipts cannot be received
//! any more, the next one might belong to an earlier message. So nothing more is sent to that rank.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, MutexGuard, PoisonError},
};

use tensorwire_memory::{Buf, copy::CopyReason};
use tensorwire_protocol::DataType;
use tensorwire_rendezvous::{Tensor, WorkerError};
use tokio::sync::oneshot;

use super::{
    Core,
    wire::{Lane, RECEIPT_BYTES, Receipt, decode_receipt, encode_receipt},
};
use crate::{call::Call, error::GroupError};

/// The key of receipts.
const RECEIPTS: &str = "receipts";

/// The receipt of a message, or how its receiver was lost.
type Known = Result<Receipt, Lost>;

/// How a receiver was lost.
#[derive(Debug, Clone)]
enum Lost {
    /// Its receipts cannot be received.
    Connection(WorkerError),
    /// It broke this rule.
    Rule(&'static str),
}

impl Lost {
    /// The error of `call` for a message to the rank `to`.
    fn error(&self, call: &Call, to: usize) -> GroupError {
        match self {
            Self::Connection(error) => GroupError::of_message(call, to, error.clone()),
            Self::Rule(rule) => GroupError::Misbehaved { call: Box::new(*call), rank: to, rule },
        }
    }
}

/// The sent messages to one rank without a receipt.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    /// The messages of each lane, oldest first. Empty lanes are removed.
    lanes: BTreeMap<Lane, VecDeque<oneshot::Sender<Known>>>,
    /// Whether a task awaits receipts.
    is_awaiting: bool,
    /// Why no more receipts come.
    lost: Option<Lost>,
}

/// Awaits the receipt of one message.
#[derive(Debug)]
pub(super) struct Pending {
    known: oneshot::Receiver<Known>,
    to: usize,
}

impl Pending {
    /// The receipt, for `call`. Must not be awaited again after it has completed.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub(super) async fn receipt(&mut self, call: &Call) -> Result<Receipt, GroupError> {
        match (&mut self.known).await {
            Ok(Ok(receipt)) => Ok(receipt),
            Ok(Err(lost)) => Err(lost.error(call, self.to)),
            // Dropped only when all operations end.
            Err(_) => Err(GroupError::Over { rank: None, why: "the group was left".to_owned() }),
        }
    }
}

impl Core {
    /// Sends a message. The returned value awaits its receipt.
    pub(super) fn post(
        self: &Arc<Self>,
        to: usize,
        lane: Lane,
        message: Tensor,
        call: &Call,
    ) -> Result<Pending, GroupError> {
        let peer = self.peer(to)?;
        let (sender, known) = oneshot::channel();
        // If the group is over, its error explains that of the operation.
        let over = || self.over.borrow().clone();
        let mut outgoing = self.outgoing(to)?;
        if let Some(lost) = &outgoing.lost {
            return Err(over().unwrap_or_else(|| lost.error(call, to)));
        }
        // Sent under the lock, so that `outgoing` has the order in which the messages are sent.
        let sent = self.step.to(peer).send(&lane.key(), message);
        sent.map_err(|error| over().unwrap_or_else(|| GroupError::of_message(call, to, error)))?;
        outgoing.lanes.entry(lane).or_default().push_back(sender);
        let is_first = !std::mem::replace(&mut outgoing.is_awaiting, true);
        drop(outgoing);
        if is_first {
            self.spawn("receipts", Box::pin(self.clone().await_receipts(to)));
        }
        Ok(Pending { known, to })
    }

    /// Sends `receipt` for the oldest message of `lane` from `to`.
    pub(super) fn acknowledge(&self, to: usize, lane: Lane, receipt: Receipt) {
        let bytes = Buf::on_heap(&encode_receipt(lane, receipt), CopyReason::Import);
        let sent = self.peer(to).and_then(|peer| {
            let receipt = Tensor::shared(bytes, DataType::U8, &[RECEIPT_BYTES as u64])?;
            Ok(self.step.to(peer).send(RECEIPTS, receipt)?)
        });
        if let Err(error) = sent {
            // The sender notices the broken connection itself.
            log!(DEBUG, rank = to, %error, "could not send a receipt");
        }
    }

    /// Awaits receipts of `from` until every message to it has one.
    async fn await_receipts(self: Arc<Self>, from: usize) {
        let Ok(peer) = self.peer(from) else { return };
        loop {
            let lost = match self.next(peer, RECEIPTS).await {
                Ok(receipt) => match self.settle(from, receipt.bytes()) {
                    Ok(true) => continue,
                    Ok(false) => return,
                    Err(lost) => lost,
                },
                Err(error) => Lost::Connection(error),
            };
            return self.give_up(from, &lost);
        }
    }

    /// Passes a receipt to the oldest message of its lane. Returns whether more receipts are due.
    fn settle(&self, from: usize, receipt: &[u8]) -> Result<bool, Lost> {
        let (lane, receipt) =
            decode_receipt(receipt).ok_or(Lost::Rule("a receipt is one of this version"))?;
        let Ok(mut outgoing) = self.outgoing(from) else { return Ok(false) };
        let unsent = Lost::Rule("a receipt is for a message that was sent");
        let waiting = outgoing.lanes.get_mut(&lane).ok_or_else(|| unsent.clone())?;
        let oldest = waiting.pop_front().ok_or(unsent)?;
        if waiting.is_empty() {
            outgoing.lanes.remove(&lane);
        }
        let more = !outgoing.lanes.is_empty();
        outgoing.is_awaiting = more;
        drop(outgoing);
        // Its sender may not wait for it.
        let _ = oldest.send(Ok(receipt));
        Ok(more)
    }

    /// Fails all messages to `from`, because no more receipts come.
    fn give_up(&self, from: usize, lost: &Lost) {
        let Ok(mut outgoing) = self.outgoing(from) else { return };
        outgoing.is_awaiting = false;
        outgoing.lost = Some(lost.clone());
        let lanes = std::mem::take(&mut outgoing.lanes);
        drop(outgoing);
        for waiting in lanes.into_values().flatten() {
            let _ = waiting.send(Err(lost.clone()));
        }
    }

    fn outgoing(&self, to: usize) -> Result<MutexGuard<'_, Outgoing>, GroupError> {
        let outgoing = self.outgoing.get(to);
        let outgoing = outgoing.ok_or_else(|| GroupError::no_such_rank("rank", to, self.peers.len()))?;
        Ok(outgoing.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
