//! One connection to one peer, both directions.

mod housekeeping;
mod inbound;
mod message_line;
mod noting;
mod outbound;
mod rings;
mod turn;

use std::{
    collections::BTreeSet,
    fmt,
    sync::{Arc, MutexGuard, PoisonError},
    task::Waker,
};

use housekeeping::Keeper;
use inbound::{ArrivalError, Inbound};
use message_line::MessageLine;
pub(crate) use message_line::Waiting;
pub use rings::Rings;
use rings::RingsInUse;
use tensorwire_testpoints::sync::Mutex;
pub(crate) use turn::Turnstile;
use turn::WaitQueue;

use crate::{
    Agreed, Channel, ChannelError, Counters, LentEnd, MetadataCache, Mode, Parameters, PeerMisbehaved,
    RequestIndex, StepId, TensorRequest,
    credit::{Flow, contents_max},
    limits::{KNOWN_METADATA_MAX, METADATA_CACHE_MAX},
    names::{NameForm, Names},
    notes::NoteChannels,
    requests::{Arrived, Requests},
    responses::Responses,
    wire::record::RECORD_BYTES_MAX,
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
pub struct Connection<C: Channel> {
    channel: C,
    agreed: Agreed,
    contents_max: u32,
    own_ring_bytes_max: u32,
    state: Mutex<State<C::Lent>>,
}

impl<C: Channel> fmt::Debug for Connection<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("agreed", &self.agreed).finish_non_exhaustive()
    }
}

/// Everything that requests and responses share. Locked briefly: never across an await, a wake-up or a return
/// of memory.
pub(crate) struct State<L> {
    failure: Option<String>,
    /// Steps that were under way when it failed. Stored, because each task that the failure wakes gives its requests up.
    under_way_at_end: BTreeSet<StepId>,
    inbound: Inbound,
    rings: RingsInUse<L>,
    flow: Flow,
    names: Names,
    /// Where messages are encoded.
    scratch: Vec<u8>,
    pub(crate) requests: Requests<L>,
    pub(crate) responses: Responses,
    notes: NoteChannels,
    pub(crate) contents_in_flight: u32,
    contents_max: u32,
    /// The first content in line had its turn, and there was no credit: the next one is left to it.
    is_content_due: bool,
    messages: WaitQueue,
    message_line: MessageLine,
    /// Nobody in line is woken to post the messages at its head: the next message takes them along, or the housekeeping task
    /// posts them.
    is_line_left: bool,
    /// Where requests are measured.
    measure: Vec<u8>,
    /// How the requests of a message name their keys.
    forms: Vec<NameForm>,
    entries: WaitQueue,
    contents: WaitQueue,
    pub(crate) cache: MetadataCache,
    pub(crate) counters: Counters,
    /// The housekeeping task, while it sleeps.
    keeper: Option<Keeper>,
    /// Size of the larger ring that is to be made for the peer.
    ring_wanted: Option<u32>,
    /// One is being made, or offered and not moved to.
    is_ring_growing: bool,
}

impl<L> State<L> {
    pub(crate) fn failure(&self) -> Result<(), ChannelError> {
        self.failure.as_ref().map_or(Ok(()), |why| Err(ChannelError(why.clone())))
    }

    /// Now, and when it failed.
    pub(crate) fn steps_under_way(&self) -> BTreeSet<StepId> {
        let now = self.requests.steps().chain(self.responses.steps());
        self.under_way_at_end.iter().copied().chain(now).collect()
    }

    pub(crate) fn queue(&mut self, turnstile: Turnstile) -> &mut WaitQueue {
        match turnstile {
            Turnstile::Messages => &mut self.messages,
            Turnstile::Requests => &mut self.entries,
            Turnstile::Contents => &mut self.contents,
        }
    }

    /// The first in line, if there may be something for it. It is woken once, until it polls. A message is left to
    /// others, if the housekeeping task sleeps: one that is awake looks at the line by itself.
    fn next_in_line(&mut self, turnstile: Turnstile) -> Option<Waker> {
        if !self.queue(turnstile).is_waiting() {
            return None;
        }
        let is_open = match turnstile {
            Turnstile::Messages => !self.is_line_left && self.flow.may_try_message(),
            Turnstile::Requests => self.requests.has_room(),
            Turnstile::Contents => self.contents_in_flight < self.contents_max && self.flow.may_try_content(),
        };
        if is_open && turnstile == Turnstile::Messages && self.keeper.is_some() && self.is_message_next() {
            self.is_line_left = true;
            return None;
        }
        if is_open { self.queue(turnstile).take_first() } else { None }
    }

    /// Whether messages leave the last credit to a content. Messages are woken first, so that contents would wait as long as there
    /// are messages: where receives are given up all the time, each brings a CANCEL_ACK.
    fn is_credit_for_content(&self) -> bool {
        let may_be_posted = self.contents_in_flight < self.contents_max && !self.contents.is_empty();
        self.is_content_due && may_be_posted && self.flow.is_last_credit()
    }

    /// Whether somebody is in line, or the housekeeping task sleeps and has work.
    fn has_waiting(&self) -> bool {
        self.has_lines() || self.has_keeper_work()
    }

    fn has_lines(&self) -> bool {
        !(self.messages.is_empty() && self.entries.is_empty() && self.contents.is_empty())
    }

    /// The first of each line, if there may be something for it. `None` if nobody is in line, which is mostly so.
    fn next_in_lines(&mut self) -> Option<[Option<Waker>; 3]> {
        self.has_lines().then(|| Turnstile::ALL.map(|turnstile| self.next_in_line(turnstile)))
    }

    /// The bytes of the content of request `index` may be reused. Gives the waker of its response.
    pub(crate) fn end_content(&mut self, index: RequestIndex) -> Option<Waker> {
        self.contents_in_flight -= 1;
        self.responses.close(index, true)
    }

    fn owes_messages(&self) -> bool {
        self.responses.has_owed() || self.requests.has_cancels()
    }

    /// Everyone who waits for anything.
    fn wakers(&mut self) -> Vec<Waker> {
        let mut wakers: Vec<Waker> = self.requests.wakers().collect();
        wakers.extend(self.responses.wakers());
        wakers.extend(self.notes.wakers());
        for turnstile in Turnstile::ALL {
            wakers.extend(self.queue(turnstile).wakers());
        }
        wakers.extend(self.keeper.take().map(|keeper| keeper.waker));
        wakers
    }
}

impl<C: Channel> Connection<C> {
    /// A connection on `channel` and `rings` with the offers of both sides. Both [`Parameters`] must be within the limits
    /// ([`Parameters::check`]), the rings of their [first sizes](Parameters::first_ring_bytes), and the queue pair of the depths of
    /// [`Depths::of`](crate::Depths::of).
    pub fn new(channel: C, rings: Rings<C::Lent>, local: Parameters, peer: Parameters) -> Arc<Self> {
        let agreed = Agreed::of(&local, &peer);
        let contents_max = contents_max(&local);
        // Mode original knows of one.
        let known_max = if agreed.mode == Mode::Original { 1 } else { KNOWN_METADATA_MAX };
        let state = State {
            failure: None,
            under_way_at_end: BTreeSet::new(),
            inbound: Inbound::new(local.first_ring_bytes(), agreed.names_max),
            rings: RingsInUse::new(rings),
            flow: Flow::new(&agreed, peer.first_ring_bytes(), peer.ring_bytes, local.first_ring_bytes()),
            names: Names::new(agreed.names_max),
            scratch: Vec::with_capacity(RECORD_BYTES_MAX),
            requests: Requests::new(agreed),
            responses: Responses::new(agreed.requests_max),
            notes: NoteChannels::default(),
            contents_in_flight: 0,
            contents_max,
            is_content_due: false,
            messages: WaitQueue::default(),
            message_line: MessageLine::default(),
            is_line_left: false,
            measure: Vec::new(),
            forms: Vec::new(),
            entries: WaitQueue::default(),
            contents: WaitQueue::default(),
            cache: MetadataCache::new(METADATA_CACHE_MAX, known_max),
            counters: Counters::default(),
            keeper: None,
            ring_wanted: None,
            is_ring_growing: false,
        };
        Arc::new(Self {
            channel,
            agreed,
            contents_max,
            own_ring_bytes_max: local.ring_bytes,
            state: Mutex::new(state),
        })
    }

    /// What it runs on.
    pub fn channel(&self) -> &C {
        &self.channel
    }

    /// What both sides agreed on.
    pub fn agreed(&self) -> Agreed {
        self.agreed
    }

    /// What was sent and received so far.
    pub fn counters(&self) -> Counters {
        self.lock().counters
    }

    /// Whether a value is on its way in either direction, as far as this side knows: its write is under way, or the
    /// sender has announced it. Requests that only wait do not count. Returns `false` once the connection is over.
    pub fn is_transferring(&self) -> bool {
        let state = self.lock();
        state.failure().is_ok() && (state.responses.is_transferring() || state.requests.is_transferring())
    }

    /// Why the connection is over, if it is.
    pub fn failure(&self) -> Option<String> {
        self.lock().failure.clone()
    }

    /// Takes in one arrival: its immediate, and the bytes written by the (logical) write that it ended. Call
    /// it for every arrival, in order, from any task. `requested` is called for each request that comes of it, in order and
    /// without a lock. It must pass them to [`respond`](Self::respond) before the next arrival is taken in.
    ///
    /// # Errors
    /// [`PeerMisbehaved`]: the peer broke a rule. The connection has [failed](Self::fail) then; later arrivals
    /// are ignored.
    pub fn on_immediate(
        &self,
        immediate: u32,
        length: u64,
        requested: impl FnMut(TensorRequest),
    ) -> Result<(), PeerMisbehaved> {
        let result = match immediate {
            MESSAGE_IMMEDIATE => self.on_message(length, requested),
            ACKNOWLEDGEMENT_IMMEDIATE => self.on_return(length),
            _ => match RequestIndex::of_immediate(immediate) {
                None => self.lock_open().map_or(Ok(()), |_| Err(PeerMisbehaved::ReservedImmediate.into())),
                Some((index, which)) => self.on_content(index, which, length),
            },
        };
        result.or_else(|stop| self.stopped(stop))
    }

    /// Takes in a loan of the peer's, in order with the other arrivals: its immediate, its length in bytes, and the
    /// view of them. A view that no request waits for is [taken back](Channel::take_back) at once.
    ///
    /// # Errors
    /// As [`on_immediate`](Self::on_immediate).
    pub fn on_loan(&self, immediate: u32, length: u64, lent: C::Lent) -> Result<(), PeerMisbehaved> {
        let mut lent = Some(lent);
        let result = self.take_loan(immediate, length, &mut lent);
        if let Some(unwanted) = lent {
            self.channel.take_back(unwanted, LentEnd::Content);
        }
        result.or_else(|stop| self.stopped(stop))
    }

    fn take_loan(&self, immediate: u32, length: u64, lent: &mut Option<C::Lent>) -> Result<(), ArrivalError> {
        let Some(mut state) = self.lock_open() else { return Ok(()) };
        let index = RequestIndex::of_immediate(immediate);
        let (index, which) = index.ok_or(PeerMisbehaved::ReservedImmediate)?;
        state.flow.take_content()?;
        self.return_if_due(&mut state)?;
        let arrived = state.requests.loan(index, which, length, lent)?;
        if !arrived.is_ignored {
            state.counters.loans_received += 1;
            state.counters.loan_bytes_received += length;
        }
        self.settle_arrival(state, arrived);
        Ok(())
    }

    /// The connection is over for `stop`; an error if that is the peer's fault.
    fn stopped(&self, stop: ArrivalError) -> Result<(), PeerMisbehaved> {
        match stop {
            ArrivalError::Lost(error) => {
                self.fail(&error.0);
                Ok(())
            }
            ArrivalError::Malformed(error) => {
                let rule = PeerMisbehaved::Malformed;
                Err(self.misbehaved(rule, &format!("{rule}: {error}")))
            }
            ArrivalError::Broken(rule) => Err(self.misbehaved(rule, &rule.to_string())),
        }
    }

    /// Locks for an arrival. `None` if the connection is over: then the arrival changes nothing, whoever found it and
    /// whenever.
    fn lock_open(&self) -> Option<MutexGuard<'_, State<C::Lent>>> {
        let mut state = self.lock();
        if state.failure.is_none() {
            return Some(state);
        }
        state.counters.ignored += 1;
        None
    }

    fn misbehaved(&self, rule: PeerMisbehaved, why: &str) -> PeerMisbehaved {
        self.fail(why);
        rule
    }

    fn on_content(&self, index: RequestIndex, which: usize, length: u64) -> Result<(), ArrivalError> {
        let Some(mut state) = self.lock_open() else { return Ok(()) };
        state.flow.take_content()?;
        self.return_if_due(&mut state)?;
        let arrived = state.requests.content(index, which, length)?;
        if !arrived.is_ignored {
            state.counters.contents_received += 1;
            state.counters.content_bytes_received += arrived.bytes;
        }
        self.settle_arrival(state, arrived);
        Ok(())
    }

    pub(crate) fn over_if_failed(&self, posted: Result<(), ChannelError>) -> Result<(), ChannelError> {
        posted.inspect_err(|error| self.fail(&error.0))
    }

    /// The bytes of a content may be reused.
    pub(crate) fn content_written(&self, index: RequestIndex) {
        let mut state = self.lock();
        let waker = state.end_content(index);
        self.unlock(state);
        drop(waker);
    }

    pub(crate) fn contents_max(&self) -> u32 {
        self.contents_max
    }

    /// Ends the connection: every receive ends with [`PeerLost`](crate::TransferError::PeerLost), except those
    /// whose answer has arrived; every response ends; later receives fail at once. The first reason stays.
    ///
    /// Memory that the peer may have been writing stays here until [`drain`](Self::drain).
    pub fn fail(&self, why: &str) {
        let wakers = {
            let mut state = self.lock();
            if state.failure.is_some() {
                return;
            }
            state.failure = Some(why.to_owned());
            state.under_way_at_end = state.steps_under_way();
            state.wakers()
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Takes the granted memory of requests that the connection's failure left open, and of the own rings. Call it when
    /// the queue pair is destroyed and drained, so that no write can still land; that is the evidence to end the grants
    /// with.
    pub fn drain(&self) -> Vec<C::Lent> {
        let mut state = self.lock();
        let rings = state.rings.drain();
        state.requests.drain().into_iter().chain(rings).collect()
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State<C::Lent>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn settle_arrival(&self, mut state: MutexGuard<'_, State<C::Lent>>, arrived: Arrived<C::Lent>) {
        let Arrived { wake, next, returned, is_ignored, .. } = arrived;
        state.counters.ignored += u64::from(is_ignored);
        self.settle(state, wake, returned);
        next.into_iter().for_each(Waker::wake);
    }

    /// Unlocks, then wakes every task that can go on now. Mostly nobody waits.
    #[inline]
    pub(crate) fn unlock(&self, state: MutexGuard<'_, State<C::Lent>>) {
        if state.has_waiting() {
            self.settle(state, None, None);
        }
    }

    /// Unlocks, then wakes `wake` and every other task that can go on now, and takes memory back.
    pub(crate) fn settle(
        &self,
        mut state: MutexGuard<'_, State<C::Lent>>,
        wake: Option<Waker>,
        returned: Option<(C::Lent, LentEnd)>,
    ) {
        let line = state.next_in_lines();
        let keeper = state.keeper_with_work();
        drop(state);
        if let Some(waker) = wake {
            waker.wake();
        }
        if let Some(keeper) = keeper {
            keeper.wake();
        }
        if let Some(line) = line {
            line.into_iter().flatten().for_each(Waker::wake);
        }
        if let Some((lent, end)) = returned {
            self.channel.take_back(lent, end);
        }
    }
}
