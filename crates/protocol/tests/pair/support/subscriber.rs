//! Subscriptions whose values are taken one by one, by tasks.

use std::sync::Arc;

use futures::lock::Mutex;
use tensorwire_protocol::{
    Connection, Delivery, Metadata, Scope, Subscription, SubscriptionTerms, TransferError,
};

use super::{
    Side,
    channel::TestChannel,
    memory::{Lent, Memory},
    pair::Pair,
    tasks::{Handle, Tasks},
};

pub(crate) type NextResult = Result<Delivery<Lent>, TransferError>;
pub(crate) type Next = Handle<NextResult>;
/// A value with its bytes.
pub(crate) type Value = (Metadata, Vec<u8>);

/// Every value, at most this many ahead.
pub(crate) fn every(values: u8) -> SubscriptionTerms {
    SubscriptionTerms { values, every: true, view: false }
}

pub(crate) fn latest(values: u8) -> SubscriptionTerms {
    SubscriptionTerms { every: false, ..every(values) }
}

pub(crate) fn views(values: u8) -> SubscriptionTerms {
    SubscriptionTerms { view: true, ..every(values) }
}

/// A subscription, which ends when this and its tasks are dropped.
pub(crate) struct Subscriber {
    subscription: Arc<Mutex<Subscription<TestChannel>>>,
    memory: Memory,
}

impl Subscriber {
    pub(crate) fn new(
        connection: &Arc<Connection<TestChannel>>,
        memory: &Memory,
        (scope, key): (Scope, &str),
        terms: SubscriptionTerms,
    ) -> Self {
        let subscription = connection.subscribe(scope, key.into(), terms);
        Self { subscription: Arc::new(Mutex::new(subscription)), memory: memory.clone() }
    }

    /// A task that takes one value.
    pub(crate) fn next(&self, tasks: &mut Tasks) -> Next {
        let (subscription, memory) = (self.subscription.clone(), self.memory.clone());
        tasks.spawn(async move { subscription.lock().await.next(&memory).await })
    }

    /// A task that takes as many values, and gives the memory of each back at once.
    pub(crate) fn take_many(&self, count: usize, tasks: &mut Tasks) -> Handle<Vec<Value>> {
        let (subscription, memory) = (self.subscription.clone(), self.memory.clone());
        tasks.spawn(async move {
            let mut values = Vec::new();
            while values.len() < count {
                values.push(value_of(subscription.lock().await.next(&memory).await.unwrap()));
            }
            values
        })
    }
}

impl Pair {
    /// A subscription of A to what B sends.
    pub(crate) fn subscribe(&self, scope: Scope, key: &str, terms: SubscriptionTerms) -> Subscriber {
        Subscriber::new(&self.a.connection, &self.a.memory, (scope, key), terms)
    }

    /// The next value, which B has sent already.
    pub(crate) fn next_of(&mut self, subscriber: &Subscriber) -> Result<Value, TransferError> {
        let next = subscriber.next(&mut self.tasks);
        self.run();
        delivered(&next)
    }

    /// The subscription is dropped, and everything comes to rest.
    pub(crate) fn end_of(&mut self, subscriber: Subscriber) {
        drop(subscriber);
        self.run();
        assert_eq!(self.counters().0.sent.cancel, self.counters().1.sent.cancel_ack);
        self.assert_clean();
    }

    /// What was posted since `from`, flow control aside.
    pub(crate) fn posted(&self, from: usize) -> Vec<&'static str> {
        self.posted_with_acks(from).into_iter().map(|(_, name)| name).filter(|name| *name != "ack").collect()
    }

    pub(crate) fn posted_with_acks(&self, from: usize) -> Vec<(Side, &'static str)> {
        let flow_control = ["counts", "ASK", "ANSWER", "RING_OFFER", "RING_MOVED"];
        let trace = self.wire.trace();
        trace[from..].iter().copied().filter(|(_, name)| !flow_control.contains(name)).collect()
    }
}

/// A value with its bytes. Ends the grant.
pub(crate) fn value_of(delivery: Delivery<Lent>) -> Value {
    let received = delivery.received;
    let length = received.metadata.byte_length as usize;
    (received.metadata, received.lent.map(|lent| lent.finish(length)).unwrap_or_default())
}

/// The value that a task has taken.
pub(crate) fn delivered(next: &Next) -> Result<Value, TransferError> {
    next.take().expect("a value has come").map(value_of)
}
