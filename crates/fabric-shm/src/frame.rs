//! Connection data and control frames: little-endian, versioned, each kind of fixed length. Frames of the peer are
//! checked here.

use std::fmt;

use tensorwire_fabric::{ConnectionData, FabricError, FabricKind, PeerViolation, Runtime};

use crate::limits::FRAME_BYTES;

/// The one version of connection data, frames and ring layout.
const VERSION: u8 = 5;
/// Second byte of connection data. It tells connection data of another fabric from those of another version.
const DATA_KIND: u8 = b's';
const NAME_BYTES: usize = 16;
const TOKEN_BYTES: usize = 32;
const DATA_BYTES: usize = 2 + NAME_BYTES + TOKEN_BYTES;

/// A secret that both sides know. Each side shows the other side's token once.
#[derive(Clone)]
pub(super) struct Token([u8; TOKEN_BYTES]);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Token {
    fn random(runtime: &dyn Runtime) -> Self {
        let mut bytes = [0; TOKEN_BYTES];
        fill(&mut bytes, runtime);
        Self(bytes)
    }

    /// Compares in constant time, so that the time does not reveal where the tokens differ.
    pub(super) fn matches(&self, other: &Self) -> bool {
        let difference = self.0.iter().zip(&other.0).fold(0, |sum, (mine, theirs)| sum | (mine ^ theirs));
        std::hint::black_box(difference) == 0
    }
}

fn fill(bytes: &mut [u8], runtime: &dyn Runtime) {
    for chunk in bytes.chunks_mut(8) {
        let random = runtime.random().to_le_bytes();
        chunk.copy_from_slice(random.get(..chunk.len()).unwrap_or_default());
    }
}

/// The address of one prepared queue pair.
#[derive(Debug, Clone)]
pub(super) struct Address {
    name: [u8; NAME_BYTES],
    pub(super) token: Token,
}

impl Address {
    /// A new address that cannot be guessed.
    pub(super) fn random(runtime: &dyn Runtime) -> Self {
        let mut name = [0; NAME_BYTES];
        fill(&mut name, runtime);
        Self { name, token: Token::random(runtime) }
    }

    /// The socket's name in the abstract namespace.
    pub(super) fn socket_name(&self) -> Vec<u8> {
        let hex: String = self.name.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("tensorwire-shm-{hex}").into_bytes()
    }

    pub(super) fn encode(&self) -> ConnectionData {
        let mut bytes = vec![VERSION, DATA_KIND];
        bytes.extend_from_slice(&self.name);
        bytes.extend_from_slice(&self.token.0);
        ConnectionData(bytes)
    }

    pub(super) fn decode(data: &ConnectionData) -> Result<Self, FabricError> {
        let fail = |detail: String| FabricError::Connect {
            kind: FabricKind::SHM,
            step: "reading the peer's connection data",
            detail,
        };
        let mut reader = Reader(&data.0);
        match (reader.byte(), reader.byte()) {
            (Some(VERSION), Some(DATA_KIND)) => {}
            (Some(other), Some(DATA_KIND)) => {
                return Err(fail(format!(
                    "the peer has version {other}, this side {VERSION}: run the same release on both"
                )));
            }
            _ => return Err(fail("it is not that of a shared-memory queue pair".to_owned())),
        }
        let parsed = (reader.array(), reader.array(), data.0.len());
        let (Some(name), Some(token), DATA_BYTES) = parsed else {
            return Err(fail(format!("it has {} bytes, expected {DATA_BYTES}", data.0.len())));
        };
        Ok(Self { name, token: Token(token) })
    }
}

/// The frames that the two sides send on their socket.
#[derive(Debug)]
pub(super) enum Frame {
    /// The first frame of each side. Carries the page set's memfd, the eventfd this side sleeps on, and the memfd of its
    /// catalogue.
    Hello {
        /// The token of the *receiver* of this frame. Only a process that got its connection data knows it.
        token: Token,
        /// Slots of this side's ring.
        slots: u32,
        /// This side's receive depth.
        receive_depth: u32,
    },
    /// The dialer has mapped the acceptor's memory.
    Ready,
    /// Carries the memfd of a block. Sent before the first descriptor that names it.
    Block {
        /// Number of the block, counted from 0 on each connection and side.
        index: u32,
        /// Number of the block in the sender's process. The sender's catalogue names blocks by it.
        number: u64,
        /// Its length in bytes.
        length: u64,
    },
}

const MAGIC: [u8; 4] = *b"TWSF";
const HELLO: u8 = 1;
const READY: u8 = 2;
const BLOCK: u8 = 3;

impl Frame {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(FRAME_BYTES);
        bytes.extend_from_slice(&MAGIC);
        bytes.push(VERSION);
        match self {
            Self::Hello { token, slots, receive_depth } => {
                bytes.push(HELLO);
                bytes.extend_from_slice(&token.0);
                bytes.extend_from_slice(&slots.to_le_bytes());
                bytes.extend_from_slice(&receive_depth.to_le_bytes());
            }
            Self::Ready => bytes.push(READY),
            Self::Block { index, number, length } => {
                bytes.push(BLOCK);
                bytes.extend_from_slice(&index.to_le_bytes());
                bytes.extend_from_slice(&number.to_le_bytes());
                bytes.extend_from_slice(&length.to_le_bytes());
            }
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, PeerViolation> {
        let mut reader = Reader(bytes);
        Self::parse(&mut reader).filter(|_| reader.0.is_empty()).ok_or(PeerViolation::Malformed)
    }

    fn parse(reader: &mut Reader<'_>) -> Option<Self> {
        if reader.array()? != MAGIC || reader.byte()? != VERSION {
            return None;
        }
        Some(match reader.byte()? {
            HELLO => {
                let token = Token(reader.array()?);
                Self::Hello { token, slots: reader.u32()?, receive_depth: reader.u32()? }
            }
            READY => Self::Ready,
            BLOCK => Self::Block { index: reader.u32()?, number: reader.u64()?, length: reader.u64()? },
            _ => return None,
        })
    }

    /// How many file descriptors come with the frame.
    pub(super) fn fds(&self) -> usize {
        match self {
            Self::Hello { .. } => 3,
            Self::Ready => 0,
            Self::Block { .. } => 1,
        }
    }
}

struct Reader<'bytes>(&'bytes [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    fn byte(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}
