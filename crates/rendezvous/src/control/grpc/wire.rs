//! The stream under HTTP/2, with or without TLS.

use std::{
    fmt, io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tensorwire_fabric_tcp::DataPort;
#[cfg(feature = "tls")]
use tensorwire_fabric_tcp::tls::{TlsPurpose, explain_io, explain_later};
#[cfg(feature = "tls")]
use tensorwire_protocol::text::escaped;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf},
    net::TcpStream,
};

#[cfg(feature = "tls")]
use super::secured::prove;
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

/// A stream of bytes: TCP, or TLS over it.
trait Bytes: AsyncRead + AsyncWrite + fmt::Debug + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + fmt::Debug + Send + Unpin> Bytes for S {}

/// A stream.
#[derive(Debug)]
pub(super) struct Wire {
    bytes: Box<dyn Bytes>,
    /// What the peer has proven by TLS.
    proven: Option<Arc<ProvenPeer>>,
    /// Nothing has been read yet.
    is_new: bool,
    trouble: Trouble,
    traffic: Traffic,
}

impl Wire {
    fn new(bytes: impl Bytes + 'static, proven: Option<ProvenPeer>, traffic: Traffic) -> Self {
        let proven = proven.map(Arc::new);
        Self { bytes: Box::new(bytes), proven, is_new: true, trouble: Trouble::default(), traffic }
    }

    /// A dialled stream, with the dialled `host`. Under TLS, after the handshake.
    ///
    /// # Errors
    /// A message for users.
    pub(super) async fn dial(stream: TcpStream, security: &Security, host: &str) -> Result<Self, String> {
        match security {
            Security::None => {
                let _ = host;
                Ok(Self::new(stream, None, Traffic::dialled()))
            }
            #[cfg(feature = "tls")]
            Security::Tls { identity, names } => {
                let stream = identity.connect(TlsPurpose::Control, stream).await;
                let stream = stream.map_err(|error| escaped(&explain_io(&error)).into_owned())?;
                let proven = prove(&stream, *names, Some(host))?;
                Ok(Self::new(stream, Some(proven), Traffic::dialled()))
            }
        }
    }

    /// An accepted stream without TLS.
    pub(super) fn accepted(stream: TcpStream) -> Self {
        Self::new(stream, None, Traffic::accepted())
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
        let proven = prove(&stream, names, None)?;
        Ok(Self::new(stream, Some(proven), Traffic::accepted()))
    }

    /// What the peer has proven by TLS.
    pub(super) fn proven(&self) -> Option<&Arc<ProvenPeer>> {
        self.proven.as_ref()
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

    /// Checks the bytes that were read, before HTTP/2 sees them.
    fn check(&mut self, read: &[u8]) -> io::Result<()> {
        let is_first = self.is_new;
        self.is_new &= read.is_empty();
        if is_first && self.proven.is_none() && read.first().is_some_and(|byte| begins_tls(*byte)) {
            return Err(self.trouble.note(
                "the peer speaks TLS, and this worker does not: give it a TLS identity of the same CA \
                 (the setting `tls`)",
            ));
        }
        let counted = self.traffic.received(read);
        counted.map_err(|text| self.trouble.first(Why { text, is_tls: false }))
    }

    /// Stores the cause of a stream's error, because HTTP/2 would lose it.
    fn noted(&self, error: io::Error) -> io::Error {
        #[cfg(feature = "tls")]
        if let Some(why) = explain_later(&error) {
            return self.trouble.note(why);
        }
        error
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
        let mut bytes = (&mut this.bytes).take(this.traffic.room() as u64);
        let read = ready!(Pin::new(&mut bytes).poll_read(context, buffer));
        read.map_err(|error| this.noted(error))?;
        let checked = this.check(&buffer.filled()[before..]);
        if checked.is_err() {
            buffer.set_filled(before);
        }
        Poll::Ready(checked)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[io::IoSlice::new(bytes)])
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().bytes).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().bytes).poll_shutdown(context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = ready!(Pin::new(&mut this.bytes).poll_write_vectored(context, slices))?;
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
