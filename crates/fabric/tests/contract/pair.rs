//! Two ends of one fabric in one process, with their memory.

use std::{future::poll_fn, sync::Arc, task::Poll, time::Duration};

use tensorwire_fabric::{
    Access, Arrival, ConnectParams, Domain, FabricError, FabricKind, Immediate, QueuePair, QueuePairConfig,
    RemoteRange, RemoteRegion, Role, Runtime, timeout,
};
use tensorwire_memory::{Block, Buf, BufMut, GrantEnd, Granted, Pool, PoolConfig, copy::CopyReason};

use super::{Setup, patience};

/// How long one awaited step may take.
pub const STEP_LIMIT: Duration = Duration::from_secs(10);

/// Depths that most tests use.
pub const DEPTHS: QueuePairConfig = QueuePairConfig { send_depth: 16, receive_depth: 16 };

/// Awaits `future` for at most [`STEP_LIMIT`] times [`patience`].
pub async fn step<F: Future>(runtime: &Arc<dyn Runtime>, what: &str, future: F) -> F::Output {
    let limit = STEP_LIMIT * patience();
    match timeout(runtime.as_ref(), limit, future).await {
        Ok(output) => output,
        Err(_) => panic!("{what} took longer than {limit:?}"),
    }
}

/// Lets every other task run once.
pub async fn yield_once() {
    let mut yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// A pool whose blocks are all registered with one domain.
pub struct RegisteredPool {
    pub pool: Pool,
    registered: tensorwire_fabric::RegisteredPool,
}

impl RegisteredPool {
    /// A pool of at most `cap` bytes.
    pub fn new(domain: &Arc<dyn Domain>, name: &'static str, access: Access, cap: u64) -> Self {
        let config = PoolConfig { block_bytes: 1 << 20, cap_bytes: cap, ..PoolConfig::new(name) };
        let pool = Pool::new(config).unwrap();
        let registered = tensorwire_fabric::RegisteredPool::new(pool.clone(), domain, access).unwrap();
        Self { pool, registered }
    }

    /// The region of `block`.
    pub fn region(&self, block: &Block) -> RemoteRegion {
        self.registered.region(block.id()).unwrap()
    }

    /// All regions so far.
    pub fn regions(&self) -> Vec<RemoteRegion> {
        self.registered.regions()
    }

    /// A frozen buffer with the [`pattern`] of `seed`.
    pub fn filled(&self, length: usize, seed: u64) -> Buf {
        let mut buffer = self.pool.try_alloc(length).unwrap();
        fill(&mut buffer, seed);
        buffer.freeze()
    }

    /// Grants a zeroed buffer.
    pub fn grant(&self, length: usize) -> Grant {
        let mut buffer = self.pool.try_alloc(length).unwrap();
        buffer.fill(0);
        let address = buffer.as_ptr() as usize;
        let granted = buffer.grant();
        let region = self.region(granted.block().unwrap());
        let range = RemoteRange {
            region: region.region,
            generation: region.generation,
            offset: granted.offset() as u64,
            length: length as u64,
        };
        Grant { granted, range, region, address }
    }
}

/// Memory granted to the peer.
pub struct Grant {
    pub granted: Granted,
    /// The peer's name for the memory.
    pub range: RemoteRange,
    pub region: RemoteRegion,
    /// Address of the first byte in this process.
    pub address: usize,
}

impl Grant {
    /// The part of the range that starts `offset` bytes in.
    pub fn part(&self, offset: u64, length: u64) -> RemoteRange {
        RemoteRange { offset: self.range.offset + offset, length, ..self.range }
    }

    /// The present content.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.granted.length()];
        self.granted.read_at(0, &mut bytes, CopyReason::Local).unwrap();
        bytes
    }

    /// Ends the grant after the content has arrived.
    pub fn take(self) -> BufMut {
        self.granted.end(GrantEnd::Content).unwrap()
    }
}

/// The fabric, domain and memory of one process.
pub struct Side {
    pub domain: Arc<dyn Domain>,
    pub source: RegisteredPool,
    pub receive: RegisteredPool,
    /// The most bytes that its fabric puts into one piece of a write.
    pub piece_bytes_max: u64,
}

impl Side {
    fn new(setup: Setup, runtime: Arc<dyn Runtime>) -> Self {
        let fabric = (setup.fabric)(runtime);
        let (domain, piece_bytes_max) =
            (fabric.open_domain().unwrap(), fabric.capabilities().piece_bytes_max);
        let source = RegisteredPool::new(&domain, "source", Access::LOCAL, 256 << 20);
        let receive = RegisteredPool::new(&domain, "receive", Access::RECEIVE, 256 << 20);
        Self { domain, source, receive, piece_bytes_max }
    }
}

/// Two connected sides. The tests write from left to right unless their name says otherwise.
pub struct Pair {
    pub runtime: Arc<dyn Runtime>,
    pub left: Side,
    pub right: Side,
    /// Left's end.
    pub to_right: QueuePair,
    /// Right's end.
    pub to_left: QueuePair,
    setup: Setup,
}

impl Pair {
    /// Two sides and a connection of [`DEPTHS`].
    pub async fn new(setup: Setup, runtime: Arc<dyn Runtime>) -> Self {
        Self::with_depths(setup, runtime, DEPTHS).await
    }

    /// Two sides and a connection with the given depths at both.
    pub async fn with_depths(setup: Setup, runtime: Arc<dyn Runtime>, depths: QueuePairConfig) -> Self {
        let left = Side::new(setup, runtime.clone());
        let right = Side::new(setup, runtime.clone());
        let (to_right, to_left) = connect(setup, &runtime, &left.domain, &right.domain, depths).await;
        Self { runtime, left, right, to_right, to_left, setup }
    }

    /// One more connection between the same two domains: (left's end, right's end).
    pub async fn connect_again(&self) -> (QueuePair, QueuePair) {
        self.connect_with(DEPTHS).await
    }

    /// Like [`connect_again`](Self::connect_again), with these depths.
    pub async fn connect_with(&self, depths: QueuePairConfig) -> (QueuePair, QueuePair) {
        connect(self.setup, &self.runtime, &self.left.domain, &self.right.domain, depths).await
    }

    /// Right grants `length` bytes and announces their region to left.
    pub fn grant_right(&self, length: usize) -> Grant {
        let grant = self.right.receive.grant(length);
        self.to_right.add_remote_region(grant.region);
        grant
    }

    /// Left grants `length` bytes and announces their region to right.
    pub fn grant_left(&self, length: usize) -> Grant {
        let grant = self.left.receive.grant(length);
        self.to_left.add_remote_region(grant.region);
        grant
    }

    /// Awaits with a limit.
    pub async fn step<F: Future>(&self, what: &str, future: F) -> F::Output {
        step(&self.runtime, what, future).await
    }

    /// The next immediate at right, with the bytes of its write.
    pub async fn arrival_at_right(&self) -> (u32, u64) {
        immediate(self.step("an arrival at right", self.to_left.next_arrival()).await.unwrap())
    }

    /// The next immediate at left.
    pub async fn arrival_at_left(&self) -> (u32, u64) {
        immediate(self.step("an arrival at left", self.to_right.next_arrival()).await.unwrap())
    }

    /// The error that ends the arrivals at right.
    pub async fn end_at_right(&self) -> FabricError {
        end_of(&self.runtime, &self.to_left).await
    }

    /// The error that ends the arrivals at left.
    pub async fn end_at_left(&self) -> FabricError {
        end_of(&self.runtime, &self.to_right).await
    }

    /// Writes one small buffer from left to right and checks it: the connection works.
    pub async fn works(&self, left_end: &QueuePair, right_end: &QueuePair) {
        let grant = self.right.receive.grant(100);
        left_end.add_remote_region(grant.region);
        let source = self.left.source.filled(100, 77);
        let write = left_end.write_imm(source.clone(), grant.range, Immediate(0x77));
        let (written, arrival) =
            self.step("a small write", futures::future::join(write, right_end.next_arrival())).await;
        written.unwrap();
        assert_eq!(immediate(arrival.unwrap()), (0x77, 100));
        assert_eq!(grant.take()[..], source[..]);
    }

    /// Whether the fabric distinguishes granted and exposed ranges from the rest of a region. A NIC does not: a peer may
    /// touch all of a region that is registered with the right.
    pub fn knows_ranges(&self) -> bool {
        super::is_able(self, "grants and exposures told from their blocks", self.names_violations())
    }

    /// Whether the fabric can name the broken rule; a NIC cannot.
    pub fn names_violations(&self) -> bool {
        self.to_right.kind() != FabricKind::VERBS && !super::grants_whole_blocks()
    }
}

/// The error that ends the arrivals on `queue_pair`.
pub async fn end_of(runtime: &Arc<dyn Runtime>, queue_pair: &QueuePair) -> FabricError {
    let arrival = step(runtime, "the end of the arrivals", queue_pair.next_arrival()).await;
    arrival.expect_err("an arrival came where the connection's end was expected")
}

/// The value and length of an arrival.
pub fn immediate(arrival: Arrival) -> (u32, u64) {
    match arrival {
        Arrival::Immediate { immediate, length } => (immediate.0, length),
        other => panic!("not an immediate: {other:?}"),
    }
}

async fn connect(
    setup: Setup,
    runtime: &Arc<dyn Runtime>,
    dialer: &Arc<dyn Domain>,
    acceptor: &Arc<dyn Domain>,
    depths: QueuePairConfig,
) -> (QueuePair, QueuePair) {
    let (dialer, acceptor) = (dialer.prepare(depths).unwrap(), acceptor.prepare(depths).unwrap());
    let params = |peer, role| ConnectParams {
        peer,
        role,
        peer_address: setup.peer_address,
        limit: STEP_LIMIT * patience(),
    };
    let dial = params(acceptor.connection_data(), Role::Dialer);
    let accept = params(dialer.connection_data(), Role::Acceptor);
    let both = futures::future::join(dialer.connect(dial), acceptor.connect(accept));
    let (dialed, accepted) = step(runtime, "connecting", both).await;
    (dialed.unwrap().spawn(&**runtime), accepted.unwrap().spawn(&**runtime))
}

/// Fills `bytes` with a pattern of period far above any alignment.
pub fn fill(bytes: &mut [u8], seed: u64) {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    for chunk in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let word = state.to_le_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
}

/// The pattern of `seed`.
pub fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; length];
    fill(&mut bytes, seed);
    bytes
}

/// FNV-1a over 8-byte words: enough to tell one pattern from another.
pub fn checksum(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(0xCBF2_9CE4_8422_2325, |hash, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        (hash ^ u64::from_le_bytes(word)).wrapping_mul(0x0100_0000_01B3)
    })
}
