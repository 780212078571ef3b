//! Connection data, hello and welcome, in bytes. All integers are little-endian.
//!
//! | bytes | connection data (control plane) | hello (dialer, first on the stream) | welcome (answer) |
//! | --- | --- | --- | --- |
//! | 0.. | version u16 | magic 8 bytes | magic 8 bytes |
//! | | address family u8 (0 none, 4, 6) | version u16 | version u16 |
//! | | address 16 bytes (4 of them for IPv4) | ticket u64 | |
//! | | port u16 (0: that of the control connection) | token 16 bytes | |
//! | | ticket u64 | nonce 16 bytes | |
//! | | token 16 bytes | | |
//! | | certificate 32 bytes, if encrypted | | |
//!
//! The dialer shows the acceptor's token, which reached it over the control plane, and as its nonce the token of its
//! own connection data, which reached the acceptor the same way: so each side knows that the stream's peer is the
//! peer of the control session. In an encrypted stream, hello and welcome are the first encrypted bytes, and each
//! side must show the certificate whose SHA-256 is in its connection data.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use tensorwire_fabric::{ConnectionData, FabricError, FabricKind, PeerViolation, Runtime};

use crate::{frame::take, protection::Certificate};

/// The version of everything on the stream and of the connection data.
pub(super) const VERSION: u16 = 1;

pub(super) const HELLO_BYTES: usize = 50;
pub(super) const WELCOME_BYTES: usize = 10;
const DATA_BYTES: usize = 45;
const CERTIFICATE_BYTES: usize = 32;

pub(super) const HELLO_MAGIC: [u8; 8] = *b"twtcp-h\n";
const WELCOME_MAGIC: [u8; 8] = *b"twtcp-w\n";

/// A one-use secret. `Debug` leaves it out.
#[derive(Clone, Copy)]
pub(super) struct Token([u8; 16]);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

impl Token {
    pub(super) fn random(runtime: &dyn Runtime) -> Self {
        let bits = u128::from(runtime.random()) << 64 | u128::from(runtime.random());
        Self(bits.to_le_bytes())
    }

    /// Compares in constant time.
    pub(super) fn matches(&self, other: &Self) -> bool {
        let differences = self.0.iter().zip(&other.0).fold(0, |sum, (a, b)| sum | (a ^ b));
        std::hint::black_box(differences) == 0
    }
}

/// What the peer needs to reach this side.
#[derive(Debug, Clone, Copy)]
pub(super) struct Address {
    /// `None` if the dialer must use the host at which it dialled the control connection. Then this side listens on
    /// every address, or at the address of the control connection.
    pub(super) ip: Option<IpAddr>,
    /// 0 for the port that the dialer dialled the control connection at.
    pub(super) port: u16,
    /// The number of this side's ticket.
    pub(super) ticket: u64,
    pub(super) token: Token,
    /// The certificate that this side will show, if the stream is to be encrypted.
    pub(super) certificate: Option<Certificate>,
}

impl Address {
    /// The address to dial, for a peer that dialled the control connection at `control`. `None` if `control` is
    /// needed and not known.
    pub(super) fn dialled_at(&self, control: Option<SocketAddr>) -> Option<SocketAddr> {
        let port = if self.port == 0 { control?.port() } else { self.port };
        let mut at = SocketAddr::new(self.ip.or(control.map(|control| control.ip()))?, port);
        // The zone of a link-local address is that of the session: the peer does not know this host's.
        if let (SocketAddr::V6(at), Some(SocketAddr::V6(control))) = (&mut at, control)
            && at.ip().is_unicast_link_local()
        {
            at.set_scope_id(control.scope_id());
        }
        Some(at)
    }

    pub(super) fn encode(&self) -> ConnectionData {
        let (family, ip) = match self.ip {
            None => (0, [0; 16]),
            Some(IpAddr::V4(ip)) => (4, padded(ip)),
            Some(IpAddr::V6(ip)) => (6, ip.octets()),
        };
        let mut data = Vec::with_capacity(DATA_BYTES + CERTIFICATE_BYTES);
        data.extend(VERSION.to_le_bytes());
        data.push(family);
        data.extend(ip);
        data.extend(self.port.to_le_bytes());
        data.extend(self.ticket.to_le_bytes());
        data.extend(self.token.0);
        data.extend(self.certificate.iter().flatten());
        ConnectionData(data)
    }

    /// # Errors
    /// [`FabricError::Connect`] for another version, [`FabricError::PeerMisbehaved`] for anything else that is
    /// not connection data.
    pub(super) fn decode(data: &ConnectionData) -> Result<Self, FabricError> {
        let mut rest = data.0.as_slice();
        let version = take(&mut rest).map(u16::from_le_bytes).ok_or_else(malformed)?;
        check_version(version)?;
        let address = Self::decode_fields(&mut rest).ok_or_else(malformed)?;
        if rest.is_empty() { Ok(address) } else { Err(malformed()) }
    }

    fn decode_fields(rest: &mut &[u8]) -> Option<Self> {
        let [family] = take(rest)?;
        let bytes: [u8; 16] = take(rest)?;
        let ip = match family {
            0 => None,
            4 => Some(IpAddr::V4(Ipv4Addr::from(*bytes.first_chunk::<4>()?))),
            6 => Some(IpAddr::V6(Ipv6Addr::from(bytes))),
            _ => return None,
        };
        let port = u16::from_le_bytes(take(rest)?);
        let ticket = u64::from_le_bytes(take(rest)?);
        let token = Token(take(rest)?);
        let certificate = if rest.is_empty() { None } else { Some(take(rest)?) };
        Some(Self { ip, port, ticket, token, certificate })
    }
}

fn padded(ip: Ipv4Addr) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&ip.octets());
    bytes
}

/// The dialer's first bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hello {
    pub(super) version: u16,
    pub(super) ticket: u64,
    pub(super) token: Token,
    pub(super) nonce: Token,
}

impl Hello {
    pub(super) fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut hello = [0; HELLO_BYTES];
        hello[..8].copy_from_slice(&HELLO_MAGIC);
        hello[8..10].copy_from_slice(&self.version.to_le_bytes());
        hello[10..18].copy_from_slice(&self.ticket.to_le_bytes());
        hello[18..34].copy_from_slice(&self.token.0);
        hello[34..50].copy_from_slice(&self.nonce.0);
        hello
    }

    /// `None` if these are not a hello of any version.
    pub(super) fn decode(hello: &[u8; HELLO_BYTES]) -> Option<Self> {
        let mut rest = hello.as_slice();
        if take(&mut rest)? != HELLO_MAGIC {
            return None;
        }
        Some(Self {
            version: u16::from_le_bytes(take(&mut rest)?),
            ticket: u64::from_le_bytes(take(&mut rest)?),
            token: Token(take(&mut rest)?),
            nonce: Token(take(&mut rest)?),
        })
    }
}

/// The acceptor's answer. If the versions differ, the acceptor closes the stream after it.
pub(super) fn encode_welcome() -> [u8; WELCOME_BYTES] {
    let mut welcome = [0; WELCOME_BYTES];
    welcome[..8].copy_from_slice(&WELCOME_MAGIC);
    welcome[8..10].copy_from_slice(&VERSION.to_le_bytes());
    welcome
}

/// # Errors
/// [`FabricError::PeerMisbehaved`] if these are not a welcome, [`FabricError::Connect`] for another version.
pub(super) fn check_welcome(welcome: &[u8; WELCOME_BYTES]) -> Result<(), FabricError> {
    let mut rest = welcome.as_slice();
    if take(&mut rest) != Some(WELCOME_MAGIC) {
        return Err(malformed());
    }
    check_version(take(&mut rest).map(u16::from_le_bytes).ok_or_else(malformed)?)
}

/// Whether these bytes, which are not a welcome, are the beginning of an HTTP/1 answer, or a frame of HTTP/2 that
/// concerns the whole connection (SETTINGS, GOAWAY, WINDOW_UPDATE).
pub(super) fn answers_in_http(welcome: &[u8; WELCOME_BYTES]) -> bool {
    let [_, _, _, kind, _, stream @ ..] = welcome;
    welcome.starts_with(b"HTTP/") || matches!(kind, 4 | 7 | 8) && stream.starts_with(&[0; 4])
}

fn check_version(theirs: u16) -> Result<(), FabricError> {
    if theirs == VERSION {
        return Ok(());
    }
    Err(FabricError::Connect {
        kind: FabricKind::TCP,
        step: "version check",
        detail: format!(
            "the peer speaks version {theirs}, this side version {VERSION}; run the same release"
        ),
    })
}

fn malformed() -> FabricError {
    FabricError::PeerMisbehaved { kind: FabricKind::TCP, violation: PeerViolation::Malformed }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(ip: Option<IpAddr>) -> Address {
        Address { ip, port: 4711, ticket: 99, token: Token([0xAB; 16]), certificate: None }
    }

    #[test]
    fn connection_data_survives_the_wire() {
        let addresses =
            [None, Some(IpAddr::V4(Ipv4Addr::new(10, 1, 2, 3))), Some(IpAddr::V6(Ipv6Addr::LOCALHOST))];
        for ip in addresses {
            let decoded = Address::decode(&address(ip).encode()).unwrap();
            assert_eq!((decoded.ip, decoded.port, decoded.ticket), (ip, 4711, 99));
            assert!(decoded.token.matches(&Token([0xAB; 16])));
            assert_eq!(decoded.certificate, None);
            let encrypted = Address { certificate: Some([7; 32]), ..address(ip) };
            assert_eq!(Address::decode(&encrypted.encode()).unwrap().certificate, Some([7; 32]));
        }
    }

    #[test]
    fn connection_data_of_every_other_length_is_malformed() {
        let whole = address(None).encode().0;
        let encrypted = whole.len() + CERTIFICATE_BYTES;
        for length in (0..encrypted).filter(|&length| length != whole.len()).chain([encrypted + 1]) {
            let mut data = whole.clone();
            data.resize(length, 0);
            let error = Address::decode(&ConnectionData(data)).unwrap_err();
            assert!(matches!(error, FabricError::PeerMisbehaved { .. }), "{length}: {error}");
        }
    }

    #[test]
    fn another_version_is_refused_and_both_are_named() {
        let mut data = address(None).encode();
        data.0[0] = 7;
        let error = Address::decode(&data).unwrap_err().to_string();
        assert!(error.contains("version 7") && error.contains("version 1"), "{error}");
        let mut welcome = encode_welcome();
        welcome[8] = 9;
        let error = check_welcome(&welcome).unwrap_err().to_string();
        assert!(error.contains("version 9") && error.contains("version 1"), "{error}");
    }

    #[test]
    fn an_answer_in_http_is_told_from_a_welcome_and_from_nonsense() {
        let first = |bytes: &[u8]| std::array::from_fn(|at| bytes.get(at).copied().unwrap_or_default());
        let answers: [&[u8]; 4] = [
            b"HTTP/1.1 400 Bad Request",
            &[0, 0, 18, 4, 0, 0, 0, 0, 0, 0],
            &[0, 0, 0, 4, 0, 0, 0, 0, 0, 0],
            &[0, 0, 8, 7, 0, 0, 0, 0, 0, 0],
        ];
        assert!(answers.iter().all(|answer| answers_in_http(&first(answer))));
        let others: [&[u8]; 3] = [b"", b"220 mail.example ESMTP", &encode_welcome()];
        assert!(!others.iter().any(|other| answers_in_http(&first(other))));
    }

    #[test]
    fn what_an_address_leaves_open_is_that_of_the_control_connection() {
        let control = Some(SocketAddr::from(([10, 0, 0, 9], 4242)));
        let ip = Some(IpAddr::V4(Ipv4Addr::new(10, 1, 2, 3)));
        let at = |address: Address, control| address.dialled_at(control).map(|at| at.to_string());
        let shared = Address { port: 0, ..address(None) };
        let control_at = |zoned: &str| at(shared, zoned.parse().ok());
        assert_eq!(control_at("[fe80::9%3]:4242").as_deref(), Some("[fe80::9%3]:4242"));
        let link_local = Address { ip: "fe80::5".parse().ok(), ..shared };
        assert_eq!(at(link_local, "[fe80::9%3]:4242".parse().ok()).as_deref(), Some("[fe80::5%3]:4242"));
        for (address, with, without) in [
            (shared, "10.0.0.9:4242", None),
            (address(None), "10.0.0.9:4711", None),
            (address(ip), "10.1.2.3:4711", Some("10.1.2.3:4711")),
        ] {
            assert_eq!(at(address, control).as_deref(), Some(with));
            assert_eq!(at(address, None).as_deref(), without);
        }
    }

    #[test]
    fn tokens_differ_by_any_bit() {
        for bit in 0..128 {
            let mut other = [0xAB; 16];
            other[bit / 8] ^= 1 << (bit % 8);
            assert!(!Token([0xAB; 16]).matches(&Token(other)));
        }
    }

    #[test]
    fn secrets_are_not_printed() {
        let shown = format!("{:?}", address(None));
        assert!(!shown.contains("171") && !shown.to_lowercase().contains("ab, ab"), "{shown}");
    }
}
