//! The stream under HTTP/2, with or without TLS.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tensorwire_fabric_tcp::DataPort;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf},
    net::TcpStream,
};

#[cfg(feature = "tls")]
use super::secured::Secured;
use super::{
    traffic::Traffic,
    trouble::{Trouble, Why},
};
use crate::control::ProvenPeer;
#[cfg(feature = "tls")]
use crate::control::TlsNames;

/// The protection of a plane's streams, dialled and accepted.
#[derive(Debug, Clone)]
pub(super) enum Security {
    /// None.
    None,
    /// Mutual TLS.
    #[cfg(feature = "tls")]
    Tls {
        /// The identity of this worker.
        identity: tensorwire_fabric_tcp::tls::TlsIdentity,
        /// What certificates of peers must contain.
        names: TlsNames,
    },
}

impl Security {
    pub(super) fn encrypts(&self) -> bool {
        !matches!(self, Self::None)
    }

    /// A port for data connections with the same protection.
    pub(super) fn data_port(&self) -> DataPort {
        match self {
            Self::None => DataPort::new(),
            #[cfg(feature = "tls")]
            Self::Tls { identity, .. } => DataPort::with_tls(identity.clone()),
        }
    }
}

/// A stream.
#[derive(Debug)]
pub(super) struct Wire {
    inner: WireStream,
    trouble: Trouble,
    traffic: Traffic,
}

#[derive(Debug)]
enum WireStream {
    /// Without TLS. The flag is true until the first bytes arrive.
    Plain(TcpStream, bool),
    #[cfg(feature = "tls")]
    Secured(Box<Secured>),
}

impl Wire {
    /// A dialled stream, with the dialled `host`. Under TLS, after the handshake.
    ///
    /// # Errors
    /// A message for users.
    pub(super) async fn dial(stream: TcpStream, security: &Security, host: &str) -> Result<Self, String> {
        let trouble = Trouble::default();
        let inner = match security {
            Security::None => {
                let _ = host;
                WireStream::Plain(stream, true)
            }
            #[cfg(feature = "tls")]
            Security::Tls { identity, names } => {
                let secured = Secured::dial(stream, identity, *names, host, trouble.clone()).await?;
                WireStream::Secured(Box::new(secured))
            }
        };
        Ok(Self { inner, trouble, traffic: Traffic::dialled() })
    }

    /// An accepted stream without TLS.
    pub(super) fn accepted(stream: TcpStream) -> Self {
        Self {
            inner: WireStream::Plain(stream, true),
            trouble: Trouble::default(),
            traffic: Traffic::accepted(),
        }
    }

    /// An accepted stream, after the TLS handshake.
    ///
    /// # Errors
    /// A message for users.
    #[cfg(feature = "tls")]
    pub(super) fn accepted_under_tls(
        stream: tokio_rustls::TlsStream<TcpStream>,
        names: TlsNames,
    ) -> Result<Self, String> {
        let trouble = Trouble::default();
        let secured = Secured::new(stream, names, None, trouble.clone())?;
        Ok(Self { inner: WireStream::Secured(Box::new(secured)), trouble, traffic: Traffic::accepted() })
    }

    /// What the peer has proven by TLS.
    pub(super) fn proven(&self) -> Option<&Arc<ProvenPeer>> {
        match &self.inner {
            WireStream::Plain(..) => None,
            #[cfg(feature = "tls")]
            WireStream::Secured(secured) => Some(secured.proven()),
        }
    }

    /// Removes the limits, because the peer is authenticated. The caller must poll again, because a read may have been
    /// held back.
    pub(super) fn admit(&mut self) {
        self.traffic.admit();
    }

    /// Whether the peer has reached its limit before it was authenticated. Then nothing is read before
    /// [`admit`](Self::admit).
    pub(super) fn is_held_back(&self) -> bool {
        self.traffic.room() == 0
    }

    pub(super) fn trouble(&self) -> &Trouble {
        &self.trouble
    }
}

/// Whether a TLS record can begin with this byte. No HTTP/2 connection begins with it.
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
        if this.is_held_back() {
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        let mut inner = (&mut this.inner).take(this.traffic.room() as u64);
        ready!(Pin::new(&mut inner).poll_read(context, buffer))?;
        let read = &buffer.filled()[before..];
        let checked = if this.inner.was_first(read) && read.first().is_some_and(|byte| begins_tls(*byte)) {
            Err(this.trouble.note(
                "the peer speaks TLS, and this worker does not: give it a TLS identity of the same CA \
                 (the setting `tls`)",
            ))
        } else {
            let counted = this.traffic.received(read);
            counted.map_err(|text| this.trouble.first(Why { text, is_tls: false }))
        };
        if checked.is_err() {
            buffer.set_filled(before);
        }
        Poll::Ready(checked)
    }
}

impl WireStream {
    /// Whether `read` contains the first bytes of a stream without TLS.
    fn was_first(&mut self, read: &[u8]) -> bool {
        match self {
            Self::Plain(_, is_new) => std::mem::replace(is_new, *is_new && read.is_empty()),
            #[cfg(feature = "tls")]
            Self::Secured(_) => false,
        }
    }
}

impl AsyncRead for WireStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream, _) => Pin::new(stream).poll_read(context, buffer),
            #[cfg(feature = "tls")]
            Self::Secured(secured) => Pin::new(&mut **secured).poll_read(context, buffer),
        }
    }
}

/// Calls the same method on either kind of stream.
macro_rules! either {
    ($self:ident, $stream:ident => $call:expr) => {
        match &mut $self.inner {
            WireStream::Plain($stream, _) => {
                let $stream = Pin::new($stream);
                $call
            }
            #[cfg(feature = "tls")]
            WireStream::Secured($stream) => {
                let $stream = Pin::new(&mut **$stream);
                $call
            }
        }
    };
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[io::IoSlice::new(bytes)])
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        either!(this, stream => stream.poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        either!(this, stream => stream.poll_shutdown(context))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = ready!(either!(this, stream => stream.poll_write_vectored(context, slices)))?;
        let mut left = written;
        for slice in slices {
            let part = slice.get(..left).unwrap_or(slice);
            this.traffic.sent(part);
            left -= part.len();
        }
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        // Both kinds accept several slices at once.
        true
    }
}
