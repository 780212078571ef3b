//! The stream under HTTP/2, encrypted or not.

use std::{
    io,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};

#[cfg(feature = "tls")]
use super::secured::Secured;
use crate::control::ProvenPeer;
#[cfg(feature = "tls")]
use crate::control::TlsNames;

/// What a plane does with its streams, in both directions.
#[derive(Debug, Clone, Default)]
pub(crate) enum Security {
    /// Nothing.
    #[default]
    None,
    /// Mutual TLS.
    #[cfg(feature = "tls")]
    Tls {
        /// Who this end is.
        identity: verbs_reactor::tls::TlsIdentity,
        /// What peers' certificates must say.
        names: TlsNames,
    },
}

impl Security {
    pub(crate) fn encrypts(&self) -> bool {
        !matches!(self, Self::None)
    }
}

/// Why TLS, or its absence, has ended a stream: HTTP/2 keeps little of what ends it. The first reason counts.
#[derive(Debug, Clone, Default)]
pub(super) struct Trouble(Arc<OnceLock<String>>);

impl Trouble {
    /// Notes it, and makes it the stream's error.
    pub(super) fn note(&self, text: impl Into<String>) -> io::Error {
        let text = self.0.get_or_init(|| text.into());
        io::Error::new(io::ErrorKind::InvalidData, text.clone())
    }

    pub(super) fn text(&self) -> Option<String> {
        self.0.get().cloned()
    }
}

/// A stream.
#[derive(Debug)]
pub(super) struct Wire {
    inner: Inner,
    trouble: Trouble,
}

#[derive(Debug)]
enum Inner {
    /// As it is; whether nothing has come yet.
    Plain(TcpStream, bool),
    #[cfg(feature = "tls")]
    Secured(Box<Secured>),
}

impl Wire {
    /// One that was dialled; `host` as the user named it. The other end has proven itself.
    ///
    /// # Errors
    /// Text for people.
    pub(super) async fn dial(stream: TcpStream, security: &Security, host: &str) -> Result<Self, String> {
        let trouble = Trouble::default();
        let inner = match security {
            Security::None => {
                let _ = host;
                Inner::Plain(stream, true)
            }
            #[cfg(feature = "tls")]
            Security::Tls { identity, names } => {
                let secured = Secured::dial(stream, identity, *names, host, trouble.clone()).await?;
                Inner::Secured(Box::new(secured))
            }
        };
        Ok(Self { inner, trouble })
    }

    /// One that came in. The other end proves itself before the first byte is read.
    pub(super) fn accept(stream: TcpStream, security: &Security) -> Self {
        let trouble = Trouble::default();
        let inner = match security {
            Security::None => Inner::Plain(stream, true),
            #[cfg(feature = "tls")]
            Security::Tls { identity, names } => {
                Inner::Secured(Box::new(Secured::accept(stream, identity, *names, trouble.clone())))
            }
        };
        Self { inner, trouble }
    }

    /// What the other end has proven so far.
    pub(super) fn proven(&self) -> Option<&Arc<ProvenPeer>> {
        match &self.inner {
            Inner::Plain(..) => None,
            #[cfg(feature = "tls")]
            Inner::Secured(secured) => secured.proven(),
        }
    }

    pub(super) fn trouble(&self) -> &Trouble {
        &self.trouble
    }
}

/// Whether a record of TLS begins with this byte; no HTTP/2 connection does, from either end.
fn begins_tls(byte: u8) -> bool {
    (0x14..=0x17).contains(&byte)
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        match &mut this.inner {
            Inner::Plain(stream, is_new) => {
                let before = buffer.filled().len();
                let read = Pin::new(stream).poll_read(context, buffer);
                let first = if *is_new { buffer.filled().get(before) } else { None };
                if first.is_some_and(|byte| begins_tls(*byte)) {
                    let trouble = "the other end speaks TLS, and this worker does not: give it a TLS identity of the \
                                   same CA (WorkerBuilder::tls, --tls-cert)";
                    return Poll::Ready(Err(this.trouble.note(trouble)));
                }
                *is_new &= first.is_none();
                read
            }
            #[cfg(feature = "tls")]
            Inner::Secured(secured) => Pin::new(&mut **secured).poll_read(context, buffer),
        }
    }
}

/// Calls the same on whichever stream it is.
macro_rules! either {
    ($self:ident, $stream:ident => $call:expr) => {
        match &mut $self.get_mut().inner {
            Inner::Plain($stream, _) => {
                let $stream = Pin::new($stream);
                $call
            }
            #[cfg(feature = "tls")]
            Inner::Secured($stream) => {
                let $stream = Pin::new(&mut **$stream);
                $call
            }
        }
    };
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        either!(self, stream => stream.poll_write(context, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => stream.poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => stream.poll_shutdown(context))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => stream.poll_write_vectored(context, slices))
    }

    fn is_write_vectored(&self) -> bool {
        // Both kinds take many slices at once.
        true
    }
}
