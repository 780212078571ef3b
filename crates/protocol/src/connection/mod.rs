//! One connection to one peer, both directions.

mod housekeeping;
mod notes;
mod sending;
mod state;

use std::{
    fmt,
    sync::{Arc, MutexGuard, PoisonError},
    task::Poll,
};

pub use notes::{NoteChannel, PutNote};
pub(crate) use sending::{Asking, content_turn, message_turn, send, send_request};
pub(crate) use state::State;
use tensorwire_testpoints::sync::Mutex;

use crate::{
    Agreed, Channel, ChannelError, Counters, LentEnd, Parameters, PeerMisbehaved, RequestIndex, Rings,
    StepId, TensorRequest, Waiting, after::After, line::ArrivalError,
};

/// Immediate: a message is in your ring.
pub const MESSAGE_IMMEDIATE: u32 = 0xFFFF_FFFF;

/// Immediate: your message in flight was taken, in mode original; an ASK or an ANSWER is in its slot, in mode
/// counted.
pub const ACKNOWLEDGEMENT_IMMEDIATE: u32 = 0xFFFF_FFFE;

/// The protocol on one [`Channel`]. A driver feeds it every arrival
/// ([`on_immediate`](Self::on_immediate)), runs the responses that come of them
/// ([`respond`](Self::respond)) and runs [`housekeeping`](Self::housekeeping); users
/// [`receive`](Self::receive).
///
/// Each method locks the state briefly, changes one of its machines, and applies the effects of the change when the lock is
/// released.
pub struct Connection<C: Channel> {
    channel: Arc<C>,
    agreed: Agreed,
    state: Mutex<State<C>>,
}

impl<C: Channel> fmt::Debug for Connection<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("agreed", &self.agreed).finish_non_exhaustive()
    }
}

impl<C: Channel> Connection<C> {
    /// A connection on `channel` and `rings` with the offers of both sides. Both [`Parameters`] must be within the limits
    /// ([`Parameters::check`]), the rings of their [first sizes](Parameters::first_ring_bytes), and the queue pair of the depths of
    /// [`Depths::of`](crate::Depths::of).
    pub fn new(channel: C, rings: Rings<C::Lent>, local: Parameters, peer: Parameters) -> Arc<Self> {
        let channel = Arc::new(channel);
        let agreed = Agreed::of(&local, &peer);
        let state = State::new(channel.clone(), rings, &local, &peer);
        Arc::new(Self { channel, agreed, state: Mutex::new(state) })
    }

    /// The channel below.
    pub fn channel(&self) -> &C {
        &self.channel
    }

    /// What both sides agreed on.
    pub fn agreed(&self) -> Agreed {
        self.agreed
    }

    /// What was sent and received so far.
    pub fn counters(&self) -> Counters {
        self.lock().line.counters
    }

    /// The requests that wait for an answer: those of this side, and those of the peer.
    pub fn requests_waiting(&self) -> (Waiting, Waiting) {
        let state = self.lock();
        (state.requests.waiting(), state.responses.waiting())
    }

    /// Whether a value is on its way in either direction, as far as this side knows: its write is under way, or the
    /// sender has announced it. Requests that only wait do not count. Returns `false` once the connection is over.
    pub fn is_transferring(&self) -> bool {
        let state = self.lock();
        state.failure().is_ok() && (state.responses.is_transferring() || state.requests.is_transferring())
    }

    /// Why the connection is over, if it is.
    pub fn failure(&self) -> Option<String> {
        self.lock().failure().err().map(|ChannelError(why)| why)
    }

    /// Retires this side: no receive is admitted from now on, as on a connection that is over, so that the caller can use another
    /// connection. Responses go on. Returns `false`, and changes nothing, if the connection is over, a receive of a step is under way or
    /// its value is held, a value is on its way to this side, a channel of notes is open, or an operation needs it to
    /// [stay](Self::stay). Receives of published values that wait go on; they can be repeated elsewhere.
    pub fn retire(&self) -> bool {
        self.lock().retire()
    }

    /// Keeps this side from being [retired](Self::retire) while the returned value lives, for an operation of several requests. `None` if it is
    /// retired.
    pub fn stay(self: &Arc<Self>) -> Option<Stay<C>> {
        let mut state = self.lock();
        let may_stay = !state.is_retired();
        state.stays += usize::from(may_stay);
        drop(state);
        may_stay.then(|| Stay(self.clone()))
    }

    /// Whether this side is [retired](Self::retire).
    pub fn is_retired(&self) -> bool {
        self.lock().is_retired()
    }

    /// The peer has [retired](Self::retire) its side: it has taken all values that were written.
    pub fn peer_retired(&self) {
        self.lock().responses.forget_written();
    }

    /// Steps whose values may be lost with this connection: their requests or contents are under way, or it is not known
    /// whether the peer has them. After the connection has [failed](Self::fail), the steps at the time of the failure.
    /// Each step occurs once, in order.
    pub fn steps_under_way(&self) -> Vec<StepId> {
        self.lock().steps_under_way().into_iter().collect()
    }

    /// Processes one arrival: its immediate, and the bytes written by the (logical) write that it ended. Call
    /// it for every arrival, in order, from any task. `requested` is called for each request that the arrival opens, in order and
    /// without a lock. It must pass them to [`respond`](Self::respond) before the next arrival is processed.
    ///
    /// # Errors
    /// [`PeerMisbehaved`]: the peer broke a rule. The connection has [failed](Self::fail) then; later arrivals
    /// are ignored.
    #[inline]
    pub fn on_immediate(
        &self,
        immediate: u32,
        length: u64,
        requested: impl FnMut(TensorRequest),
    ) -> Result<(), PeerMisbehaved> {
        match immediate {
            MESSAGE_IMMEDIATE => {
                let opened = self.on_arrival(|state, after| state.on_message(length, after))?;
                opened.into_iter().for_each(requested);
                Ok(())
            }
            ACKNOWLEDGEMENT_IMMEDIATE => self.on_arrival(|state, _| state.on_return(length)),
            _ => self.on_arrival(|state, after| {
                let (index, which) = content_of(immediate)?;
                state.on_content(
                    after,
                    |requests| requests.content(index, which, length),
                    Counters::count_content,
                )
            }),
        }
    }

    /// Processes a loan of the peer, in order with the other arrivals: its immediate, its length in bytes, and the view of them. A
    /// view that no request waits for is [taken back](Channel::take_back) at once.
    ///
    /// # Errors
    /// As [`on_immediate`](Self::on_immediate).
    pub fn on_loan(&self, immediate: u32, length: u64, lent: C::Lent) -> Result<(), PeerMisbehaved> {
        let mut lent = Some(lent);
        let result = self.on_arrival(|state, after| {
            let (index, which) = content_of(immediate)?;
            state.on_content(
                after,
                |requests| requests.loan(index, which, length, &mut lent),
                Counters::count_loan,
            )
        });
        if let Some(unwanted) = lent {
            self.channel.take_back(unwanted, LentEnd::Content);
        }
        result
    }

    /// Sends what is owed: CANCEL for receives that were given up, CANCEL_ACK for the peer's; posts messages in the queue that wait for
    /// credits, or for others of their task; takes back the memory of receives that were given up; and offers the peer a larger ring when it
    /// needs one. Ends when the connection has failed. The owner must run it as long as the connection.
    ///
    /// # Cancel safety
    /// Dropping it while it makes a ring loses that ring; nothing else is lost, and a new call continues where this one stopped.
    pub async fn housekeeping(self: Arc<Self>) {
        housekeeping::housekeeping(&*self).await;
    }

    /// Ends the connection: every receive ends with [`PeerLost`](crate::TransferError::PeerLost), except those
    /// whose answer has arrived; every response ends; later receives fail at once. The first reason stays.
    ///
    /// Memory that the peer may have been writing stays here until [`drain`](Self::drain).
    pub fn fail(&self, why: &str) {
        self.change(|state, after| state.fail(why, after));
    }

    /// Takes the granted memory of requests that the connection's failure left open, and of the own rings. Call it when
    /// the queue pair is destroyed and drained, so that no write can still land; that is the evidence to end the grants
    /// with.
    pub fn drain(&self) -> Vec<C::Lent> {
        let mut state = self.lock();
        let rings = state.line.drain();
        state.requests.drain().into_iter().chain(rings).collect()
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State<C>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state. When the lock is released, wakes every task that can go on now, drops wakers and takes memory back.
    #[inline]
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut State<C>, &mut After<C::Lent>) -> T) -> T {
        let mut after = After::new();
        let mut state = self.lock();
        let changed = change(&mut state, &mut after);
        if after.wakes_queues {
            state.wake_next(&mut after);
        }
        drop(state);
        after.run(&*self.channel);
        changed
    }

    /// As [`change`](Self::change). An error ends the connection.
    #[inline]
    pub(crate) fn try_change<T>(
        &self,
        change: impl FnOnce(&mut State<C>, &mut After<C::Lent>) -> Result<T, ChannelError>,
    ) -> Result<T, ChannelError> {
        self.change(|state, after| {
            let changed = change(state, after);
            changed.inspect_err(|error| state.fail(&error.0, after))
        })
    }

    /// As [`try_change`](Self::try_change), for a poll.
    #[inline]
    pub(crate) fn poll_change<T>(
        &self,
        poll: impl FnOnce(&mut State<C>, &mut After<C::Lent>) -> Result<Poll<T>, ChannelError>,
    ) -> Poll<Result<T, ChannelError>> {
        self.try_change(poll).map_or_else(|error| Poll::Ready(Err(error)), |polled| polled.map(Ok))
    }

    /// As [`change`](Self::change), for an arrival. It has no effect if the connection is over, whichever task found the arrival,
    /// and whenever it did. An error ends the connection, and is returned if the peer caused it.
    #[inline]
    fn on_arrival<T: Default>(
        &self,
        process: impl FnOnce(&mut State<C>, &mut After<C::Lent>) -> Result<T, ArrivalError>,
    ) -> Result<T, PeerMisbehaved> {
        self.change(|state, after| {
            if state.failure().is_err() {
                state.line.counters.ignored += 1;
                return Ok(T::default());
            }
            process(state, after).or_else(|error| state.end(error, after).map(|()| T::default()))
        })
    }
}

/// Keeps a connection from being retired, see [`Connection::stay`].
#[derive(Debug)]
#[must_use = "the connection may be retired once this is dropped"]
pub struct Stay<C: Channel>(Arc<Connection<C>>);

impl<C: Channel> Drop for Stay<C> {
    fn drop(&mut self) {
        self.0.lock().stays -= 1;
    }
}

/// The request that a content or a loan answers, and which of its known metadata it has.
fn content_of(immediate: u32) -> Result<(RequestIndex, usize), PeerMisbehaved> {
    RequestIndex::of_immediate(immediate).ok_or(PeerMisbehaved::ReservedImmediate)
}
