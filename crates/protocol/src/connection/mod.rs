//! One connection to one peer, both directions.

mod turn;

use std::{
    fmt,
    future::poll_fn,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Poll, Waker},
};

use futures::future::join;
pub(crate) use turn::Turnstile;
use turn::WaitQueue;

use crate::{
    Agreed, Channel, ChannelError, Counters, LentEnd, Message, MetadataCache, Parameters, PeerMisbehaved,
    RequestIndex, TensorRequest,
    credit::{RingConsumer, RingProducer, contents_max},
    limits::{MESSAGE_BYTES_MAX, METADATA_CACHE_MAX},
    request::{Arrived, Requests},
    response::Responses,
    wire::{self, WireError},
};

/// Immediate: a message is in your ring.
pub const MESSAGE_IMMEDIATE: u32 = 0xFFFF_FFFF;

/// Immediate: your oldest message in flight was taken.
pub const ACKNOWLEDGEMENT_IMMEDIATE: u32 = 0xFFFF_FFFE;

/// The protocol on one [`Channel`]. A driver feeds it every arrival
/// ([`on_immediate`](Self::on_immediate)), runs the responses that come of them
/// ([`respond`](Self::respond)) and keeps [`housekeeping`](Self::housekeeping) running; users
/// [`receive`](Self::receive).
pub struct Connection<C: Channel> {
    channel: C,
    agreed: Agreed,
    contents_max: u32,
    state: Mutex<State<C::Lent>>,
    inbound: Mutex<Inbound>,
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
    producer: RingProducer,
    /// Where messages are encoded.
    scratch: Vec<u8>,
    pub(crate) requests: Requests<L>,
    pub(crate) responses: Responses,
    pub(crate) contents_in_flight: u32,
    contents_max: u32,
    messages: WaitQueue,
    entries: WaitQueue,
    contents: WaitQueue,
    pub(crate) cache: MetadataCache,
    pub(crate) counters: Counters,
    /// Waits for memory to take back.
    returner: Option<Waker>,
    /// Waits for owed messages.
    sender: Option<Waker>,
}

/// The own ring, read by the driver.
struct Inbound {
    consumer: RingConsumer,
    bytes: Vec<u8>,
}

impl<L> State<L> {
    pub(crate) fn failure(&self) -> Result<(), ChannelError> {
        self.failure.as_ref().map_or(Ok(()), |why| Err(ChannelError(why.clone())))
    }

    pub(crate) fn queue(&mut self, turnstile: Turnstile) -> &mut WaitQueue {
        match turnstile {
            Turnstile::Messages => &mut self.messages,
            Turnstile::Requests => &mut self.entries,
            Turnstile::Contents => &mut self.contents,
        }
    }

    /// The first in line, if there may be something for it.
    fn next_in_line(&self, turnstile: Turnstile) -> Option<Waker> {
        let (queue, is_open) = match turnstile {
            Turnstile::Messages => (&self.messages, self.producer.has_window()),
            Turnstile::Requests => (&self.entries, self.requests.has_room()),
            Turnstile::Contents => (&self.contents, self.contents_in_flight < self.contents_max),
        };
        queue.first().filter(|_| is_open).cloned()
    }

    fn owes_messages(&self) -> bool {
        self.responses.has_owed() || self.requests.has_cancels()
    }

    /// Everyone who waits for anything.
    fn wakers(&mut self) -> Vec<Waker> {
        let mut wakers: Vec<Waker> = self.requests.wakers().collect();
        wakers.extend(self.responses.wakers());
        for turnstile in Turnstile::ALL {
            wakers.extend(self.queue(turnstile).wakers());
        }
        wakers.extend(self.returner.take());
        wakers.extend(self.sender.take());
        wakers
    }
}

impl<C: Channel> Connection<C> {
    /// A connection on `channel` with what both ends offered. Both [`Parameters`] must be within the limits
    /// ([`Parameters::check`]), the rings of the sizes they name, and the queue pair of the depths of
    /// [`Depths::of`](crate::Depths::of).
    pub fn new(channel: C, local: Parameters, peer: Parameters) -> Arc<Self> {
        let agreed = Agreed::of(&local, &peer);
        let contents_max = contents_max(&local);
        let state = State {
            failure: None,
            producer: RingProducer::new(peer.ring_bytes, agreed.window),
            scratch: Vec::with_capacity(MESSAGE_BYTES_MAX),
            requests: Requests::new(agreed.requests_max),
            responses: Responses::new(agreed.requests_max),
            contents_in_flight: 0,
            contents_max,
            messages: WaitQueue::default(),
            entries: WaitQueue::default(),
            contents: WaitQueue::default(),
            cache: MetadataCache::new(METADATA_CACHE_MAX),
            counters: Counters::default(),
            returner: None,
            sender: None,
        };
        let inbound =
            Inbound { consumer: RingConsumer::new(local.ring_bytes), bytes: vec![0; MESSAGE_BYTES_MAX] };
        Arc::new(Self {
            channel,
            agreed,
            contents_max,
            state: Mutex::new(state),
            inbound: Mutex::new(inbound),
        })
    }

    /// What it runs on.
    pub fn channel(&self) -> &C {
        &self.channel
    }

    /// What both ends agreed on.
    pub fn agreed(&self) -> Agreed {
        self.agreed
    }

    /// What was sent and received so far.
    pub fn counters(&self) -> Counters {
        self.lock().counters
    }

    /// Why the connection is over, if it is.
    pub fn failure(&self) -> Option<String> {
        self.lock().failure.clone()
    }

    /// Takes in one arrival: its immediate, and the bytes written by the (logical) write that it ended. Call
    /// it for every arrival, in order, from one task. A TENSOR_REQUEST that comes of it must be given to
    /// [`respond`](Self::respond) before the next arrival is taken in.
    ///
    /// # Errors
    /// [`PeerMisbehaved`]: the peer broke a rule. The connection has [failed](Self::fail) then; later arrivals
    /// are ignored.
    pub fn on_immediate(&self, immediate: u32, length: u64) -> Result<Option<TensorRequest>, PeerMisbehaved> {
        if self.is_over_count_ignored() {
            return Ok(None);
        }
        let result = match immediate {
            MESSAGE_IMMEDIATE => return self.on_message(),
            ACKNOWLEDGEMENT_IMMEDIATE => self.on_acknowledgement(),
            index if RequestIndex(index).is_reserved() => Err(PeerMisbehaved::ReservedImmediate),
            index => self.on_content(RequestIndex(index), length),
        };
        result.map(|()| None).map_err(|rule| self.misbehaved(rule, &rule.to_string()))
    }

    fn is_over_count_ignored(&self) -> bool {
        let mut state = self.lock();
        let is_over = state.failure.is_some();
        state.counters.ignored += u64::from(is_over);
        is_over
    }

    fn misbehaved(&self, rule: PeerMisbehaved, why: &str) -> PeerMisbehaved {
        self.fail(why);
        rule
    }

    fn on_acknowledgement(&self) -> Result<(), PeerMisbehaved> {
        let mut state = self.lock();
        state.producer.retire().map_err(|_| PeerMisbehaved::AcknowledgementUnasked)?;
        state.counters.acknowledgements_received += 1;
        self.settle(state, None, None);
        Ok(())
    }

    fn on_content(&self, index: RequestIndex, length: u64) -> Result<(), PeerMisbehaved> {
        let mut state = self.lock();
        let arrived = state.requests.content(index, length)?;
        if !arrived.is_ignored {
            state.counters.contents_received += 1;
            state.counters.content_bytes_received += length;
        }
        self.settle_arrival(state, arrived);
        Ok(())
    }

    /// Reads, parses, acknowledges, acts; in this order (`tensorflow-verbs.md` §3.8).
    fn on_message(&self) -> Result<Option<TensorRequest>, PeerMisbehaved> {
        let message = match self.read_message() {
            Ok(Ok(message)) => message,
            Ok(Err(error)) => {
                let rule = PeerMisbehaved::Malformed;
                return Err(self.misbehaved(rule, &format!("{rule}: {error}")));
            }
            Err(error) => {
                self.fail(&error.0);
                return Ok(None);
            }
        };
        if !self.is_credit_skipped()
            && let Err(error) = self.channel.post_acknowledgement()
        {
            self.fail(&error.0);
            return Ok(None);
        }
        self.act(message).map_err(|rule| self.misbehaved(rule, &rule.to_string()))
    }

    /// Whether a planted bug keeps the acknowledgement of the last message back.
    #[cfg(feature = "planted-bugs")]
    fn is_credit_skipped(&self) -> bool {
        let planted = crate::planted::is_planted(crate::planted::Bug::CreditSkipped);
        planted && self.lock().counters.acknowledgements_sent.is_multiple_of(8)
    }

    #[cfg(not(feature = "planted-bugs"))]
    fn is_credit_skipped(&self) -> bool {
        false
    }

    /// The next message of the ring.
    fn read_message(&self) -> Result<Result<Message, WireError>, ChannelError> {
        let mut inbound = self.inbound.lock().unwrap_or_else(PoisonError::into_inner);
        let Inbound { consumer, bytes } = &mut *inbound;
        let mut prefix = [0; 4];
        self.read_ring(consumer, &mut prefix)?;
        let length = match wire::encoded_length(prefix) {
            Ok(length) => length,
            Err(error) => return Ok(Err(error)),
        };
        let Some(bytes) = bytes.get_mut(..length) else {
            return Ok(Err(WireError::Truncated { field: "ring" }));
        };
        self.read_ring(consumer, bytes)?;
        let message = wire::decode(bytes);
        consumer.advance(length as u32);
        let mut state = self.lock();
        if let Ok(message) = &message {
            state.counters.received.count(message);
            state.counters.message_bytes_received += length as u64;
            state.counters.acknowledgements_sent += 1;
        }
        Ok(message)
    }

    fn read_ring(&self, consumer: &RingConsumer, into: &mut [u8]) -> Result<(), ChannelError> {
        let beyond = || ChannelError("the message is longer than the own ring".to_owned());
        let (first, second) = consumer.spans(into.len() as u32).ok_or_else(beyond)?;
        let (head, tail) = into.split_at_mut_checked(first.length as usize).ok_or_else(beyond)?;
        self.channel.read_ring(first.offset, head)?;
        if tail.is_empty() { Ok(()) } else { self.channel.read_ring(second.offset, tail) }
    }

    fn act(&self, message: Message) -> Result<Option<TensorRequest>, PeerMisbehaved> {
        let mut state = self.lock();
        let arrived = match message {
            Message::TensorRequest(request) => {
                state.responses.open(request.index, request.scope)?;
                return Ok(Some(request));
            }
            Message::TensorReRequest(request) => {
                let woken = state.responses.re_request(request.index, request.destination)?;
                state.counters.ignored += u64::from(woken.is_none());
                self.settle(state, woken.flatten(), None);
                return Ok(None);
            }
            Message::Cancel(index) => {
                let woken = state.responses.cancel(index)?;
                self.settle(state, woken, None);
                return Ok(None);
            }
            Message::MetaDataResponse(response) => {
                state.requests.meta_data_response(response.index, response.metadata)?
            }
            Message::ErrorStatus(error) => state.requests.error_status(error.index, error.status)?,
            Message::CancelAck(index) => state.requests.cancel_ack(index)?,
        };
        self.settle_arrival(state, arrived);
        Ok(None)
    }

    /// Sends what is owed: CANCEL for receives that were given up, CANCEL_ACK for the peer's; and takes back
    /// the memory of receives that were given up. Ends when the connection has failed. Must be kept running.
    ///
    /// # Cancel safety
    /// Cancel-safe: nothing is lost, and a new call goes on where this one was.
    pub async fn housekeeping(self: Arc<Self>) {
        join(self.return_memory(), self.send_owed()).await;
    }

    async fn return_memory(&self) {
        let next = || {
            poll_fn(|context| {
                let mut state = self.lock();
                if state.failure.is_some() {
                    return Poll::Ready(None);
                }
                if let Some(returned) = state.requests.next_return() {
                    self.settle(state, None, None);
                    return Poll::Ready(Some(returned));
                }
                let replaced = state.returner.replace(context.waker().clone());
                drop(state);
                drop(replaced);
                Poll::Pending
            })
        };
        while let Some((lent, end)) = next().await {
            self.channel.take_back(lent, end);
        }
    }

    async fn send_owed(&self) {
        while self.owes_messages().await {
            let sent = self.turn(Turnstile::Messages, |state| self.try_post_owed(state)).await;
            if sent.and_then(|posted| self.over_if_failed(posted)).is_err() {
                return;
            }
        }
    }

    /// Waits for an owed message; false once the connection is over.
    async fn owes_messages(&self) -> bool {
        poll_fn(|context| {
            let mut state = self.lock();
            if state.failure.is_some() || state.owes_messages() {
                return Poll::Ready(state.failure.is_none());
            }
            let replaced = state.sender.replace(context.waker().clone());
            drop(state);
            drop(replaced);
            Poll::Pending
        })
        .await
    }

    fn try_post_owed(&self, state: &mut State<C::Lent>) -> Option<Result<(), ChannelError>> {
        if let Some(message) = state.responses.next_owed() {
            let posted = self.try_post(state, &message)?;
            state.responses.owed_posted();
            return Some(posted);
        }
        let Some(index) = state.requests.next_cancel() else { return Some(Ok(())) };
        let posted = self.try_post(state, &Message::Cancel(index))?;
        state.requests.cancel_posted(index);
        Some(posted)
    }

    /// Sends `message` when it is its turn; `posted` runs as it is posted.
    pub(crate) async fn send(
        &self,
        message: &Message,
        mut posted: impl FnMut(&mut State<C::Lent>),
    ) -> Result<(), ChannelError> {
        let sent = self.turn(Turnstile::Messages, |state| {
            let result = self.try_post(state, message)?;
            posted(state);
            Some(result)
        });
        self.over_if_failed(sent.await?)
    }

    /// Posts `message` if window and ring allow it now.
    pub(crate) fn try_post(
        &self,
        state: &mut State<C::Lent>,
        message: &Message,
    ) -> Option<Result<(), ChannelError>> {
        if !state.producer.has_window() {
            return None;
        }
        state.scratch.clear();
        wire::encode_into(message, &mut state.scratch);
        let (first, second) = state.producer.reserve(state.scratch.len() as u32)?;
        state.counters.sent.count(message);
        state.counters.message_bytes_sent += state.scratch.len() as u64;
        Some(self.channel.post_message(first, second, &state.scratch))
    }

    pub(crate) fn over_if_failed(&self, posted: Result<(), ChannelError>) -> Result<(), ChannelError> {
        posted.inspect_err(|error| self.fail(&error.0))
    }

    /// The bytes of a content may be reused.
    pub(crate) fn content_written(&self, index: RequestIndex) {
        let mut state = self.lock();
        state.contents_in_flight -= 1;
        let waker = state.responses.close(index, true);
        self.settle(state, None, None);
        drop(waker);
    }

    pub(crate) fn contents_max(&self) -> u32 {
        self.contents_max
    }

    /// Ends the connection: every receive ends with [`PeerLost`](crate::TransferError::PeerLost), except those
    /// whose answer is there already; every response ends; later receives fail at once. The first reason stays.
    ///
    /// Memory that the peer may have been writing stays here until [`drain`](Self::drain).
    pub fn fail(&self, why: &str) {
        let wakers = {
            let mut state = self.lock();
            if state.failure.is_some() {
                return;
            }
            state.failure = Some(why.to_owned());
            state.wakers()
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Takes the lent memory of requests that the connection's failure left open. Call it when the queue pair
    /// is destroyed and drained, so that no write can still land; that is the evidence to end the loans with.
    pub fn drain(&self) -> Vec<C::Lent> {
        self.lock().requests.drain()
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State<C::Lent>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn settle_arrival(&self, mut state: MutexGuard<'_, State<C::Lent>>, arrived: Arrived<C::Lent>) {
        let Arrived { wake, next, returned, is_ignored } = arrived;
        state.counters.ignored += u64::from(is_ignored);
        self.settle(state, wake, returned);
        next.into_iter().for_each(Waker::wake);
    }

    /// Unlocks, then wakes `wake` and whoever else has something to do now, and takes memory back.
    pub(crate) fn settle(
        &self,
        mut state: MutexGuard<'_, State<C::Lent>>,
        wake: Option<Waker>,
        returned: Option<(C::Lent, LentEnd)>,
    ) {
        let line = Turnstile::ALL.map(|turnstile| state.next_in_line(turnstile));
        let returner = if state.requests.has_returns() { state.returner.take() } else { None };
        let sender = if state.owes_messages() { state.sender.take() } else { None };
        drop(state);
        let woken = [wake, returner, sender].into_iter().chain(line);
        woken.flatten().for_each(Waker::wake);
        if let Some((lent, end)) = returned {
            self.channel.take_back(lent, end);
        }
    }
}
