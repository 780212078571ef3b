//! A peer that writes arbitrary bytes into the stream, while this side posts operations.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a failed step is a finding

#[path = "../../../fuzz/input.rs"]
mod input;
#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;

use std::{
    io::{Read, Write},
    net::TcpStream,
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::Arc,
};

use futures::FutureExt;
use tensorwire_fabric::{
    Access, Capabilities, ConnectionData, Immediate, Look, Operation, PeerViolation, QueuePair,
    QueuePairConfig, ReadDestination, RegionGeneration, RegionId, RegionTable, RemoteRange, RemoteRegion,
    Runtime, TokioRuntime, WorkRequest,
};
use tensorwire_memory::{Buf, BufMut, Exposure, GrantEnd, Granted, Pool, PoolConfig};

use crate::{
    frame::{AnswerFrame, Ending, Frame, HEADER_BYTES, Key, ReadFrame, Refusal, WriteFrame},
    handshake::{self, HELLO_BYTES, Hello, WELCOME_BYTES},
    link::{EndState, TcpLink},
};

use self::input::Input;

const BYTES: usize = 4096;
const STEPS_MAX: usize = 200;

/// Connection data and the greetings of a stream.
pub fn tcp_data(data: &[u8]) {
    let mut input = Input::new(data);
    match input.below(2) {
        0 => address(input.rest()),
        _ => greeting(input.rest()),
    }
}

/// Connection data is either invalid, or equals the encoding of the address that it decodes to, except for the bytes
/// that an IPv4 address leaves unused.
fn address(data: &[u8]) {
    let data = ConnectionData(data.to_vec());
    match handshake::Address::decode(&data) {
        Ok(address) => {
            let again = handshake::Address::decode(&address.encode()).unwrap();
            assert_eq!((again.ip, again.port, again.ticket), (address.ip, address.port, address.ticket));
            assert!(again.token.matches(&address.token));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// The first bytes of either side, and a header.
fn greeting(data: &[u8]) {
    let mut input = Input::new(data);
    let hello: [u8; HELLO_BYTES] = input.array();
    if let Some(decoded) = Hello::decode(&hello) {
        assert_eq!(decoded.encode(), hello);
    }
    let welcome: [u8; WELCOME_BYTES] = input.array();
    if handshake::check_welcome(&welcome).is_ok() {
        assert_eq!(welcome, handshake::encode_welcome());
    }
    let header: [u8; HEADER_BYTES] = input.array();
    if let Ok(frame) = Frame::decode(&header) {
        assert_eq!(frame.encode(), header);
    }
}

/// Drives one connection against such a peer. Memory that was not granted to it never changes, and every turn ends.
pub fn tcp_stream(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _guard = runtime.enter();
    let mut attack = Attack::new();
    let mut input = Input::new(data);
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        attack.step(&mut input);
    }
    attack.end();
}

struct Attack {
    runtime: Arc<dyn Runtime>,
    table: Arc<RegionTable>,
    pool: Pool,
    link: Arc<TcpLink>,
    victim: QueuePair,
    peer: UnixStream,
    granted: Option<Granted>,
    /// What the peer may write and read, with the keys.
    writable: (RemoteRange, u32),
    readable: (RemoteRange, u32),
    exposure: Exposure,
    /// Memory that the peer may not write, filled with 1.
    own: Vec<BufMut>,
    operations: Vec<Operation>,
}

fn ones(pool: &Pool, length: usize) -> BufMut {
    let mut buffer = pool.try_alloc(length).unwrap();
    buffer.fill(1);
    buffer
}

impl Attack {
    fn new() -> Self {
        let runtime: Arc<dyn Runtime> = Arc::new(TokioRuntime::current().unwrap());
        let table = Arc::new(RegionTable::new(runtime.as_ref()));
        let pool = Pool::new(PoolConfig { block_bytes: 1 << 20, ..PoolConfig::new("victim") }).unwrap();
        let (peer, stream) = UnixStream::pair().unwrap();
        peer.set_nonblocking(true).unwrap();
        stream.set_nonblocking(true).unwrap();
        // The link needs no more than what every kind of stream socket supports.
        let stream = tokio::net::TcpStream::from_std(TcpStream::from(OwnedFd::from(stream))).unwrap();
        let config = QueuePairConfig { send_depth: 8, receive_depth: 8 };
        let mut capabilities = Capabilities::WRITES;
        capabilities.read = true;
        let (link, victim) = TcpLink::new(table.clone(), config, capabilities, stream.into()).unwrap();
        victim.add_remote_region(peers());
        let before = ones(&pool, BYTES);
        let granted = pool.try_alloc(BYTES).unwrap().grant();
        let own = vec![before, ones(&pool, BYTES)];
        let exposed = ones(&pool, BYTES).freeze();
        let named = |access, offset: usize| {
            let region = table.register(runtime.as_ref(), exposed.block().unwrap(), access);
            let RemoteRegion { region, generation, key, .. } = region;
            (RemoteRange { region, generation, offset: offset as u64, length: BYTES as u64 }, key)
        };
        let writable = named(Access::RECEIVE, granted.offset());
        let readable = named(Access::READABLE, exposed.offset());
        let exposure = exposed.expose();
        let (granted, operations) = (Some(granted), Vec::new());
        Self {
            runtime,
            table,
            pool,
            link,
            victim,
            peer,
            granted,
            writable,
            readable,
            exposure,
            own,
            operations,
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let choice = input.u8();
        match choice & 15 {
            0..=8 => self.frame(input),
            9 => self.write(input.bytes(120)),
            10 | 11 => self.post(input),
            12 => while let Some(Ok(_)) = self.victim.next_arrival().now_or_never() {},
            13 => self.change_grant(),
            14 => self.operations.clear(),
            _ => {
                let mut sink = [0; 1 << 10];
                let _what_the_victim_says = self.peer.read(&mut sink);
            }
        }
        if choice & 0xC0 != 0xC0 {
            self.link.receive();
        }
    }

    /// A frame that is mostly well-formed, with a payload that is mostly whole.
    fn frame(&mut self, input: &mut Input<'_>) {
        let (range, key) = if input.below(4) == 0 { self.readable } else { self.writable };
        let range = RemoteRange {
            region: RegionId(if input.below(16) == 0 { input.u32() } else { range.region.0 }),
            generation: RegionGeneration(range.generation.0 ^ u32::from(input.below(16) == 0)),
            offset: range.offset.wrapping_add(input.near(BYTES as u64)),
            length: input.near(BYTES as u64),
        };
        let key = Key(key ^ u32::from(input.below(16) == 0));
        let length =
            if input.below(4) > 0 { range.length.min(BYTES as u64) } else { input.near(BYTES as u64) };
        let (frame, payload) = match input.below(8) {
            0 => (Frame::Read(ReadFrame { range, key, tag: input.u8().into() }), 0),
            1 => {
                let rest = if input.flag() { length } else { input.near(BYTES as u64) };
                (Frame::Answer(AnswerFrame { tag: input.below(20) as u32, length, rest }), length)
            }
            2 if input.below(4) == 0 => (Frame::Goodbye, 0),
            3 if input.below(4) == 0 => {
                (Frame::Refusal(Refusal { reason: PeerViolation::NoRight, depth: 0 }), 0)
            }
            _ => {
                let ending = match input.below(3) {
                    0 => Ending::Plain,
                    1 => Ending::Segment,
                    _ => Ending::Immediate(Immediate(input.u8().into())),
                };
                (Frame::Write(WriteFrame { range, key, length, ending }), length)
            }
        };
        let payload = if input.below(8) > 0 { payload } else { input.near(BYTES as u64) };
        self.write(&frame.encode());
        self.write(&vec![7; payload.min(2 * BYTES as u64) as usize]);
    }

    fn write(&mut self, bytes: &[u8]) {
        let _the_victim_may_have_hung_up = self.peer.write(bytes);
    }

    /// This side posts something of its own.
    fn post(&mut self, input: &mut Input<'_>) {
        let length = input.pick(&[0, 1, 64, 1000]);
        let bytes = ones(&self.pool, length);
        let RemoteRegion { region, generation, .. } = peers();
        let remote = RemoteRange { region, generation, offset: 64, length: length as u64 };
        let immediate = Some(Immediate(input.u8().into()));
        let request = match input.below(3) {
            0 if length > 0 => WorkRequest::Read { remote, into: ReadDestination::new(bytes) },
            1 => WorkRequest::Write { local: Buf::empty(), remote: None, immediate },
            _ => WorkRequest::Write { local: bytes.freeze(), remote: Some(remote), immediate },
        };
        self.operations.extend(self.victim.post_now(&request));
    }

    /// Ends a grant, or grants memory again.
    fn change_grant(&mut self) {
        match self.granted.take() {
            Some(granted) => {
                let mut buffer = granted.end(GrantEnd::Content).unwrap();
                buffer.fill(1);
                self.own.push(buffer);
            }
            None => {
                let Ok(buffer) = self.pool.try_alloc(BYTES) else { return };
                let granted = buffer.grant();
                let block = granted.block().unwrap();
                let region = self.table.register(self.runtime.as_ref(), block, Access::RECEIVE);
                let RemoteRegion { region, generation, key, .. } = region;
                let (offset, length) = (granted.offset() as u64, BYTES as u64);
                self.writable = (RemoteRange { region, generation, offset, length }, key);
                self.granted = Some(granted);
            }
        }
    }

    fn end(self) {
        let turns = (0..1000).find(|_| self.link.receive() != Look::More);
        assert!(turns.is_some(), "a bounded stream keeps this side busy");
        let is_over = self.link.end_state() != EndState::Open;
        assert_eq!(is_over, self.victim.failure().is_some());
        if is_over {
            let stats = self.link.core().stats();
            assert_eq!(self.link.receive(), Look::Over);
            assert_eq!(stats, self.link.core().stats(), "something moved after the end");
            for operation in self.operations {
                assert!(operation.now_or_never().is_some(), "an operation did not end");
            }
        }
        for own in &self.own {
            assert!(own.iter().all(|&byte| byte == 1), "memory changed that is nobody's but this side's");
        }
        assert!(self.exposure.buf().iter().all(|&byte| byte == 1), "what may be read was written");
        // Memory that stays granted would be leaked, and thousands of inputs run in one process.
        let granted = self.granted;
        drop((self.victim, self.link));
        granted.into_iter().for_each(|granted| drop(granted.end(GrantEnd::QueuePairDrained).unwrap()));
    }
}

/// The region that the peer announces for writes of this side.
fn peers() -> RemoteRegion {
    RemoteRegion { region: RegionId(9), generation: RegionGeneration(1), base: 0, length: 1 << 20, key: 5 }
}

#[cfg(test)]
mod tests {
    use super::replay::replay;

    #[test]
    fn d_fuzz_tcp_data() {
        replay("tcp_data", super::tcp_data);
    }

    #[test]
    fn d_fuzz_tcp_stream() {
        replay("tcp_stream", super::tcp_stream);
    }
}
