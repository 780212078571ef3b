//! Tagged messages, received from one rank, one of several, or any.

use std::{
    fmt,
    future::IntoFuture,
    ops::{Range, RangeFull},
    sync::{Arc, atomic::Ordering},
};

use futures::stream::{FuturesUnordered, StreamExt as _};
use tensorwire_fabric::BoxFuture;
use tensorwire_memory::copy::{CopyReason, copy_bytes};
use tensorwire_rendezvous::{Element, Tensor};
use zerocopy::{FromBytes, IntoBytes as _};

use super::{
    Core, Pairs,
    receipts::Pending,
    wait::Wait,
    wire::{Lane, Receipt},
};
use crate::{
    call::{Call, CallKind},
    error::GroupError,
};

/// The ranks from which a message may come. Converts from a rank's number, several numbers, and `..` for any rank.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// From this rank.
    Rank(usize),
    /// From one of these.
    Ranks(Vec<usize>),
    /// From any rank of the group, this one included.
    Any,
}

impl From<usize> for Source {
    fn from(rank: usize) -> Self {
        Self::Rank(rank)
    }
}

impl From<Vec<usize>> for Source {
    fn from(ranks: Vec<usize>) -> Self {
        Self::Ranks(ranks)
    }
}

impl From<&[usize]> for Source {
    fn from(ranks: &[usize]) -> Self {
        Self::Ranks(ranks.to_vec())
    }
}

impl<const COUNT: usize> From<[usize; COUNT]> for Source {
    fn from(ranks: [usize; COUNT]) -> Self {
        Self::Ranks(ranks.to_vec())
    }
}

impl From<Range<usize>> for Source {
    fn from(ranks: Range<usize>) -> Self {
        Self::Ranks(ranks.collect())
    }
}

impl From<RangeFull> for Source {
    fn from(_: RangeFull) -> Self {
        Self::Any
    }
}

impl Source {
    /// Its ranks, each once.
    fn ranks(self, size: usize) -> Result<Vec<usize>, GroupError> {
        let mut ranks = match self {
            Self::Rank(rank) => vec![rank],
            Self::Ranks(ranks) => ranks,
            Self::Any => (0..size).collect(),
        };
        ranks.sort_unstable();
        ranks.dedup();
        match ranks.last() {
            Some(last) if *last >= size => Err(GroupError::no_such_rank("from", *last, size)),
            Some(_) => Ok(ranks),
            None => Err(GroupError::Argument {
                field: "from",
                value: "no ranks".to_owned(),
                remedy: "give at least one rank, or `..` for any".to_owned(),
            }),
        }
    }
}

/// A received message.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Message {
    /// The rank that sent it.
    pub rank: usize,
    /// Its content. On one host, a view of the sender's memory.
    pub tensor: Tensor,
}

/// A sent message. It is received even if this is dropped.
///
/// Awaiting it, or [`wait`](Self::wait), completes once the receiver has the message.
#[must_use = "whether the message was received is known once this is awaited; drop it if that does not matter"]
pub struct Sent {
    pairs: Arc<Pairs>,
    call: Call,
    to: usize,
    pending: Pending,
    done: Option<Result<(), GroupError>>,
}

impl Sent {
    /// Completes once the receiver has the message. Receipts are counted: if several receives of one tag race, it is known how
    /// many messages were received, but not which.
    ///
    /// # Errors
    /// Awaiting it returns [`GroupError::TimedOut`] or [`GroupError::Aborted`], after which it may be called again;
    /// [`GroupError::RankLost`], [`GroupError::Left`] or [`GroupError::Over`], after which it is unknown whether the message was
    /// received.
    ///
    /// # Cancel safety
    /// Cancel-safe.
    pub fn wait(&mut self) -> Wait<'_, ()> {
        let Self { pairs, call, to, pending, done } = self;
        Wait::new(pairs, *call, vec![*to], async move {
            if done.is_none() {
                *done = Some(pending.receipt(call).await.map(drop));
            }
            done.clone().unwrap_or(Ok(()))
        })
    }
}

impl fmt::Debug for Sent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sent({}, to {})", self.call, self.to)
    }
}

/// As [`Sent::wait`], with the group's limit.
impl IntoFuture for Sent {
    type Output = Result<(), GroupError>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(mut self) -> Self::IntoFuture {
        Box::pin(async move { self.wait().await })
    }
}

/// As [`Group::send`](crate::Group::send).
pub(crate) fn send(pairs: &Arc<Pairs>, to: usize, tag: u64, tensor: Tensor) -> Result<Sent, GroupError> {
    let call = Call::plain(tag, CallKind::Send);
    let pending = pairs.core.post(to, Lane::Tag(tag), tensor, &call)?;
    Ok(Sent { pairs: pairs.clone(), call, to, pending, done: None })
}

/// As [`Group::recv`](crate::Group::recv).
pub(crate) fn recv(pairs: &Arc<Pairs>, from: Source, tag: u64) -> Wait<'static, Message> {
    let call = Call::plain(tag, CallKind::Receive);
    match from.ranks(pairs.core.peers.len()) {
        Err(error) => Wait::failed(pairs, call, error),
        Ok(ranks) => {
            let (core, from) = (pairs.core.clone(), ranks.clone());
            Wait::new(pairs, call, ranks, async move { receive(&core, &from, &call).await })
        }
    }
}

/// As [`Group::recv_into`](crate::Group::recv_into).
pub(crate) fn recv_into<'a, T: Element + FromBytes>(
    pairs: &Arc<Pairs>,
    from: Source,
    tag: u64,
    values: &'a mut [T],
) -> Wait<'a, usize> {
    let call = Call::plain(tag, CallKind::Receive);
    let ranks = match from.ranks(pairs.core.peers.len()) {
        Err(error) => return Wait::failed(pairs, call, error),
        Ok(ranks) => ranks,
    };
    let (core, from) = (pairs.core.clone(), ranks.clone());
    Wait::new(pairs, call, ranks, async move {
        let Message { rank, tensor } = receive(&core, &from, &call).await?;
        let elements = values.len();
        let bytes = values.as_mut_bytes();
        if tensor.dtype() != T::DTYPE || tensor.bytes().len() != bytes.len() {
            return Err(GroupError::Argument {
                field: "values",
                value: format!("{elements} x {}", T::DTYPE),
                remedy: format!(
                    "rank {rank} sent {tensor:?}, which is dropped: receive into that many of that type"
                ),
            });
        }
        copy_bytes(bytes, tensor.bytes(), CopyReason::Local);
        Ok(rank)
    })
}

/// Receives the first message of one of the ranks. All are requested. Messages of the others stay on their senders, or wait here
/// for the next receive.
///
/// The ranks after the one that was received from last are requested first, so that none starves.
async fn receive(core: &Core, from: &[usize], call: &Call) -> Result<Message, GroupError> {
    let lane = Lane::Tag(call.number);
    let key = lane.key();
    let turn = core.turn.load(Ordering::Relaxed);
    let (before, after) = from.split_at(from.partition_point(|rank| *rank < turn));
    let asked = after.iter().chain(before).filter_map(|rank| {
        let (key, peer) = (&key, core.peers.get(*rank)?);
        Some(async move { (*rank, core.next(peer, key).await) })
    });
    let mut asked: FuturesUnordered<_> = asked.collect();
    let Some((rank, tensor)) = asked.next().await else {
        return Err(GroupError::no_such_rank("from", turn, core.peers.len()));
    };
    let tensor = tensor.map_err(|error| GroupError::of_message(call, rank, error))?;
    if from.len() > 1 {
        core.turn.store(rank + 1, Ordering::Relaxed);
    }
    // No await follows: the message will be returned.
    core.acknowledge(rank, lane, Receipt::Taken);
    Ok(Message { rank, tensor })
}
