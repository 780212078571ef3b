//! Why a stream ended.

use std::{
    io,
    sync::{Arc, OnceLock},
};

use tensorwire_protocol::text::escaped;

/// Why this end has ended a stream: HTTP/2 keeps little of what ends it. The first reason counts.
#[derive(Debug, Clone, Default)]
pub(super) struct Trouble(Arc<OnceLock<Why>>);

/// A reason, for people.
#[derive(Debug, Clone)]
pub(super) struct Why {
    pub(super) text: String,
    /// TLS, or its absence; else what the peer sent.
    pub(super) is_tls: bool,
}

impl Trouble {
    /// Notes what TLS, or its absence, has come to, escaped, and makes it the stream's error.
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
