//! What a receive waits for before its request: the answer to earlier cancels of its key, which may leave a content here, and
//! a free entry.

use std::{
    sync::Arc,
    task::{Poll, Waker},
};

use super::{Awaiting, FirstPoll, ReceiveOptions};
use crate::{
    Allocator, Channel, Code, Connection, Message, Metadata, RequestIndex, Scope, Status, TensorRequest,
    TransferError, Want,
    after::After,
    connection::State,
    limits::NAME_BYTES_MAX,
    requests::{Landed, Requests, StepKey},
    text::{escaped, has_active},
};

/// How a receive begins.
pub(super) enum Admission<L> {
    /// With a request of its own, which may be posted already; its content comes inside a message then.
    Request { index: RequestIndex, known: Known, first: Option<FirstPoll> },
    /// Without a request: with the content of an earlier receive that was given up. Boxed, because it is rare and large.
    Stashed(Arc<str>, Box<Landed<L>>),
}

/// What is known of a value.
pub(super) struct Known {
    pub(super) key: Arc<str>,
    pub(super) metadata: Arc<[Metadata]>,
}

/// The allocator and the options of a receive.
pub(super) struct Terms<'a, A> {
    pub(super) allocator: &'a A,
    pub(super) options: ReceiveOptions,
}

impl<A> Clone for Terms<'_, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Terms<'_, A> {}

impl<L> Requests<L> {
    /// The cache's key and metadata for `key`, which are shared, so that nothing is allocated for a value that came before.
    ///
    /// # Errors
    /// A key that cannot travel. Keys in the cache have travelled.
    fn known(
        &self,
        (scope, key): (Scope, &str),
        expected: Option<&Arc<[Metadata]>>,
    ) -> Result<Known, TransferError> {
        let is_forgotten = tensorwire_testpoints::chance!("cached metadata of a value is not found");
        match self.cache.entry(scope, key).filter(|_| !is_forgotten) {
            Some((key, metadata)) if scope.is_remembered() => {
                Ok(Known { key: key.clone(), metadata: metadata.clone() })
            }
            _ => {
                check_key(key)?;
                Ok(Known { key: key.into(), metadata: expected.cloned().unwrap_or_default() })
            }
        }
    }
}

fn check_key(key: &str) -> Result<(), TransferError> {
    if key.len() > NAME_BYTES_MAX {
        return Err(TransferError::KeyTooLong { length: key.len() });
    }
    if has_active(key) {
        return Err(TransferError::KeyActive { shown: escaped(key).into_owned() });
    }
    Ok(())
}

impl<A: Allocator> Terms<'_, A> {
    /// Whether each value that was seen is one that the allocator prefers to come inside a message of at most `most` bytes.
    fn is_known_to_be_small(&self, known: &Known, most: u32) -> bool {
        let is_small = |bytes: u64| 0 < bytes && bytes <= most.into();
        !known.metadata.is_empty()
            && known.metadata.iter().all(|metadata| {
                is_small(metadata.byte_length)
                    && self.allocator.prefers_eager(metadata)
                    && self.allocator.accepts(metadata).is_ok()
            })
    }
}

/// A receive that has no request yet. Dropping it gives up its positions in the queues; it has taken nothing.
pub(super) struct WaitingReceive<'connection, C: Channel> {
    connection: &'connection Connection<C>,
    scope: Scope,
    /// `None` until the first poll.
    places: Option<Places>,
}

/// The positions of a waiting receive. A receive of a value of a step first waits among the receives of its key, for a content or
/// for the answer to a cancel. Once first there, it also waits for a free entry.
struct Places {
    known: Known,
    /// The number of the cache's changes when it was asked.
    changes: u64,
    step_key: Option<StepKey>,
    ticket: Option<u64>,
    entry: Option<u64>,
}

impl Places {
    /// Gives both positions up, and wakes the next receive of the key.
    fn leave<L>(&mut self, requests: &mut Requests<L>, after: &mut After<L>) {
        after.drop(requests.queue.leave(&mut self.entry).and_then(|left| left.waker));
        if let Some(step_key) = &self.step_key {
            let [own, next] = requests.stash.leave(step_key, &mut self.ticket);
            after.drop(own);
            after.wake(next);
        }
        after.wakes_queues &=
            !tensorwire_testpoints::planted!("a task that leaves the queue does not wake the next");
    }
}

impl<'connection, C: Channel> WaitingReceive<'connection, C> {
    pub(super) fn new(connection: &'connection Connection<C>, scope: Scope) -> Self {
        Self { connection, scope, places: None }
    }

    /// Begins the receive, or stays in the queues with `waker`. A value that is known to be small is requested under the same
    /// lock.
    ///
    /// # Errors
    /// [`TransferError::PeerLost`], [`TransferError::StashFull`], and keys that cannot travel.
    pub(super) fn poll<A: Allocator>(
        &mut self,
        key: &str,
        terms: Terms<'_, A>,
        waker: &Waker,
    ) -> Poll<Result<Admission<C::Lent>, TransferError>> {
        self.connection.change(|state, after| {
            let polled =
                self.attempt(state, (key, terms.allocator.expected()), after).and_then(
                    |attempt| match attempt {
                        Attempt::Stashed(admission) => Ok(Poll::Ready(admission)),
                        Attempt::Free(places) => {
                            self.ask(places, terms, waker, state, after).map(Poll::Ready)
                        }
                        Attempt::Waits { may_ask } => {
                            self.wait(may_ask, waker, &mut state.requests, after);
                            Ok(Poll::Pending)
                        }
                    },
                );
            polled.map_or_else(|error| Poll::Ready(Err(error)), |polled| polled.map(Ok))
        })
    }

    /// Opens a request that the peer has asked for: over the same connection, also if that is retired, and before other receives, which may
    /// wait for the peer.
    fn pull(
        &mut self,
        state: &mut State<C>,
        wanted: (&str, Option<&Arc<[Metadata]>>),
    ) -> Result<Attempt<C::Lent>, TransferError> {
        state.failure()?;
        if !state.requests.has_room_for_pull() {
            let message =
                "too many writes of pages and calls are under way: wait for those that were given up";
            return Err(TransferError::Local(Status::new(Code::ResourceExhausted, message)));
        }
        self.places(&state.requests, wanted)?;
        self.places.take().map(Attempt::Free).ok_or_else(TransferError::gone)
    }

    fn attempt(
        &mut self,
        state: &mut State<C>,
        wanted: (&str, Option<&Arc<[Metadata]>>),
        after: &mut After<C::Lent>,
    ) -> Result<Attempt<C::Lent>, TransferError> {
        if self.scope.is_pull() {
            return self.pull(state, wanted);
        }
        state.admits()?;
        let requests = &mut state.requests;
        let places = self.places(requests, wanted)?;
        let mut may_ask = true;
        if let Some(step_key) = &places.step_key {
            let is_first = requests.stash.is_first(step_key, places.ticket);
            if is_first && let Some(landed) = requests.stash.take(step_key) {
                tensorwire_testpoints::mark!("stashed content was delivered");
                // There may be room for a request now.
                places.leave(requests, after);
                return Ok(Attempt::Stashed(Admission::Stashed(places.known.key.clone(), Box::new(landed))));
            }
            may_ask = is_first && !requests.is_unresolved(step_key);
            if may_ask && let Some(stashed) = requests.stash_in_excess() {
                return Err(TransferError::StashFull { stashed });
            }
        }
        if may_ask
            && requests.queue.is_turn(places.entry)
            && requests.has_room()
            && let Some(places) = self.places.take()
        {
            return Ok(Attempt::Free(places));
        }
        Ok(Attempt::Waits { may_ask })
    }

    /// The receive's positions, none at first, with what is known of the value now: that may change while the receive waits.
    fn places(
        &mut self,
        requests: &Requests<C::Lent>,
        (key, expected): (&str, Option<&Arc<[Metadata]>>),
    ) -> Result<&mut Places, TransferError> {
        let (scope, changes) = (self.scope, requests.cache.changes());
        match &mut self.places {
            Some(places) => {
                if places.changes != changes {
                    (places.known, places.changes) = (requests.known((scope, key), expected)?, changes);
                }
                Ok(places)
            }
            none => {
                let known = requests.known((scope, key), expected)?;
                let step_key = scope.step().map(|step| StepKey::new(step, known.key.clone()));
                Ok(none.insert(Places { known, changes, step_key, ticket: None, entry: None }))
            }
        }
    }

    /// Opens a request, for which there is room, and leaves both queues. Posts the request if the value is known to be small, no message
    /// waits, and credits and ring space suffice. A task that will not poll for the reply stores its waker under the same lock.
    fn ask<A: Allocator>(
        &self,
        mut places: Places,
        terms: Terms<'_, A>,
        waker: &Waker,
        state: &mut State<C>,
        after: &mut After<C::Lent>,
    ) -> Result<Admission<C::Lent>, TransferError> {
        places.leave(&mut state.requests, after);
        let Places { known, step_key, .. } = places;
        let opened =
            if self.scope.is_pull() { state.requests.open_pull() } else { state.requests.open(step_key) };
        let index = opened.ok_or_else(TransferError::gone)?;
        if terms.options.awaiting == Awaiting::Together
            || !state.line.has_no_message()
            || !terms.is_known_to_be_small(&known, self.connection.agreed().eager_bytes_max)
        {
            return Ok(Admission::Request { index, known, first: None });
        }
        let (key, metadata) = (known.key.clone(), known.metadata.clone());
        let (scope, arguments) = (self.scope, terms.allocator.arguments());
        let request = TensorRequest { index, scope, key, known: metadata, want: Want::Eager, arguments };
        let posted = state.post(&Message::TensorRequest(request));
        let is_posted = posted.inspect_err(|error| {
            state.requests.release(index, after);
            state.fail(&error.0, after);
        })?;
        if !is_posted {
            return Ok(Admission::Request { index, known, first: None });
        }
        let mut first = Some(FirstPoll::Looks);
        if !terms.options.may_poll()
            || !state.requests.may_help(index)
            || !self.connection.channel().may_help()
        {
            after.drop(state.requests.store_waker(index, waker));
            first = Some(FirstPoll::Sleeps);
        }
        Ok(Admission::Request { index, known, first })
    }

    fn wait(
        &mut self,
        may_ask: bool,
        waker: &Waker,
        requests: &mut Requests<C::Lent>,
        after: &mut After<C::Lent>,
    ) {
        let Some(places) = &mut self.places else { return };
        if let Some(step_key) = &places.step_key {
            after.drop(requests.stash.wait(step_key, &mut places.ticket, waker));
        }
        if may_ask {
            after.drop(requests.queue.wait(&mut places.entry, waker));
            after.wakes_queues = false;
        } else {
            // A receive that must wait for a cancel's answer does not hold up those behind it.
            after.drop(requests.queue.leave(&mut places.entry).and_then(|left| left.waker));
        }
    }
}

/// What a receive without a request can do now.
enum Attempt<L> {
    /// Begin with a content of an earlier receive.
    Stashed(Admission<L>),
    /// Open a request.
    Free(Places),
    /// Wait; perhaps for nothing but an entry.
    Waits { may_ask: bool },
}

impl<C: Channel> Drop for WaitingReceive<'_, C> {
    fn drop(&mut self) {
        let waiting = self.places.as_mut().filter(|places| places.ticket.is_some() || places.entry.is_some());
        if let Some(places) = waiting {
            self.connection.change(|state, after| places.leave(&mut state.requests, after));
        }
    }
}
