//! Frames of the control plane: greeting, connections, regions, lists, requests to a store, and liveness.

mod encoding;
mod report;

use std::fmt;

use encoding::{read_frame, write_entry, write_frame};

use super::{FRAME_BYTES_MIN, WireError, codec::frame, frame_length, open_frame};
pub use crate::credit::Parameters;
use crate::{Destination, Metadata, Status, limits::CONTROL_FRAME_BYTES_MAX, report::WorkerReport};

/// One fabric that a worker can use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FabricOffer {
    /// The fabric's number.
    pub kind: u8,
    /// Two workers can use the fabric together if this is equal.
    pub reach: Vec<u8>,
}

/// Where the peer writes messages and flow control.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingOffer {
    /// The message ring; its capacity is the ring's size, that of [`Parameters::first_ring_bytes`].
    pub destination: Destination,
    /// The slots of ASK and ANSWER, of [`SLOT_BYTES`](crate::limits::SLOT_BYTES) each, in this order.
    pub slots: Destination,
}

/// A region that the peer may name in destinations. `Debug` leaves the key out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RegionRecord {
    /// The region.
    pub region: u32,
    /// Its generation.
    pub generation: u32,
    /// Virtual address of its first byte where the fabric needs one, else 0.
    pub base: u64,
    /// Length in bytes.
    pub length: u64,
    /// Remote key.
    pub key: u32,
}

impl fmt::Debug for RegionRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegionRecord")
            .field("region", &self.region)
            .field("generation", &self.generation)
            .field("length", &self.length)
            .finish_non_exhaustive()
    }
}

/// One published tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListEntry {
    /// Its name.
    pub name: String,
    /// What it is.
    pub metadata: Metadata,
    /// Counts replacements.
    pub version: u64,
    /// The checksum of its bytes, if the list was requested with checksums.
    pub checksum: Option<u64>,
}

impl ListEntry {
    /// Bytes that this entry takes in a frame, so that a list can be cut into frames that fit.
    pub fn encoded_length(&self) -> usize {
        let mut bytes = Vec::new();
        frame(&mut bytes, |writer| write_entry(writer, self));
        bytes.len() - 4
    }
}

/// What one side of a data connection needs to know of the other. `Debug` leaves the connection data out, which may hold a
/// one-use token.
#[derive(Clone, PartialEq, Eq)]
pub struct Connect {
    /// Chosen by the asking side.
    pub connection: u32,
    /// The fabric's number.
    pub kind: u8,
    /// The fabric's connection data.
    pub data: Vec<u8>,
    /// What the sender offers.
    pub parameters: Parameters,
    /// The sender's ring.
    pub ring: RingOffer,
    /// The sender's regions.
    pub regions: Vec<RegionRecord>,
}

impl fmt::Debug for Connect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connect")
            .field("connection", &self.connection)
            .field("kind", &self.kind)
            .field("parameters", &self.parameters)
            .field("regions", &self.regions)
            .finish_non_exhaustive()
    }
}

/// A frame of the control plane. `Debug` leaves proofs, keys, connection data and the bodies of store frames out.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ControlFrame {
    /// The first frame of both sides; the dialling side sends its own first.
    Hello {
        /// Wire version. Checked while decoding, so a decoded frame has the own one.
        wire_version: u16,
        /// Name of the worker.
        worker: String,
        /// The worker's incarnation.
        incarnation: u64,
        /// Where it accepts control connections itself.
        listen_address: Option<String>,
        /// Random, for the peer's proof.
        nonce: [u8; 32],
    },
    /// From the dialling side, which proves itself first.
    Proof {
        /// Proves that the sender knows the secret and has seen both Hello frames. The frame's last bytes.
        proof: [u8; 32],
    },
    /// The sender has accepted the peer's proof. Sent by both, by the accepting side first.
    Welcome {
        /// What the worker can use, best first.
        fabrics: Vec<FabricOffer>,
        /// Proves that the sender knows the secret and has sent these fields. The frame's last bytes.
        proof: [u8; 32],
    },
    /// Asks for a data connection.
    Connect(Connect),
    /// Asks for a data connection that is to take the place of another. It is used once that one is [retired](Self::Retired).
    Standby {
        /// The number of the data connection in use.
        replaces: u32,
        /// As of [`Connect`](Self::Connect).
        offer: Connect,
    },
    /// The sender has no request under way on this data connection, and uses its standby from now on. When both sides have sent this, the
    /// connection is closed.
    Retired {
        /// The data connection.
        connection: u32,
    },
    /// Agrees to a data connection; the fields are those of the agreeing side.
    Connected(Connect),
    /// Refuses a data connection.
    Refused {
        /// The number of the `Connect`.
        connection: u32,
        /// Why.
        status: Status,
    },
    /// A data connection is over on the sender's side. The peer may not notice that otherwise: an adapter that has given up
    /// sends nothing over a network that it cannot reach.
    Disconnected {
        /// The data connection.
        connection: u32,
        /// Why.
        status: Status,
    },
    /// REGION_ADD: announces a region.
    RegionAdd {
        /// The data connection.
        connection: u32,
        /// The region.
        region: RegionRecord,
    },
    /// Confirms a `RegionAdd`; from now on the region may be named in destinations.
    RegionAck {
        /// The data connection.
        connection: u32,
        /// The region.
        region: u32,
    },
    /// REGION_REMOVE: withdraws a region.
    RegionRemove {
        /// The data connection.
        connection: u32,
        /// The region.
        region: u32,
    },
    /// Asks for published tensors, in the order of their names.
    ListRequest {
        /// Chosen by the asking side.
        request: u32,
        /// Continue after this name.
        after: Option<String>,
        /// Whether checksums are wanted.
        with_checksums: bool,
    },
    /// Published tensors.
    ListResponse {
        /// The number of the `ListRequest`.
        request: u32,
        /// One page.
        entries: Vec<ListEntry>,
        /// Whether there are further ones.
        more: bool,
    },
    /// Asks for a report of the peer.
    ReportRequest {
        /// Chosen by the asking side.
        request: u32,
    },
    /// A report of the sender.
    ReportResponse {
        /// The number of the `ReportRequest`.
        request: u32,
        /// Boxed, because it is several times as large as all other frames.
        report: Box<WorkerReport>,
    },
    /// A request to the store that the peer serves.
    StoreRequest {
        /// Chosen by the asking side.
        request: u32,
        /// The request, in the format of the store. The frame's last bytes.
        body: Vec<u8>,
    },
    /// Answers a `StoreRequest`.
    StoreResponse {
        /// The number of the `StoreRequest`.
        request: u32,
        /// The answer, in the format of the store; `None` if the sender serves no store. The frame's last bytes.
        body: Option<Vec<u8>>,
    },
    /// The answer to a `StoreRequest` is not needed any more.
    StoreCancel {
        /// The number of the `StoreRequest`.
        request: u32,
    },
    /// Asks for a sign of life.
    Ping {
        /// Comes back in the answer.
        nonce: u64,
    },
    /// Answers a `Ping`.
    Pong {
        /// The nonce of the `Ping`.
        nonce: u64,
    },
    /// Orderly end.
    Goodbye {
        /// Why.
        status: Status,
    },
}

/// The length of the control frame that starts with `prefix`, prefix included.
///
/// # Errors
/// [`WireError::Truncated`] or [`WireError::TooLong`] when no frame is that long.
pub fn encoded_length(prefix: [u8; 4]) -> Result<usize, WireError> {
    frame_length(prefix, CONTROL_FRAME_BYTES_MAX)
}

impl ControlFrame {
    /// The encoded form. Contents above their limits make a frame that every peer refuses.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(FRAME_BYTES_MIN);
        frame(&mut bytes, |writer| write_frame(writer, self));
        bytes
    }

    /// The frame that `bytes` encode, all of them.
    ///
    /// # Errors
    /// [`WireError`] names what is wrong.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut reader = open_frame(bytes, CONTROL_FRAME_BYTES_MAX)?;
        let frame = read_frame(&mut reader)?;
        reader.end()?;
        Ok(frame)
    }
}

impl fmt::Debug for ControlFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hello { wire_version, worker, incarnation, listen_address, .. } => f
                .debug_struct("Hello")
                .field("wire_version", wire_version)
                .field("worker", worker)
                .field("incarnation", incarnation)
                .field("listen_address", listen_address)
                .finish_non_exhaustive(),
            Self::Proof { .. } => f.debug_struct("Proof").finish_non_exhaustive(),
            Self::Welcome { fabrics, .. } => {
                f.debug_struct("Welcome").field("fabrics", fabrics).finish_non_exhaustive()
            }
            Self::Connect(end) => end.fmt(f),
            Self::Connected(end) => write!(f, "Connected({end:?})"),
            Self::Standby { replaces, offer } => write!(f, "Standby(for {replaces}, {offer:?})"),
            Self::Retired { connection } => write!(f, "Retired({connection})"),
            Self::Refused { connection, status } => write!(f, "Refused({connection}, {status})"),
            Self::RegionAdd { connection, region } => write!(f, "RegionAdd({connection}, {region:?})"),
            Self::RegionAck { connection, region } => write!(f, "RegionAck({connection}, {region})"),
            Self::RegionRemove { connection, region } => write!(f, "RegionRemove({connection}, {region})"),
            Self::ListRequest { request, after, with_checksums } => {
                write!(f, "ListRequest({request}, after {after:?}, checksums {with_checksums})")
            }
            Self::ListResponse { request, entries, more } => {
                write!(f, "ListResponse({request}, {} entries, more {more})", entries.len())
            }
            Self::ReportRequest { request } => write!(f, "ReportRequest({request})"),
            Self::ReportResponse { request, report } => {
                write!(
                    f,
                    "ReportResponse({request}, {} peers, {} sets)",
                    report.peers.len(),
                    report.sets.len()
                )
            }
            Self::StoreRequest { request, .. } => write!(f, "StoreRequest({request})"),
            Self::StoreResponse { request, .. } => write!(f, "StoreResponse({request})"),
            Self::StoreCancel { request } => write!(f, "StoreCancel({request})"),
            Self::Ping { nonce } => write!(f, "Ping({nonce})"),
            Self::Pong { nonce } => write!(f, "Pong({nonce})"),
            Self::Disconnected { connection, status } => write!(f, "Disconnected({connection}, {status})"),
            Self::Goodbye { status } => write!(f, "Goodbye({status})"),
        }
    }
}
