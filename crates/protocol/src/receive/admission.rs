//! What a receive waits for before its request: the answer to earlier cancels of its key, which may leave a content here, and
//! a free entry.

use std::{
    sync::{Arc, MutexGuard},
    task::{Poll, Waker},
};

use super::{Awaiting, FirstPoll, ReceiveOptions, Request};
use crate::{
    Allocator, Channel, ChannelError, Connection, Metadata, RequestIndex, Scope, TensorRequest,
    TransferError, Want,
    connection::{State, Turnstile},
    limits::NAME_BYTES_MAX,
    requests::{Landed, StepKey},
    text::{escaped, has_active},
};

/// How a receive begins.
pub(super) enum Admission<'connection, C: Channel> {
    /// With a request of its own, and what is known of the value. The request may be posted already; its content comes inside a
    /// message then.
    Request(Request<'connection, C>, Known, Option<FirstPoll>),
    /// Without a request: with the content of an earlier receive that was given up. Boxed, because it is rare and large.
    Stashed(Arc<str>, Box<Landed<C::Lent>>),
}

/// A request that was posted, if it was: how its task waits for the reply.
type Posted = Option<Result<FirstPoll, ChannelError>>;

/// What is known of a value.
pub(super) struct Known {
    pub(super) key: Arc<str>,
    pub(super) metadata: Arc<[Metadata]>,
}

impl<L> State<L> {
    /// What the cache has of `key`, so that nothing is allocated for a value that came before.
    ///
    /// # Errors
    /// A key that cannot travel. Keys in the cache have travelled.
    fn known(&self, scope: Scope, key: &str) -> Result<Known, TransferError> {
        let is_forgotten = tensorwire_testpoints::chance!("cached metadata of a value is not found");
        match self.cache.entry(scope, key).filter(|_| !is_forgotten) {
            Some((key, metadata)) => Ok(Known { key: key.clone(), metadata: metadata.clone() }),
            None => {
                check_key(key)?;
                Ok(Known { key: key.into(), metadata: Arc::default() })
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

impl<C: Channel> Connection<C> {
    /// Begins a receive, or joins the lines for what it must wait for, with `waker`. A value that is known to be small is asked
    /// for under the same lock.
    ///
    /// # Errors
    /// [`TransferError::PeerLost`], [`TransferError::StashFull`], and keys that cannot travel; or, outside, the receive in
    /// line.
    pub(super) fn begin<A: Allocator>(
        &self,
        scope: Scope,
        key: &str,
        asking: (&A, ReceiveOptions),
        waker: &Waker,
    ) -> Result<Result<Admission<'_, C>, TransferError>, Box<ReceiveInLine<'_, C>>> {
        let mut receive = ReceiveInLine { connection: self, scope, line: None };
        match receive.poll(key, asking, waker) {
            Poll::Ready(begun) => Ok(begun),
            // Boxed, because otherwise the future of every receive has room for this one.
            Poll::Pending => Err(Box::new(receive)),
        }
    }

    /// The request `index`, and whether it was posted.
    fn admitted(
        &self,
        index: RequestIndex,
        known: Known,
        asked: Posted,
    ) -> Result<Admission<'_, C>, TransferError> {
        let request = Request::new(self, index);
        let first = asked.map(|asked| asked.inspect_err(|error| self.fail(&error.0))).transpose()?;
        Ok(Admission::Request(request, known, first))
    }

    /// Whether each value that was seen is one that the allocator prefers to come inside a message.
    fn is_known_to_be_small<A: Allocator>(&self, known: &Known, allocator: &A) -> bool {
        let most = self.agreed().eager_bytes_max.into();
        let is_small = |bytes: u64| 0 < bytes && bytes <= most;
        !known.metadata.is_empty()
            && known.metadata.iter().all(|metadata| {
                is_small(metadata.byte_length)
                    && allocator.prefers_eager(metadata)
                    && allocator.accepts(metadata).is_ok()
            })
    }

    /// Posts the request for a value that is known to be small, if the queue of messages is empty and credits and ring space suffice. A
    /// task that will not look for the reply leaves its waker under the same lock. Gives back what is known of
    /// the value.
    fn ask_at_once<A: Allocator>(
        &self,
        state: &mut State<C::Lent>,
        (index, scope): (RequestIndex, Scope),
        known: Known,
        (allocator, options): (&A, ReceiveOptions),
        waker: &Waker,
    ) -> (Known, Posted) {
        if options.awaiting == Awaiting::Together || !self.is_known_to_be_small(&known, allocator) {
            return (known, None);
        }
        let Known { key, metadata } = known;
        let request = TensorRequest { index, scope, key, known: metadata, want: Want::Eager };
        let posted = self.try_post_first(state, &request);
        let known = Known { key: request.key, metadata: request.known };
        let Some(posted) = posted else { return (known, None) };
        let first = if options.may_look() && state.requests.may_help(index) && self.channel().may_help() {
            FirstPoll::Looks
        } else {
            // A new request has no waker that this would replace.
            let _ = state.requests.store_waker(index, waker);
            FirstPoll::Sleeps
        };
        (known, Some(posted.map(|()| first)))
    }
}

/// Two positions in line, given up when dropped. Nothing was taken then.
pub(super) struct ReceiveInLine<'connection, C: Channel> {
    connection: &'connection Connection<C>,
    scope: Scope,
    /// `None` until the first poll.
    line: Option<Line>,
}

/// For a value of a step, a position among the receives of its key, for a content or the answer to a cancel; and, once first
/// there, a position for a free entry.
struct Line {
    known: Known,
    /// The number of the cache's changes when it was asked.
    changes: u64,
    step_key: Option<StepKey>,
    ticket: Option<u64>,
    entry: Option<u64>,
}

impl Line {
    /// Begins a request, for which there is room, leaves both lines, and unlocks.
    fn begin<'connection, C: Channel, A: Allocator>(
        mut self,
        connection: &'connection Connection<C>,
        mut state: StateGuard<'connection, C>,
        scope: Scope,
        asking: (&A, ReceiveOptions),
        waker: &Waker,
    ) -> Result<Admission<'connection, C>, TransferError> {
        let left = self.take_out(&mut state);
        let Self { known, step_key, .. } = self;
        let Some(index) = state.requests.open(step_key) else { return Err(TransferError::gone()) };
        let (known, asked) = connection.ask_at_once(&mut state, (index, scope), known, asking, waker);
        left.settle(connection, state);
        connection.admitted(index, known, asked)
    }

    /// Leaves both lines, unlocks, and wakes the next receive in each.
    fn leave<C: Channel>(&mut self, connection: &Connection<C>, mut state: StateGuard<'_, C>) {
        self.take_out(&mut state).settle(connection, state);
    }

    /// Leaves both lines.
    fn take_out<L>(&mut self, state: &mut State<L>) -> LeftLine {
        let entry = state.queue(Turnstile::Requests).leave(&mut self.entry);
        let stash = &mut state.requests.stash;
        let [own, next] =
            self.step_key.as_ref().map_or([None, None], |step_key| stash.leave(step_key, &mut self.ticket));
        LeftLine { own: [entry, own], next }
    }
}

/// The wakers of a receive that has left its lines.
struct LeftLine {
    /// Its own, to be dropped.
    own: [Option<Waker>; 2],
    /// That of the next receive of its key.
    next: Option<Waker>,
}

impl LeftLine {
    /// Unlocks, and wakes the next receive in each line.
    fn settle<C: Channel>(self, connection: &Connection<C>, state: StateGuard<'_, C>) {
        if tensorwire_testpoints::planted!("a task that leaves the queue does not wake the next") {
            drop(state);
        } else {
            connection.unlock(state);
        }
        drop(self.own);
        self.next.into_iter().for_each(Waker::wake);
    }
}

type StateGuard<'connection, C> = MutexGuard<'connection, State<<C as Channel>::Lent>>;

/// How a receive begins, or the lock, and whether nothing but an entry is missing.
type Attempt<'connection, C> =
    Result<Result<Admission<'connection, C>, TransferError>, (StateGuard<'connection, C>, bool)>;

impl<'connection, C: Channel> ReceiveInLine<'connection, C> {
    fn attempt<A: Allocator>(
        &mut self,
        mut state: StateGuard<'connection, C>,
        key: &str,
        asking: (&A, ReceiveOptions),
        waker: &Waker,
    ) -> Attempt<'connection, C> {
        let (connection, scope) = (self.connection, self.scope);
        if let Err(over) = state.failure() {
            return Ok(Err(over.into()));
        }
        let line = match self.line(&state, key) {
            Ok(line) => line,
            Err(refused) => return Ok(Err(refused)),
        };
        let mut may_ask = true;
        if let Some(step_key) = &line.step_key {
            let is_first = state.requests.stash.is_first(step_key, line.ticket);
            if is_first && let Some(landed) = state.requests.stash.take(step_key) {
                tensorwire_testpoints::mark!("stashed content was delivered");
                // There may be room for a request now.
                let key = line.known.key.clone();
                line.leave(connection, state);
                return Ok(Ok(Admission::Stashed(key, Box::new(landed))));
            }
            may_ask = is_first && !state.requests.is_unresolved(step_key);
            if may_ask && let Some(kept) = state.requests.stash_in_excess() {
                return Ok(Err(TransferError::StashFull { kept }));
            }
        }
        if may_ask
            && state.queue(Turnstile::Requests).is_turn(line.entry)
            && state.requests.has_room()
            && let Some(line) = self.line.take()
        {
            return Ok(line.begin(connection, state, scope, asking, waker));
        }
        Err((state, may_ask))
    }

    /// The receive's positions in line, none at first, with what is known of the value now: that may change while the receive
    /// waits.
    fn line(&mut self, state: &State<C::Lent>, key: &str) -> Result<&mut Line, TransferError> {
        let (scope, changes) = (self.scope, state.cache.changes());
        match &mut self.line {
            Some(line) => {
                if line.changes != changes {
                    (line.known, line.changes) = (state.known(scope, key)?, changes);
                }
                Ok(line)
            }
            none => {
                let known = state.known(scope, key)?;
                let step_key = scope.step().map(|step| StepKey::new(step, known.key.clone()));
                Ok(none.insert(Line { known, changes, step_key, ticket: None, entry: None }))
            }
        }
    }

    /// Begins the receive, or stays in line with `waker`.
    pub(super) fn poll<A: Allocator>(
        &mut self,
        key: &str,
        asking: (&A, ReceiveOptions),
        waker: &Waker,
    ) -> Poll<Result<Admission<'connection, C>, TransferError>> {
        let connection = self.connection;
        let (mut state, may_ask) = match self.attempt(connection.lock(), key, asking, waker) {
            Ok(begun) => return Poll::Ready(begun),
            Err(waits) => waits,
        };
        let Some(line) = &mut self.line else { return Poll::Pending };
        let stash = &mut state.requests.stash;
        let step_key = line.step_key.as_ref();
        let own = step_key.and_then(|step_key| stash.wait(step_key, &mut line.ticket, waker));
        let queue = state.queue(Turnstile::Requests);
        let replaced = if may_ask {
            let replaced = queue.wait(&mut line.entry, waker);
            drop(state);
            replaced
        } else {
            // A receive that must wait for a cancel's answer does not hold up those behind it.
            let left = queue.leave(&mut line.entry);
            connection.unlock(state);
            left
        };
        drop((replaced, own));
        Poll::Pending
    }
}

impl<C: Channel> Drop for ReceiveInLine<'_, C> {
    fn drop(&mut self) {
        if let Some(line) = self.line.as_mut().filter(|line| line.ticket.is_some() || line.entry.is_some()) {
            line.leave(self.connection, self.connection.lock());
        }
    }
}
