//! What each kind of transfer costs, in messages, content writes and flow control, by whole workers on any fabric.
//!
//! In mode `original` every figure is exact. In the default mode messages and contents are exact, and flow control takes
//! no more than there. There a content of up to 4,096 bytes whose metadata is unknown comes inside META_DATA_RESPONSE,
//! which also answers for a value without bytes. Content of more than 96 bytes with known metadata is written, because the
//! receiver has granted memory for it.
//!
//! Contents that are validated cost the same, except in mode original: there each transfer costs what a miss does.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // test support: a failed step is a failed test
#![allow(unreachable_pub)] // each test binary compiles this as its own module

use std::{future::poll_fn, pin::pin, sync::Arc, task::Poll, time::Duration};

use futures::future::join_all;
use tensorwire_fabric::Runtime;
use tensorwire_protocol::{Code, Counters, DataType, Mode, Validation, limits::EAGER_BYTES_MAX};
use tensorwire_rendezvous::{Tensor, Worker, WorkerError};

pub const SENDER: &str = "/job:ps/replica:0/task:0";
pub const RECEIVER: &str = "/job:worker/replica:0/task:0";
const SENDER_CPU: &str = "/job:ps/replica:0/task:0/device:CPU:0";
const RECEIVER_CPU: &str = "/job:worker/replica:0/task:0/device:CPU:0";

/// Longer than any content that travels inside a message.
const LONG: usize = 12_000;

/// How long both sides may take until no more messages pass.
const QUIET_LIMIT: Duration = Duration::from_secs(20);

/// What a transfer cost at both sides together. Messages: TENSOR_REQUEST, META_DATA_RESPONSE, TENSOR_RE_REQUEST,
/// ERROR_STATUS, CANCEL, CANCEL_ACK.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cost {
    messages: [u64; 6],
    contents: u64,
}

impl Cost {
    const fn of(messages: [u64; 6], contents: u64) -> Self {
        Self { messages, contents }
    }

    fn total(&self) -> u64 {
        self.messages.iter().sum()
    }
}

/// The table. Flow control in mode original is one acknowledgement for each message.
const HIT: Cost = Cost::of([1, 0, 0, 0, 0, 0], 1);
const MISS: Cost = Cost::of([1, 1, 1, 0, 0, 0], 1);
const ERROR: Cost = Cost::of([1, 0, 0, 1, 0, 0], 0);
const CANCEL: Cost = Cost::of([1, 0, 0, 0, 1, 1], 0);
/// A content inside META_DATA_RESPONSE.
const EAGER: Cost = Cost::of([1, 1, 0, 0, 0, 0], 0);

/// Receives at once in the case of many.
const MANY: u64 = 20;

/// Tensors fetched by one call.
const FETCHED: u64 = 100;

fn times(cost: Cost, count: u64) -> Cost {
    Cost { messages: cost.messages.map(|messages| messages * count), contents: cost.contents * count }
}

/// Two connected workers.
pub struct Two {
    pub sender: Worker,
    pub receiver: Worker,
    pub runtime: Arc<dyn Runtime>,
    pub mode: Mode,
    pub validation: Validation,
}

impl Two {
    fn send(&self, edge: &str, tensor: &Tensor) {
        let key = self.sender.key(SENDER_CPU, RECEIVER_CPU, edge).unwrap();
        self.sender.shared_step(1).send(&key, tensor.clone()).unwrap();
    }

    async fn receive(&self, edge: &str) -> Result<Tensor, WorkerError> {
        let key = self.receiver.key(SENDER_CPU, RECEIVER_CPU, edge).unwrap();
        self.receiver.shared_step(1).recv(&key).await
    }

    /// What a transfer of known metadata costs.
    fn hit(&self) -> Cost {
        if self.mode == Mode::Original && self.validation.is_on() { MISS } else { HIT }
    }

    fn ends(&self) -> [Counters; 2] {
        [&self.sender, &self.receiver]
            .map(|worker| worker.peers().first().map(|peer| peer.counters).unwrap_or_default())
    }

    fn sum(&self, count: impl Fn(&Counters) -> u64) -> u64 {
        self.ends().iter().map(count).sum()
    }

    fn cost(&self) -> Cost {
        let messages = [
            self.sum(|end| end.sent.tensor_request),
            self.sum(|end| end.sent.meta_data_response),
            self.sum(|end| end.sent.tensor_re_request),
            self.sum(|end| end.sent.error_status),
            self.sum(|end| end.sent.cancel),
            self.sum(|end| end.sent.cancel_ack),
        ];
        assert_eq!(
            messages.iter().sum::<u64>(),
            self.sum(|end| end.sent.total()),
            "messages of another kind"
        );
        Cost { messages, contents: self.sum(|end| end.contents_sent) }
    }

    /// What was sent has been received, and in mode original acknowledged.
    fn is_quiet(&self) -> bool {
        let [one, other] = self.ends();
        let matches = |one: &Counters, other: &Counters| {
            one.sent == other.received
                && one.contents_sent == other.contents_received
                && one.count_only_sent == other.count_only_received
                && one.asks_sent == one.answers_received
                && (self.mode != Mode::Original || one.sent.total() == one.acknowledgements_received)
        };
        matches(&one, &other) && matches(&other, &one)
    }

    async fn quiet(&self) {
        let began = self.runtime.now();
        while !self.is_quiet() {
            assert!(self.runtime.now() - began < QUIET_LIMIT, "not quiet: {:?}", self.ends());
            self.runtime.sleep(Duration::from_micros(200)).await;
        }
    }

    /// Awaits `transfer`, which must cost what the table has.
    async fn costs<T>(&self, case: &str, expected: Cost, transfer: impl Future<Output = T>) -> T {
        let (before, flow_before) = (self.cost(), self.sum(Counters::flow_control_sent));
        let output = transfer.await;
        self.quiet().await;
        let (after, flow) = (self.cost(), self.sum(Counters::flow_control_sent) - flow_before);
        let messages = std::array::from_fn(|kind| after.messages[kind] - before.messages[kind]);
        let cost = Cost { messages, contents: after.contents - before.contents };
        assert_eq!(cost, expected, "{case}, {:?}", self.mode);
        let original = expected.total();
        let flow_fits = if self.mode == Mode::Original { flow == original } else { flow <= original };
        assert!(flow_fits, "{case}, {:?}: {flow} of flow control, original has {original}", self.mode);
        output
    }

    fn bytes(&self, length: usize, seed: u8) -> Tensor {
        let mut buffer = self.sender.pool().try_alloc(length).unwrap();
        buffer.fill(seed);
        Tensor::new(buffer, DataType::U8, &[length as u64]).unwrap()
    }

    /// Sends and receives `tensor`, which must cost `expected`.
    async fn one(&self, case: &str, edge: &str, tensor: &Tensor, expected: Cost) {
        self.send(edge, tensor);
        let got = self.costs(case, expected, self.receive(edge)).await.unwrap();
        assert_eq!((got.metadata(), got.is_dead()), (tensor.metadata(), tensor.is_dead()), "{case}");
        assert!(got.bytes() == tensor.bytes(), "{case}");
    }

    async fn many(&self, case: &str, expected: Cost) {
        let tensor = self.bytes(LONG, 7);
        let edges: Vec<String> = (0..MANY).map(|number| format!("many {number}")).collect();
        edges.iter().for_each(|edge| self.send(edge, &tensor));
        let all = join_all(edges.iter().map(|edge| self.receive(edge)));
        for got in self.costs(case, times(expected, MANY), all).await {
            assert!(got.unwrap().bytes() == tensor.bytes());
        }
    }

    /// What the transfer of a content costs that fits a message.
    fn short(&self, original: Cost) -> Cost {
        if self.mode == Mode::Original { original } else { EAGER }
    }

    /// Contents up to the longest that travels inside a message, and beyond.
    async fn small_cases(&self) {
        let hit = self.hit();
        for (length, again) in
            [(1, self.short(hit)), (96, self.short(hit)), (97, hit), (EAGER_BYTES_MAX as usize, hit)]
        {
            let (small, edge) = (self.bytes(length, 4), format!("small {length}"));
            self.one("first small value", &edge, &small, self.short(MISS)).await;
            self.one("small again", &edge, &small, again).await;
        }
        let larger = self.bytes(EAGER_BYTES_MAX as usize + 1, 5);
        self.one("first larger value", "larger", &larger, MISS).await;
        self.one("larger again", "larger", &larger, hit).await;
        self.one("small in place of a larger one", "larger", &self.bytes(8, 5), self.short(MISS)).await;
    }

    /// Cost of `count` transfers that are asked for together: in the default mode, with one TENSOR_REQUEST.
    fn together(&self, one: Cost, count: u64) -> Cost {
        let mut cost = times(one, count);
        if self.mode != Mode::Original {
            cost.messages[0] = 1;
        }
        cost
    }

    /// Several tensors asked for by one call.
    async fn cases_of_several(&self) {
        let peer = self.receiver.peer(SENDER).unwrap();
        let hit = self.hit();
        let small = (8, FETCHED, self.short(MISS), self.short(hit));
        for (length, count, first, again) in [small, (LONG, FETCHED, MISS, hit)] {
            let names: Vec<String> = (0..count).map(|number| format!("{length} {number}")).collect();
            let tensor = self.bytes(length, 6);
            for (case, one) in [("first fetch of many", first), ("fetch of many again", again)] {
                for name in &names {
                    // Published anew, it is in no catalogue: over shared memory, too, it is asked for.
                    self.sender.withdraw(name);
                    self.sender.publish(name, tensor.clone()).unwrap();
                }
                let fetched = peer.fetch_many(&names).into_future();
                let all = self.costs(case, self.together(one, count), fetched).await.unwrap();
                assert!(all.len() == names.len() && all.iter().all(|got| got.bytes() == tensor.bytes()));
            }
        }
        let tensor = self.bytes(LONG, 7);
        let edges: Vec<String> = (0..MANY).map(|number| format!("many {number}")).collect();
        edges.iter().for_each(|edge| self.send(edge, &tensor));
        let key = |edge: &String| self.receiver.key(SENDER_CPU, RECEIVER_CPU, edge).unwrap();
        let keys: Vec<_> = edges.iter().map(key).collect();
        let step = self.receiver.shared_step(1);
        let all = self
            .costs("many keys at once", self.together(hit, MANY), step.recv_many(&keys).into_future())
            .await;
        assert!(all.unwrap().iter().all(|got| got.bytes() == tensor.bytes()));
        edges.iter().for_each(|edge| self.send(edge, &tensor));
        let step = self.receiver.shared_step(1);
        let each = join_all(keys.iter().map(|key| step.recv(key).beside().into_future()));
        let all = self.costs("many keys, each beside the others", times(hit, MANY), each).await;
        assert!(all.into_iter().all(|got| got.unwrap().bytes() == tensor.bytes()));
    }

    /// Asks for a value that is not there and gives up once the request is out.
    async fn give_up(&self, edge: &str) {
        let requests = || self.sum(|end| end.received.tensor_request);
        let (before, acked) = (requests(), self.sum(|end| end.received.cancel_ack));
        {
            let mut receive = pin!(self.receive(edge));
            while requests() == before {
                let mut moment = self.runtime.sleep(Duration::from_micros(200));
                let ended = poll_fn(|context| match receive.as_mut().poll(context) {
                    Poll::Ready(output) => Poll::Ready(Some(output)),
                    Poll::Pending => moment.as_mut().poll(context).map(|()| None),
                });
                assert!(ended.await.is_none(), "there was a value");
            }
        }
        while self.sum(|end| end.received.cancel_ack) == acked {
            self.runtime.sleep(Duration::from_micros(200)).await;
        }
    }

    /// Every case of the table.
    pub async fn all_cases(&self) {
        let hit = self.hit();
        let long = self.bytes(LONG, 1);
        self.one("miss", "plain", &long, MISS).await;
        self.one("hit", "plain", &long, hit).await;
        self.one("hit again", "plain", &self.bytes(LONG, 2), hit).await;

        let longer = self.bytes(LONG + 1, 3);
        self.one("change of shape", "plain", &longer, MISS).await;
        self.one("hit after a change", "plain", &longer, hit).await;

        let nothing = self.short(MISS);
        let dead = Tensor::dead(DataType::U8, &[3]).unwrap();
        self.one("first dead value", "dead", &dead, nothing).await;
        self.one("dead again", "dead", &dead, hit).await;

        let empty = Tensor::from_values::<f32>(self.sender.pool(), &[0, 5], &[]).unwrap();
        self.one("first empty tensor", "empty", &empty, nothing).await;
        self.one("empty again", "empty", &empty, hit).await;

        self.many("many misses", MISS).await;
        self.many("many hits", hit).await;

        self.small_cases().await;
        self.cases_of_several().await;

        self.costs("cancel", CANCEL, self.give_up("plain")).await;
        self.one("hit after a cancel", "plain", &longer, hit).await;
        self.costs("cancel of what is unknown", CANCEL, self.give_up("unknown")).await;
        self.one("miss after a cancel", "unknown", &longer, MISS).await;

        self.sender.cleanup(1);
        let error = self.costs("error", ERROR, self.receive("plain")).await;
        assert!(matches!(error, Err(WorkerError::Remote { status, .. }) if status.code == Code::Aborted));
        let matched = self.sum(|end| end.checksums_matched) > 0;
        assert_eq!((matched, self.sum(|end| end.checksums_mismatched)), (self.validation.is_on(), 0));
    }
}
