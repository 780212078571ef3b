//! What a rank calls, and the header by which ranks compare their calls.

use std::fmt;

use tensorwire_protocol::DataType;
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

/// The length of an encoded [`Call`].
pub(crate) const HEADER_BYTES: usize = size_of::<Header>();

/// The first bytes of each header. They change with the format.
const MAGIC: [u8; 4] = *b"TWG4";

/// [`Call::root`] of a call without a root.
const NO_ROOT: u32 = u32::MAX;

/// An encoded [`Call`].
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Header {
    magic: [u8; 4],
    kind: u8,
    reduction: u8,
    algorithm: u8,
    unused: u8,
    dtype: U32,
    root: U32,
    number: U64,
    elements: U64,
    parts: U32,
}

/// A collective, or an operation between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum CallKind {
    /// Joining the group.
    Join = 1,
    /// [`Group::barrier`](crate::Group::barrier).
    Barrier = 2,
    /// [`Group::broadcast`](crate::Group::broadcast).
    Broadcast = 3,
    /// [`Group::all_reduce`](crate::Group::all_reduce).
    AllReduce = 4,
    /// [`Group::reduce`](crate::Group::reduce).
    Reduce = 5,
    /// [`Group::reduce_scatter`](crate::Group::reduce_scatter).
    ReduceScatter = 6,
    /// [`Group::all_gather`](crate::Group::all_gather).
    AllGather = 7,
    /// [`Group::gather`](crate::Group::gather).
    Gather = 8,
    /// [`Group::scatter`](crate::Group::scatter).
    Scatter = 9,
    /// [`Group::all_to_all`](crate::Group::all_to_all).
    AllToAll = 10,
    /// [`Group::close`](crate::Group::close).
    Close = 11,
    /// [`Group::send`](crate::Group::send).
    Send = 12,
    /// [`Group::recv`](crate::Group::recv).
    Receive = 13,
    /// [`SendBuffer::send`](crate::pair::SendBuffer::send).
    SlotSend = 14,
    /// [`SendBuffer::wait_send`](crate::pair::SendBuffer::wait_send).
    WaitSend = 15,
    /// [`RecvBuffer::wait_recv`](crate::pair::RecvBuffer::wait_recv).
    WaitReceive = 16,
    /// [`Group::get`](crate::Group::get).
    Get = 17,
    /// [`Group::put`](crate::Group::put).
    Put = 18,
    /// [`Group::derive`](crate::Group::derive) and [`Group::subgroup`](crate::Group::subgroup).
    Derive = 19,
    /// [`Group::all_reduce_tensors`](crate::Group::all_reduce_tensors).
    AllReduceTensors = 20,
}

impl CallKind {
    const ALL: [(Self, &'static str); 20] = [
        (Self::Join, "join"),
        (Self::Barrier, "barrier"),
        (Self::Broadcast, "broadcast"),
        (Self::AllReduce, "all_reduce"),
        (Self::Reduce, "reduce"),
        (Self::ReduceScatter, "reduce_scatter"),
        (Self::AllGather, "all_gather"),
        (Self::Gather, "gather"),
        (Self::Scatter, "scatter"),
        (Self::AllToAll, "all_to_all"),
        (Self::Close, "close"),
        (Self::Send, "send"),
        (Self::Receive, "recv"),
        (Self::SlotSend, "slot_send"),
        (Self::WaitSend, "wait_send"),
        (Self::WaitReceive, "wait_recv"),
        (Self::Get, "get"),
        (Self::Put, "put"),
        (Self::Derive, "derive"),
        (Self::AllReduceTensors, "all_reduce_tensors"),
    ];

    fn of_number(number: u8) -> Option<Self> {
        Self::ALL.iter().map(|(kind, _)| *kind).find(|kind| *kind as u8 == number)
    }
}

impl fmt::Display for CallKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.iter().find(|(kind, _)| kind == self).map_or("?", |(_, name)| name);
        f.write_str(name)
    }
}

/// A call of one rank. Every field must be the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// Its number within the group, from 0; the tag, slot or export of an operation between two ranks.
    pub number: u64,
    /// Which collective.
    pub kind: CallKind,
    /// The element type. `None` if each value has its own.
    pub dtype: Option<DataType>,
    /// The number of elements. 0 if each value has its own.
    pub elements: u64,
    /// The number of the [`Reduction`](crate::Reduction). 0 if nothing is reduced.
    pub reduction: u8,
    /// The number of the [`Algorithm`](crate::Algorithm). 0 if there is no choice.
    pub algorithm: u8,
    /// The root's rank, if there is one.
    pub root: Option<u32>,
    /// A hash of the number of elements of each rank's part; of the name and ranks of a derived group; or of the number and shape
    /// of each rank's tensors. 0 if there are none.
    pub parts: u32,
}

impl Call {
    /// A call without elements, reduction or root.
    pub(crate) fn plain(number: u64, kind: CallKind) -> Self {
        Self { number, kind, dtype: None, elements: 0, reduction: 0, algorithm: 0, root: None, parts: 0 }
    }

    /// How many bytes the elements have, as far as the header says. `None` if each value has its own number.
    pub(crate) fn bytes(&self) -> Option<u64> {
        Some(self.elements.saturating_mul(self.dtype?.bits()).div_ceil(8))
    }

    /// A call with a root. A root too large for the field becomes another invalid one.
    pub(crate) fn rooted(number: u64, kind: CallKind, root: usize) -> Self {
        let root = u32::try_from(root).unwrap_or(NO_ROOT).min(NO_ROOT - 1);
        Self { root: Some(root), ..Self::plain(number, kind) }
    }

    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let header = Header {
            magic: MAGIC,
            kind: self.kind as u8,
            reduction: self.reduction,
            algorithm: self.algorithm,
            unused: 0,
            dtype: self.dtype.map_or(0, |dtype| dtype as u32).into(),
            root: self.root.unwrap_or(NO_ROOT).into(),
            number: self.number.into(),
            elements: self.elements.into(),
            parts: self.parts.into(),
        };
        zerocopy::transmute!(header)
    }

    /// Decodes a header. `None` if it is of another version or invalid.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (header, _content) = Header::ref_from_prefix(bytes).ok()?;
        if header.magic != MAGIC {
            return None;
        }
        let dtype = match header.dtype.get() {
            0 => None,
            number => Some(DataType::from_number(number).ok()?),
        };
        Some(Self {
            number: header.number.get(),
            kind: CallKind::of_number(header.kind)?,
            dtype,
            elements: header.elements.get(),
            reduction: header.reduction,
            algorithm: header.algorithm,
            root: Some(header.root.get()).filter(|root| *root != NO_ROOT),
            parts: header.parts.get(),
        })
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.kind, self.number)?;
        if let Some(dtype) = self.dtype {
            write!(f, " of {} x {dtype}", self.elements)?;
        }
        if let Some(reduction) = crate::reduction::name_of_number(self.reduction) {
            write!(f, ", {reduction}")?;
        }
        if let Some(algorithm) = crate::schedule::Algorithm::of_number(self.algorithm) {
            write!(f, ", {algorithm}")?;
        }
        if self.parts != 0 {
            write!(f, ", parts {:08x}", self.parts)?;
        }
        match self.root {
            Some(root) => write!(f, ", root {root}"),
            None => Ok(()),
        }
    }
}

/// FNV-1a: a hash that does not depend on the build.
pub(crate) fn hash(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes
        .into_iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// A hash of numbers, for [`Call::parts`].
pub(crate) fn hash_of_numbers(numbers: impl IntoIterator<Item = u64>) -> u32 {
    hash(numbers.into_iter().flat_map(u64::to_le_bytes)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_survives_its_encoding() {
        for (kind, _) in CallKind::ALL {
            for dtype in DataType::ALL.iter().copied().map(Some).chain([None]) {
                let call = Call {
                    number: u64::MAX,
                    kind,
                    dtype,
                    elements: 7,
                    reduction: 3,
                    algorithm: 2,
                    root: Some(0),
                    parts: 9,
                };
                assert_eq!(Call::decode(&call.encode()), Some(call));
                let call = Call { root: None, ..call };
                assert_eq!(Call::decode(&call.encode()), Some(call));
            }
        }
    }

    #[test]
    fn what_is_no_header_is_refused() {
        let bytes = Call::plain(1, CallKind::Barrier).encode();
        assert_eq!(Call::decode(&bytes[..HEADER_BYTES - 1]), None);
        for (at, wrong) in [(0, 0), (4, 0), (4, 200), (8, 255)] {
            let mut bytes = bytes;
            bytes[at] = wrong;
            assert_eq!(Call::decode(&bytes), None, "byte {at} is {wrong}");
        }
    }
}
