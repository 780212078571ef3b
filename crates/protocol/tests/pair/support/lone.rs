//! One real connection at side A; side B is a script that may break any rule.

use std::sync::Arc;

use protocol::{
    ACKNOWLEDGEMENT_IMMEDIATE, Agreed, Channel, Connection, MESSAGE_IMMEDIATE, Message, Parameters,
    PeerMisbehaved, Scope, TensorRequest, credit::RingProducer, wire,
};

use super::{
    Side,
    channel::{TestChannel, Wire},
    memory::{Lent, Memory},
    pair::Outcome,
    source::TestSource,
    tasks::{Handle, Tasks},
};

pub(crate) struct Lone {
    pub(crate) connection: Arc<Connection<TestChannel>>,
    pub(crate) memory: Memory,
    pub(crate) source: Arc<TestSource>,
    pub(crate) wire: Wire,
    pub(crate) tasks: Tasks,
    script: TestChannel,
    producer: RingProducer,
}

impl Lone {
    pub(crate) fn new(parameters: Parameters) -> Self {
        let memory = Memory::new(64);
        let wire = Wire::new((parameters, memory.clone()), (parameters, Memory::new(0)));
        let connection = Connection::new(wire.channel(Side::A), parameters, parameters);
        let mut tasks = Tasks::default();
        tasks.spawn(connection.clone().housekeeping());
        let window = Agreed::of(&parameters, &parameters).window;
        Self {
            connection,
            memory,
            source: Arc::new(TestSource::default()),
            script: wire.channel(Side::B),
            wire,
            tasks,
            producer: RingProducer::new(parameters.ring_bytes, window),
        }
    }

    pub(crate) fn receive(&mut self, scope: Scope, key: &str) -> Handle<Outcome> {
        let (connection, memory, key) = (self.connection.clone(), self.memory.clone(), key.to_owned());
        let handle = self.tasks.spawn(async move { connection.receive(scope, &key, &memory).await });
        self.tasks.run();
        handle
    }

    /// What A has posted is taken away and acknowledged; its acknowledgements free the script's window.
    fn absorb(&mut self) {
        while self.wire.has_posted(Side::A) {
            self.wire.land(Side::A);
            self.wire.complete(Side::A);
        }
        while let Some(arrival) = self.wire.take(Side::B) {
            if arrival.immediate == ACKNOWLEDGEMENT_IMMEDIATE {
                self.producer.retire().unwrap();
            } else if arrival.immediate == MESSAGE_IMMEDIATE {
                self.script.post_acknowledgement().unwrap();
            }
        }
    }

    /// Everything the script has posted is taken in; the last result.
    pub(crate) fn arrive(&mut self) -> Result<Option<TensorRequest>, PeerMisbehaved> {
        let mut last = Ok(None);
        while self.wire.has_posted(Side::B) {
            self.wire.land(Side::B);
            self.wire.complete(Side::B);
        }
        while let Some(arrival) = self.wire.take(Side::A) {
            last = self.connection.on_immediate(arrival.immediate, arrival.length);
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
        let bytes = wire::encode(message);
        let (first, second) = self.producer.reserve(bytes.len() as u32).expect("window and room");
        self.script.post_message(first, second, &bytes).unwrap();
    }

    /// The script writes a message of these bytes, at the start of the ring.
    pub(crate) fn raw_message(&mut self, bytes: &[u8]) -> Result<Option<TensorRequest>, PeerMisbehaved> {
        self.wire.forge(Side::B, 0, bytes, MESSAGE_IMMEDIATE);
        self.arrive()
    }

    /// The script notifies `immediate`; `length` is what the fabric says was written.
    pub(crate) fn immediate(&mut self, immediate: u32, length: u64) -> Result<(), PeerMisbehaved> {
        let result = self.connection.on_immediate(immediate, length);
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
        let response = self.connection.respond(request, &self.source);
        self.tasks.spawn(response);
        self.tasks.run();
    }

    /// The connection is over for `rule`; everything ends and no memory stays away.
    pub(crate) fn assert_over(&mut self, rule: PeerMisbehaved) {
        let failure = self.connection.failure().expect("the connection is over");
        assert!(failure.starts_with(&rule.to_string()), "{failure}");
        self.tasks.run();
        self.connection.drain().into_iter().for_each(Lent::end_drained);
        assert_eq!((self.memory.lent(), self.memory.leaked()), (0, 0));
        let ignored = self.connection.counters().ignored;
        assert_eq!(self.connection.on_immediate(MESSAGE_IMMEDIATE, 0), Ok(None));
        assert_eq!(self.connection.counters().ignored, ignored + 1);
    }
}
