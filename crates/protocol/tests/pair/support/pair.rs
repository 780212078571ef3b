//! Two connections, their memories and sources, and the methods by which a test moves the wire.

use std::sync::Arc;

use futures::future::join_all;
use tensorwire_protocol::{
    Agreed, Awaiting, Connection, Counters, Mode, Parameters, PeerMisbehaved, ReceiveOptions, Received,
    Responded, Scope, Sharing, TensorRequest, TransferError, Validation,
};

use super::{
    Side,
    channel::{TestChannel, Wire},
    mailbox::TestMailbox,
    memory::{Lent, Memory, values},
    source::TestSource,
    tasks::{Handle, TaskId, Tasks},
};

pub(crate) type ReceiveResult = Result<Received<Lent>, TransferError>;

pub(crate) struct PairEnd {
    pub(crate) connection: Arc<Connection<TestChannel>>,
    pub(crate) memory: Memory,
    pub(crate) source: Arc<TestSource>,
    /// Requests that were given to `respond`.
    pub(crate) requests: Vec<TensorRequest>,
    pub(crate) responses: Vec<TaskId>,
    pub(crate) misbehaviour: Option<PeerMisbehaved>,
}

pub(crate) struct Pair {
    pub(crate) a: PairEnd,
    pub(crate) b: PairEnd,
    pub(crate) wire: Wire,
    pub(crate) tasks: Tasks,
}

/// Something that may happen next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// A woken task runs.
    Poll(TaskId),
    /// The oldest write of this side lands.
    Land(Side),
    /// The oldest arrival of this side is taken in.
    Take(Side),
    /// The oldest completion is reported to this side.
    Complete(Side),
}

/// Small enough that every limit is met soon.
pub(crate) fn small() -> Parameters {
    Parameters {
        mode: Mode::Counted,
        depth: 10,
        ring_bytes: 8 << 10,
        requests_max: 8,
        contents_max: 2,
        names_max: 4,
        eager_bytes_max: 0,
        requests_per_message: 1,
        piece_bytes: 256 << 10,
        validation: Validation::Off,
    }
}

pub(crate) fn original() -> Parameters {
    Parameters { mode: Mode::Original, ..small() }
}

impl Pair {
    pub(crate) fn new(parameters: Parameters) -> Self {
        Self::with(parameters, parameters, 64)
    }

    pub(crate) fn with(a: Parameters, b: Parameters, blocks: usize) -> Self {
        Self::beside([None, None], a, b, blocks)
    }

    /// Of two workers of one host.
    pub(crate) fn with_mailboxes(parameters: Parameters) -> Self {
        Self::beside(TestMailbox::two().map(Some), parameters, parameters, 64)
    }

    fn beside(mailboxes: [Option<TestMailbox>; 2], a: Parameters, b: Parameters, blocks: usize) -> Self {
        let has_results = Agreed::of(&a, &b).has_result_slots();
        let memory = || Memory::with_results(blocks, has_results);
        let memories = (memory(), memory());
        let wire = Wire::new((a, memories.0.clone()), (b, memories.1.clone()));
        let mut tasks = Tasks::default();
        let mut mailboxes = mailboxes.into_iter();
        let mut end = |side, local, peer, memory| {
            let mut channel = wire.channel(side);
            channel.mailbox = mailboxes.next().flatten();
            let connection = Connection::new(channel, wire.rings(side), local, peer);
            tasks.spawn(connection.clone().housekeeping());
            PairEnd {
                connection,
                memory,
                source: Arc::new(TestSource::default()),
                requests: Vec::new(),
                responses: Vec::new(),
                misbehaviour: None,
            }
        };
        let left = end(Side::A, a, b, memories.0);
        let right = end(Side::B, b, a, memories.1);
        Self { a: left, b: right, wire, tasks }
    }

    pub(crate) fn end(&mut self, side: Side) -> &mut PairEnd {
        match side {
            Side::A => &mut self.a,
            Side::B => &mut self.b,
        }
    }

    pub(crate) fn counters(&self) -> (Counters, Counters) {
        (self.a.connection.counters(), self.b.connection.counters())
    }

    /// Starts a receive at `side`; it runs when tasks run.
    pub(crate) fn receive(&mut self, side: Side, scope: Scope, key: &str) -> Handle<ReceiveResult> {
        let (connection, memory) = (self.end(side).connection.clone(), self.end(side).memory.clone());
        let key = key.to_owned();
        self.tasks.spawn(async move { connection.receive(scope, &key, &memory).await })
    }

    /// As [`receive`](Self::receive) at A, of one of several values that are asked for together.
    pub(crate) fn together(&mut self, scope: Scope, key: &str) -> Handle<ReceiveResult> {
        let (connection, memory, key) = (self.a.connection.clone(), self.a.memory.clone(), key.to_owned());
        let options = ReceiveOptions { awaiting: Awaiting::Together, ..ReceiveOptions::default() };
        self.tasks.spawn(async move { connection.receive_with(scope, &key, &memory, options).await })
    }

    /// As [`receive`](Self::receive) at A, of all of these at once, by one task.
    pub(crate) fn receive_many(&mut self, scope: Scope, keys: &[String]) -> Handle<Vec<ReceiveResult>> {
        let (connection, memory, keys) = (self.a.connection.clone(), self.a.memory.clone(), keys.to_vec());
        let options = ReceiveOptions { awaiting: Awaiting::Together, ..ReceiveOptions::default() };
        self.tasks.spawn(async move {
            join_all(keys.iter().map(|key| connection.receive_with(scope, key, &memory, options))).await
        })
    }

    /// As [`receive`](Self::receive) at A, of a view.
    pub(crate) fn view(&mut self, scope: Scope, key: &str) -> Handle<ReceiveResult> {
        let (connection, memory, key) = (self.a.connection.clone(), self.a.memory.clone(), key.to_owned());
        self.tasks
            .spawn(async move { connection.receive_with(scope, &key, &memory, Sharing::View.into()).await })
    }

    /// The oldest arrival of `side` is taken in; false without one.
    pub(crate) fn take(&mut self, side: Side) -> bool {
        let Some(arrival) = self.wire.take(side) else { return false };
        let (end, mut requests) = (self.end(side), Vec::new());
        let taken = match arrival.loan {
            Some(bytes) => {
                let view = end.memory.view(bytes);
                end.connection.on_loan(arrival.immediate, arrival.length, view)
            }
            None => end
                .connection
                .on_immediate(arrival.immediate, arrival.length, |request| requests.push(request)),
        };
        if let Err(rule) = taken {
            end.misbehaviour = Some(rule);
        }
        for request in requests {
            let end = self.end(side);
            end.requests.push(request.clone());
            if let Responded::Waiting(answer) = end.connection.respond(request, &end.source) {
                let task = self.tasks.spawn(answer.run()).task;
                self.end(side).responses.push(task);
            }
        }
        true
    }

    /// What may happen next, in a fixed order.
    pub(crate) fn enabled(&self) -> Vec<Event> {
        let mut events: Vec<Event> = self.tasks.woken().into_iter().map(Event::Poll).collect();
        events.extend(self.wire_events());
        events
    }

    fn wire_events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for side in Side::BOTH {
            let wire = &self.wire;
            events.extend(wire.has_completions(side).then_some(Event::Complete(side)));
            events.extend(wire.has_arrivals(side).then_some(Event::Take(side)));
            events.extend(wire.has_posted(side).then_some(Event::Land(side)));
        }
        events
    }

    pub(crate) fn fire(&mut self, event: Event) {
        match event {
            Event::Poll(task) => self.tasks.poll(task),
            Event::Land(side) => self.wire.land(side),
            Event::Take(side) => {
                self.take(side);
            }
            Event::Complete(side) => self.wire.complete(side),
        }
    }

    /// Fires the first enabled event; false when there is none.
    pub(crate) fn step(&mut self) -> bool {
        let woken = self.tasks.first_woken().map(Event::Poll);
        let next = woken.or_else(|| self.wire_events().first().copied());
        next.into_iter().for_each(|event| self.fire(event));
        next.is_some()
    }

    /// Fires events until none is enabled.
    pub(crate) fn run(&mut self) {
        for steps in 0.. {
            assert!(steps < 10_000_000, "the pair never comes to rest");
            if !self.step() {
                return;
            }
        }
    }

    /// Everything that `side` has posted lands and is taken in, without running any task.
    pub(crate) fn deliver(&mut self, side: Side) {
        while self.wire.has_posted(side) {
            self.wire.land(side);
        }
        while self.take(side.other()) {}
    }

    /// The wire breaks and both sides notice. Tasks run, then the queue pairs are gone and memory comes back.
    pub(crate) fn break_down(&mut self) {
        self.wire.cut();
        for side in Side::BOTH {
            self.end(side).connection.fail("the wire was cut");
        }
        self.run();
        for side in Side::BOTH {
            let drained = values(self.end(side).connection.drain());
            drained.into_iter().for_each(Lent::end_drained);
        }
    }

    /// Receives at A what B sends, until all of it has arrived.
    pub(crate) fn pull(
        &mut self,
        scope: Scope,
        key: &str,
    ) -> Result<(tensorwire_protocol::Metadata, Vec<u8>), TransferError> {
        let handle = self.receive(Side::A, scope, key);
        self.run();
        settled(&handle)
    }

    /// No rule was broken, no memory is granted or leaked, no message is owed.
    pub(crate) fn assert_clean(&mut self) {
        for side in Side::BOTH {
            let end = self.end(side);
            assert_eq!(end.misbehaviour, None, "{side:?}");
            assert_eq!(end.connection.failure(), None, "{side:?}");
            assert_eq!(end.memory.lent(), 0, "{side:?} has memory lent");
            assert_eq!(end.memory.leaked(), 0, "{side:?} leaked memory");
        }
        let (a, b) = self.counters();
        assert_eq!((a.sent, b.sent), (b.received, a.received));
        for counters in [a, b] {
            let is_original = self.a.connection.agreed().mode == Mode::Original;
            let acknowledged = |messages: u64| if is_original { messages } else { 0 };
            assert_eq!(counters.acknowledgements_sent, acknowledged(counters.received.total()));
            assert_eq!(counters.acknowledgements_received, acknowledged(counters.sent.total()));
            assert_eq!(
                (counters.asks_sent, counters.answers_sent),
                (counters.answers_received, counters.asks_received)
            );
            assert!(!is_original || counters.flow_control_sent() == counters.acknowledgements_sent);
        }
        assert_eq!((a.count_only_sent, b.count_only_sent), (b.count_only_received, a.count_only_received));
    }
}

/// The result of a receive, with its bytes. Ends the grant.
pub(crate) fn settled(
    handle: &Handle<ReceiveResult>,
) -> Result<(tensorwire_protocol::Metadata, Vec<u8>), TransferError> {
    let received = handle.take().expect("the receive has ended")?;
    let length = received.metadata.byte_length as usize;
    Ok((received.metadata, received.lent.map(|lent| lent.finish(length)).unwrap_or_default()))
}
