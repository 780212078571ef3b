//! Queues of tasks, first come, first served: for a free request entry, for a message's turn, for a content's turn.

use std::{collections::VecDeque, task::Waker};

use crate::Message;

/// Tasks that wait, one entry for each future. A message may wait in its task's place: then any task may post it, so that a
/// future that is not polled delays no other.
#[derive(Debug, Default)]
pub(crate) struct WaitQueue {
    next_ticket: u64,
    /// The waiters, by ticket. Tasks join at the back and usually leave at the front, so a queue of thousands costs as much as a
    /// short one.
    waiting: VecDeque<Waiter>,
}

#[derive(Debug)]
pub(crate) struct Waiter {
    ticket: u64,
    /// `None` if the task was woken and has not polled since. No wake-up is lost: its poll stores a waker again or leaves
    /// the queue, dropping it leaves the queue too, and leaving wakes the next waiter.
    pub(crate) waker: Option<Waker>,
    /// Boxed, because few waiters have a message.
    pub(crate) message: Option<Box<Message>>,
}

impl WaitQueue {
    /// Whether the holder of `ticket`, or a newcomer without one, is first.
    pub(crate) fn is_turn(&self, ticket: Option<u64>) -> bool {
        self.waiting.front().is_none_or(|first| Some(first.ticket) == ticket)
    }

    /// Joins the queue, with a message if any task may post it. Returns the ticket.
    pub(crate) fn join(&mut self, waker: &Waker, message: Option<Box<Message>>) -> u64 {
        self.next_ticket += 1;
        self.waiting.push_back(Waiter { ticket: self.next_ticket, waker: Some(waker.clone()), message });
        self.next_ticket
    }

    /// Joins the queue without a message, or stays in it with a ticket. Returns the waker that is replaced.
    pub(crate) fn wait(&mut self, ticket: &mut Option<u64>, waker: &Waker) -> Option<Waker> {
        let Some(ticket) = *ticket else {
            *ticket = Some(self.join(waker, None));
            return None;
        };
        let place = self.place(ticket)?;
        self.waiting.get_mut(place)?.waker.replace(waker.clone())
    }

    /// Leaves the queue.
    pub(crate) fn leave(&mut self, ticket: &mut Option<u64>) -> Option<Waiter> {
        let place = self.place(ticket.take()?)?;
        self.waiting.remove(place)
    }

    pub(crate) fn contains(&self, ticket: u64) -> bool {
        self.place(ticket).is_some()
    }

    pub(crate) fn first_mut(&mut self) -> Option<&mut Waiter> {
        self.waiting.front_mut()
    }

    pub(crate) fn pop_first(&mut self) -> Option<Waiter> {
        self.waiting.pop_front()
    }

    /// The messages at the head of the queue, up to the first waiter without one.
    pub(crate) fn messages(&self) -> impl Iterator<Item = &Message> {
        self.waiting.iter().map_while(|waiter| waiter.message.as_deref())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether there is a first waiter that was not woken since it polled.
    pub(crate) fn has_sleeper(&self) -> bool {
        self.waiting.front().is_some_and(|first| first.waker.is_some())
    }

    /// The waker of the first waiter, unless it was woken and has not polled since.
    pub(crate) fn take_first(&mut self) -> Option<Waker> {
        self.waiting.front_mut()?.waker.take()
    }

    pub(crate) fn wakers(&self) -> impl Iterator<Item = Waker> {
        self.waiting.iter().filter_map(|waiter| waiter.waker.clone())
    }

    fn place(&self, ticket: u64) -> Option<usize> {
        match self.waiting.front() {
            Some(first) if first.ticket == ticket => Some(0),
            _ => self.waiting.binary_search_by_key(&ticket, |waiter| waiter.ticket).ok(),
        }
    }
}
