//! Waiting in line: for room for a message, for a request entry, for a position among the contents under way.

use std::{
    collections::VecDeque,
    future::poll_fn,
    task::{Poll, Waker},
};

use super::{Connection, State, message_line::Posted};
use crate::{Channel, ChannelError};

/// What can be waited for in line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turnstile {
    /// Window and ring room for a message.
    Messages,
    /// A free request entry.
    Requests,
    /// A position among the contents under way.
    Contents,
}

impl Turnstile {
    pub(super) const ALL: [Self; 3] = [Self::Messages, Self::Requests, Self::Contents];
}

/// Tasks in line, first come, first served. One entry for each future that waits.
#[derive(Debug, Default)]
pub(crate) struct WaitQueue {
    next_ticket: u64,
    /// By ticket. Tasks join at the back and mostly leave at the front, so that thousands in line cost as much as a few.
    /// Without a waker, a task was woken and has not polled since. No wake-up is lost by that: its poll leaves a waker again
    /// or leaves the line, and if it is dropped, that leaves the line too; whoever leaves wakes the next.
    waiting: VecDeque<(u64, Option<Waker>)>,
}

impl WaitQueue {
    /// Whether the holder of `ticket`, or a newcomer without one, is first.
    pub(crate) fn is_turn(&self, ticket: Option<u64>) -> bool {
        self.waiting.front().is_none_or(|&(first, _)| Some(first) == ticket)
    }

    /// Joins the line, or stays in it with a ticket. Returns the waker that is replaced.
    pub(crate) fn wait(&mut self, ticket: &mut Option<u64>, waker: &Waker) -> Option<Waker> {
        let Some(ticket) = *ticket else {
            self.next_ticket += 1;
            *ticket = Some(self.next_ticket);
            self.waiting.push_back((self.next_ticket, Some(waker.clone())));
            return None;
        };
        match self.place(ticket) {
            Ok(place) => self.waiting.get_mut(place)?.1.replace(waker.clone()),
            Err(place) => {
                self.waiting.insert(place, (ticket, Some(waker.clone())));
                None
            }
        }
    }

    pub(crate) fn leave(&mut self, ticket: &mut Option<u64>) -> Option<Waker> {
        let place = self.place(ticket.take()?).ok()?;
        self.waiting.remove(place)?.1
    }

    /// The positions in line, first one first.
    pub(super) fn tickets(&self) -> impl Iterator<Item = u64> {
        self.waiting.iter().map(|(ticket, _)| *ticket)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether there is a first one that was not woken since it polled.
    pub(super) fn is_waiting(&self) -> bool {
        self.waiting.front().is_some_and(|(_, waker)| waker.is_some())
    }

    /// The waker of the first, unless it was woken and has not polled since.
    pub(super) fn take_first(&mut self) -> Option<Waker> {
        self.waiting.front_mut()?.1.take()
    }

    pub(super) fn wakers(&self) -> impl Iterator<Item = Waker> {
        self.waiting.iter().filter_map(|(_, waker)| waker.clone())
    }

    /// Where the holder of `ticket` stands, or would stand.
    fn place(&self, ticket: u64) -> Result<usize, usize> {
        match self.waiting.front() {
            Some(&(first, _)) if first == ticket => Ok(0),
            _ => self.waiting.binary_search_by_key(&ticket, |&(other, _)| other),
        }
    }
}

/// A position in line, given up when dropped.
pub(super) struct PositionInLine<'connection, C: Channel> {
    connection: &'connection Connection<C>,
    turnstile: Turnstile,
    pub(super) ticket: Option<u64>,
}

impl<'connection, C: Channel> PositionInLine<'connection, C> {
    /// None yet.
    pub(super) fn new(connection: &'connection Connection<C>, turnstile: Turnstile) -> Self {
        Self { connection, turnstile, ticket: None }
    }
}

impl<C: Channel> Drop for PositionInLine<'_, C> {
    fn drop(&mut self) {
        if self.ticket.is_some() {
            let mut state = self.connection.lock();
            let waker = state.queue(self.turnstile).leave(&mut self.ticket);
            self.connection.unlock(state);
            drop(waker);
        }
    }
}

impl<C: Channel> Connection<C> {
    /// Waits in line at `turnstile` until `attempt` gives something. `attempt` runs under the connection's
    /// lock, and changes nothing when it gives nothing.
    ///
    /// # Errors
    /// The connection is over.
    ///
    /// # Cancel safety
    /// Dropping the future gives the position in line up; `attempt` has not given anything then.
    pub(crate) async fn turn<T>(
        &self,
        turnstile: Turnstile,
        mut attempt: impl FnMut(&mut State<C::Lent>) -> Option<T>,
    ) -> Result<T, ChannelError> {
        let mut position = PositionInLine::new(self, turnstile);
        poll_fn(|context| {
            let mut state = self.lock();
            if let Err(over) = state.failure() {
                return Poll::Ready(Err(over));
            }
            let asked = self.post_before(turnstile, &mut state);
            if state.queue(turnstile).is_turn(position.ticket)
                && let Some(value) = attempt(&mut state)
            {
                let waker = state.queue(turnstile).leave(&mut position.ticket);
                let settled = self.settle_posted(state, asked, true);
                drop(waker);
                return Poll::Ready(settled.map(|()| value));
            }
            let replaced = state.queue(turnstile).wait(&mut position.ticket, context.waker());
            self.settle_posted(state, asked, false)?;
            drop(replaced);
            Poll::Pending
        })
        .await
    }

    /// As [`turn`](Self::turn), without waiting: `None` if it is not the caller's turn now, or `attempt` gives nothing.
    pub(crate) fn turn_now<T>(
        &self,
        turnstile: Turnstile,
        attempt: impl FnOnce(&mut State<C::Lent>) -> Option<T>,
    ) -> Option<Result<T, ChannelError>> {
        let mut state = self.lock();
        if let Err(over) = state.failure() {
            return Some(Err(over));
        }
        let asked = self.post_before(turnstile, &mut state);
        let is_turn = state.queue(turnstile).is_turn(None);
        let value = if is_turn { attempt(&mut state) } else { None };
        let settled = self.settle_posted(state, asked, value.is_some());
        match (settled, value) {
            (Err(over), _) => Some(Err(over)),
            (Ok(()), value) => value.map(Ok),
        }
    }

    /// Posts what is before a message in line, whose futures may not be polled.
    fn post_before(&self, turnstile: Turnstile, state: &mut State<C::Lent>) -> Posted {
        if turnstile == Turnstile::Messages { self.post_line(state) } else { Posted::default() }
    }
}
