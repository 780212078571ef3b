//! One real connection at side A; side B is a script that may break any rule.

use std::sync::Arc;

use tensorwire_protocol::{
    ACKNOWLEDGEMENT_IMMEDIATE, Agreed, Channel, Connection, MESSAGE_IMMEDIATE, Message, MetaDataResponse,
    Metadata, Mode, Parameters, PeerMisbehaved, RecordSlot, RequestIndex, Responded, Scope, Sharing,
    TensorRequest,
    credit::{Answer, Ask, Blocked, Counts, Flow},
    names::NameForm,
    wire::record::{self, ASK_BYTES, Control},
};

use super::{
    Side,
    channel::{TestChannel, Wire, ring_at},
    memory::{Lent, Memory},
    pair::ReceiveResult,
    source::TestSource,
    tasks::{Handle, Tasks},
};

pub(crate) struct Lone {
    pub(crate) connection: Arc<Connection<TestChannel>>,
    pub(crate) memory: Memory,
    pub(crate) source: Arc<TestSource>,
    pub(crate) wire: Wire,
    pub(crate) tasks: Tasks,
    mode: Mode,
    script: TestChannel,
    flow: Flow,
    /// Ordinary immediates and ring bytes that the script has posted.
    posted: Counts,
    /// Ordinary immediates and ring bytes of A that the script has taken in.
    taken: Counts,
    /// ASKs of A that the script has taken in.
    pub(crate) asks: u32,
}

impl Lone {
    pub(crate) fn new(parameters: Parameters) -> Self {
        let agreed = Agreed::of(&parameters, &parameters);
        let memory = Memory::with_results(64, agreed.has_result_slots());
        let wire = Wire::new((parameters, memory.clone()), (parameters, Memory::new(0)));
        let connection = Connection::new(wire.channel(Side::A), wire.rings(Side::A), parameters, parameters);
        let mut tasks = Tasks::default();
        tasks.spawn(connection.clone().housekeeping());
        let ring_bytes = parameters.first_ring_bytes();
        Self {
            connection,
            memory,
            source: Arc::new(TestSource::default()),
            script: wire.channel(Side::B),
            wire,
            tasks,
            mode: agreed.mode,
            // Room for every message, so that the script need not wait; it may break any rule.
            flow: Flow::new(&Agreed { depth: u32::MAX, ..agreed }, ring_bytes, ring_bytes, ring_bytes),
            posted: Counts::default(),
            taken: Counts::default(),
            asks: 0,
        }
    }

    /// One transfer after which the receiver knows the metadata of `key`.
    pub(crate) fn know(&mut self, key: &str, metadata: &Metadata) {
        let handle = self.receive(super::STEP, key);
        let (index, metadata) = (RequestIndex(0), metadata.clone());
        let length = metadata.byte_length;
        let response =
            MetaDataResponse { index, metadata, content: None, loan_follows: false, checksum: None };
        assert_eq!(self.message(&Message::MetaDataResponse(response)), Ok(None));
        assert_eq!(self.immediate(0, length), Ok(()));
        super::pair::settled(&handle).unwrap();
    }

    pub(crate) fn receive(&mut self, scope: Scope, key: &str) -> Handle<ReceiveResult> {
        let (connection, memory, key) = (self.connection.clone(), self.memory.clone(), key.to_owned());
        let handle = self.tasks.spawn(async move { connection.receive(scope, &key, &memory).await });
        self.tasks.run();
        handle
    }

    /// As [`receive`](Self::receive), of a view.
    pub(crate) fn view(&mut self, scope: Scope, key: &str) -> Handle<ReceiveResult> {
        let (connection, memory, key) = (self.connection.clone(), self.memory.clone(), key.to_owned());
        let handle = self
            .tasks
            .spawn(async move { connection.receive_with(scope, &key, &memory, Sharing::View.into()).await });
        self.tasks.run();
        handle
    }

    /// The script lends `bytes` with `immediate`.
    pub(crate) fn loan(&mut self, immediate: u32, bytes: &[u8]) -> Result<(), PeerMisbehaved> {
        let view = self.memory.view(bytes.to_vec());
        let result = self.connection.on_loan(immediate, bytes.len() as u64, view);
        self.tasks.run();
        result
    }

    /// Takes A's posts off the wire, learns the counts that they return, and acknowledges them.
    pub(crate) fn absorb(&mut self) {
        while self.wire.has_posted(Side::A) {
            self.wire.land(Side::A);
            self.wire.complete(Side::A);
        }
        while let Some(arrival) = self.wire.take(Side::B) {
            match (self.mode, arrival.immediate) {
                (Mode::Original, ACKNOWLEDGEMENT_IMMEDIATE) => self.flow.acknowledged().unwrap(),
                (Mode::Original, MESSAGE_IMMEDIATE) => self.script.post_acknowledgement().unwrap(),
                (Mode::Original, _) => {}
                (_, ACKNOWLEDGEMENT_IMMEDIATE) => self.asks += u32::from(arrival.length == ASK_BYTES as u64),
                (_, immediate) => {
                    self.taken.receives += 1;
                    if immediate == MESSAGE_IMMEDIATE {
                        self.taken.ring_bytes += arrival.ring_bytes;
                    }
                }
            }
        }
    }

    /// The script returns all that A's ASK asks for.
    pub(crate) fn answer(&mut self) -> Result<(), PeerMisbehaved> {
        self.absorb();
        self.answer_with(Answer { counts: self.taken, asks: self.asks })
    }

    pub(crate) fn answer_with(&mut self, answer: Answer) -> Result<(), PeerMisbehaved> {
        self.script.post_record(RecordSlot::Answer, &record::encode_answer(answer)).unwrap();
        self.arrive_and_run()
    }

    pub(crate) fn ask(&mut self, ask: Ask) -> Result<(), PeerMisbehaved> {
        self.script.post_record(RecordSlot::Ask, &record::encode_ask(ask)).unwrap();
        self.arrive_and_run()
    }

    /// The script sends a flow control message with `counts`.
    pub(crate) fn control(&mut self, counts: Counts, control: Control) -> Result<(), PeerMisbehaved> {
        let mut bytes = Vec::new();
        record::encode_control(counts, control, &mut bytes);
        self.post_bytes(&bytes);
        self.arrive_and_run()
    }

    fn arrive_and_run(&mut self) -> Result<(), PeerMisbehaved> {
        let result = self.arrive();
        self.tasks.run();
        result.map(|request| assert!(request.is_none()))
    }

    /// What the script has taken in, once it has [absorbed](Self::absorb).
    pub(crate) fn taken(&self) -> Counts {
        self.taken
    }

    /// An arrival is taken in. Returns the first request that it opens.
    pub(crate) fn taken_in(
        &self,
        immediate: u32,
        length: u64,
    ) -> Result<Option<TensorRequest>, PeerMisbehaved> {
        let mut first = None;
        self.connection.on_immediate(immediate, length, |request| {
            first.get_or_insert(request);
        })?;
        Ok(first)
    }

    /// Everything that the script has posted is taken in. Returns the last result.
    pub(crate) fn arrive(&mut self) -> Result<Option<TensorRequest>, PeerMisbehaved> {
        let mut last = Ok(None);
        while self.wire.has_posted(Side::B) {
            self.wire.land(Side::B);
            self.wire.complete(Side::B);
        }
        while let Some(arrival) = self.wire.take(Side::A) {
            last = self.taken_in(arrival.immediate, arrival.length);
        }
        last
    }

    /// The script sends `message`; tasks of A run afterwards.
    pub(crate) fn message(&mut self, message: &Message) -> Result<Option<TensorRequest>, PeerMisbehaved> {
        let result = self.message_before_tasks_run(message);
        self.tasks.run();
        result
    }

    /// As [`message`](Self::message), without tasks running.
    pub(crate) fn message_before_tasks_run(
        &mut self,
        message: &Message,
    ) -> Result<Option<TensorRequest>, PeerMisbehaved> {
        self.absorb();
        self.post(message);
        self.arrive()
    }

    /// As [`message`](Self::message), while nothing that A has posted lands or completes.
    pub(crate) fn message_without_acknowledging(
        &mut self,
        message: &Message,
    ) -> Result<Option<TensorRequest>, PeerMisbehaved> {
        self.post(message);
        let result = self.arrive();
        self.tasks.run();
        result
    }

    fn post(&mut self, message: &Message) {
        self.post_named(message, NameForm::Plain);
    }

    /// As [`message`](Self::message), naming the key in this form.
    pub(crate) fn named(
        &mut self,
        message: &Message,
        form: NameForm,
    ) -> Result<Option<TensorRequest>, PeerMisbehaved> {
        self.absorb();
        self.post_named(message, form);
        let result = self.arrive();
        self.tasks.run();
        result
    }

    fn post_named(&mut self, message: &Message, form: NameForm) {
        let forms = vec![form; message.requests().len()];
        let counted = (self.mode != Mode::Original).then_some((self.taken, &forms[..]));
        let mut bytes = Vec::new();
        record::encode_message(counted, message, &mut bytes);
        self.post_bytes(&bytes);
    }

    fn post_bytes(&mut self, bytes: &[u8]) {
        if self.mode != Mode::Original {
            // Everything posted before was taken in.
            self.flow.take_message(0, self.posted).unwrap();
            self.flow.ask(Blocked { wanted: 0 });
            self.posted.receives += 1;
            self.posted.ring_bytes += bytes.len() as u32;
        }
        let place = self.flow.post_message(bytes.len() as u32).expect("a credit and room");
        let ring = ring_at(0, self.wire.ring_lengths(Side::A)[0]);
        self.script.post_message(ring, place.first, place.second, bytes).unwrap();
    }

    /// The script writes a message of these bytes, at the start of the ring.
    pub(crate) fn raw_message(&mut self, bytes: &[u8]) -> Result<Option<TensorRequest>, PeerMisbehaved> {
        self.wire.forge(Side::B, 0, bytes, MESSAGE_IMMEDIATE);
        self.arrive()
    }

    /// The script notifies `immediate`; `length` is what the fabric reports as written.
    pub(crate) fn immediate(&mut self, immediate: u32, length: u64) -> Result<(), PeerMisbehaved> {
        let result = self.taken_in(immediate, length);
        self.tasks.run();
        assert!(!matches!(result, Ok(Some(_))));
        result.map(|_| ())
    }

    /// The script sends a TENSOR_REQUEST, and A answers it.
    pub(crate) fn request(&mut self, request: TensorRequest) {
        self.absorb();
        self.request_without_acknowledging(request);
    }

    pub(crate) fn request_without_acknowledging(&mut self, request: TensorRequest) {
        let message = Message::TensorRequest(request);
        let request = self.message_without_acknowledging(&message).unwrap().unwrap();
        if let Responded::Waiting(answer) = self.connection.respond(request, &self.source) {
            self.tasks.spawn(answer.run());
        }
        self.tasks.run();
    }

    /// The connection is over for `rule`: everything ends, and all memory comes back.
    pub(crate) fn assert_over(&mut self, rule: PeerMisbehaved) {
        let failure = self.connection.failure().expect("the connection is over");
        assert!(failure.starts_with(&rule.to_string()), "{failure}");
        self.tasks.run();
        self.connection.drain().into_iter().for_each(Lent::end_drained);
        assert_eq!((self.memory.lent(), self.memory.leaked()), (0, 0));
        let ignored = self.connection.counters().ignored;
        assert_eq!(self.taken_in(MESSAGE_IMMEDIATE, 0), Ok(None));
        assert_eq!(self.connection.counters().ignored, ignored + 1);
    }
}
