//! One connection whose peer does anything, while receives, values and completions come and go.
//!
//! The peer may end the connection, and has no other effect: every receive ends, all memory comes back, and everything that the
//! connection posts until then is well-formed. The channel of the pairs' tests checks that.

use std::{num::NonZeroU64, sync::Arc};

use tensorwire_protocol::{
    ACKNOWLEDGEMENT_IMMEDIATE, Agreed, BufferRequest, Buffers, CallTerms, Channel, Code, Connection,
    DataType, Destination, ErrorStatus, MESSAGE_IMMEDIATE, Message, MetaDataResponse, Metadata, Mode, Note,
    Offered, OfferedArguments, Parameters, RecordSlot, RequestIndex, Responded, ResultSlot, Scope,
    SetContent, Shape, Sharing, Status, StepId, SubscriptionTerms, TensorReRequest, TensorRequest,
    TensorWrite, TraceContext, Validation, VersionNotice, Want, Wanted,
    credit::{Answer, Ask, Counts},
    names::NameForm,
    wire::record::{self, ASK_BYTES, Control, RECORD_BYTES_MAX},
};

use crate::{
    input::{Input, framed},
    support::{
        Side, bytes_of,
        channel::{TestChannel, Wire},
        memory::{Lent, Memory},
        pair::ReceiveResult,
        source::TestSource,
        subscriber::{Next, Subscriber, value_of},
        tasks::{Handle, Tasks},
    },
};

/// Steps of one input, so that none takes long.
const STEPS_MAX: usize = 400;
/// Blocks that the connection's memory has.
const BLOCKS: usize = 8;
const KEYS: [&str; 4] = ["", "a", "weights", "0123456789abcdef0123456789abcdef"];

struct Rig {
    connection: Arc<Connection<TestChannel>>,
    memory: Memory,
    source: Arc<TestSource>,
    wire: Wire,
    tasks: Tasks,
    script: TestChannel,
    mode: Mode,
    /// The position of the script's next write, in the ring that it believes the connection reads.
    ring: usize,
    at: usize,
    /// What the script has taken in.
    taken: Counts,
    asks: u32,
    answers: u32,
    receives: Vec<Handle<ReceiveResult>>,
    subscribers: Vec<(Subscriber, Next)>,
}

pub(crate) fn connection(data: &[u8]) {
    let mut input = Input::new(data);
    let mut rig = Rig::new(parameters(&mut input));
    for _ in 0..STEPS_MAX {
        if input.is_empty() || rig.connection.failure().is_some() {
            break;
        }
        let runs = rig.step(&mut input);
        if runs {
            rig.tasks.run();
        }
    }
    rig.end();
}

/// Small, so that every limit is met.
fn parameters(input: &mut Input<'_>) -> Parameters {
    let parameters = Parameters {
        mode: input.pick(&[Mode::Counted, Mode::Counted, Mode::Counted, Mode::Original]),
        depth: 4 + input.below(16) as u32,
        ring_bytes: 8 << (10 + input.below(4)),
        requests_max: 1 + input.below(8) as u32,
        contents_max: 1 + input.below(3) as u32,
        names_max: input.below(5) as u32,
        eager_bytes_max: input.pick(&[0, 64, 4096]),
        requests_per_message: 1 + input.below(4) as u32,
        piece_bytes: 4 << 10,
        validation: input.pick(&Validation::ALL),
    };
    parameters.check().unwrap();
    parameters
}

impl Rig {
    fn new(parameters: Parameters) -> Self {
        let agreed = Agreed::of(&parameters, &parameters);
        let memory = Memory::with_results(BLOCKS, agreed.has_result_slots());
        let wire = Wire::new((parameters, memory.clone()), (parameters, Memory::new(0)));
        let connection = Connection::new(wire.channel(Side::A), wire.rings(Side::A), parameters, parameters);
        let mut tasks = Tasks::default();
        tasks.spawn(connection.clone().housekeeping());
        tasks.run();
        Self {
            connection,
            memory,
            source: Arc::new(TestSource::default()),
            script: wire.channel(Side::B),
            wire,
            tasks,
            mode: agreed.mode,
            ring: 0,
            at: 0,
            taken: Counts::default(),
            asks: 0,
            answers: 0,
            receives: Vec::new(),
            subscribers: Vec::new(),
        }
    }

    /// One step. Returns whether tasks run after it.
    fn step(&mut self, input: &mut Input<'_>) -> bool {
        let choice = input.u8();
        match choice & 31 {
            0..=9 => self.say(input),
            10 => self.babble(input),
            11..=13 => self.content(input),
            14 => self.lend(input),
            15 | 16 => self.record(input),
            17..=19 => self.receive(input),
            20 => self.subscribe(input),
            21 => self.give_up(input),
            22..=24 => self.send_value(input),
            25 | 26 => self.absorb(),
            27 => self.wire.land(Side::A),
            28 => self.wire.complete(Side::A),
            29 => self.acknowledge(),
            _ => self.change_the_world(input),
        }
        choice & 0xC0 != 0xC0
    }

    /// A message whose fields are chosen, with counts that are usually true.
    fn say(&mut self, input: &mut Input<'_>) {
        let counts = if input.below(8) > 0 {
            self.taken
        } else {
            Counts { receives: input.number() as u32, ring_bytes: input.number() as u32 }
        };
        let mut bytes = Vec::new();
        let kind = input.below(16);
        match kind {
            0..=12 => {
                let message = message(kind, input);
                let forms: Vec<NameForm> = message.requests().iter().map(|_| name_form(input)).collect();
                let counted = (self.mode == Mode::Counted).then_some((counts, &forms[..]));
                record::encode_message(counted, &message, &mut bytes);
            }
            13 => record::encode_control(counts, Control::CountOnly, &mut bytes),
            14 => {
                let capacity = input.pick(&[0, 8 << 10, 16 << 10, 32 << 10, 1 << 20, u64::MAX]);
                let ring = Destination { region: input.u8().into(), ..destination(input, capacity) };
                record::encode_control(counts, Control::RingOffer(ring), &mut bytes);
            }
            _ => record::encode_control(counts, Control::RingMoved, &mut bytes),
        }
        self.write_record(&bytes);
    }

    /// Bytes that are usually no message.
    fn babble(&mut self, input: &mut Input<'_>) {
        let bytes = input.bytes(96);
        let framed = framed(bytes);
        self.write_record(if input.flag() { bytes } else { &framed });
    }

    fn write_record(&mut self, bytes: &[u8]) {
        self.follow_ring();
        let ring_bytes = self.wire.ring_lengths(Side::A)[self.ring];
        let bytes = &bytes[..bytes.len().min(ring_bytes).min(RECORD_BYTES_MAX + 8)];
        let (head, tail) = bytes.split_at(bytes.len().min(ring_bytes - self.at));
        let parts = [(self.at as u32, head.to_vec()), (0, tail.to_vec())];
        self.wire.forge_parts(Side::B, parts.to_vec(), MESSAGE_IMMEDIATE);
        self.at = (self.at + bytes.len()) % ring_bytes;
        self.arrive();
    }

    /// Goes to the ring that the connection reads now.
    fn follow_ring(&mut self) {
        let reading = self.wire.reading(Side::A);
        if reading != self.ring {
            (self.ring, self.at) = (reading, 0);
            self.wire.forge_into(Side::B, reading);
        }
    }

    /// The connection takes in all that the script has posted, and has a task for each request.
    fn arrive(&mut self) {
        while self.wire.has_posted(Side::B) {
            self.wire.land(Side::B);
            self.wire.complete(Side::B);
        }
        while let Some(arrival) = self.wire.take(Side::A) {
            self.take_in(arrival.immediate, arrival.length);
        }
    }

    /// An arrival may break a rule; requests that come of it are answered.
    fn take_in(&mut self, immediate: u32, length: u64) {
        let mut requests = Vec::new();
        let _broken_rule = self.connection.on_immediate(immediate, length, |request| requests.push(request));
        for request in requests {
            if let Responded::Waiting(answer) = self.connection.respond(request, &self.source) {
                self.tasks.spawn(answer.run());
            }
        }
    }

    /// The immediate of a content, or any other.
    fn content(&mut self, input: &mut Input<'_>) {
        let immediate = match input.below(8) {
            0 => input.u32(),
            _ => index(input).0 | (input.below(4) as u32) << 30,
        };
        self.take_in(immediate, input.number());
    }

    fn lend(&mut self, input: &mut Input<'_>) {
        let immediate = index(input).0 | (input.below(4) as u32) << 30;
        let bytes = vec![5; input.below(300)];
        let length = if input.below(4) > 0 { bytes.len() as u64 } else { input.number() };
        let view = self.memory.view(bytes);
        let _it_may_break_a_rule = self.connection.on_loan(immediate, length, view);
    }

    /// An ASK or an ANSWER that is usually true.
    fn record(&mut self, input: &mut Input<'_>) {
        self.follow_ring();
        let is_true = input.below(8) > 0;
        let number = |input: &mut Input<'_>, known| if is_true { known } else { input.number() as u32 };
        let counts =
            if is_true { self.taken } else { Counts { receives: input.u32(), ring_bytes: input.u32() } };
        if input.flag() {
            let answers = number(input, self.answers);
            let ask = Ask { counts, answers, wanted: input.number() as u32 };
            self.script.post_record(RecordSlot::Ask, &record::encode_ask(ask)).unwrap();
        } else {
            let answer = Answer { counts, asks: number(input, self.asks) };
            self.script.post_record(RecordSlot::Answer, &record::encode_answer(answer)).unwrap();
        }
        self.arrive();
    }

    fn receive(&mut self, input: &mut Input<'_>) {
        let (connection, memory) = (self.connection.clone(), self.memory.clone());
        let (scope, key) = (scope(input), input.pick(&KEYS).to_owned());
        let sharing = if input.below(4) == 0 { Sharing::View } else { Sharing::Copy };
        let receive = async move { connection.receive_with(scope, &key, &memory, sharing.into()).await };
        self.receives.push(self.tasks.spawn(receive));
    }

    /// A new subscription, or a value of one, or the end of one.
    fn subscribe(&mut self, input: &mut Input<'_>) {
        let choice = input.below(8);
        if choice < 2 || self.subscribers.is_empty() {
            let (scope, key, terms) = (scope(input), input.pick(&KEYS), terms(input));
            let subscriber = Subscriber::new(&self.connection, &self.memory, (scope, key), terms);
            let next = subscriber.next(&mut self.tasks);
            return self.subscribers.push((subscriber, next));
        }
        let (subscriber, next) = self.subscribers.swap_remove(choice % self.subscribers.len());
        if choice == 7 || next.is_pending() {
            self.tasks.cancel(next.task);
        }
        take_value(&next);
        if choice < 7 {
            let next = subscriber.next(&mut self.tasks);
            self.subscribers.push((subscriber, next));
        }
    }

    fn give_up(&mut self, input: &mut Input<'_>) {
        if !self.receives.is_empty() {
            let given_up = self.receives.swap_remove(input.below(self.receives.len()));
            self.tasks.cancel(given_up.task);
            finish(&given_up);
        }
    }

    fn send_value(&mut self, input: &mut Input<'_>) {
        let (scope, key) = (scope(input), input.pick(&KEYS));
        match input.below(8) {
            0 => {
                self.source.refuse(scope, key, Status::new(Code::NotFound, "no such thing"));
            }
            1 => self.source.send(scope, key, metadata(input), vec![1; input.below(64)]),
            _ => self.source.send_bytes(scope, key, input.pick(&[0, 1, 8, 64, 4096, 5000]), 9),
        }
    }

    /// The script takes in all that has been posted to it.
    fn absorb(&mut self) {
        while self.wire.has_posted(Side::A) {
            self.wire.land(Side::A);
        }
        while self.wire.has_completions(Side::A) {
            self.wire.complete(Side::A);
        }
        while let Some(arrival) = self.wire.take(Side::B) {
            if self.mode == Mode::Counted && arrival.immediate == ACKNOWLEDGEMENT_IMMEDIATE {
                let is_ask = arrival.length == ASK_BYTES as u64;
                self.asks += u32::from(is_ask);
                self.answers += u32::from(!is_ask);
                continue;
            }
            self.taken.receives = self.taken.receives.wrapping_add(1);
            self.taken.ring_bytes = self.taken.ring_bytes.wrapping_add(arrival.ring_bytes);
        }
    }

    /// The acknowledgement of mode original.
    fn acknowledge(&mut self) {
        self.take_in(ACKNOWLEDGEMENT_IMMEDIATE, 0);
    }

    fn change_the_world(&mut self, input: &mut Input<'_>) {
        match input.below(7) {
            0 => self.memory.stick(input.flag()),
            1 => self.memory.refuse(crate::support::memory::exhausted()),
            2 => self.memory.allow(),
            3 => self.wire.refuse_rings(Side::A),
            4 => self.wire.allow_loans(Side::A, input.below(3) as u32),
            5 => self.wire.allow_posts(Side::A, input.u8().into()),
            _ => self.connection.fail("the end has had enough"),
        }
    }

    /// Whatever happened: everything ends, and all memory comes back.
    fn end(mut self) {
        self.memory.allow();
        self.memory.stick(false);
        self.connection.fail("the queue pair is gone");
        self.wire.cut();
        self.tasks.run();
        assert!(self.tasks.all_finished(), "a task waits for a connection that is over");
        self.receives.iter().for_each(finish);
        self.subscribers.drain(..).for_each(|(_, next)| take_value(&next));
        self.connection.drain().into_iter().for_each(Lent::end_drained);
        assert_eq!((self.memory.lent(), self.memory.leaked()), (0, 0));
    }
}

/// A receive that has ended gives its memory back.
fn finish(receive: &Handle<ReceiveResult>) {
    if let Some(Ok(received)) = receive.take() {
        let length = received.metadata.byte_length as usize;
        received.lent.map(|lent| lent.finish(length));
    }
}

/// The value of a subscription gives its memory back.
fn take_value(next: &Next) {
    next.take().and_then(Result::ok).map(value_of);
}

/// Indices that connections use: a slot and how often it was used.
fn index(input: &mut Input<'_>) -> RequestIndex {
    let byte = u32::from(input.u8());
    RequestIndex(byte & 15 | (byte >> 4 & 3) << 14)
}

fn at(capacity: u64) -> Destination {
    Destination { region: 1, generation: 1, offset: 0, capacity, result: None }
}

fn destination(input: &mut Input<'_>, capacity: u64) -> Destination {
    let slot = ResultSlot { region: 2, generation: 1, offset: 64 };
    Destination { result: input.flag().then_some(slot), ..at(capacity) }
}

fn scope(input: &mut Input<'_>) -> Scope {
    match input.below(10) {
        0 => Scope::Published,
        1 => Scope::Versioned(Wanted::Now),
        2 => match u64::from(input.u8()) {
            version @ ..200 => Scope::Versioned(Wanted::NewerThan { incarnation: 1, version }),
            number @ 200..230 => Scope::Pages(NonZeroU64::new(number & 1)),
            number @ 230..240 => Scope::Arguments(NonZeroU64::MIN.saturating_add(number & 1)),
            number => {
                let arguments = OfferedArguments { number: NonZeroU64::MIN, bytes: 5000 };
                let trace = TraceContext::new(1, 1, 1).filter(|_| number & 2 == 0);
                Scope::Call(CallTerms { limit_ms: 1, offered: (number & 1 == 0).then_some(arguments), trace })
            }
        },
        3 => Scope::Offered(Offered { incarnation: 1, edition: input.u8().into(), cell: 0 }),
        4 => Scope::Set(Wanted::NewerThan { incarnation: 1, version: input.u8().into() }),
        5 => Scope::SetContent(SetContent { edition: input.u8().into(), number: 2, is_last: false }),
        6 => Scope::Slice,
        7 => Scope::SetSlice(SetContent { edition: input.u8().into(), number: 2, is_last: true }),
        step => Scope::Step(StepId(step as i64 & 1)),
    }
}

/// Of a call that offers none.
fn arguments(scope: Scope) -> Option<Arc<[u8]>> {
    let has_arguments = matches!(scope, Scope::Call(CallTerms { offered: None, .. }));
    has_arguments.then(|| Arc::from([5, 0, 0, 0, 9]))
}

fn metadata(input: &mut Input<'_>) -> Metadata {
    let length = input.pick(&[0, 1, 8, 8, 64, 4096, 5000, 1 << 20, 1 << 40]);
    match input.below(8) {
        0 => Metadata::dead(DataType::F32, Shape::new([length]).unwrap()),
        1 => Metadata::encoded(DataType::String, Shape::new([2]).unwrap(), length).unwrap(),
        2 => Metadata { byte_length: input.number(), ..bytes_of(length) },
        _ => bytes_of(length),
    }
}

fn terms(input: &mut Input<'_>) -> SubscriptionTerms {
    let flags = input.u8();
    SubscriptionTerms { values: 1 + (flags >> 2) % 8, every: flags & 1 == 0, view: flags & 2 != 0 }
}

fn buffers(input: &mut Input<'_>) -> Buffers {
    let (index, values) = (index(input), input.below(3) as u8);
    let (count, capacity) = (input.below(4), input.pick(&[1, 8, 64, 4096, 5000]));
    Buffers { index, values, destinations: (0..count).map(|_| destination(input, capacity)).collect() }
}

/// What the receiver of a subscription sends.
fn taking(input: &mut Input<'_>) -> Message {
    match input.below(3) {
        0 => {
            let (index, scope, key) = (index(input), scope(input), input.pick(&KEYS).into());
            let (known, want) = (Arc::default(), Want::Each(terms(input)));
            let arguments = arguments(scope);
            Message::TensorRequest(TensorRequest { index, scope, key, known, want, arguments })
        }
        1 => Message::BufferResponse(buffers(input)),
        _ => Message::BufferIdle(buffers(input)),
    }
}

/// What the sender of a subscription sends.
fn giving(input: &mut Input<'_>) -> Message {
    if input.below(3) == 0 {
        return Message::BufferRequest(BufferRequest { index: index(input), metadata: metadata(input) });
    }
    let (version, sequence) = (input.number(), input.number());
    Message::TensorWrite(TensorWrite { version, sequence, began: 0, value: meta_data_response(input) })
}

fn name_form(input: &mut Input<'_>) -> NameForm {
    let number = input.below(6) as u16;
    match input.below(4) {
        0 => NameForm::Define(number),
        1 => NameForm::Number(number),
        _ => NameForm::Plain,
    }
}

fn request(input: &mut Input<'_>) -> TensorRequest {
    let (index, scope, key) = (index(input), scope(input), input.pick(&KEYS).into());
    let known: Arc<[Metadata]> = (0..input.below(6)).map(|_| metadata(input)).collect();
    let needed = known.iter().map(|metadata| metadata.byte_length).max().unwrap_or(0);
    let want = match input.below(8) {
        0 => Want::Eager,
        1 => Want::View,
        2 => Want::Write(Some(destination(input, 8))),
        _ => Want::Write((needed > 0).then(|| destination(input, needed))),
    };
    TensorRequest { index, scope, key, known, want, arguments: arguments(scope) }
}

fn message(kind: usize, input: &mut Input<'_>) -> Message {
    match kind {
        0..=1 => Message::TensorRequest(request(input)),
        2 => taking(input),
        3 => Message::TensorRequests((0..input.below(5)).map(|_| request(input)).collect()),
        4..=5 => Message::MetaDataResponse(meta_data_response(input)),
        6 => giving(input),
        7 => {
            let (index, capacity) = (index(input), input.pick(&[0, 1, 8, 64, 4096, 5000]));
            let destination = (capacity > 0).then(|| destination(input, capacity));
            Message::TensorReRequest(TensorReRequest { index, destination })
        }
        8 => {
            let status = Status::new(Code::NotFound, "no such thing");
            Message::ErrorStatus(ErrorStatus { index: index(input), status })
        }
        9 => Message::Cancel(index(input)),
        10 => {
            let bytes = vec![5; input.below(70)].into();
            Message::Note(Note { channel: input.below(2) as u64, lane: input.below(3) as u16, bytes })
        }
        11 => Message::CancelAck(index(input)),
        _ => Message::Version(VersionNotice { index: index(input), version: input.number() }),
    }
}

fn meta_data_response(input: &mut Input<'_>) -> MetaDataResponse {
    let (index, metadata) = (index(input), metadata(input));
    let fits = metadata.byte_length <= 4096;
    let content = (fits && input.flag()).then(|| vec![3; metadata.byte_length as usize].into());
    let loan_follows = content.is_none() && input.below(4) == 0;
    let checksum = input.flag().then(|| input.number());
    MetaDataResponse { index, metadata, content, loan_follows, checksum }
}

#[test]
fn d_fuzz_connection() {
    crate::replay::replay("connection", connection);
}
