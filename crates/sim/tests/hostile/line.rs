//! A rogue's side of a data connection: it can do all that a worker's side does, at any time.

use std::sync::{Arc, Mutex, MutexGuard};

use tensorwire_fabric::{Arrival, Immediate, QueuePair, RemoteRange};
use tensorwire_memory::{Buf, Granted, copy::CopyReason};
use tensorwire_protocol::{
    ACKNOWLEDGEMENT_IMMEDIATE, Agreed, Destination, MESSAGE_IMMEDIATE, Message, Metadata, Mode,
    TensorRequest, Want,
    credit::{Counts, Flow, RingConsumer, RingPlace},
    limits::{RESULT_SLOT_BYTES, SLOT_BYTES},
    names::{NameForm, NameTable},
    wire::{
        control::{Connect, RegionRecord},
        record::{self, ANSWER_BYTES, ASK_BYTES, Control, Record},
    },
};
use tensorwire_sim::Rng;

use super::{
    answers,
    memory_of::{range_of, region_of},
    paging,
    rogue::{Rogue, Talk},
    stage::PAGE_BYTES,
};

pub(super) const MESSAGE: Immediate = Immediate(MESSAGE_IMMEDIATE);
pub(super) const ACKNOWLEDGEMENT: Immediate = Immediate(ACKNOWLEDGEMENT_IMMEDIATE);

#[derive(Debug)]
pub(super) struct Line {
    pub(super) number: u32,
    pub(super) rogue: Arc<Rogue>,
    /// The honest worker.
    pub(super) target: usize,
    pub(super) queue_pair: QueuePair,
    /// The parameters that the honest worker sent.
    pub(super) peer: Connect,
    pub(super) agreed: Agreed,
    /// Returns no credits.
    stingy: bool,
    ring: Granted,
    slots: Granted,
    state: Mutex<LineState>,
}

#[derive(Debug)]
struct LineState {
    flow: Flow,
    consumer: RingConsumer,
    names: NameTable,
    /// The latest requests of the honest worker.
    requests: Vec<TensorRequest>,
    /// Destinations that it may write, or could write earlier.
    destinations: Vec<Destination>,
    /// Records that it has sent.
    sent: Vec<Vec<u8>>,
    /// Views of the honest worker's memory.
    loans: Vec<Buf>,
    next_index: u32,
    answers_asked: u32,
}

impl Line {
    pub(super) fn new(
        talk: &Talk,
        queue_pair: QueuePair,
        (own, peer): (Connect, Connect),
        (ring, slots): (Granted, Granted),
        stingy: bool,
    ) -> Arc<Self> {
        peer.regions.iter().for_each(|record| queue_pair.add_remote_region(region_of(record)));
        let agreed = Agreed::of(&own.parameters, &peer.parameters);
        let own_ring = own.parameters.first_ring_bytes();
        let flow =
            Flow::new(&agreed, peer.parameters.first_ring_bytes(), peer.parameters.ring_bytes, own_ring);
        let state = LineState {
            flow,
            consumer: RingConsumer::new(own_ring),
            names: NameTable::new(agreed.names_max),
            requests: Vec::new(),
            destinations: Vec::new(),
            sent: Vec::new(),
            loans: Vec::new(),
            next_index: 0,
            answers_asked: 0,
        };
        let (rogue, target) = (talk.rogue.clone(), talk.target);
        let line = Self {
            number: peer.connection,
            rogue,
            target,
            queue_pair,
            agreed,
            stingy,
            ring,
            slots,
            state: Mutex::new(state),
            peer,
        };
        line.claim(&range_of(&line.peer.ring.destination, 0, line.peer.ring.destination.capacity));
        line.claim(&range_of(&line.peer.ring.slots, 0, line.peer.ring.slots.capacity));
        Arc::new(line)
    }

    fn lock(&self) -> MutexGuard<'_, LineState> {
        self.state.lock().unwrap()
    }

    pub(super) fn did(&self, deed: &'static str) {
        self.rogue.stage.did(deed);
    }

    /// Claims a range that the honest worker has just announced.
    fn claim(&self, range: &RemoteRange) {
        let stage = &self.rogue.stage;
        let target = stage.truth().nodes.get(self.target).copied();
        if let Some(target) = target {
            stage.handle.claim(self.rogue.node.id(), target, range);
        }
    }

    pub(super) fn add_region(&self, record: &RegionRecord) {
        self.queue_pair.add_remote_region(region_of(record));
    }

    pub(super) fn requests(&self) -> Vec<TensorRequest> {
        self.lock().requests.clone()
    }

    pub(super) fn destinations(&self) -> Vec<Destination> {
        self.lock().destinations.clone()
    }

    pub(super) fn sent(&self) -> Vec<Vec<u8>> {
        self.lock().sent.clone()
    }

    /// An index for a request of the rogue.
    pub(super) fn next_index(&self) -> u32 {
        let mut state = self.lock();
        state.next_index += 1;
        state.next_index
    }

    /// The counts that an honest side would send.
    pub(super) fn counts(&self) -> Counts {
        self.lock().flow.counts()
    }

    /// Writes `bytes`, and ignores the result.
    pub(super) fn write(&self, remote: RemoteRange, bytes: &[u8], immediate: Option<Immediate>) {
        let Some(mut local) = self.rogue.source.buffer(bytes.len()) else { return };
        local.copy_from_slice(bytes);
        let remote = RemoteRange { length: bytes.len() as u64, ..remote };
        drop(match immediate {
            Some(immediate) => self.queue_pair.write_imm(local.freeze(), remote, immediate),
            None => self.queue_pair.write(local.freeze(), remote),
        });
    }

    pub(super) fn notify(&self, immediate: u32) {
        drop(self.queue_pair.notify(Immediate(immediate)));
    }

    /// Writes these bytes as the next record of the peer's ring; false if flow control has no room for it.
    pub(super) fn record(&self, bytes: &[u8]) -> bool {
        let place = {
            let mut state = self.lock();
            let place = state.flow.post_message(bytes.len() as u32);
            if place.is_ok() && state.sent.len() < 16 {
                state.sent.push(bytes.to_vec());
            }
            place
        };
        match place {
            Ok(place) => {
                self.place(place, bytes);
                true
            }
            Err(blocked) => {
                let ask = self.lock().flow.ask(blocked);
                if let Some(ask) = ask {
                    self.slot(0, &record::encode_ask(ask));
                }
                false
            }
        }
    }

    fn place(&self, RingPlace { first, second }: RingPlace, bytes: &[u8]) {
        let ring = &self.peer.ring.destination;
        let (head, tail) = bytes.split_at((first.length as usize).min(bytes.len()));
        let range = |offset: u32| range_of(ring, offset.into(), 0);
        if tail.is_empty() {
            return self.write(range(first.offset), head, Some(MESSAGE));
        }
        self.write(range(first.offset), head, None);
        self.write(range(second.offset), tail, Some(MESSAGE));
    }

    /// Writes the record of ASK (0) or ANSWER (1).
    pub(super) fn slot(&self, which: u64, bytes: &[u8]) {
        let range = range_of(&self.peer.ring.slots, which * u64::from(SLOT_BYTES), 0);
        self.write(range, bytes, Some(ACKNOWLEDGEMENT));
    }

    pub(super) fn encoded(&self, counts: Counts, form: NameForm, message: &Message) -> Vec<u8> {
        let mut bytes = Vec::new();
        let forms = vec![form; message.requests().len().max(1)];
        let counted = (self.agreed.mode != Mode::Original).then_some((counts, forms.as_slice()));
        record::encode_message(counted, message, &mut bytes);
        bytes
    }

    pub(super) fn message(&self, message: &Message) -> bool {
        let bytes = self.encoded(self.counts(), NameForm::Plain, message);
        self.record(&bytes)
    }

    pub(super) fn control(&self, control: Control) -> bool {
        let mut bytes = Vec::new();
        record::encode_control(self.counts(), control, &mut bytes);
        self.record(&bytes)
    }

    /// Writes a content, as the answer to a request with this destination.
    pub(super) fn content(&self, destination: Option<Destination>, bytes: &[u8], immediate: u32) {
        let _may_be_without_credit = self.lock().flow.post_content();
        let Some(destination) = destination.filter(|_| !bytes.is_empty()) else {
            return self.notify(immediate);
        };
        if let Some(slot) = destination.result {
            let at = Destination {
                region: slot.region,
                generation: slot.generation,
                offset: slot.offset,
                ..destination
            };
            self.write(range_of(&at, 0, 0), &answers::result_of(self.agreed.validation, bytes), None);
        }
        self.write(range_of(&destination, 0, 0), bytes, Some(Immediate(immediate)));
    }

    /// Writes bytes without an immediate.
    pub(super) fn uncounted(&self, destination: Destination, bytes: &[u8]) {
        self.write(range_of(&destination, 0, 0), bytes, None);
    }

    /// Takes all arrivals until the connection is over.
    pub(super) async fn take_arrivals(self: Arc<Self>, mut rng: Rng) {
        while let Ok(arrival) = self.queue_pair.next_arrival().await {
            match arrival {
                Arrival::Immediate { immediate: MESSAGE, .. } => self.take_message(&mut rng),
                Arrival::Immediate { immediate: ACKNOWLEDGEMENT, length } => {
                    self.take_record(length, &mut rng);
                }
                Arrival::Immediate { .. } => {
                    let _ = self.lock().flow.take_content();
                }
                Arrival::Loan { buffer, .. } => {
                    let mut state = self.lock();
                    let _ = state.flow.take_content();
                    // Held until the rogue ends.
                    state.loans.push(buffer);
                    drop(state);
                    self.did("holds a lease");
                }
                _ => {}
            }
        }
    }

    fn read_message(&self) -> Option<Message> {
        let mut state = self.lock();
        let LineState { flow, consumer, names, .. } = &mut *state;
        let read = |place: RingPlace, into: &mut [u8]| {
            let (head, tail) = into.split_at_mut((place.first.length as usize).min(into.len()));
            self.ring.read_at(place.first.offset as usize, head, CopyReason::Message).ok()?;
            self.ring.read_at(place.second.offset as usize, tail, CopyReason::Message).ok()
        };
        let mut prefix = [0; 4];
        read(consumer.place(4)?, &mut prefix)?;
        let length = record::record_length(self.agreed.mode, prefix).ok()?;
        let mut bytes = vec![0; length];
        read(consumer.place(length as u32)?, &mut bytes)?;
        let requests = self.agreed.requests_per_message;
        let (counts, record) = record::decode_record(self.agreed.mode, &bytes, names, requests).ok()?;
        consumer.advance(length as u32);
        if self.agreed.mode == Mode::Counted {
            // The counts may be wrong because of what this side has sent.
            let _ = flow.take_message(length as u32, counts);
        }
        match record {
            Record::Message(message) => Some(message),
            Record::Control(_) => None,
        }
    }

    fn take_message(self: &Arc<Self>, rng: &mut Rng) {
        let message = self.read_message();
        if self.agreed.mode == Mode::Original && !self.stingy && !rng.chance(1, 30) {
            self.notify(ACKNOWLEDGEMENT.0);
        }
        let Some(message) = message else { return };
        let counts_due = self.lock().flow.is_return_due();
        if counts_due && !self.stingy && !rng.chance(1, 10) {
            self.control(Control::CountOnly);
        }
        for request in message.requests() {
            let destination = match request.want {
                Want::Write(destination) => destination,
                Want::Eager | Want::View | Want::Each(_) => None,
            };
            self.note(request.clone(), destination);
        }
        match &message {
            Message::TensorReRequest(request) => self.note_destination(request.destination),
            Message::BufferResponse(buffers) | Message::BufferIdle(buffers) => {
                buffers.destinations.iter().for_each(|buffer| self.note_destination(Some(*buffer)));
            }
            _ => {}
        }
        if self.stingy && rng.chance(1, 2) {
            answers::answer_too_soon(self, &message);
        }
        answers::react(self, &message, rng);
    }

    fn note(&self, request: TensorRequest, destination: Option<Destination>) {
        self.note_destination(destination);
        // Each page is a grant of its own.
        if let Some(arena) = destination {
            let pages = paging::places(&request).into_iter();
            pages.for_each(|place| self.claim(&range_of(&arena, place, PAGE_BYTES as u64)));
        }
        let mut state = self.lock();
        state.requests.push(request);
        let excess = state.requests.len().saturating_sub(16);
        state.requests.drain(..excess);
    }

    fn note_destination(&self, destination: Option<Destination>) {
        let Some(destination) = destination else { return };
        self.claim(&range_of(&destination, 0, destination.capacity));
        if let Some(slot) = destination.result {
            let at = Destination {
                region: slot.region,
                generation: slot.generation,
                offset: slot.offset,
                ..destination
            };
            self.claim(&range_of(&at, 0, RESULT_SLOT_BYTES.into()));
        }
        let mut state = self.lock();
        state.destinations.push(destination);
        let excess = state.destinations.len().saturating_sub(16);
        state.destinations.drain(..excess);
    }

    /// Takes ASK or ANSWER, or the acknowledgement of mode original.
    fn take_record(&self, length: u64, rng: &mut Rng) {
        let mut state = self.lock();
        if self.agreed.mode == Mode::Original {
            let _ = state.flow.acknowledged();
            return;
        }
        match usize::try_from(length) {
            Ok(ASK_BYTES) => {
                let mut bytes = [0; ASK_BYTES];
                if self.slots.read_at(0, &mut bytes, CopyReason::Message).is_err() {
                    return;
                }
                let answer = state.flow.take_ask(record::decode_ask(bytes));
                state.answers_asked += 1;
                drop(state);
                if let Ok(mut answer) = answer
                    && !self.stingy
                    && !rng.chance(1, 12)
                {
                    if rng.chance(1, 12) {
                        answer.counts.receives = answer.counts.receives.wrapping_sub(1);
                        self.did("answers ASK with too little");
                    }
                    self.slot(1, &record::encode_answer(answer));
                }
            }
            Ok(ANSWER_BYTES) => {
                let mut bytes = [0; ANSWER_BYTES];
                if self.slots.read_at(SLOT_BYTES as usize, &mut bytes, CopyReason::Message).is_ok() {
                    let _ = state.flow.take_answer(record::decode_answer(bytes));
                }
            }
            _ => {}
        }
    }

    /// A value that a rogue sends.
    pub(super) fn value(rng: &mut Rng) -> (Metadata, Vec<u8>) {
        let length = rng.pick([0, 1, 8, 64, 300, 5000]);
        answers::value_of(length, rng)
    }
}
