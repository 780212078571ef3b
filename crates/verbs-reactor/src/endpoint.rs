//! The data that two queue pairs exchange to connect.

use tensorwire_fabric::ConnectionData;

use super::{Gid, GidKind, LinkLayer, Mtu};

const VERSION: u8 = 2;
/// Bytes before the host's name.
const FIXED_BYTES: usize = 46;
const HOST_BYTES_MAX: usize = 64;
const NUMBER_MAX: u32 = (1 << 24) - 1;
const SERVICE_LEVEL_MAX: u8 = 15;

/// One side of a connection: the fields that TensorFlow's plugin sends in `GetRemoteAddress`, and some more. They are
/// encoded as connection data of version 2, little-endian:
///
/// | bytes | content |
/// | --- | --- |
/// | 0 | version |
/// | 1 | link layer: 1 InfiniBand, 2 Ethernet |
/// | 2 | packets: 0 InfiniBand, 1 RoCE v1, 2 RoCE v2 |
/// | 3 | largest packet as `enum ibv_mtu`, 1 to 5; the connection uses the smaller one of both sides |
/// | 4 | service level of this side's packets, 0 to 15 |
/// | 5..7 | partition key |
/// | 7..9 | local identifier |
/// | 9..13 | queue pair number, 24 bits |
/// | 13..17 | first packet sequence number, 24 bits |
/// | 17..21 | bytes of a piece, at least 1 |
/// | 21..25 | writes posted at once, at least 1 |
/// | 25..29 | immediates that may be on their way to this side, at least 1 |
/// | 29..45 | GID: subnet prefix and interface identifier, as the library gives them |
/// | 45 | reads of the peer that this side serves at once |
/// | 46.. | the host's name in UTF-8, at most 64 bytes, for messages |
///
/// Regions are announced by the control plane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Endpoint {
    pub(crate) link: LinkLayer,
    pub(crate) kind: GidKind,
    pub(crate) mtu: Mtu,
    pub(crate) service_level: u8,
    pub(crate) partition_key: u16,
    pub(crate) local_identifier: u16,
    pub(crate) number: u32,
    /// Random, so that a host off the path cannot guess which packets the connection accepts.
    pub(crate) sequence: u32,
    /// Bytes of the pieces that this side splits its writes into.
    pub(crate) piece_bytes: u32,
    pub(crate) send_depth: u32,
    pub(crate) receive_depth: u32,
    pub(crate) gid: Gid,
    /// Reads of the peer that this side serves at once; 0 for none.
    pub(crate) reads: u8,
    pub(crate) host: String,
}

impl Endpoint {
    pub(crate) fn encode(&self) -> ConnectionData {
        let link = match self.link {
            LinkLayer::InfiniBand => 1,
            LinkLayer::Ethernet => 2,
        };
        let kind = match self.kind {
            GidKind::InfiniBand => 0,
            GidKind::RoceV1 => 1,
            GidKind::RoceV2 => 2,
        };
        let mtu = u8::try_from(self.mtu.code()).unwrap_or(1);
        let mut bytes = Vec::with_capacity(FIXED_BYTES + self.host.len());
        bytes.extend([VERSION, link, kind, mtu, self.service_level]);
        bytes.extend(self.partition_key.to_le_bytes());
        bytes.extend(self.local_identifier.to_le_bytes());
        for number in [self.number, self.sequence, self.piece_bytes, self.send_depth, self.receive_depth] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(self.gid.0);
        bytes.push(self.reads);
        bytes.extend(self.host.as_bytes());
        ConnectionData(bytes)
    }

    /// Parses the peer's data. The error describes what is wrong with them.
    pub(crate) fn decode(data: &ConnectionData) -> Result<Self, String> {
        let version = data.0.first().copied();
        if version != Some(VERSION) {
            let version = version.map_or("missing".to_owned(), |version| version.to_string());
            return Err(format!("the peer's version is {version}, ours is {VERSION}: run the same release"));
        }
        let (fixed, host) = data
            .0
            .split_first_chunk::<FIXED_BYTES>()
            .ok_or_else(|| format!("{} bytes, fewer than {FIXED_BYTES}", data.0.len()))?;
        let mut fields = Fields(&fixed[1..]);
        let end = Self {
            link: link(fields.byte())?,
            kind: kind(fields.byte())?,
            mtu: mtu(fields.byte())?,
            service_level: fields.byte(),
            partition_key: fields.short(),
            local_identifier: fields.short(),
            number: fields.word(),
            sequence: fields.word(),
            piece_bytes: fields.word(),
            send_depth: fields.word(),
            receive_depth: fields.word(),
            gid: Gid(fields.take()),
            reads: fields.byte(),
            host: host_of(host)?,
        };
        end.in_range()?;
        Ok(end)
    }

    fn in_range(&self) -> Result<(), String> {
        if self.piece_bytes == 0 || self.send_depth == 0 || self.receive_depth == 0 {
            let Self { piece_bytes, send_depth, receive_depth, .. } = self;
            return Err(format!(
                "pieces of {piece_bytes} bytes, {send_depth} writes or {receive_depth} immediates at once: each must be at least 1"
            ));
        }
        if self.number > NUMBER_MAX || self.sequence > NUMBER_MAX || self.service_level > SERVICE_LEVEL_MAX {
            let Self { number, sequence, service_level, .. } = self;
            return Err(format!(
                "queue pair {number}, sequence number {sequence} or service level {service_level} is out of range"
            ));
        }
        Ok(())
    }

    /// Checks that each side takes the packets of the other. The error names the values that differ.
    pub(crate) fn check(&self, peer: &Self) -> Result<(), String> {
        let host = &peer.host;
        if peer.link != self.link {
            return Err(format!(
                "the port of the peer on {host} is {:?}, ours is {:?}",
                peer.link, self.link
            ));
        }
        if peer.kind != self.kind {
            return Err(format!(
                "the address of the peer on {host} is of {:?}, ours of {:?}: name an entry of the same kind with \
                 TENSORWIRE_RDMA_GID_INDEX",
                peer.kind, self.kind
            ));
        }
        // The highest bit is set for full members of a partition. Two limited members cannot exchange packets.
        let (ours, theirs) = (self.partition_key, peer.partition_key);
        if (ours ^ theirs) & 0x7FFF != 0 || (ours | theirs) & 0x8000 == 0 {
            return Err(format!(
                "the partition key of the peer on {host} is {theirs:#06x}, ours is {ours:#06x}, and they do not fit: \
                 name an entry that does with TENSORWIRE_RDMA_PKEY_INDEX"
            ));
        }
        Ok(())
    }
}

/// The rest of the fixed part. Reads past its end give zeros.
struct Fields<'data>(&'data [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let Some((taken, rest)) = self.0.split_first_chunk::<N>() else { return [0; N] };
        self.0 = rest;
        *taken
    }

    fn byte(&mut self) -> u8 {
        let [byte] = self.take();
        byte
    }

    fn short(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    fn word(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }
}

fn link(byte: u8) -> Result<LinkLayer, String> {
    match byte {
        1 => Ok(LinkLayer::InfiniBand),
        2 => Ok(LinkLayer::Ethernet),
        other => Err(format!("link layer {other} is unknown")),
    }
}

fn kind(byte: u8) -> Result<GidKind, String> {
    match byte {
        0 => Ok(GidKind::InfiniBand),
        1 => Ok(GidKind::RoceV1),
        2 => Ok(GidKind::RoceV2),
        other => Err(format!("kind of packets {other} is unknown")),
    }
}

fn mtu(byte: u8) -> Result<Mtu, String> {
    Mtu::from_code(u32::from(byte)).ok_or_else(|| format!("packet size {byte} is out of range"))
}

fn host_of(bytes: &[u8]) -> Result<String, String> {
    if bytes.len() > HOST_BYTES_MAX {
        return Err(format!("a host name of {} bytes, more than {HOST_BYTES_MAX}", bytes.len()));
    }
    let text = str::from_utf8(bytes).map_err(|error| format!("a host name that is no UTF-8: {error}"))?;
    // Host names consist of graphic ASCII characters. Other characters could control the terminal that shows a message
    // or log.
    Ok(text.chars().filter(char::is_ascii_graphic).collect())
}

/// This host's name.
pub(crate) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    let end = (0..=HOST_BYTES_MAX.min(name.len())).rev().find(|end| name.is_char_boundary(*end));
    name[..end.unwrap_or(0)].to_owned()
}

/// A first packet sequence number from random bits.
pub(crate) fn sequence(random: u64) -> u32 {
    (random & u64::from(NUMBER_MAX)) as u32
}

#[cfg(test)]
impl Endpoint {
    /// An end for tests; its other fields are always equal.
    pub(crate) fn sample(link: LinkLayer, mtu: Mtu) -> Self {
        let (kind, gid, host) = (GidKind::RoceV2, Gid([9; 16]), "left".to_owned());
        Self {
            link,
            kind,
            mtu,
            service_level: 3,
            partition_key: 0xFFFF,
            local_identifier: 0x1234,
            number: 0x00AB_CDEF,
            sequence: 0x0001_0203,
            piece_bytes: 8 << 20,
            send_depth: 256,
            receive_depth: 258,
            gid,
            reads: 16,
            host,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end() -> Endpoint {
        Endpoint::sample(LinkLayer::Ethernet, Mtu::Bytes4096)
    }

    #[test]
    fn an_end_survives_the_control_plane() {
        assert_eq!(Endpoint::decode(&end().encode()), Ok(end()));
        let nameless = Endpoint { host: String::new(), ..end() };
        assert_eq!(Endpoint::decode(&nameless.encode()), Ok(nameless));
    }

    #[test]
    fn the_layout_is_the_table() {
        let bytes = end().encode().0;
        let expected = [
            &[2, 2, 2, 5, 3, 0xFF, 0xFF, 0x34, 0x12, 0xEF, 0xCD, 0xAB, 0, 3, 2, 1, 0, 0, 0, 0x80, 0][..],
            &[0, 1, 0, 0, 2, 1, 0, 0],
            &[9; 16],
            &[16],
            b"left",
        ];
        assert_eq!(bytes, expected.concat());
    }

    #[test]
    fn damaged_data_are_refused_with_what_is_wrong() {
        let good = end().encode().0;
        for length in 0..FIXED_BYTES {
            Endpoint::decode(&ConnectionData(good[..length].to_vec())).unwrap_err();
        }
        let with = |index: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[index] = value;
            Endpoint::decode(&ConnectionData(bytes))
        };
        assert!(with(0, 1).unwrap_err().contains("version is 1, ours is 2"));
        assert!(with(1, 3).unwrap_err().contains("link layer"));
        assert!(with(2, 3).unwrap_err().contains("kind of packets"));
        for (index, value) in [(3, 0), (3, 6), (4, 16), (12, 1), (16, 1)] {
            assert!(with(index, value).unwrap_err().contains("out of range"), "byte {index}");
        }
        let long = [good, vec![b'x'; HOST_BYTES_MAX]].concat();
        assert!(Endpoint::decode(&ConnectionData(long)).unwrap_err().contains("host name"));
    }

    #[test]
    fn empty_pieces_and_queues_are_refused() {
        for none in [
            Endpoint { piece_bytes: 0, ..end() },
            Endpoint { send_depth: 0, ..end() },
            Endpoint { receive_depth: 0, ..end() },
        ] {
            assert!(Endpoint::decode(&none.encode()).unwrap_err().contains("at least 1"));
        }
    }

    #[test]
    fn a_host_name_cannot_write_on_a_terminal() {
        let hostile = Endpoint { host: "a\u{1b}[2Jb\n".to_owned(), ..end() };
        assert_eq!(Endpoint::decode(&hostile.encode()).unwrap().host, "a[2Jb");
    }

    #[test]
    fn ends_that_cannot_hear_each_other_are_told_both_values() {
        let ours = end();
        ours.check(&end()).unwrap();
        // Packet sizes and depths may differ: the smaller one applies.
        ours.check(&Endpoint { mtu: Mtu::Bytes256, receive_depth: 1, ..end() }).unwrap();
        for (theirs, words) in [
            (Endpoint { link: LinkLayer::InfiniBand, ..end() }, ["InfiniBand", "Ethernet"]),
            (Endpoint { kind: GidKind::RoceV1, ..end() }, ["RoceV1", "RoceV2"]),
            (Endpoint { partition_key: 0x8001, ..end() }, ["0x8001", "0xffff"]),
        ] {
            let error = ours.check(&theirs).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)) && error.contains("left"), "{error}");
        }
        let limited = Endpoint { partition_key: 0x7FFF, ..end() };
        ours.check(&limited).unwrap();
        limited.check(&limited).unwrap_err();
    }

    #[test]
    fn sequence_numbers_fit_their_24_bits() {
        assert_eq!(sequence(u64::MAX), NUMBER_MAX);
    }

    #[test]
    fn the_own_host_name_fits() {
        assert!(host_name().len() <= HOST_BYTES_MAX);
    }
}
