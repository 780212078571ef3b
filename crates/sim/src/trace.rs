//! The events of a run: as a hash, and the last few as text.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    hash::{Hash, Hasher},
    time::Duration,
};

use tensorwire_fabric::FabricKind;

use crate::ids::{BlockNumber, EndpointId, GrantNumber, LeaseId, NodeId, OperationId, SessionId, TaskId};

/// One event. It holds nothing that differs between two runs of a seed: no addresses, no process-wide numbers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the names are the documentation
#[non_exhaustive]
pub enum Event {
    Started { node: NodeId },
    Crashed { node: NodeId },
    Phase { name: &'static str },
    Frozen { node: NodeId, nic: bool },
    Thawed { node: NodeId },
    Slowed { node: NodeId },
    TurnedHostile { node: NodeId },
    HostileRefused { endpoint: EndpointId, why: &'static str },
    NoReceive { endpoint: EndpointId },
    CallFailed { node: NodeId, call: &'static str },
    HalfOpened { endpoint: EndpointId },
    LateRefused { why: &'static str },
    BitFlipped { endpoint: EndpointId, how: &'static str },
    LinkLost { from: NodeId, to: NodeId, control: bool },
    Spawned { node: NodeId, task: TaskId, name: &'static str },
    Polled { task: TaskId, finished: bool },
    Fired { node: NodeId, timer: u64 },
    Jitter,
    Reached { name: &'static str },
    Allocated { node: NodeId, block: BlockNumber, offset: usize, length: usize },
    Freed { node: NodeId, block: BlockNumber, offset: usize, length: usize },
    Granted { node: NodeId, block: BlockNumber, offset: usize, length: usize, grant: GrantNumber },
    GrantEnded { node: NodeId, grant: GrantNumber, how: &'static str },
    Connected { endpoint: EndpointId, node: NodeId, peer: EndpointId },
    ConnectFailed { endpoint: EndpointId },
    Posted { endpoint: EndpointId, write: u64, length: u64, immediate: Option<u32> },
    Parted { endpoint: EndpointId, write: u64, parts: usize },
    Read { endpoint: EndpointId, write: u64, offset: usize, length: usize },
    Landed { endpoint: EndpointId, write: u64, offset: usize, length: usize, content: u64 },
    Delivered { endpoint: EndpointId, write: u64, immediate: Option<u32> },
    Lent { endpoint: EndpointId, write: u64, lease: LeaseId, length: u64 },
    LoanRefused { endpoint: EndpointId },
    LoanOfTheDead { lease: LeaseId },
    Released { lease: LeaseId, retired: bool },
    Retired { lease: LeaseId },
    Buried { node: NodeId, leases: usize },
    RanMeanwhile { endpoint: EndpointId, task: TaskId },
    Stored { endpoint: EndpointId, at: usize, content: u64 },
    Asked { endpoint: EndpointId, read: u64, length: u64 },
    Sampled { endpoint: EndpointId, read: u64, offset: usize, length: usize },
    Returned { endpoint: EndpointId, read: u64, offset: usize, length: usize },
    SendQueueFull { endpoint: EndpointId },
    PiecesLost { endpoint: EndpointId, pieces: usize },
    Torn { endpoint: EndpointId, writes: usize },
    Completed { endpoint: EndpointId, write: u64, ok: bool },
    Failed { endpoint: EndpointId, why: &'static str },
    Closing { endpoint: EndpointId },
    Flushed { endpoint: EndpointId },
    Drained { endpoint: EndpointId },
    Dialled { session: SessionId, node: NodeId, peer: Option<NodeId>, crossed: bool },
    ControlSent { session: SessionId, length: usize, content: u64 },
    ControlDelivered { session: SessionId, length: usize },
    ControlEnded { session: SessionId, orderly: bool },
    Began { operation: OperationId, node: NodeId },
    Ended { operation: OperationId, result: &'static str },
    DeviceLost { node: NodeId, kind: FabricKind },
    DeviceRestored { node: NodeId, kind: FabricKind },
}

impl Event {
    /// The rare branch that this event proves to have been taken, if any. Suites assert that all were taken.
    fn mark(&self) -> Option<&'static str> {
        match self {
            Self::GrantEnded { how, .. } => Some(how),
            Self::Ended { result, .. } => Some(result),
            Self::Failed { why, .. } => Some(why),
            Self::ConnectFailed { .. } => Some("connect failed"),
            Self::Completed { ok: false, .. } => Some("completed with an error"),
            Self::Posted { immediate: None, .. } => Some("plain write"),
            Self::Frozen { nic: false, .. } => Some("process stopped"),
            Self::Frozen { nic: true, .. } => Some("process stopped, its NIC not"),
            Self::Slowed { .. } => Some("process slow"),
            Self::CallFailed { call, .. } => Some(call),
            Self::HalfOpened { .. } => Some("half-open"),
            Self::LateRefused { why } => Some(why),
            Self::BitFlipped { how, .. } => Some(how),
            Self::Dialled { crossed: true, .. } => Some("both sides dialled"),
            Self::Parted { .. } => Some("write of many parts"),
            Self::DeviceLost { .. } => Some("device lost"),
            Self::DeviceRestored { .. } => Some("device restored"),
            Self::LinkLost { control: false, .. } => Some("link lost"),
            Self::LinkLost { control: true, .. } => Some("control link lost"),
            Self::ControlEnded { orderly: false, .. } => Some("control session lost"),
            Self::ControlEnded { orderly: true, .. } => Some("control session ended"),
            Self::PiecesLost { .. } => Some("pieces lost"),
            Self::Lent { .. } => Some("loan"),
            Self::LoanRefused { .. } => Some("loan refused"),
            Self::LoanOfTheDead { .. } => Some("loan of a dead lender"),
            Self::Released { retired: false, .. } => Some("lease released"),
            Self::Released { retired: true, .. } => Some("retired lease released"),
            Self::Retired { .. } => Some("lease retired"),
            Self::Buried { .. } => Some("leases of a dead holder"),
            Self::SendQueueFull { .. } => Some("send queue full"),
            Self::HostileRefused { why, .. } => Some(why),
            Self::NoReceive { .. } => Some("hostile: no receive"),
            Self::Torn { .. } => Some("write torn by a crash"),
            Self::RanMeanwhile { .. } => Some("a peer ran in the middle of a poll"),
            Self::Reached { name } => Some(name),
            _ => None,
        }
    }
}

/// FNV-1a over the fields of the events.
#[derive(Debug, Clone)]
pub(crate) struct Fnv(u64);

impl Fnv {
    pub(crate) fn new() -> Self {
        Self(0xCBF2_9CE4_8422_2325)
    }

    /// The hash of `bytes` alone.
    pub(crate) fn of(bytes: &[u8]) -> u64 {
        let mut hasher = Self::new();
        hasher.write(bytes);
        hasher.finish()
    }
}

impl Hasher for Fnv {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3);
        }
    }
}

/// The running hash and the tail of the history.
#[derive(Debug)]
pub(crate) struct Trace {
    hash: Fnv,
    events: u64,
    marks: BTreeMap<&'static str, u64>,
    tail: VecDeque<(Duration, Event)>,
    tail_length: usize,
}

impl Trace {
    pub(crate) fn new(tail_length: usize) -> Self {
        Self { hash: Fnv::new(), events: 0, marks: BTreeMap::new(), tail: VecDeque::new(), tail_length }
    }

    pub(crate) fn record(&mut self, at: Duration, event: Event) {
        at.hash(&mut self.hash);
        event.hash(&mut self.hash);
        self.events += 1;
        if let Some(mark) = event.mark() {
            *self.marks.entry(mark).or_default() += 1;
        }
        self.tail.push_back((at, event));
        self.trim();
    }

    pub(crate) fn keep(&mut self, count: usize) {
        self.tail_length = count;
        self.trim();
    }

    fn trim(&mut self) {
        while self.tail.len() > self.tail_length {
            self.tail.pop_front();
        }
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash.finish()
    }

    pub(crate) fn events(&self) -> u64 {
        self.events
    }

    pub(crate) fn marks(&self) -> BTreeMap<&'static str, u64> {
        self.marks.clone()
    }

    pub(crate) fn reached(&self, mark: &str) -> u64 {
        self.marks.get(mark).copied().unwrap_or_default()
    }

    pub(crate) fn tail(&self) -> Vec<(Duration, Event)> {
        self.tail.iter().cloned().collect()
    }
}

/// A line of the report.
pub(crate) fn line(f: &mut fmt::Formatter<'_>, number: u64, at: Duration, event: &Event) -> fmt::Result {
    writeln!(f, "  {number:>8}  {:>12.6} ms  {event:?}", at.as_secs_f64() * 1e3)
}
