//! The purpose of an encrypted connection.

/// The purpose of a connection. The handshake agrees on it, so that a connection cannot be used for the other purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TlsPurpose {
    /// Control sessions, over HTTP/2.
    Control,
    /// Data connections of the tcp fabric.
    Data,
}

impl TlsPurpose {
    pub(super) fn protocol(self) -> &'static [u8] {
        match self {
            Self::Control => b"h2",
            Self::Data => b"tensorwire-data/1",
        }
    }
}
