//! What two queue pairs must know of each other.

use crate::ConnectionData;

use super::{Gid, LinkLayer};

const VERSION: u8 = 1;
const BYTES: usize = 34;
const NUMBER_MAX: u32 = (1 << 24) - 1;

/// One end of a connection. As connection data, version 1, little-endian:
///
/// | bytes | content |
/// | --- | --- |
/// | 0 | version |
/// | 1 | link layer: 1 InfiniBand, 2 Ethernet |
/// | 2 | path MTU as `enum ibv_mtu`, 1 to 5 |
/// | 3..5 | local identifier |
/// | 5..9 | queue pair number, 24 bits |
/// | 9..13 | first packet sequence number, 24 bits |
/// | 13..17 | bytes of a piece, at least 1 |
/// | 17..33 | GID |
/// | 33 | reads of the other end that this one serves at once |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Endpoint {
    pub(crate) link: LinkLayer,
    pub(crate) mtu: u32,
    pub(crate) local_identifier: u16,
    pub(crate) number: u32,
    /// Random, so that nobody off the path guesses what the connection accepts.
    pub(crate) sequence: u32,
    /// Into pieces of how many bytes this end splits its writes.
    pub(crate) piece_bytes: u32,
    pub(crate) gid: Gid,
    /// Reads of the other end that this one serves at once; 0 for none.
    pub(crate) reads: u8,
}

impl Endpoint {
    pub(crate) fn encode(&self) -> ConnectionData {
        let link = match self.link {
            LinkLayer::InfiniBand => 1,
            LinkLayer::Ethernet => 2,
        };
        let mut bytes = Vec::with_capacity(BYTES);
        bytes.extend([VERSION, link, u8::try_from(self.mtu).unwrap_or(1)]);
        bytes.extend(self.local_identifier.to_le_bytes());
        bytes.extend(self.number.to_le_bytes());
        bytes.extend(self.sequence.to_le_bytes());
        bytes.extend(self.piece_bytes.to_le_bytes());
        bytes.extend(self.gid.0);
        bytes.push(self.reads);
        ConnectionData(bytes)
    }

    /// Parses the peer's data. The error says what is wrong with them.
    pub(crate) fn decode(data: &ConnectionData) -> Result<Self, String> {
        let version = data.0.first().copied();
        if version != Some(VERSION) {
            return Err(format!(
                "the peer's version is {version:?}, ours is {VERSION}: run the same release"
            ));
        }
        let bytes: &[u8; BYTES] =
            data.0.as_slice().try_into().map_err(|_| format!("{} bytes instead of {BYTES}", data.0.len()))?;
        let [_, link, mtu, l0, l1, n0, n1, n2, n3, s0, s1, s2, s3, p0, p1, p2, p3, gid @ .., reads] = *bytes;
        let link = match link {
            1 => LinkLayer::InfiniBand,
            2 => LinkLayer::Ethernet,
            other => return Err(format!("link layer {other} is unknown")),
        };
        let number = u32::from_le_bytes([n0, n1, n2, n3]);
        let sequence = u32::from_le_bytes([s0, s1, s2, s3]);
        let piece_bytes = u32::from_le_bytes([p0, p1, p2, p3]);
        if piece_bytes == 0 {
            return Err("a piece of 0 bytes".to_owned());
        }
        if !(1..=5).contains(&mtu) || number > NUMBER_MAX || sequence > NUMBER_MAX {
            return Err(format!(
                "mtu {mtu}, queue pair {number} or sequence number {sequence} is out of range"
            ));
        }
        let local_identifier = u16::from_le_bytes([l0, l1]);
        let (mtu, gid) = (u32::from(mtu), Gid(gid));
        Ok(Self { link, mtu, local_identifier, number, sequence, piece_bytes, gid, reads })
    }
}

/// A first packet sequence number from random bits.
pub(crate) fn sequence(random: u64) -> u32 {
    (random & u64::from(NUMBER_MAX)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: Endpoint = Endpoint {
        link: LinkLayer::Ethernet,
        mtu: 5,
        local_identifier: 0x1234,
        number: 0x00AB_CDEF,
        sequence: 0x0001_0203,
        piece_bytes: 8 << 20,
        gid: Gid([9; 16]),
        reads: 16,
    };

    #[test]
    fn an_end_survives_the_control_plane() {
        assert_eq!(Endpoint::decode(&END.encode()), Ok(END));
    }

    #[test]
    fn damaged_data_are_refused_with_what_is_wrong() {
        let good = END.encode().0;
        for length in 0..good.len() {
            Endpoint::decode(&ConnectionData(good[..length].to_vec())).unwrap_err();
        }
        let with = |index: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[index] = value;
            Endpoint::decode(&ConnectionData(bytes))
        };
        assert!(with(0, 2).unwrap_err().contains("version"));
        assert!(with(1, 3).unwrap_err().contains("link layer"));
        for (index, value) in [(2, 0), (2, 6), (8, 1), (12, 1)] {
            assert!(with(index, value).unwrap_err().contains("out of range"), "byte {index}");
        }
    }

    #[test]
    fn pieces_without_bytes_are_refused() {
        let end = Endpoint { piece_bytes: 0, ..END };
        assert!(Endpoint::decode(&end.encode()).unwrap_err().contains("piece"));
    }

    #[test]
    fn sequence_numbers_fit_their_24_bits() {
        assert_eq!(sequence(u64::MAX), NUMBER_MAX);
    }
}
