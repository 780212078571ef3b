//! The reason why a stream ended.

use std::{
    io,
    sync::{Arc, OnceLock},
};

use tensorwire_protocol::text::escaped;

/// The reason why this side ended a stream. Stored here, because HTTP/2's errors do not contain it. The first reason is
/// used.
#[derive(Debug, Clone, Default)]
pub(super) struct Trouble(Arc<OnceLock<Why>>);

/// A reason, as a message for users.
#[derive(Debug, Clone)]
pub(super) struct Why {
    pub(super) text: String,
    /// Whether TLS or its absence is the cause; otherwise the peer's bytes are.
    pub(super) is_tls: bool,
}

impl Trouble {
    /// Stores an error of TLS, or of its absence, escaped, and returns it as the stream's error.
    pub(super) fn note(&self, text: impl Into<String>) -> io::Error {
        self.first(Why { text: escaped(&text.into()).into_owned(), is_tls: true })
    }

    pub(super) fn why(&self) -> Option<&Why> {
        self.0.get()
    }

    pub(super) fn first(&self, why: Why) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, self.0.get_or_init(|| why).text.clone())
    }
}
