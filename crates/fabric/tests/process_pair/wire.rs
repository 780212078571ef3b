//! Values as bytes, little-endian. The other process is trusted: bytes that cannot be decoded are a bug and end the
//! test.

use std::{net::SocketAddr, time::Duration};

use tensorwire_fabric::{
    Access, Capabilities, ConnectParams, ConnectionData, FabricError, FabricKind, Immediate, LossCause,
    PeerViolation, Purpose, QueuePairConfig, QueuePairStats, RegionGeneration, RegionId, RemoteRange,
    RemoteRegion, Role,
};

/// A value that can be sent between the two processes.
pub(super) trait Wire: Sized {
    fn put(&self, out: &mut Vec<u8>);
    fn get(from: &mut &[u8]) -> Self;
}

macro_rules! numbers {
    ($($number:ty)*) => {
        $(impl Wire for $number {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }

            fn get(from: &mut &[u8]) -> Self {
                let (taken, rest) = from.split_first_chunk().expect("the frame is too short");
                *from = rest;
                Self::from_le_bytes(*taken)
            }
        })*
    };
}

numbers!(u8 u32 u64);

/// Structs whose fields are all public.
macro_rules! structs {
    ($($name:ident { $($field:tt)* })*) => {
        $(impl Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
            }

            fn get(from: &mut &[u8]) -> Self {
                Self { $($field: Wire::get(from)),* }
            }
        })*
    };
}

structs! {
    RegionId { 0 }
    RegionGeneration { 0 }
    Immediate { 0 }
    ConnectionData { 0 }
    RemoteRange { region generation offset length }
    RemoteRegion { region generation base length key }
    Access { remote_write remote_read purpose }
    QueuePairConfig { send_depth receive_depth }
    ConnectParams { peer role peer_address limit }
}

/// Enums: each variant after its name. With `..`, other variants are sent as their text.
macro_rules! enums {
    ($($name:ident { $($variant:ident { $($field:ident)* })* } $(.. $from_text:ident)?)*) => {
        $(impl Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $(Self::$variant { $($field),* } => {
                        stringify!($variant).to_owned().put(out);
                        $($field.put(out);)*
                    })*
                    $(other => {
                        stringify!($from_text).to_owned().put(out);
                        other.to_string().put(out);
                    })?
                }
            }

            fn get(from: &mut &[u8]) -> Self {
                let name = String::get(from);
                $(if name == stringify!($variant) {
                    return Self::$variant { $($field: Wire::get(from)),* };
                })*
                $(if name == stringify!($from_text) {
                    return $from_text(String::get(from));
                })?
                panic!("`{name}` is no {}", stringify!($name))
            }
        })*
    };
}
pub(super) use enums;

enums! {
    Purpose { Payload {} Messages {} }
    Role { Dialer {} Acceptor {} }
    FabricError {
        PeerLost { kind cause detail }
        RemoteRefused { kind reason }
        PeerMisbehaved { kind violation }
        ReceiverNotReady { kind depth }
        Closed {}
        SendQueueFull { depth }
        TooManyPieces { pieces depth }
        UnknownRemoteRegion { region }
        LengthMismatch { local remote }
        OverlappingSegments { region offset }
        ConnectTimeout { kind limit_ms }
    }
    .. unlisted
}

/// An error that no rule of the suite inspects.
fn unlisted(text: String) -> FabricError {
    FabricError::device(FabricKind::SIM, "what the other process did", std::io::Error::other(text))
}

/// Enums without fields that may get more variants: by their index in a list.
macro_rules! listed {
    ($($name:ident [$($variant:ident)*])*) => {
        $(impl Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                let place = [$(Self::$variant),*].iter().position(|listed| listed == self);
                let place = place.unwrap_or_else(|| panic!("{self:?} is new: name it here"));
                out.push(u8::try_from(place).unwrap());
            }

            fn get(from: &mut &[u8]) -> Self {
                [$(Self::$variant),*][usize::from(u8::get(from))]
            }
        })*
    };
}

listed! {
    LossCause [EndOfFile Reset RetryExceeded Unresponsive ClosedByPeer DeviceLost]
    PeerViolation [
        Malformed UnknownRegion WrongKey OutOfBounds NoRight NotGranted NotExposed TooManyReads ReceiverNotReady
        UnsealedBlock BadToken
    ]
}

impl Wire for FabricKind {
    fn put(&self, out: &mut Vec<u8>) {
        self.name().to_owned().put(out);
    }

    fn get(from: &mut &[u8]) -> Self {
        Self::new(String::get(from).leak())
    }
}

impl Wire for bool {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }

    fn get(from: &mut &[u8]) -> Self {
        u8::get(from) != 0
    }
}

impl Wire for () {
    fn put(&self, _: &mut Vec<u8>) {}

    fn get(_: &mut &[u8]) -> Self {}
}

impl<T: Wire> Wire for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u64).put(out);
        self.iter().for_each(|item| item.put(out));
    }

    fn get(from: &mut &[u8]) -> Self {
        (0..u64::get(from)).map(|_| T::get(from)).collect()
    }
}

impl Wire for String {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u64).put(out);
        out.extend(self.as_bytes());
    }

    fn get(from: &mut &[u8]) -> Self {
        Self::from_utf8(Vec::get(from)).expect("a string is UTF-8")
    }
}

impl<T: Wire> Wire for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }

    fn get(from: &mut &[u8]) -> Self {
        bool::get(from).then(|| T::get(from))
    }
}

impl<T: Wire> Wire for Result<T, FabricError> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_ok().put(out);
        match self {
            Ok(value) => value.put(out),
            Err(error) => error.put(out),
        }
    }

    fn get(from: &mut &[u8]) -> Self {
        if bool::get(from) { Ok(T::get(from)) } else { Err(FabricError::get(from)) }
    }
}

impl Wire for Duration {
    fn put(&self, out: &mut Vec<u8>) {
        u64::try_from(self.as_nanos()).unwrap().put(out);
    }

    fn get(from: &mut &[u8]) -> Self {
        Self::from_nanos(u64::get(from))
    }
}

impl Wire for SocketAddr {
    fn put(&self, out: &mut Vec<u8>) {
        self.to_string().put(out);
    }

    fn get(from: &mut &[u8]) -> Self {
        String::get(from).parse().expect("an address")
    }
}

impl Wire for Capabilities {
    fn put(&self, out: &mut Vec<u8>) {
        let Self { vectored, read, lend, .. } = self;
        let able = [vectored, read, lend];
        able.iter().for_each(|able| able.put(out));
        self.piece_bytes_max.put(out);
    }

    fn get(from: &mut &[u8]) -> Self {
        let mut able = Self::WRITES;
        let Self { vectored, read, lend, .. } = &mut able;
        for ability in [vectored, read, lend] {
            *ability = bool::get(from);
        }
        able.piece_bytes_max = u64::get(from);
        able
    }
}

impl Wire for QueuePairStats {
    fn put(&self, out: &mut Vec<u8>) {
        let counts = [self.operations, self.bytes_sent, self.arrivals, self.bytes_received];
        counts.iter().for_each(|count| count.put(out));
    }

    fn get(from: &mut &[u8]) -> Self {
        let mut stats = Self::default();
        let Self { operations, bytes_sent, arrivals, bytes_received, .. } = &mut stats;
        for count in [operations, bytes_sent, arrivals, bytes_received] {
            *count = u64::get(from);
        }
        stats
    }
}
