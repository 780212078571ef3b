//! How a sender learns that a message was taken.
//!
//! Messages of a lane are taken in the order in which they were sent. For each, the receiver sends a receipt back when it hands the
//! message out, all under one key. While a rank has messages under way to another, a task awaits the other's receipts: one request at
//! a time, however many messages there are. It also notices the loss of the other rank. A sender that does not wait for its receipt
//! leaves nothing behind.
//!
//! Receipts are not numbered, as messages are tensors of the user without a frame. Once those of a rank cannot be received, the next one
//! could be that of a message that was given up. So nothing more is sent to such a rank.

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

/// What is known about a message: its receipt, or how its receiver was lost.
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
    /// The error of `call`, of a message to the rank `to`.
    fn error(&self, call: &Call, to: usize) -> GroupError {
        match self {
            Self::Connection(error) => GroupError::of_message(call, to, error.clone()),
            Self::Rule(rule) => GroupError::Misbehaved { call: Box::new(*call), rank: to, rule },
        }
    }
}

/// The messages to one rank that were not taken yet.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    /// For each lane the messages under way, oldest first. Empty ones are removed.
    lanes: BTreeMap<Lane, VecDeque<oneshot::Sender<Known>>>,
    /// Whether a task awaits receipts.
    is_awaiting: bool,
    /// Why no more receipts come.
    lost: Option<Lost>,
}

/// Where the receipt of one message arrives.
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
            // Only the end of all operations drops it.
            Err(_) => Err(GroupError::Over { rank: None, why: "the group was left".to_owned() }),
        }
    }
}

impl Core {
    /// Sends a message, whose receipt the returned value awaits.
    pub(super) fn post(
        self: &Arc<Self>,
        to: usize,
        lane: Lane,
        message: Tensor,
        call: &Call,
    ) -> Result<Pending, GroupError> {
        let peer = self.peer(to)?;
        let (sender, known) = oneshot::channel();
        // What the end of the group has caused is told with its reason.
        let over = || self.over.borrow().clone();
        let mut outgoing = self.outgoing(to)?;
        if let Some(lost) = &outgoing.lost {
            return Err(over().unwrap_or_else(|| lost.error(call, to)));
        }
        // Sent under the lock: the messages of a lane are in the same order here and there.
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
            // The sender finds out by itself that the two are parted.
            tracing::debug!(rank = to, %error, "a receipt was not sent");
        }
    }

    /// Awaits receipts of `from` until no message to it is under way.
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

    /// Gives a receipt to whom it is for. Returns whether more are to come.
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
        // Nobody may wait for it.
        let _ = oldest.send(Ok(receipt));
        Ok(more)
    }

    /// No more receipts come from `from`.
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
