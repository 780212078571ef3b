//! A peer made of a plain `std` stream, which sends any bytes that a test chooses.
//!
//! The bytes are written down here a second time, on purpose: they pin the format.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::Duration,
};

use tensorwire_fabric::{
    Access, ConnectParams, ConnectionData, Domain, Fabric, FabricError, Prepared, QueuePair, QueuePairConfig,
    Role, Runtime, TokioRuntime, timeout,
};
use tensorwire_fabric_tcp::{TcpConfig, TcpFabric};

use super::HOST;
use crate::contract::pair::{DEPTHS, Grant, RegisteredPool, STEP_LIMIT, step};

/// How long a blocking read of the raw peer may take.
const READ_LIMIT: Duration = Duration::from_secs(10);

/// The raw peer's nonce.
pub(crate) const NONCE: [u8; 16] = *b"nonce of the raw";

/// The fabric of one process, which the raw peer dials.
pub(crate) struct Local {
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) fabric: TcpFabric,
    pub(crate) domain: Arc<dyn Domain>,
    pub(crate) source: RegisteredPool,
    pub(crate) receive: RegisteredPool,
}

impl Local {
    pub(crate) fn new(runtime: Arc<dyn Runtime>) -> Self {
        Self::with_config(runtime, TcpConfig::default())
    }

    pub(crate) fn with_config(runtime: Arc<dyn Runtime>, config: TcpConfig) -> Self {
        let fabric = TcpFabric::new(runtime.clone(), config);
        let domain = fabric.open_domain().unwrap();
        let source = RegisteredPool::new(&domain, "source", Access::LOCAL, 256 << 20);
        let receive = RegisteredPool::new(&domain, "receive", Access::RECEIVE, 256 << 20);
        Self { runtime, fabric, domain, source, receive }
    }

    pub(crate) async fn step<F: Future>(&self, what: &str, future: F) -> F::Output {
        step(&self.runtime, what, future).await
    }

    pub(crate) fn prepare(&self) -> Box<dyn Prepared> {
        self.domain.prepare(DEPTHS).unwrap()
    }

    /// A queue pair whose peer is a raw one.
    pub(crate) async fn connect(&self) -> (QueuePair, RawPeer) {
        self.connect_with(DEPTHS).await
    }

    pub(crate) async fn connect_with(&self, depths: QueuePairConfig) -> (QueuePair, RawPeer) {
        let prepared = self.domain.prepare(depths).unwrap();
        let mut raw = RawPeer::dial(&prepared.connection_data());
        raw.say(&hello(&prepared.connection_data(), NONCE));
        let queue_pair = self.step("accepting the raw peer", accept(prepared)).await.unwrap();
        assert_eq!(raw.hear(WELCOME.len()), WELCOME);
        (queue_pair, raw)
    }
}

/// Connects as the acceptor of the raw peer.
pub(crate) async fn accept(prepared: Box<dyn Prepared>) -> Result<QueuePair, FabricError> {
    let params = ConnectParams {
        peer: connection_data(0, NONCE),
        role: Role::Acceptor,
        peer_address: None,
        limit: STEP_LIMIT,
    };
    let connected = prepared.connect(params).await?;
    Ok(connected.spawn(&TokioRuntime::current().unwrap()))
}

/// The fields of connection data.
pub(crate) struct Address {
    pub(crate) port: u16,
    pub(crate) ticket: [u8; 8],
    pub(crate) token: [u8; 16],
}

pub(crate) fn address(data: &ConnectionData) -> Address {
    let data = &data.0;
    assert_eq!(data.len(), 45);
    Address {
        port: u16::from_le_bytes(data[19..21].try_into().unwrap()),
        ticket: data[21..29].try_into().unwrap(),
        token: data[29..45].try_into().unwrap(),
    }
}

/// Connection data of a side that listens on `port` of every address.
pub(crate) fn connection_data(port: u16, token: [u8; 16]) -> ConnectionData {
    let mut data = vec![1, 0, 0];
    data.extend([0; 16]);
    data.extend(port.to_le_bytes());
    data.extend([0; 8]);
    data.extend(token);
    ConnectionData(data)
}

/// The first bytes of a dialer.
pub(crate) fn hello(to: &ConnectionData, nonce: [u8; 16]) -> Vec<u8> {
    let Address { ticket, token, .. } = address(to);
    let mut hello = b"twtcp-h\n\x01\x00".to_vec();
    hello.extend(ticket);
    hello.extend(token);
    hello.extend(nonce);
    hello
}

pub(crate) const WELCOME: [u8; 10] = *b"twtcp-w\n\x01\x00";

/// A plain stream.
pub(crate) struct RawPeer {
    pub(crate) stream: TcpStream,
}

impl RawPeer {
    /// Connects to the listener that `data` names, and sends nothing yet.
    pub(crate) fn dial(data: &ConnectionData) -> Self {
        let stream = TcpStream::connect(SocketAddr::new(HOST, address(data).port)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(READ_LIMIT)).unwrap();
        Self { stream }
    }

    pub(crate) fn say(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// Exactly the next `length` bytes.
    pub(crate) fn hear(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    pub(crate) fn hear_frame(&mut self) -> Frame {
        Frame::decode(&self.hear(40))
    }

    /// Reads until the stream is closed or reset, and returns what came before.
    pub(crate) fn hear_end(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self.stream.read_to_end(&mut bytes) {
            Err(error) if error.kind() != std::io::ErrorKind::ConnectionReset => panic!("{error}"),
            _ => bytes,
        }
    }
}

/// Awaits a blocking step of a raw peer on a thread of its own, so that the runtime goes on.
pub(crate) async fn aside<T: Send + 'static>(
    runtime: &Arc<dyn Runtime>,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (done, result) = futures::channel::oneshot::channel();
    std::thread::spawn(move || {
        let _ = done.send(work());
    });
    let result = timeout(runtime.as_ref(), READ_LIMIT, result).await;
    result.expect("the raw peer took too long").expect("the raw peer's thread failed; see its message")
}

/// A frame's header. Its kind: 1 write, 2 write with immediate, 3 goodbye, 4 refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Frame {
    pub(crate) kind: u8,
    pub(crate) reason: u8,
    pub(crate) region: u32,
    pub(crate) generation: u32,
    pub(crate) key: u32,
    pub(crate) immediate: u32,
    pub(crate) length: u32,
    pub(crate) offset: u64,
    pub(crate) rest: u64,
}

impl Frame {
    /// A whole write of `length` bytes to the start of the granted memory `grant`.
    pub(crate) fn write(grant: &Grant, length: u32) -> Self {
        Self {
            kind: 1,
            region: grant.range.region.0,
            generation: grant.range.generation.0,
            key: grant.region.key,
            length,
            offset: grant.range.offset,
            rest: u64::from(length),
            ..Self::default()
        }
    }

    pub(crate) fn notify(immediate: u32) -> Self {
        Self { kind: 2, immediate, ..Self::default() }
    }

    pub(crate) fn with_immediate(self, immediate: u32) -> Self {
        Self { kind: 2, immediate, ..self }
    }

    /// The first `length` bytes of the same write.
    pub(crate) fn first(self, length: u32) -> Self {
        Self { kind: 1, immediate: 0, length, ..self }
    }

    /// The part that follows [`first`](Self::first).
    pub(crate) fn after(self, length: u32) -> Self {
        let rest = self.rest - u64::from(length);
        Self { offset: self.offset + u64::from(length), rest, length: rest as u32, ..self }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![self.kind, self.reason, 0, 0];
        for field in [self.region, self.generation, self.key, self.immediate, self.length] {
            bytes.extend(field.to_le_bytes());
        }
        bytes.extend(self.offset.to_le_bytes());
        bytes.extend(self.rest.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Self {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let frame = Self {
            kind: bytes[0],
            reason: bytes[1],
            region: word(4),
            generation: word(8),
            key: word(12),
            immediate: word(16),
            length: word(20),
            offset: long(24),
            rest: long(32),
        };
        assert_eq!(frame.encode(), bytes);
        frame
    }

    pub(crate) fn with_body(&self, body: &[u8]) -> Vec<u8> {
        let mut bytes = self.encode();
        bytes.extend_from_slice(body);
        bytes
    }
}

/// The header of a refusal.
pub(crate) fn refusal(reason: u8, depth: u32) -> Frame {
    Frame { kind: 4, reason, immediate: depth, ..Frame::default() }
}
